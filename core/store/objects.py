"""What a run needs of a store: seven operations on immutable objects, and the errors that steer retries."""

from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from shrinkpoint.errors import StoreError
from shrinkpoint.store.keys import new_nonce, probe_key
from shrinkpoint.warn import warn

# what a store of one's own needs (docs/reference/stores.md); the trial of put-if-absent is for the run alone
__all__ = [
    "CredentialsError",
    "MissingKeyError",
    "ObjectInfo",
    "ObjectStore",
    "ObjectsBelow",
    "TransientStoreError",
]

T = TypeVar("T")

_RACERS = 8


class MissingKeyError(StoreError):
    """There is no object under this key.

    Examples:
        >>> from shrinkpoint.store.objects import MissingKeyError
        >>> try:
        ...     shrinkpoint.load("model-of-yesterday.shrink")
        ... except MissingKeyError as error:
        ...     print(error)
        cannot read ...model-of-yesterday.shrink: No such file or directory
    """


class TransientStoreError(StoreError):
    """The operation failed, may have been carried out nevertheless, and is worth another attempt.

    Examples:
        >>> from shrinkpoint.store.objects import TransientStoreError
        >>> def get(key):  # of a store of one's own: what it raises so is tried again
        ...     try:
        ...         return my_service.read(key)
        ...     except TimeoutError as error:
        ...         raise TransientStoreError(f"{key} timed out") from error
    """


class CredentialsError(StoreError):
    """The credentials have expired, or are not (yet) valid: other ones may do.

    Examples:
        >>> from shrinkpoint.store.objects import CredentialsError
        >>> try:
        ...     state = shrinkpoint.load("runs/7#newest")
        ... except CredentialsError as error:
        ...     print(f"log in again: {error}")
    """


@dataclass(frozen=True, kw_only=True)
class ObjectInfo:
    """One entry of a listing.

    Attributes:
        key: Relative to the run's prefix.
        size: In bytes.
        modified: Seconds since 1970 by the *store's* clock; None where the store does not say.

    Examples:
        >>> from shrinkpoint.store.objects import ObjectInfo
        >>> ObjectInfo(key="data/000000001000-a-b.shrink", size=1024, modified=None).size
        1024
    """

    key: str
    size: int
    modified: float | None


class ObjectStore(Protocol):
    """Objects below one prefix, under relative keys.

    Every operation may be repeated: keys are written once, so that a second attempt can only write the same bytes.
    All raise :class:`~shrinkpoint.errors.StoreError`: :class:`TransientStoreError` where another attempt makes sense.

    Examples:
        A store that counts what is read, around one that the library opens:

        >>> from shrinkpoint.store.connect import open_objects
        >>> from shrinkpoint.store.run import RunStore
        >>> class Counting:
        ...     def __init__(self, inner):
        ...         self.inner, self.reads = inner, 0
        ...
        ...     def __getattr__(self, name):
        ...         return getattr(self.inner, name)
        ...
        ...     def get(self, key, start=None, end=None, *, max_size):
        ...         self.reads += 1
        ...         return self.inner.get(key, start, end, max_size=max_size)
        >>> counting = Counting(open_objects("runs/7"))
        >>> len(RunStore("runs/7", objects=counting).manifests()), counting.reads
        (3, 3)
    """

    @property
    def display(self) -> str:
        """The prefix for messages, without credentials."""

    @property
    def create_is_atomic(self) -> bool | None:
        """True where put-if-absent is known to be exclusive; None where that must be probed."""

    def show(self, key: str) -> str:
        """Return where ``key`` lies, for messages."""

    def put_if_absent(self, key: str, data: bytes) -> bool:
        """Write durably, whole or not at all, unless ``key`` exists.

        Returns:
            False when ``key`` exists. After a lost response that may be this very object: read it and compare.
        """

    def put(self, key: str, data: bytes) -> None:
        """Write durably, whole or not at all, under a key that nobody else uses."""

    def get(self, key: str, start: int | None = None, end: int | None = None, *, max_size: int) -> bytes:
        """Return bytes ``start`` (included) to ``end`` (excluded) of an object, or all of it.

        Raises:
            MissingKeyError: There is no such object.
            CorruptionError: More than ``max_size`` bytes would be read, or the object ends before ``end``.
        """

    def list(self, prefix: str, *, limit: int | None = None) -> list[ObjectInfo]:
        """Return every object whose key begins with ``prefix``, never from a cache; at most ``limit`` of them."""

    def delete(self, keys: Collection[str]) -> None:
        """Remove objects durably; absent ones are no error."""

    def server_time(self) -> float:
        """Now, by the clock that stamps ``ObjectInfo.modified``."""

    def sweep(self, before: float) -> int:
        """Remove what interrupted writes of ours left invisible below the prefix, if older than ``before``.

        Returns:
            How many temporary files or unfinished uploads were removed.
        """


class ObjectsBelow:
    """An `ObjectStore` around another one, whose keys are those of the other one without a prefix.

    Args:
        inner: the other store.
        prefix: of its keys, with a slash at its end; or nothing.

    Examples:
        >>> from shrinkpoint.store.connect import open_objects
        >>> from shrinkpoint.store.objects import ObjectsBelow
        >>> len(ObjectsBelow(open_objects("runs/7"), "data/").list(""))
        3
    """

    def __init__(self, inner: ObjectStore, prefix: str = "") -> None:
        self.inner = inner
        """The other store."""
        self._prefix = prefix

    def _do(self, work: Callable[[ObjectStore], T]) -> T:
        """Carry out one operation on the other store."""
        return work(self.inner)

    @property
    def display(self) -> str:
        """See `ObjectStore`."""
        return self.inner.show(self._prefix.rstrip("/")) if self._prefix else self.inner.display

    @property
    def create_is_atomic(self) -> bool | None:
        """See `ObjectStore`."""
        return self.inner.create_is_atomic

    def show(self, key: str) -> str:
        """See `ObjectStore`."""
        return self.inner.show(self._prefix + key)

    def put_if_absent(self, key: str, data: bytes) -> bool:
        """See `ObjectStore`."""
        return self._do(lambda inner: inner.put_if_absent(self._prefix + key, data))

    def put(self, key: str, data: bytes) -> None:
        """See `ObjectStore`."""
        self._do(lambda inner: inner.put(self._prefix + key, data))

    def get(self, key: str, start: int | None = None, end: int | None = None, *, max_size: int) -> bytes:
        """See `ObjectStore`."""
        return self._do(lambda inner: inner.get(self._prefix + key, start, end, max_size=max_size))

    def list(self, prefix: str, *, limit: int | None = None) -> list[ObjectInfo]:
        """See `ObjectStore`."""
        found = self._do(lambda inner: inner.list(self._prefix + prefix, limit=limit))
        cut = len(self._prefix)
        return [replace(info, key=info.key[cut:]) for info in found] if cut else found

    def delete(self, keys: Collection[str]) -> None:
        """See `ObjectStore`."""
        self._do(lambda inner: inner.delete([self._prefix + key for key in keys]))

    def server_time(self) -> float:
        """See `ObjectStore`."""
        return self._do(lambda inner: inner.server_time())

    def sweep(self, before: float) -> int:
        """See `ObjectStore`; below a prefix nothing: the store around this one removes what was left."""
        return 0 if self._prefix else self._do(lambda inner: inner.sweep(before))


def honours_put_if_absent(objects: ObjectStore) -> bool:
    """Try out whether exactly one of several writers of one new key wins, first one after the other, then at once.

    Some servers accept the condition and ignore it, or check it without a lock. A race that is lost only sometimes may pass; an ignored condition never does. Costs 13 small requests; where the answer
    is known it costs one, because that the store can be written to must be known before training starts.

    Raises:
        StoreError: The store could not be written to at all.
    """
    sequential, race = probe_key(), probe_key()
    if objects.create_is_atomic is not None:
        objects.put(sequential, b"")
        _remove(objects, [sequential])
        return objects.create_is_atomic
    try:
        if not _wins(objects, sequential) or _wins(objects, sequential):
            return False
        with ThreadPoolExecutor(_RACERS) as pool:
            return sum(pool.map(lambda _: _wins(objects, race), range(_RACERS))) == 1
    finally:
        _remove(objects, [sequential, race])


def _wins(objects: ObjectStore, key: str) -> bool:
    """Return whether this attempt created ``key``; a refusal counts as a win when a lost response hid that it was one."""
    mine = new_nonce().encode()
    return objects.put_if_absent(key, mine) or objects.get(key, max_size=len(mine)) == mine


def _remove(objects: ObjectStore, keys: list[str]) -> None:
    try:
        objects.delete(keys)
    except StoreError as error:
        warn(f"{error}: saving works, but old checkpoints cannot be removed from {objects.display}")
