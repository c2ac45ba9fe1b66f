"""The writing side of a run: the commit point, fencing, pins, what comes back, collection."""

import hashlib
import os
import threading
import time
from collections.abc import Callable, Collection, Mapping
from importlib.metadata import version
from typing import Any, Literal, final

from shrinkpoint.errors import (
    ChainError,
    ConfigError,
    FencedError,
    FormatError,
    NoCheckpointError,
    StoreError,
    UnsupportedFormatError,
)
from shrinkpoint.store import gc
from shrinkpoint.store.catalog import Catalog, Listing, read_checked
from shrinkpoint.store.keys import (
    COMMITTED_KEY,
    MAX_STEP,
    commit_key,
    data_key,
    new_nonce,
    pin_key,
    seq_of_commit,
)
from shrinkpoint.store.manifest import MAX_MANIFEST_BYTES, PARTS, Anchor, BlobRef, Head, Manifest, seal
from shrinkpoint.store.objects import MissingKeyError, ObjectStore
from shrinkpoint.warn import warn

# A commit that takes longer may meet a collection that takes its blobs for leftovers (grace: 24 h).
COMMIT_LIMIT_S = 3600.0
_PIN_ATTEMPTS = 5
_SLOTS_BEFORE_RESCAN = 8


def _uptime() -> float:
    """Return seconds that also pass while the machine is suspended, which ``time.monotonic`` leaves out."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.time()


@final
class RunWriter:
    """One writer's turn in a run; made by :meth:`shrinkpoint.store.run.RunStore.writer`.

    Safe to call from several threads, one of which works at a time; not usable in a forked child.

    Attributes:
        mode: ``"conditional"`` where the store honours put-if-absent, else ``"single-writer"``.
        epoch: Number of this turn; higher than that of every writer before.
        session: This writer's nonce.
        last: The newest checkpoint that this writer committed, or None.
    """

    def __init__(
        self,
        objects: ObjectStore,
        catalog: Catalog,
        *,
        mode: Literal["conditional", "single-writer"],
        protect: Collection[str] = (),
        clock: Callable[[], float] = _uptime,
    ) -> None:
        listing = catalog.scan()
        self.mode: Literal["conditional", "single-writer"] = mode
        self.epoch = listing.next_epoch
        self.session = new_nonce()
        self.last: Manifest | None = None
        self._objects = objects
        self._catalog = catalog
        self._protect = protect
        self._clock = clock
        # The number that the next manifest is to have, if nobody else takes it.
        self._next_seq = self._opened_at = listing.max_seq + 1
        self._is_first = True
        self._has_committed = False
        self._known: dict[str, float] = {}
        self._marked = self._warned_unmarked = False
        self._lock = threading.RLock()
        self._pid = os.getpid()
        self._library = f"shrinkpoint {version('shrinkpoint')}"
        self._fenced: str | None = None
        self._unusable: str | None = None

    def __enter__(self) -> "RunWriter":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """End this turn. Everything that was committed is stored already; calling it twice is fine."""
        self._unusable = "this writer is closed: open another one with RunStore.writer()"

    def commit(
        self,
        container: bytes | Head,
        *,
        step: int,
        kind: Literal["base", "delta"],
        parent: Manifest | None,
        state_digest: str,
        meta: Mapping[str, Any],
        replaces: Manifest | None = None,
        anchor: Anchor | None = None,
        began: float | None = None,
    ) -> Manifest:
        """Store a checkpoint. When this returns, it survives a crash; when it raises, it may or may not be there.

        Args:
            container: The checkpoint's bytes; or the head of several containers, which several ranks have put already.
            step: Training step, 0 or more.
            kind: ``"base"``, or ``"delta"`` against ``parent``.
            parent: The checkpoint that a delta builds on; None for a base.
            state_digest: Digest of the decoded state; opaque here.
            meta: Finite JSON to keep with it.
            replaces: The checkpoint of the same state, or of the same weights, whose place in the order this one takes; None: it is
                the newest.
            anchor: An earlier checkpoint of ``parent``'s chain, which the delta builds on instead; its manifest may be gone.
            began: `now` of before the first of several containers was put; None: now.

        Raises:
            ConfigError: An argument has a value that cannot be stored.
            ChainError: ``parent``, or a container of its chain, is no longer in the run: save a base instead.
            FencedError: Another writer has taken over; this one can save no more, and nothing was harmed.
            StoreError: The store failed; committing again is safe and makes another checkpoint.
        """
        with self._lock:
            began = self._clock() if began is None else began
            self._check_usable()
            self._check_arguments(step, kind, parent)
            if parent is not None:
                self._check_parent(parent)
            self._catch_up()
            head = container if isinstance(container, Head) else None
            data = container.to_bytes() if isinstance(container, Head) else bytes(container)
            ref = BlobRef(
                key=data_key(step, self.session),
                size=len(data),
                sha256=hashlib.sha256(data).hexdigest(),
                parts=len(head.parts) if head else 0,
                parts_bytes=head.parts_bytes if head else 0,
            )
            before = parent.chain if parent else ()
            chain = (*(before if anchor is None else before[: anchor.containers]), ref)
            builds_on = anchor or parent
            wall_time = time.time()

            def draft(seq: int) -> Manifest:
                try:
                    manifest = Manifest(
                        seq=seq,
                        epoch=self.epoch,
                        session=self.session,
                        reader_features=(PARTS,) if any(ref.parts for ref in chain) else (),
                        step=step,
                        kind=kind,
                        chain=chain,
                        parent_digest=builds_on.digest if builds_on else None,
                        state_digest=state_digest,
                        wall_time=wall_time,
                        library=self._library,
                        meta=dict(meta),
                        replaces=replaces.position if replaces else None,
                    )
                    return Manifest.from_bytes(manifest.to_bytes())  # what is committed is what a reader gets
                except FormatError as error:
                    raise ConfigError(
                        f"the checkpoint of step {step} cannot be described: {error}"
                    ) from error

            draft(self._next_seq)  # refuse what cannot be written before anything is
            self._objects.put(ref.key, data)
            self._catch_up()  # once more, since that may have taken minutes
            publish = self._publish_exclusively if self.mode == "conditional" else self._publish_alone
            manifest = publish(draft, began)
            self._check_late(began, manifest)
            self._known[manifest.digest] = self._clock()
            if replaces is None:
                self.last = manifest
            self._mark_committed()
            return manifest

    def now(self) -> float:
        """Give this writer's clock, in seconds: for `commit`."""
        return self._clock()

    def pin(self, name: str, manifest: Manifest) -> None:
        """Keep ``manifest`` through every collection until :meth:`unpin`.

        Raises:
            ConfigError: The name is not allowed, or pins another checkpoint already.
            NoCheckpointError: The checkpoint is not in the run (any more).
            StoreError: The store failed, or another process sets and removes this pin all the time.
        """
        with self._lock:
            self._check_usable()
            key = pin_key(name)
            data = seal({"type": "shrinkpoint-pin", "seq": manifest.seq, "digest": manifest.digest})
            self._put_pin(name, key, data)
            # Only now: a collection that began before the pin was there may have removed it.
            self._catalog.scan()
            if self._catalog.published_key(manifest) is None:
                self._objects.delete([key])
                raise NoCheckpointError(
                    f"checkpoint {manifest.seq} (step {manifest.step}) is not in {self._objects.display}"
                )

    def _put_pin(self, name: str, key: str, data: bytes) -> None:
        for _ in range(_PIN_ATTEMPTS):
            if self._objects.put_if_absent(key, data):
                return
            try:
                other = self._objects.get(key, max_size=MAX_MANIFEST_BYTES)
            except MissingKeyError:
                continue  # another process has unpinned it since: it can be set
            if other != data:
                raise ConfigError(
                    f"pin {name!r} holds another checkpoint: unpin it first, or choose another name"
                )
            return
        raise StoreError(
            f"{self._objects.show(key)} could not be written, since it was there, nor read, since it was not, {_PIN_ATTEMPTS} times: if no"
            f" other process sets and removes pin {name!r}, unpin it and pin again, or choose another name"
        )

    def unpin(self, name: str) -> None:
        """Release a pin; an unknown name is no error."""
        with self._lock:
            self._check_usable()
            self._objects.delete([pin_key(name)])

    def undelete(self, manifest: Manifest) -> None:
        """Bring back a checkpoint of :meth:`shrinkpoint.store.run.RunStore.removed`, in its old place.

        A retention that removed it removes it again unless it is pinned.

        Raises:
            NoCheckpointError: A collection has deleted a container of it meanwhile.
        """
        with self._lock:
            self._check_usable()
            gc.publish_again(self._objects, self._catalog, manifest, numbered=self.mode == "conditional")

    def collect(
        self,
        keep: Collection[int],
        *,
        seen: Collection[Manifest] | None = None,
        grace_s: float = gc.DEFAULT_GRACE_S,
    ) -> gc.GcReport:
        """Remove checkpoints that are not kept, and blobs that nothing has needed for ``grace_s`` seconds.

        The newest checkpoint whose containers are all there in their sizes, pinned ones, and the one this run was resumed from
        (until the first commit) stay.

        Args:
            keep: Sequence numbers, as chosen by :class:`shrinkpoint.engine.retention.RetentionPolicy`.
            seen: The manifests that ``keep`` was chosen from. What another process has committed since then was never judged,
                and stays. None: all that are there now.
            grace_s: Seconds, by the store's clock. Below two hours only where no second writer or reader exists.

        Raises:
            ConfigError: ``grace_s`` is negative.
            FencedError: Another writer has taken over; only it may collect.
            StoreError: The store failed; the next collection goes on from there.
        """
        if not grace_s >= 0:
            raise ConfigError(f"grace_s={grace_s}: use 0 or more seconds; 86400 is the default")
        with self._lock:
            self._check_usable()
            return gc.collect(
                self._objects,
                self._catalog,
                keep=keep,
                seen=None if seen is None else {manifest.digest for manifest in seen},
                protect=[self.last.digest] if self.last else self._protect,
                check_fence=self._check_fence,
                grace_s=grace_s,
            )

    # ---- the commit point

    def _catch_up(self) -> None:
        """Before the first manifest, go on behind whatever was committed since the writer was opened.

        An older writer may have gone on, and removed the manifest of the number that was free then. A manifest that filled this gap
        would be below the older writer's next number, who would not meet it, and go on.
        """
        if self.mode == "conditional" and self._is_first:
            self._go_behind(self._catalog.scan())

    def _check_fence(self, listing: Listing) -> None:
        """Raise FencedError where a listing of now shows that another writer has taken over."""
        for damaged in listing.damaged:
            if damaged.unsupported and (seq_of_commit(damaged.key) or 0) >= self._opened_at:
                raise self._fence(f"a newer shrinkpoint ({damaged.reason}) committed")
        for manifest in listing.manifests:
            self._check_overtaken(manifest)

    def _publish_exclusively(self, draft: Callable[[int], Manifest], began: float) -> Manifest:
        """Take the first free number by put-if-absent: THE COMMIT POINT."""
        taken = 0
        while True:
            manifest, key = draft(self._next_seq), commit_key(self._next_seq)
            data = manifest.to_bytes()
            self._check_early(began)
            try:
                committed = self._objects.put_if_absent(key, data) or self._is_mine(key, data)
            except StoreError:
                # It may be there, seen by some and not by others: what is committed next must count as newer.
                self._next_seq += 1
                raise
            if committed:
                self._has_committed = True
                self._catalog.note(key, manifest)
                self._next_seq += 1
                if self._is_met(manifest):
                    return manifest
                continue
            taken += 1
            self._next_seq += 1
            if taken % _SLOTS_BEFORE_RESCAN == 0:
                self._go_behind(self._catalog.scan())

    def _is_met(self, manifest: Manifest) -> bool:
        """Return whether an older writer that still runs will find this one's first manifest; else it is published again, after all others."""
        if self._is_first:
            listing = self._catalog.scan()
            if listing.max_seq > manifest.seq:
                self._go_behind(listing)
                return False
            self._is_first = False
        return True

    def _go_behind(self, listing: Listing) -> None:
        self._check_fence(listing)
        self._next_seq = max(self._next_seq, listing.max_seq + 1)

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

    def _publish_alone(self, draft: Callable[[int], Manifest], began: float) -> Manifest:
        """Without a condition to rely on: look for other writers, then use a name that cannot collide."""
        listing = self._catalog.scan()
        self._check_fence(listing)
        manifest = draft(listing.max_seq + 1)
        key = commit_key(manifest.seq, manifest.chain[-1].key)
        self._check_early(began)
        self._objects.put(key, manifest.to_bytes())
        self._has_committed = True
        self._catalog.note(key, manifest)
        return manifest

    def _check_overtaken(self, other: Manifest) -> None:
        """Higher epochs win; of one epoch, whoever commits first; where both did so at once, the smaller nonce.

        An epoch is taken by its first commit. A writer that was opened and stood still since, before a later one took its epoch,
        must not go on from where it stands.
        """
        wins = self._has_committed and self.session <= other.session
        if other.epoch > self.epoch or (
            other.epoch == self.epoch and other.session != self.session and not wins
        ):
            raise self._fence(
                f"another writer (epoch {other.epoch}, session {other.session}) committed checkpoint {other.seq}, step"
                f" {other.step}"
            )

    def _fence(self, reason: str) -> FencedError:
        self._fenced = (
            f"{reason} to {self._objects.display} after this one (epoch {self.epoch}, session {self.session}) was opened:"
            " this process can save no more. Stop it, or, if it is the one to keep, stop the other and start this again"
        )
        return FencedError(self._fenced)

    # ---- what a commit takes

    def _check_usable(self) -> None:
        if self._fenced is not None:
            raise FencedError(self._fenced)
        if self._unusable is not None:
            raise StoreError(self._unusable)
        if os.getpid() != self._pid:
            raise StoreError(
                "this writer belongs to the process that opened it: open another one after a fork"
            )

    def _check_arguments(self, step: int, kind: str, parent: Manifest | None) -> None:
        if not isinstance(step, int) or not 0 <= step <= MAX_STEP:
            raise ConfigError(f"step={step!r}: use an integer from 0 to {MAX_STEP}")
        if kind not in ("base", "delta"):
            raise ConfigError(f"kind={kind!r}: use 'base' or 'delta'")
        if (kind == "delta") != (parent is not None):
            raise ConfigError(f"kind={kind!r} with parent={parent}: a delta has a parent, a base has none")

    def _check_parent(self, parent: Manifest) -> None:
        """Make sure that the parent's chain is there, and that it was published a short while ago: then it stays for a grace."""
        present = self._catalog.sizes()
        try:
            needed = self._catalog.refs(parent)
        except FormatError as error:
            raise ChainError(
                f"{error}, so that a delta against it could not be restored: save a base"
            ) from error
        for ref in needed:
            if present.get(ref.key) != ref.size:
                self._marked = False  # it may be another folder or bucket by now
                raise ChainError(
                    f"{self._objects.show(ref.key)}, which checkpoint {parent.seq} (step {parent.step}) needs, is missing or"
                    " of another size, so that a delta against it could not be restored: save a base"
                )
        seen = self._known.get(parent.digest)
        if seen is not None and self._clock() - seen < COMMIT_LIMIT_S:
            return
        now = self._clock()
        if self._catalog.key_of(parent) is None:
            self._catalog.scan()
        if self._catalog.published_key(parent) is None:
            raise ChainError(
                f"checkpoint {parent.seq} (step {parent.step}) is no longer in {self._objects.display}, so that a delta"
                " against it could not be restored: save a base"
            )
        self._known[parent.digest] = now

    def _mark_committed(self) -> None:
        """Note, next to ``commits/``, that there is a checkpoint: an empty listing is not believed from now on."""
        if self._marked:
            return
        try:
            self._objects.put_if_absent(COMMITTED_KEY, seal({"type": "shrinkpoint-committed"}))
        except StoreError as error:  # the checkpoint is stored all the same
            if not self._warned_unmarked:
                self._warned_unmarked = True
                warn(
                    f"{error}. Until {COMMITTED_KEY} can be written, an empty commits/ is taken for a run that was never saved, with a"
                    " warning. This one comes once"
                )
        else:
            self._marked = True

    def _check_early(self, began: float) -> None:
        if self._clock() - began > COMMIT_LIMIT_S:
            raise StoreError(
                f"the upload to {self._objects.display} took longer than {COMMIT_LIMIT_S:.0f} s, so that its blob may have"
                " been collected: save again"
            )

    def _check_late(self, began: float, manifest: Manifest) -> None:
        """After a commit that was delayed (a suspended machine), acknowledge it only if its whole chain is there."""
        if self._clock() - began <= COMMIT_LIMIT_S:
            return
        present = self._catalog.sizes()
        if not self._catalog.is_whole(manifest, present):
            raise StoreError(
                f"checkpoint {manifest.seq} was delayed and its blobs have been collected: save again"
            )
