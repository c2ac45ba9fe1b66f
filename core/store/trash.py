"""Checkpoints that were removed and can come back: their manifests lie in ``trash/`` until the grace is over."""

from shrinkpoint.errors import FormatError, NoCheckpointError
from shrinkpoint.store.catalog import Catalog, read_checked
from shrinkpoint.store.keys import commit_key, is_trash_key
from shrinkpoint.store.manifest import MAX_MANIFEST_BYTES, Manifest
from shrinkpoint.store.objects import MissingKeyError, ObjectStore
from shrinkpoint.warn import warn

__all__ = ["publish_again", "removed"]


def removed(objects: ObjectStore, catalog: Catalog) -> list[Manifest]:
    """Removed checkpoints whose containers are all there in their sizes, newest first.

    One in whose place another stands (compaction) is left out: its state is not gone.

    Raises:
        StoreError: The store could not be listed or read.
    """
    listing = catalog.scan()
    published = {manifest.digest for manifest in listing.manifests}
    replaced = {manifest.replaces for manifest in listing.manifests}
    sizes = _sizes(objects)
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
    if not catalog.is_whole(manifest, _sizes(objects)):
        objects.delete([key])
        raise NoCheckpointError(
            f"checkpoint {manifest.seq} (step {manifest.step}) of {objects.display} has just been deleted for good by a collection"
        )


def _holds(objects: ObjectStore, key: str, data: bytes) -> bool:
    try:
        return objects.get(key, max_size=MAX_MANIFEST_BYTES) == data
    except MissingKeyError:
        return False  # collected meanwhile: the number is used up all the same


def _sizes(objects: ObjectStore) -> dict[str, int]:
    return {info.key: info.size for info in objects.list("data/")}
