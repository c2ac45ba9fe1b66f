"""Puts in two halves, for stores that are folders: the bytes are on the disk before it is known whether they are to count."""

from collections.abc import Sequence

from shrinkpoint.errors import StoreError
from shrinkpoint.runtime.unlocked import join_bytes
from shrinkpoint.store.local import LocalObjects
from shrinkpoint.store.objects import ObjectStore, TransientStoreError
from shrinkpoint.store.retry import without_retries

__all__ = ["Prepared", "can_stage", "put_parts"]


class Prepared:
    """A put-if-absent that is about to be decided; its slow half is done where the store is a folder.

    Args:
        objects: The store.
        key: What to write.
        data: Its bytes.
    """

    def __init__(self, objects: ObjectStore, key: str, data: bytes) -> None:
        self._objects, self._key, self._data = objects, key, data
        folder = _folder(objects)
        self._staged = None if folder is None else folder.stage(key, [data])

    def put_if_absent(self) -> bool | None:
        """See :class:`~shrinkpoint.store.objects.ObjectStore`; once.

        Returns:
            None where what was prepared has gone, with its folder for instance: put it as if nothing had been prepared.
        """
        if self._staged is None:
            return self._objects.put_if_absent(self._key, self._data)
        try:
            return self._staged.publish(exclusive=True)
        except StoreError:
            return None

    def discard(self) -> None:
        """Leave nothing behind where it was decided against."""
        if self._staged is not None:
            self._staged.discard()


def can_stage(objects: ObjectStore) -> bool:
    """Whether preparing a put does more than nothing: the store is a folder."""
    return _folder(objects) is not None


def put_parts(objects: ObjectStore, key: str, parts: Sequence[bytes | memoryview]) -> None:
    """Put an object of several pieces, which a folder takes without joining them in memory."""
    folder = _folder(objects)
    if folder is not None:
        try:
            folder.stage(key, parts).publish(exclusive=False)
            return
        except TransientStoreError:
            pass  # the store repeats by itself what fails for a passing reason
    objects.put(key, join_bytes(parts, sum(map(len, parts))))


def _folder(objects: ObjectStore) -> LocalObjects | None:
    below = without_retries(objects)
    return below if isinstance(below, LocalObjects) else None
