"""The writing side of a run: commits, pins, what comes back, collection."""

import hashlib
import os
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from importlib.metadata import version
from typing import Any, Literal, final

from shrinkpoint.errors import (
    ChainError,
    ConfigError,
    FencedError,
    FormatError,
    NoCheckpointError,
    StoreError,
)
from shrinkpoint.store import gc
from shrinkpoint.store.catalog import Catalog
from shrinkpoint.store.commit_point import CommitPoint
from shrinkpoint.store.gc import publish_again
from shrinkpoint.store.keys import COMMITTED_KEY, MAX_STEP, commit_key, data_key, new_nonce, pin_key
from shrinkpoint.store.manifest import MAX_MANIFEST_BYTES, PARTS, Anchor, BlobRef, Manifest, seal
from shrinkpoint.store.objects import MissingKeyError, ObjectStore
from shrinkpoint.store.parts import Head, Part
from shrinkpoint.warn import warn

__all__ = ["COMMIT_LIMIT_S", "RunWriter"]

# A commit that takes longer may meet a collection that takes its blobs for leftovers (grace: 24 h).
COMMIT_LIMIT_S = 3600.0
_PIN_ATTEMPTS = 5


def _uptime() -> float:
    """Seconds that also pass while the machine is suspended, which ``time.monotonic`` leaves out."""
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
        make_ready: Callable[[str, bytes], None] | None = None,
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
        self._make_ready = make_ready
        self._clock = clock
        self._point = CommitPoint(
            objects, catalog, mode=mode, epoch=self.epoch, session=self.session, next_seq=listing.max_seq + 1
        )
        self._known: dict[str, float] = {}
        self._marked = self._warned_unmarked = False
        self._lock = threading.RLock()
        self._pid = os.getpid()
        self._library = f"shrinkpoint {version('shrinkpoint')}"
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
        container: bytes,
        *,
        step: int,
        kind: Literal["base", "delta"],
        parent: Manifest | None,
        state_digest: str,
        meta: Mapping[str, Any],
        replaces: Manifest | None = None,
        anchor: Anchor | None = None,
    ) -> Manifest:
        """Store a checkpoint. When this returns, it survives a crash; when it raises, it may or may not be there.

        Args:
            container: The checkpoint's bytes.
            step: Training step, 0 or more.
            kind: ``"base"``, or ``"delta"`` against ``parent``.
            parent: The checkpoint that a delta builds on; None for a base.
            state_digest: Digest of the decoded state; opaque here.
            meta: Finite JSON to keep with it.
            replaces: The checkpoint of the same state, or of the same weights, whose place in the order this one takes; None: it is
                the newest.
            anchor: An earlier checkpoint of ``parent``'s chain, which the delta builds on instead; its manifest may be gone.

        Raises:
            ConfigError: An argument has a value that cannot be stored.
            ChainError: ``parent``, or a container of its chain, is no longer in the run: save a base instead.
            FencedError: Another writer has taken over; this one can save no more, and nothing was harmed.
            StoreError: The store failed; committing again is safe and makes another checkpoint.
        """
        with self._lock:
            return self._commit(
                bytes(container),
                None,
                step,
                kind,
                parent,
                state_digest,
                meta,
                replaces,
                self._clock(),
                anchor,
            )

    def commit_parts(
        self,
        parts: Sequence[Part],
        *,
        step: int,
        kind: Literal["base", "delta"],
        parent: Manifest | None,
        meta: Mapping[str, Any],
        began: float,
    ) -> Manifest:
        """Store a checkpoint of which the containers are stored already, by several ranks: its head, then its manifest.

        Args:
            parts: The containers, in the order of the ranks.
            step: As of `commit`, like `kind`, `parent` and `meta`.
            kind: See there.
            parent: See there.
            meta: See there.
            began: `now` of before the first of the containers was put.

        Raises:
            ShrinkpointError: As `commit`.
        """
        with self._lock:
            head = Head(step=step, parts=tuple(parts))
            return self._commit(
                head.to_bytes(), head, step, kind, parent, head.state_digest, meta, None, began
            )

    def now(self) -> float:
        """This writer's clock, in seconds: for `commit_parts`."""
        return self._clock()

    def _commit(
        self,
        data: bytes,
        head: Head | None,
        step: int,
        kind: Literal["base", "delta"],
        parent: Manifest | None,
        state_digest: str,
        meta: Mapping[str, Any],
        replaces: Manifest | None,
        began: float,
        anchor: Anchor | None = None,
    ) -> Manifest:
        """Put one container, or the head of several, and publish it."""
        self._check_usable()
        self._check_arguments(step, kind, parent)
        if parent is not None:
            self._check_parent(parent)
        self._point.catch_up()
        ref = BlobRef(
            key=data_key(step, self.session),
            size=len(data),
            sha256=hashlib.sha256(data).hexdigest(),
            parts=len(head.parts) if head else 0,
            parts_bytes=head.parts_bytes if head else 0,
        )
        before = parent.chain if parent else ()
        chain = (*(before if anchor is None else before[: anchor.containers]), ref)
        place = replaces.position if replaces else None
        builds_on = anchor or parent
        draft = self._draft(
            step, kind, chain, builds_on.digest if builds_on else None, state_digest, meta, place
        )
        first = draft(self._point.next_seq).to_bytes()  # refuse what cannot be written before anything is
        if self._make_ready is not None and self.mode == "conditional":
            self._make_ready(commit_key(self._point.next_seq), first)
        self._objects.put(ref.key, data)
        self._point.catch_up()  # once more, since that may have taken minutes
        manifest = self._point.publish(draft, lambda: self._check_early(began))
        self._check_late(began, manifest)
        self._known[manifest.digest] = self._clock()
        if replaces is None:
            self.last = manifest
        self._mark_committed()
        return manifest

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
            if not self._catalog.is_published(manifest):
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
            publish_again(self._objects, self._catalog, manifest, numbered=self.mode == "conditional")

    def collect(
        self,
        keep: Collection[int],
        *,
        seen: Collection[Manifest] | None = None,
        grace_s: float = gc.DEFAULT_GRACE_S,
        dry_run: bool = False,
    ) -> gc.GcReport:
        """Remove checkpoints that are not kept, and blobs that nothing has needed for ``grace_s`` seconds.

        The newest checkpoint whose containers are all there in their sizes, pinned ones, and the one this run was resumed from
        (until the first commit) stay.

        Args:
            keep: Sequence numbers, as chosen by :class:`shrinkpoint.engine.retention.RetentionPolicy`.
            seen: The manifests that ``keep`` was chosen from. What another process has committed since then was never judged,
                and stays. None: all that are there now.
            grace_s: Seconds, by the store's clock. Below two hours only where no second writer or reader exists.
            dry_run: Report only.

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
                check_fence=self._point.check_fence,
                grace_s=grace_s,
                dry_run=dry_run,
            )

    def _check_usable(self) -> None:
        if self._point.fenced is not None:
            raise FencedError(self._point.fenced)
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
        for ref in self._refs(parent):
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
        if not self._catalog.is_published(parent):
            raise ChainError(
                f"checkpoint {parent.seq} (step {parent.step}) is no longer in {self._objects.display}, so that a delta"
                " against it could not be restored: save a base"
            )
        self._known[parent.digest] = now

    def _refs(self, parent: Manifest) -> Sequence[BlobRef]:
        try:
            return self._catalog.refs(parent)
        except FormatError as error:
            raise ChainError(
                f"{error}, so that a delta against it could not be restored: save a base"
            ) from error

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

    def _draft(
        self,
        step: int,
        kind: Literal["base", "delta"],
        chain: tuple[BlobRef, ...],
        parent_digest: str | None,
        state_digest: str,
        meta: Mapping[str, Any],
        replaces: tuple[int, int] | None,
    ) -> Callable[[int], Manifest]:
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
                    parent_digest=parent_digest,
                    state_digest=state_digest,
                    wall_time=wall_time,
                    library=self._library,
                    meta=dict(meta),
                    replaces=replaces,
                )
                return Manifest.from_bytes(manifest.to_bytes())  # what is committed is what a reader gets
            except FormatError as error:
                raise ConfigError(f"the checkpoint of step {step} cannot be described: {error}") from error

        return draft

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
