"""One run in a store: which checkpoints it has, their bytes, the newest sound one, and the way to a writer."""

import hashlib
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Literal, TypeVar, cast

from shrinkpoint.errors import (
    ChainError,
    ConfigError,
    FormatError,
    NoCheckpointError,
    RunMismatchError,
    UnsupportedFormatError,
)
from shrinkpoint.store.catalog import (
    Catalog,
    DamagedCheckpoint,
    Listing,
    exists,
    is_begun_here,
    is_listed,
    read_checked,
)
from shrinkpoint.store.connect import StorageOptions, open_objects, shared_fate
from shrinkpoint.store.gc import removed
from shrinkpoint.store.keys import COMMITTED_KEY, FORMAT_KEY, MEMBER_KEY, probe_key
from shrinkpoint.store.manifest import BlobRef, Head, Manifest
from shrinkpoint.store.near import NEAR_KEY, NearCopies, Share, is_near
from shrinkpoint.store.objects import MissingKeyError, ObjectStore, honours_put_if_absent
from shrinkpoint.store.retry import RetryingObjects, RetryPolicy, without_retries
from shrinkpoint.store.urls import COMMAS, RunUrl
from shrinkpoint.store.writer import RunWriter
from shrinkpoint.warn import warn

if TYPE_CHECKING:
    from shrinkpoint.store.striped.objects import StripedObjects

T = TypeVar("T")

_READERS = 8
_RESTARTS = 3
_WHOLE = Share()


class _ListingOutdatedError(Exception):
    """A checkpoint was collected while it was being read; the run has to be listed again."""


class RunStore:
    """The checkpoints of one training run below one URL. Making one does no I/O; it may be pickled and used after a fork.

    A pickle holds ``storage_options``, but no connection.

    Args:
        url: ``/folder``, ``s3://bucket/prefix`` or the URL of another fsspec file system; or a list of 2 to 32, which hold the
            run together (docs/stores.md); or `Stores` with options.
        storage_options: For the file system: credentials, ``endpoint_url`` and so on; or a list of as many.
        retry: How long to insist when the store fails for a passing reason.
        objects: Use this object store instead of opening ``url``.

    Raises:
        ConfigError: The URL or the options cannot work.
        MissingDependencyError: The package for the URL's protocol is not installed.

    Examples:
        >>> from shrinkpoint.store.run import RunStore
        >>> [manifest.step for manifest in RunStore("runs/7").manifests()]
        [3000, 2000, 1000]

        A run of one's own containers:

        >>> store = RunStore("memory://doctest/run-1")
        >>> with store.writer() as writer:
        ...     base = writer.commit(
        ...         b"...", step=10, kind="base", parent=None, state_digest="", meta={"loss": 2.5}
        ...     )
        >>> [(manifest.step, manifest.meta) for manifest in store.manifests()]
        [(10, {'loss': 2.5})]
        >>> store.fetch(base)
        [b'...']
    """

    def __init__(
        self,
        url: RunUrl,
        *,
        storage_options: StorageOptions = None,
        retry: RetryPolicy | None = None,
        objects: ObjectStore | None = None,
    ) -> None:
        inner = open_objects(url, storage_options) if objects is None else objects
        below = without_retries(inner)
        # recognised by its `group`: most runs have one store, and import nothing of that package
        self.stores = cast("StripedObjects", below) if hasattr(below, "group") else None
        """The several stores of the run, if there are several."""
        self.objects: ObjectStore = RetryingObjects(inner, retry or RetryPolicy())
        """What lies below the URL."""
        self._opened = (url, storage_options) if self.stores is not None and objects is None else None
        self._is_implied = isinstance(url, str)
        self._near = NearCopies.of(url) if objects is None else None
        self._catalog = Catalog(self.objects)
        self._warned: set[str] = set()
        self._restored: str | None = None
        self._is_begun = False  # by another process; not looked at until this one opens a writer
        self.damaged: tuple[DamagedCheckpoint, ...] = ()
        """Manifests that the last listing could not read, with the reasons."""

    @property
    def display(self) -> str:
        """The run's URL or folder for messages, without credentials."""
        return self.objects.display

    def is_same_place(self, other: "RunStore") -> bool:
        """Return whether this run and another one are in one place, or in one of several: folders are the same where links lead to one."""
        return not self._places().isdisjoint(other._places())

    def _places(self) -> frozenset[str]:
        shown = [self.display] if self.stores is None else self.stores.group.shown
        return frozenset(os.path.realpath(one) if os.path.isabs(one) else one for one in shown)

    def what_is_there(self) -> str:
        """Words for a prefix that holds no run: what it holds instead, such as runs below it.

        Raises:
            StoreError: The store could not be listed.
        """
        words = self._catalog.what_is_there()
        return words if self.stores is not None or "," not in self.display else f"{words}. {COMMAS}"

    @property
    def redundancy(self) -> int | None:
        """How many of several stores may be lost now, as far as this process knows; None where there is one."""
        return None if self.stores is None else self.stores.group.redundancy

    @property
    def parity(self) -> int | None:
        """How many of several stores may be lost where all are well; None where there is one."""
        return None if self.stores is None else self.stores.group.parity

    def exists(self) -> bool:
        """Return whether the prefix holds a run.

        Raises:
            RunMismatchError: Its ``format.json`` is damaged or foreign.
            UnsupportedFormatError: The run needs a newer shrinkpoint.
            StoreError: The store could not be read; that never looks like an absent run.
        """
        self._refuse_member()
        return self._catalog.record() is not None

    def run_id(self) -> str:
        """Return the nonce that distinguishes this run from every other: 32 hexadecimal digits.

        Raises:
            NoCheckpointError: There is no run yet; opening a writer makes one.
            RunMismatchError: Its ``format.json`` is damaged or foreign.
        """
        run = self._catalog.run_id()
        if run is None:
            raise NoCheckpointError(f"there is no run at {self.display}")
        return run

    def manifests(self) -> list[Manifest]:
        """Return every committed checkpoint, newest first by (epoch, number).

        Unreadable ones are left out, kept in ``damaged`` and warned about once.

        Raises:
            StoreError: The store could not be listed or read.
        """
        return list(self._scan().manifests)

    def pins(self, *, without: str | None = None) -> dict[str, int]:
        """Give the sequence numbers that are pinned, by the pins' names; `without` this pin, which may be damaged."""
        return self._catalog.pins(without=without)

    def sizes(self) -> dict[str, int]:
        """List the bytes of every container by its key, in one request or a few."""
        return self._catalog.sizes()

    def removed(self) -> list[Manifest]:
        """Return checkpoints that were removed and whose data is still there, newest first; `RunWriter.undelete` brings them back."""
        return removed(self.objects, self._catalog)

    def fetch(self, manifest: Manifest) -> list[bytes]:
        """Return the containers of the whole chain, base first, each checked for size and SHA-256; in place of a head, its parts.

        Raises:
            ChainError: A container is missing.
            CorruptionError: A container's bytes are not those that were written.
            StoreError: The store could not be read.
        """
        containers = [ref for ref in self.refs(manifest) if not ref.parts]
        with ThreadPoolExecutor(min(_READERS, len(containers))) as pool:
            return list(pool.map(lambda ref: self.fetch_blob(ref, manifest), containers))

    def refs(self, manifest: Manifest) -> tuple[BlobRef, ...]:
        """Return every object that a restore of ``manifest`` reads: its chain, base first, each head followed by its parts.

        Raises:
            ChainError: A head is missing.
            CorruptionError: A head's bytes are not those that were written.
            StoreError: The store could not be read.
        """
        return self._catalog.refs(manifest)

    def head(self, ref: BlobRef) -> Head:
        """Return the parts of a checkpoint, whose head `ref` is.

        Raises:
            ChainError, CorruptionError, StoreError: As `refs`.
        """
        if self._near is not None and (copy := self._near.read(ref)) is not None:
            return Head.from_bytes(copy, ref.key)
        return self._catalog.head(ref)

    def put_part(self, key: str, container: bytes) -> BlobRef:
        """Store one rank's container of a checkpoint, whose head `RunWriter.commit` commits.

        Args:
            key: A new key of `shrinkpoint.store.keys.data_key`.
            container: Its bytes.

        Raises:
            StoreError: The store failed.
        """
        self.objects.put(key, container)
        return BlobRef(key=key, size=len(container), sha256=hashlib.sha256(container).hexdigest())

    def fetch_blob(self, ref: BlobRef, manifest: Manifest) -> bytes:
        """Return one container of the chain of ``manifest``, checked for size and SHA-256.

        Raises:
            ChainError: The container is missing.
            CorruptionError: Its bytes are not those that were written.
            StoreError: The store could not be read.
        """
        if self._near is not None and (copy := self._near.read(ref)) is not None:
            return copy
        try:
            return read_checked(self.objects, ref.key, ref.verify, max_size=ref.size)
        except MissingKeyError as error:
            shown = self.objects.show(ref.key)
            raise ChainError(f"{shown}, which checkpoint {manifest.seq} needs, is missing") from error

    def fetch_range(self, ref: BlobRef, start: int, end: int, *, near: bool = True) -> bytes:
        """Return bytes ``start`` (included) to ``end`` (excluded) of one container; the caller checks them.

        Args:
            ref: The container.
            start: The first byte.
            end: The byte after the last one.
            near: Whether a copy on this node is good enough: only if the caller goes on to `fetch_blob` where it is damaged.

        Raises:
            ConfigError: The range is not within the container.
            ChainError: The container is missing.
            CorruptionError: The container is shorter than its manifest says.
        """
        if not 0 <= start <= end <= ref.size:
            raise ConfigError(f"range {start}..{end} is not within the {ref.size} bytes of {ref.key}")
        if near and self._near is not None and (copy := self._near.read(ref, start, end)) is not None:
            return copy
        try:
            return self.objects.get(ref.key, start, end, max_size=end - start)
        except MissingKeyError as error:
            raise ChainError(f"{self.objects.show(ref.key)} is missing") from error

    def try_to_write(self) -> None:
        """Write and remove a small object, to see whether this process may.

        Raises:
            StoreError: It may not, or the store cannot be reached.
        """
        key = probe_key()
        self.objects.put(key, b"")
        self.objects.delete([key])

    def newest_readable(self, read: Callable[[Manifest], T]) -> tuple[Manifest, T] | None:
        """Return the newest checkpoint that ``read`` takes, with what it returned.

        Args:
            read: Reads what it needs of the chain; raises FormatError, ChainError or CorruptionError to have the next older
                checkpoint tried. Each one that is passed over is warned about.

        Returns:
            None where nothing was ever committed.

        Raises:
            ChainError: There are checkpoints, but none is sound: never a silent start from step 0.
            UnsupportedFormatError: A checkpoint needs a newer shrinkpoint; an older one would lose progress silently.
            StoreError: The store could not be listed or read.
        """
        skipped: dict[str, str] = {}
        self._refuse_member()
        for _ in range(_RESTARTS):
            listing = self._scan()
            if (nearer := self._nearer(listing, read)) is not None:
                self._restored = nearer[0].digest
                return nearer
            if not listing.manifests and not listing.damaged:
                self._warn_of_no_checkpoint()
                return None
            for damaged in listing.damaged:
                if damaged.unsupported:
                    raise UnsupportedFormatError(damaged.reason)
                skipped[damaged.key] = damaged.reason
            try:
                found = self._first_sound(listing, read, skipped)
            except _ListingOutdatedError:
                continue
            if found is not None:
                self._restored = found[0].digest
                return found
            break
        reasons = "".join(f"\n  {key}: {reason}" for key, reason in skipped.items())
        raise ChainError(
            f"{self.display} has checkpoints, but none of them can be restored:{reasons}\n"
            "Nothing was changed. Repair or restore the files named, or start a new run under another URL."
        )

    def _first_sound(
        self, listing: Listing, read: Callable[[Manifest], T], skipped: dict[str, str]
    ) -> tuple[Manifest, T] | None:
        for manifest in listing.manifests:
            try:
                return manifest, read(manifest)
            except UnsupportedFormatError:
                raise
            except (FormatError, ChainError) as error:
                key = self._catalog.key_of(manifest) or str(manifest.seq)
                # what is listed but cannot be read was not collected
                if isinstance(error.__cause__, MissingKeyError) and not is_listed(self.objects, key):
                    raise _ListingOutdatedError from error
                skipped[key] = str(error)
                self._warn(
                    key,
                    f"checkpoint {manifest.seq} (step {manifest.step}) passed over for an older one: {error}",
                )
        return None

    def writer(self, *, mode: Literal["auto", "single-writer"] = "auto") -> RunWriter:
        """Begin a turn as the run's writer; every earlier writer is fenced off at its next save.

        Makes the run where there is none, finds out whether the store honours put-if-absent, and takes the next epoch.

        Args:
            mode: ``"single-writer"``: do not ask the store for conditions; only one process may ever write at a time.

        Raises:
            ConfigError: ``mode`` is unknown.
            RunMismatchError: The prefix holds something else.
            UnsupportedFormatError: The run needs a newer shrinkpoint.
            StoreError: The store cannot be written to.
        """
        if mode not in ("auto", "single-writer"):
            raise ConfigError(f"mode={mode!r}: use 'auto' or 'single-writer'")
        self._refuse_member()
        self._refuse_near()
        record = self._catalog.record()
        if record is None:
            record = self._catalog.create_record()
            self._say_parity()
        self._is_begun = not is_begun_here(record)
        self.open_near()
        if self._opened is not None and (fate := shared_fate(*self._opened)) is not None:
            self._warn(
                "shared",
                f"{fate} will be lost together, on one device or in one bucket: such stores count as one",
            )
        self._warn_of_containers_alone()
        conditional = mode == "auto" and honours_put_if_absent(self.objects)
        if mode == "auto" and not conditional:
            warn(
                f"{self.display}: this store does not honour put-if-absent, so that two processes that write to the same"
                " run cannot be kept apart reliably: make sure that there is only one, or use another store"
            )
        return RunWriter(
            self.objects,
            self._catalog,
            mode="conditional" if conditional else "single-writer",
            protect=[self._restored] if self._restored else [],
        )

    def _warn_of_containers_alone(self) -> None:
        """Return containers without a single manifest: mostly those of a first save that was interrupted, which nobody relies on."""
        listing = self._catalog.scan()
        if listing.manifests or listing.damaged or not self.objects.list("data/", limit=1):
            return
        self._warn(
            "data/",
            f"{self.display} holds containers but no checkpoint: either its first save was interrupted, or commits/ is not"
            " where it was (a disk that is not mounted, a copy that is not complete). Saving starts afresh; stop now if"
            " checkpoints should be here",
        )

    def _warn_of_no_checkpoint(self) -> None:
        """Warn of a run of before that has nothing to continue from: mostly one that ended before its first
        save."""
        if self._is_begun and "data/" not in self._warned:
            self._warn(
                "begun",
                f"{self.display} was begun before ({FORMAT_KEY} is there), but holds no checkpoint: either it ended before its"
                " first save, or its checkpoints are not where they were (a disk that is not mounted, a copy that is not"
                f" complete). {COMMITTED_KEY}, which is written after the first save, is not there either. The training"
                " starts afresh; stop it now if checkpoints should be here",
            )

    def _say_parity(self) -> None:
        """Say what a comma in the URL of a run that begins means."""
        if self.stores is not None and self._is_implied and self._opened is not None:
            count = len(self.stores.group.stores)
            self._warn(
                "parity",
                f"a run begins in {count} stores with parity={self.parity}, for none was given: {self.display}. It stays so."
                f" To choose, give Stores(..., parity=) and another place; a folder with a comma in its name is given as a list of one",
            )

    def _refuse_near(self) -> None:
        """Refuse to write to a folder of copies: the writer of their run deletes in it."""
        if self.stores is None and is_near(self.objects):
            raise RunMismatchError(
                f"{self.display} holds the copies that near= keeps of another run: give that run's URL. If it is lost, delete"
                f" {NEAR_KEY} there, and this is a run of its own"
            )

    @property
    def copies_near(self) -> bool:
        """Whether copies on this node were asked for."""
        return self._near is not None

    def open_near(self) -> None:
        """Begin to copy to this node, if such copies were asked for; the run is there.

        Raises:
            RunMismatchError: The folder holds something else, which must not be deleted.
        """
        if self._near is not None:
            self._near.open(self._catalog.record() or {})

    def copy_near(self, manifest: Manifest, own: Mapping[str, bytes], share: Share = _WHOLE) -> None:
        """Copy a checkpoint that was committed to this node, if such copies were asked for; nothing is raised.

        Args:
            manifest: What was committed.
            own: Its own container, or this process's part, by its key.
            share: What this process copies.
        """
        if self._near is not None:
            self._near.keep(manifest, own, lambda ref: self.fetch_blob(ref, manifest), self.head, share)

    def _nearer(self, listing: Listing, read: Callable[[Manifest], T]) -> tuple[Manifest, T] | None:
        """Return a checkpoint of which only this node's copy is left, newer than all that the run lists, and not removed on purpose."""
        run_id = None if self._near is None else self._catalog.run_id()
        if self._near is None or run_id is None:
            return None
        copies = self._near.manifests(run_id)
        newest = listing.manifests[0].position if listing.manifests else (-1, -1)
        copies = [copy for copy in copies if copy.position > newest]
        if not copies:
            return None
        gone = {manifest.digest for manifest in self.removed()}
        for copy in copies:
            if copy.digest in gone:
                continue
            try:
                found = read(copy)
            except (FormatError, ChainError) as error:
                self._warn(f"near {copy.digest}", f"{self._near.display} holds a damaged copy: {error}")
                continue
            self._warn(
                "near",
                f"{self.display} does not list checkpoint {copy.seq} (step {copy.step}), which was stored there; this node's copy"
                f" in {self._near.display} is sound, and is taken. To go on from what is listed, delete that folder",
            )
            return copy, found
        return None

    def _scan(self) -> Listing:
        listing = self._catalog.scan()
        self.damaged = listing.damaged
        for damaged in listing.damaged:
            self._warn(damaged.key, f"unreadable checkpoint passed over: {damaged.reason}")
        return listing

    def _warn(self, key: str, message: str) -> None:
        if key not in self._warned:
            self._warned.add(key)
            warn(message)

    def _refuse_member(self) -> None:
        """Refuse one store of a set, which holds its records but only shards of its containers."""
        if self.stores is not None or not exists(self.objects, MEMBER_KEY):
            return
        from shrinkpoint.store.striped.members import read_member

        if (member := read_member(self.objects)) is not None:
            raise RunMismatchError(
                f"{self.display} is store {member.number} of a set: give all of its stores, which were"
                f" {', '.join(member.stores)} when the run began"
            )
