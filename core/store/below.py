"""The objects below a prefix of another object store, as a store of their own."""

from collections.abc import Collection
from dataclasses import replace

from shrinkpoint.store.objects import ObjectInfo, ObjectStore

__all__ = ["ObjectsBelow"]


class ObjectsBelow:
    """An `ObjectStore` whose keys are those of another one without a prefix.

    Args:
        inner: the other store.
        prefix: of its keys, with a slash at its end.
    """

    def __init__(self, inner: ObjectStore, prefix: str) -> None:
        self._inner = inner
        self._prefix = prefix

    @property
    def display(self) -> str:
        """See `ObjectStore`."""
        return self._inner.show(self._prefix.rstrip("/"))

    @property
    def create_is_atomic(self) -> bool | None:
        """See `ObjectStore`."""
        return self._inner.create_is_atomic

    def show(self, key: str) -> str:
        """See `ObjectStore`."""
        return self._inner.show(self._prefix + key)

    def put_if_absent(self, key: str, data: bytes) -> bool:
        """See `ObjectStore`."""
        return self._inner.put_if_absent(self._prefix + key, data)

    def put(self, key: str, data: bytes) -> None:
        """See `ObjectStore`."""
        self._inner.put(self._prefix + key, data)

    def get(self, key: str, start: int | None = None, end: int | None = None, *, max_size: int) -> bytes:
        """See `ObjectStore`."""
        return self._inner.get(self._prefix + key, start, end, max_size=max_size)

    def list(self, prefix: str, *, limit: int | None = None) -> list[ObjectInfo]:
        """See `ObjectStore`."""
        cut = len(self._prefix)
        found = self._inner.list(self._prefix + prefix, limit=limit)
        return [replace(info, key=info.key[cut:]) for info in found]

    def delete(self, keys: Collection[str]) -> None:
        """See `ObjectStore`."""
        self._inner.delete([self._prefix + key for key in keys])

    def server_time(self) -> float:
        """See `ObjectStore`."""
        return self._inner.server_time()

    def sweep(self, before: float) -> int:
        """Nothing: unfinished writes are removed by the store around this one."""
        return 0
