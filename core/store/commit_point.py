"""The commit point: a manifest appears under a number of its own, unless another writer has taken over."""

from collections.abc import Callable
from typing import Literal, final

from shrinkpoint.errors import FencedError, FormatError, StoreError, UnsupportedFormatError
from shrinkpoint.store.catalog import Catalog, Listing, read_checked
from shrinkpoint.store.keys import commit_key, seq_of_commit
from shrinkpoint.store.manifest import Manifest
from shrinkpoint.store.objects import MissingKeyError, ObjectStore

__all__ = ["CommitPoint"]

_SLOTS_BEFORE_RESCAN = 8


@final
class CommitPoint:
    """Where one writer publishes its manifests, and learns of others.

    Args:
        objects: The run's.
        catalog: The run's.
        mode: As of `shrinkpoint.store.writer.RunWriter`, like `epoch` and `session`.
        epoch: See there.
        session: See there.
        next_seq: The number that the first manifest is to have.
    """

    def __init__(
        self,
        objects: ObjectStore,
        catalog: Catalog,
        *,
        mode: Literal["conditional", "single-writer"],
        epoch: int,
        session: str,
        next_seq: int,
    ) -> None:
        self._objects = objects
        self._catalog = catalog
        self._mode = mode
        self._epoch = epoch
        self._session = session
        self.next_seq = next_seq
        """The number that the next manifest is to have, if nobody else takes it."""
        self._opened_at = next_seq
        self._is_first = True
        self._has_committed = False
        self.fenced: str | None = None
        """Why this writer may publish no more; None while it may."""

    def catch_up(self) -> None:
        """Before the first manifest, go on behind whatever was committed since the writer was opened.

        An older writer may have gone on, and removed the manifest of the number that was free then. A manifest that filled this gap
        would be below the older writer's next number, who would not meet it, and go on.

        Raises:
            FencedError: Another writer has taken over.
            StoreError: The store could not be listed or read.
        """
        if self._mode == "conditional" and self._is_first:
            self._go_behind(self._catalog.scan())

    def publish(self, draft: Callable[[int], Manifest], before: Callable[[], None]) -> Manifest:
        """Publish a manifest under the first number that is free.

        Args:
            draft: Makes it, given the number.
            before: Called right before each attempt; raises where it is too late.

        Raises:
            FencedError: Another writer has taken over.
            StoreError: The store failed; the manifest may be there or not.
        """
        publish = self._publish_exclusively if self._mode == "conditional" else self._publish_alone
        return publish(draft, before)

    def check_fence(self, listing: Listing) -> None:
        """Make sure that no other writer has taken over.

        Args:
            listing: of now.

        Raises:
            FencedError: One has.
        """
        for damaged in listing.damaged:
            if damaged.unsupported and (seq_of_commit(damaged.key) or 0) >= self._opened_at:
                raise self._fence(f"a newer shrinkpoint ({damaged.reason}) committed")
        for manifest in listing.manifests:
            self._check_overtaken(manifest)

    def _publish_exclusively(self, draft: Callable[[int], Manifest], before: Callable[[], None]) -> Manifest:
        """Take the first free number by put-if-absent: THE COMMIT POINT."""
        taken = 0
        while True:
            manifest, key = draft(self.next_seq), commit_key(self.next_seq)
            data = manifest.to_bytes()
            before()
            try:
                committed = self._objects.put_if_absent(key, data) or self._is_mine(key, data)
            except StoreError:
                # It may be there, seen by some and not by others: what is committed next must count as newer.
                self.next_seq += 1
                raise
            if committed:
                self._has_committed = True
                self._catalog.note(key, manifest)
                self.next_seq += 1
                if self._is_met(manifest):
                    return manifest
                continue
            taken += 1
            self.next_seq += 1
            if taken % _SLOTS_BEFORE_RESCAN == 0:
                self._go_behind(self._catalog.scan())

    def _is_met(self, manifest: Manifest) -> bool:
        """Whether an older writer that goes on comes to this one's first manifest; else it is to be published again, behind all others."""
        if self._is_first:
            listing = self._catalog.scan()
            if listing.max_seq > manifest.seq:
                self._go_behind(listing)
                return False
            self._is_first = False
        return True

    def _go_behind(self, listing: Listing) -> None:
        self.check_fence(listing)
        self.next_seq = max(self.next_seq, listing.max_seq + 1)

    def _is_mine(self, key: str, data: bytes) -> bool:
        """Whose manifest took the number? Ours, when the response to an earlier attempt was lost."""
        try:
            other = read_checked(self._objects, key, Manifest.from_bytes)
        except MissingKeyError:
            return False  # collected meanwhile: the number is used up all the same
        except UnsupportedFormatError as error:
            raise self._fence(f"a newer shrinkpoint ({error}) committed") from error
        except FormatError:
            return False  # unreadable: occupies its number, says nothing about its writer
        if other.to_bytes() == data:
            return True
        self._check_overtaken(other)
        return False

    def _publish_alone(self, draft: Callable[[int], Manifest], before: Callable[[], None]) -> Manifest:
        """Without a condition to rely on: look for other writers, then use a name that cannot collide."""
        listing = self._catalog.scan()
        self.check_fence(listing)
        manifest = draft(listing.max_seq + 1)
        key = commit_key(manifest.seq, manifest.chain[-1].key)
        before()
        self._objects.put(key, manifest.to_bytes())
        self._has_committed = True
        self._catalog.note(key, manifest)
        return manifest

    def _check_overtaken(self, other: Manifest) -> None:
        """Higher epochs win; of one epoch, whoever commits first; where both did so at once, the smaller nonce.

        An epoch is taken by its first commit. A writer that was opened and stood still since, before a later one took its epoch,
        must not go on from where it stands.
        """
        wins = self._has_committed and self._session <= other.session
        if other.epoch > self._epoch or (
            other.epoch == self._epoch and other.session != self._session and not wins
        ):
            raise self._fence(
                f"another writer (epoch {other.epoch}, session {other.session}) committed checkpoint {other.seq}, step"
                f" {other.step}"
            )

    def _fence(self, reason: str) -> FencedError:
        self.fenced = (
            f"{reason} to {self._objects.display} after this one (epoch {self._epoch}, session {self._session}) was opened:"
            " this process can save no more. Stop it, or, if it is the one to keep, stop the other and start this again"
        )
        return FencedError(self.fenced)
