"""Copies of the newest checkpoints in a folder on this node, for fast restarts: read where their digests are right, never needed."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shrinkpoint.errors import ConfigError, CorruptionError, RunMismatchError, ShrinkpointError
from shrinkpoint.store.catalog import Catalog, exists
from shrinkpoint.store.connect import check_outside
from shrinkpoint.store.keys import FORMAT_KEY, commit_key, is_own_key
from shrinkpoint.store.local import LocalObjects
from shrinkpoint.store.manifest import FORMAT, MAX_MANIFEST_BYTES, BlobRef, Head, Manifest, seal
from shrinkpoint.store.objects import MissingKeyError, ObjectStore
from shrinkpoint.store.retry import without_retries
from shrinkpoint.store.urls import RunUrl, Stores, parse_url
from shrinkpoint.warn import warn

NEAR_KEY = "near.json"
"""Marks a folder as one of copies, which their writer may delete at any time, and names their run."""

_MAGIC = "shrinkpoint-near"
_LOOK_AT = 1000
_OLD_S = 3600.0


@dataclass(frozen=True)
class Share:
    """What one of several processes copies of a checkpoint that all have written."""

    rank: int = 0
    size: int = 1
    """Processes that write."""
    leads: bool = True
    """Whether it is its node's first one, which lists the checkpoint, and removes what is too old."""


class NearCopies:
    """A folder in the form of a run, with whole copies of the newest checkpoints and the chains that they need.

    A copy is made when its checkpoint is committed at the run's URL, and is not acknowledged. All trouble with the folder is
    a warning. Making one does no I/O.

    Args:
        folder: An absolute path.
        keep: How many checkpoints it holds at most.
    """

    def __init__(self, folder: str, keep: int) -> None:
        self._objects = LocalObjects(folder)
        self._catalog = Catalog(self._objects)
        self._keep = keep
        self._mark: bytes | None = None
        self._off = False
        self._warned: set[str] = set()

    @classmethod
    def of(cls, url: RunUrl) -> "NearCopies | None":
        """Open the folder `near` of a run; None where there is none.

        Raises:
            ConfigError: It is no folder, or the run, or a store of it, is in it or around it.
        """
        stores = Stores.of(url)
        if stores.near is None:
            return None
        location = parse_url(stores.near)
        if location.kind != "local":
            raise ConfigError(
                f"near={location.display!r} must be a folder on this node, such as /local/nvme/run-7 or /dev/shm/run-7"
            )
        check_outside(url, location)
        return cls(location.path, stores.near_keep)

    @property
    def display(self) -> str:
        """The folder."""
        return self._objects.display

    def open(self, record: dict[str, Any]) -> None:
        """Begin to copy to the folder, which is made if need be.

        Args:
            record: The run's `format.json`.

        Raises:
            RunMismatchError: It holds something else, which must not be deleted.
        """
        self._mark, self._off = _mark_of(record.get("run")), False
        try:
            there = _read(self._objects, NEAR_KEY)
            if there is None:
                keys = [info.key for info in self._objects.list("", limit=_LOOK_AT)]
                if keys:
                    own = is_own_key(keys[0])
                    raise RunMismatchError(
                        f"near={self.display} holds {'a run of its own' if own else 'something else'} ({keys[0]!r} for one), and"
                        " copies there are deleted again: give an empty folder"
                    )
                self._objects.put_if_absent(NEAR_KEY, self._mark)
            elif there != self._mark:
                raise RunMismatchError(
                    f"near={self.display} holds copies of another run: give each run a folder of its own, or delete this one"
                )
            self._objects.put_if_absent(FORMAT_KEY, seal(record))
            self._objects.sweep(self._objects.server_time() - _OLD_S)
        except RunMismatchError:
            raise
        except ShrinkpointError as error:
            self._trouble(f"near={self.display} cannot be used: {error}")

    def keep(
        self,
        manifest: Manifest,
        own: Mapping[str, bytes],
        fetch: Callable[[BlobRef], bytes],
        head: Callable[[BlobRef], Head],
        share: Share,
    ) -> None:
        """Copy a committed checkpoint, in the place of the oldest of `keep`; nothing is raised.

        Args:
            manifest: It.
            own: Its own container, or this process's part, by its key.
            fetch: Gives those of its chain that the folder does not have.
            head: Gives the parts that several ranks wrote.
            share: What this process does of it.
        """
        if self._mark is None or self._off:
            return
        try:
            if _read(self._objects, NEAR_KEY) != self._mark:
                # To make it again could fill the disk on which something was mounted.
                self._off = True
                self._trouble(
                    f"near={self.display} is no longer what it was (not mounted, or cleared): no copies are made there until"
                    " the next start"
                )
                return
            parts = [[part.ref for part in head(ref).parts] for ref in manifest.chain if ref.parts]
            wanted = [ref for refs in parts for ref in refs[share.rank :: share.size]]
            if share.leads:
                wanted += manifest.chain
                self._thin(manifest, {ref.key for refs in (manifest.chain, *parts) for ref in refs})
            sizes = self._catalog.sizes()
            for ref in wanted:
                if sizes.get(ref.key) != ref.size:
                    self._objects.put(ref.key, own[ref.key] if ref.key in own else fetch(ref))
            if share.leads:
                self._objects.put(commit_key(manifest.seq, manifest.chain[-1].key), manifest.to_bytes())
            self._warned.clear()
        except ShrinkpointError as error:
            self._trouble(f"no copy could be made in near={self.display}: {error} (step {manifest.step})")

    def _thin(self, coming: Manifest, needed: set[str]) -> None:
        """Delete what will not be among the newest, before anything is written: the folder may be small.

        Args:
            coming: What will be the newest.
            needed: The keys of all its containers.
        """
        listing = self._catalog.scan()
        older = [manifest for manifest in listing.manifests if manifest != coming][: self._keep - 1]
        kept = [*older, coming]
        gone = [self._catalog.key_of(manifest) for manifest in listing.manifests if manifest not in kept]
        keys = [*(key for key in gone if key is not None), *(damaged.key for damaged in listing.damaged)]
        self._objects.delete(keys)
        self._catalog.forget(keys)
        for manifest in older:
            needed |= {ref.key for ref in self._refs(manifest)}
        self._objects.delete([key for key in self._catalog.sizes() if key not in needed and is_own_key(key)])

    def _refs(self, manifest: Manifest) -> Sequence[BlobRef]:
        try:
            return self._catalog.refs(manifest)
        except ShrinkpointError:  # a head is not there, or damaged: what it names is of no use
            return manifest.chain

    def manifests(self, run_id: str) -> list[Manifest]:
        """Return what there are copies of, newest first; none where the folder is another run's, or cannot be read."""
        try:
            if _read(self._objects, NEAR_KEY) != _mark_of(run_id):
                return []
            return list(self._catalog.scan().manifests)
        except ShrinkpointError as error:
            self._trouble(f"near={self.display} cannot be read: {error}")
            return []

    def read(self, ref: BlobRef, start: int = 0, end: int | None = None) -> bytes | None:
        """Return a container, if there is a copy whose length and SHA-256 are those of the manifest; or a range of one, which the caller checks."""
        try:
            if end is not None:
                return self._objects.get(ref.key, start, end, max_size=end - start)
            return ref.verify(self._objects.get(ref.key, max_size=ref.size), self._objects.show(ref.key))
        except MissingKeyError:
            return None
        except ShrinkpointError as error:
            self._trouble(f"{error}. It is a copy: the one at the run's URL is read instead")
            return None

    def _trouble(self, message: str) -> None:
        """Give a warning, once until a copy succeeds again."""
        topic = message.partition(":")[0]
        if topic not in self._warned:
            self._warned.add(topic)
            warn(message)


def is_near(objects: ObjectStore) -> bool:
    """Return whether a folder is one of copies."""
    return isinstance(without_retries(objects), LocalObjects) and exists(objects, NEAR_KEY)


def _mark_of(run_id: object) -> bytes:
    return seal({"type": _MAGIC, "format": FORMAT, "run": run_id})


def _read(objects: ObjectStore, key: str) -> bytes | None:
    """Read a mark; None where there is none. A damaged one is no run's: nothing, which equals no mark."""
    try:
        return objects.get(key, max_size=MAX_MANIFEST_BYTES)
    except MissingKeyError:
        return None
    except CorruptionError:
        return b""
