"""Garbage collection: unpublish a manifest first, delete its blobs a grace later, by the store's own clock.

Before a manifest is deleted, a copy goes to ``trash/``; the time stamp of that copy starts the grace of the blobs that it
names. A reader in the middle of a restore, or a writer that resumed from the checkpoint a moment ago, keeps its blobs.
Without a grace there is no such copy. What can be freed without writing is freed first: a full disk is when one collects.
Every step can be repeated: a collection that was interrupted anywhere is completed by the next one.
"""

from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from shrinkpoint.errors import ChainError, FormatError, NoCheckpointError, StoreError
from shrinkpoint.store.catalog import Catalog, Listing, is_listed, read_checked
from shrinkpoint.store.keys import commit_key, is_data_key, is_probe_key, is_trash_key, trash_key
from shrinkpoint.store.manifest import MAX_MANIFEST_BYTES, BlobRef, Manifest
from shrinkpoint.store.objects import MissingKeyError, ObjectInfo, ObjectStore
from shrinkpoint.warn import warn

DEFAULT_GRACE_S = 86400.0
# Blobs are written before the manifest that names them; between the two time stamps lies at most one commit.
_SLACK_S = 7200.0
_UNPUBLISHED_TOGETHER = 16


@dataclass(frozen=True, kw_only=True)
class GcReport:
    """What a collection did.

    Attributes:
        kept: Sequence numbers that stay restorable.
        removed: Sequence numbers that were unpublished; their blobs follow when the grace is over, without one at once.
        blobs_removed: Keys of deleted containers.
        bytes_freed: Their total size.
        waiting: Containers that no kept checkpoint needs and whose grace is not over.
        damaged: Keys of unreadable manifests; they, and every container that they may name, are left alone.
    """

    kept: tuple[int, ...]
    removed: tuple[int, ...]
    blobs_removed: tuple[str, ...]
    bytes_freed: int
    waiting: int
    damaged: tuple[str, ...]


def collect(
    objects: ObjectStore,
    catalog: Catalog,
    *,
    keep: Collection[int],
    seen: Collection[str] | None,
    protect: Collection[str],
    check_fence: Callable[[Listing], None],
    grace_s: float,
) -> GcReport:
    """Collect as `shrinkpoint.store.writer.RunWriter.collect`, the manifests first, then their blobs.

    Args:
        objects: The run's object store.
        catalog: Its manifests.
        keep: Sequence numbers to keep.
        seen: Digests of the manifests that `keep` was chosen from; None: all that are there.
        protect: Digests of manifests to keep besides.
        check_fence: Raises FencedError where a listing shows that another writer has taken over.
        grace_s: How long blobs outlive the last manifest that named them.

    Raises:
        StoreError: The store failed. Or it lists a manifest that it cannot read, and what else it says is not to be built on.
    """
    now = objects.server_time()
    listing = catalog.scan()
    check_fence(listing)
    for damaged in listing.damaged:
        if damaged.missing:
            raise StoreError(
                f"{damaged.reason}. Nothing is removed until that is repaired, or the entry is gone"
            )
    sizes = catalog.sizes()
    wanted = set(keep) | set(catalog.pins().values())
    newest = next((m for m in listing.manifests if catalog.is_whole(m, sizes)), None)
    spared = {*protect, *([newest.digest] if newest else [])}
    judged = [m for m in listing.manifests if seen is None or m.digest in seen]
    doomed = [m for m in judged if m.seq not in wanted and m.digest not in spared]
    at_once = grace_s == 0
    if at_once:
        _unpublish(objects, catalog, doomed, copied=False)
    gone = {manifest.digest for manifest in doomed}
    blobs, waiting, expired = _dead_blobs(objects, catalog, gone, now - grace_s, check_fence)
    objects.delete([info.key for info in blobs])
    objects.delete(expired)
    _sweep(objects, now - grace_s)
    if not at_once:  # only now, since the copies take space, which may just have been freed
        _unpublish(objects, catalog, doomed, copied=True)
    return GcReport(
        kept=tuple(sorted(m.seq for m in listing.manifests if m.digest not in gone)),
        removed=tuple(sorted(m.seq for m in doomed)),
        blobs_removed=tuple(info.key for info in blobs),
        bytes_freed=sum(info.size for info in blobs),
        waiting=waiting,
        damaged=tuple(damaged.key for damaged in listing.damaged),
    )


def _unpublish(objects: ObjectStore, catalog: Catalog, doomed: list[Manifest], *, copied: bool) -> None:
    """Let go of manifests, oldest first and a few at a time, so that a collection that is cut short has achieved some."""
    oldest_first = sorted(doomed, key=lambda manifest: (manifest.epoch, manifest.seq))
    for start in range(0, len(oldest_first), _UNPUBLISHED_TOGETHER):
        batch = oldest_first[start : start + _UNPUBLISHED_TOGETHER]
        for manifest in batch if copied else ():
            try:
                objects.put(trash_key(manifest.seq), manifest.to_bytes())
            except StoreError as error:
                raise StoreError(
                    f"{error}. This was the copy of checkpoint {manifest.seq} (step {manifest.step}) by which it can come back"
                    " within the grace. Without a grace there is none, so that nothing is written and a full disk is no"
                    " obstacle: `shrinkpoint prune --grace 0`, if nothing else reads or writes the run"
                ) from error
        with ThreadPoolExecutor(_UNPUBLISHED_TOGETHER) as pool:
            found = list(pool.map(catalog.published_key, batch))
        keys = [key for key in found if key is not None]
        if keys:
            try:
                objects.delete(keys)
            finally:
                catalog.forget(keys)


def _dead_blobs(
    objects: ObjectStore,
    catalog: Catalog,
    gone: set[str],
    before: float,
    check_fence: Callable[[Listing], None],
) -> tuple[list[ObjectInfo], int, list[str]]:
    """Return blobs to delete, how many more wait for the end of their grace, and trash entries to delete after them.

    What manifests in `gone` name that are still listed waits.
    """
    # The order matters: a blob that this listing shows was named, if ever, by a manifest that the later one shows.
    infos = objects.list("data/")
    modified = {info.key: info.modified for info in infos}
    recent, expired = _read_trash(objects, catalog, modified, before)
    listing = catalog.scan()
    check_fence(listing)
    live = _Named(catalog, modified)
    for manifest in listing.manifests:
        (recent if manifest.digest in gone else live).add(manifest)
    for damaged in listing.damaged:
        live.add_unknown(damaged.modified)
    unknown_until = max(live.unknown_until, recent.unknown_until)
    dead: list[ObjectInfo] = []
    waiting = 0
    for info in infos:
        if info.key in live.keys or not is_data_key(info.key):
            continue
        may_be_named = info.modified is None or info.modified <= unknown_until + _SLACK_S
        if info.key in recent.keys or may_be_named or info.modified is None or info.modified >= before:
            waiting += 1
        else:
            dead.append(info)
    return dead, waiting, expired


class _Named:
    """Every object that some manifests need, and how far those reach that cannot be read."""

    def __init__(self, catalog: Catalog, modified: Mapping[str, float | None]) -> None:
        self._catalog, self._modified = catalog, modified
        self._seen: set[BlobRef] = set()
        self.keys: set[str] = set()
        self.unknown_until = float("-inf")

    def add(self, manifest: Manifest) -> None:
        """Add what a manifest needs; the parts of a head that cannot be read are unknown, but older than it."""
        for ref in set(manifest.chain) - self._seen:
            self._seen.add(ref)
            self.keys.add(ref.key)
            if not ref.parts:
                continue
            try:
                self.keys.update(part.ref.key for part in self._catalog.head(ref).parts)
            except (ChainError, FormatError):
                self.add_unknown(self._modified.get(ref.key))

    def add_unknown(self, at: float | None) -> None:
        """Add what something named that was written at this time and cannot be read."""
        self.unknown_until = max(self.unknown_until, float("inf") if at is None else at)


def _read_trash(
    objects: ObjectStore, catalog: Catalog, modified: Mapping[str, float | None], before: float
) -> tuple[_Named, list[str]]:
    """Return what entries in their grace name, and the keys of those past theirs.

    Whatever a damaged entry named is older than it: all of that is kept until the entry itself expires.
    """
    recent = _Named(catalog, modified)
    expired: list[str] = []
    for info in objects.list("trash/"):
        if not is_trash_key(info.key):
            continue  # another run's, which lies here
        if info.modified is not None and info.modified < before:
            expired.append(info.key)
            continue
        try:
            recent.add(read_checked(objects, info.key, Manifest.from_bytes))
        except (MissingKeyError, FormatError) as error:
            if isinstance(error, MissingKeyError) and not is_listed(objects, info.key):
                continue  # another collection has finished with it
            recent.add_unknown(info.modified)
    return recent, expired


def _sweep(objects: ObjectStore, before: float) -> None:
    probes = [
        i.key
        for i in objects.list("probe/")
        if is_probe_key(i.key) and i.modified is not None and i.modified < before
    ]
    if probes:
        objects.delete(probes)
    try:
        objects.sweep(before)
    except StoreError as error:
        warn(f"{error}: unfinished uploads stay; have the bucket abort them by a lifecycle rule")


def removed(objects: ObjectStore, catalog: Catalog) -> list[Manifest]:
    """Removed checkpoints whose containers are all there in their sizes, newest first.

    One in whose place another stands (compaction) is left out: its state is not gone.

    Raises:
        StoreError: The store could not be listed or read.
    """
    listing = catalog.scan()
    published = {manifest.digest for manifest in listing.manifests}
    replaced = {manifest.replaces for manifest in listing.manifests}
    sizes = catalog.sizes()
    found: dict[str, Manifest] = {}
    for info in objects.list("trash/"):
        if not is_trash_key(info.key):
            continue
        try:
            manifest = read_checked(objects, info.key, Manifest.from_bytes)
        except MissingKeyError:
            continue  # a collection has finished with it
        except FormatError as error:
            warn(f"passed over: {error}")
            continue
        found[manifest.digest] = manifest
    back = [
        manifest
        for manifest in found.values()
        if manifest.digest not in published
        and manifest.position not in replaced
        and catalog.is_whole(manifest, sizes)
    ]
    return sorted(back, key=lambda manifest: manifest.position, reverse=True)


def publish_again(objects: ObjectStore, catalog: Catalog, manifest: Manifest, *, numbered: bool) -> None:
    """Put a removed manifest back into ``commits/``, under its own number and in its old place.

    The entry in ``trash/`` stays: until it expires it protects the containers from a collection that is under way.

    Args:
        objects: The run's object store.
        catalog: Its manifests.
        manifest: One of :func:`removed`.
        numbered: Whether the store honours put-if-absent, so that the number alone makes a name.

    Raises:
        NoCheckpointError: A collection has deleted a container meanwhile.
        StoreError: The store failed.
    """
    key, data = commit_key(manifest.seq), manifest.to_bytes()
    own = commit_key(manifest.seq, manifest.chain[-1].key)
    if not numbered or not (objects.put_if_absent(key, data) or _holds(objects, key, data)):
        key = own  # a writer that was fenced off may have used the number again
        objects.put_if_absent(key, data)
    catalog.note(key, manifest)
    # Only now: a collection that began before the manifest was there may have gone on.
    if not catalog.is_whole(manifest, catalog.sizes()):
        objects.delete([key])
        raise NoCheckpointError(
            f"checkpoint {manifest.seq} (step {manifest.step}) of {objects.display} has just been deleted for good by a collection"
        )


def _holds(objects: ObjectStore, key: str, data: bytes) -> bool:
    try:
        return objects.get(key, max_size=MAX_MANIFEST_BYTES) == data
    except MissingKeyError:
        return False  # collected meanwhile: the number is used up all the same
