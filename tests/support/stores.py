"""Sets of stores in memory, each of which can be lost, blanked, held up, damaged or put back to an earlier day."""

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, MutableMapping

from support.fake_objects import FakeObjects, InjectedError

from shrinkpoint.store.manifest import Manifest
from shrinkpoint.store.objects import MissingKeyError, ObjectInfo
from shrinkpoint.store.retry import RetryPolicy
from shrinkpoint.store.run import RunStore
from shrinkpoint.store.striped.calls import Patience
from shrinkpoint.store.striped.objects import StripedObjects
from shrinkpoint.store.striped.shards import ShardName

__all__ = ["QUICK", "FakeSet", "NamedFake", "Stores", "forget", "take"]

QUICK = Patience(late_floor_s=0.15, late_factor=2.0, alone_s=0.3, limit_s=2.0)


def take(manifest: Manifest, blobs: list[bytes]) -> list[bytes]:
    return blobs


class NamedFake(FakeObjects):
    """A fake store with a name of its own."""

    def __init__(self, name: str, **how: bool) -> None:
        super().__init__(**how)
        self.name = name

    @property
    def display(self) -> str:
        return f"fake://{self.name}"

    def show(self, key: str) -> str:
        return f"fake://{self.name}/{key}"

    def lose(self) -> None:
        """Refuse everything."""

        def before(operation: str, key: str) -> None:
            raise InjectedError(f"{self.name} is gone")

        self.before = before

    def hang(self, operations: Iterable[str]) -> threading.Event:
        """Hold up these operations until the event is set."""
        release, reference = threading.Event(), set(operations)

        def before(operation: str, key: str) -> None:
            if operation in reference:
                release.wait(20)

        self.before = before
        return release

    def sweep(self, before: float) -> int:
        return 0

    # A request that hangs must not hold the lock that the others need.
    def _note(self, operation: str, key: str) -> None:
        self.calls.append((operation, key))
        self._lock.release()
        try:
            self.before(operation, key)
        finally:
            self._lock.acquire()


class Stores:
    """`count` stores, and a run over them."""

    def __init__(self, count: int = 3, parity: int | None = 1) -> None:
        self.each = [NamedFake("abcdefghij"[i]) for i in range(count)]
        self.parity = parity

    def objects(self, *, read_anyway: bool = False) -> StripedObjects:
        """A process's own view: it knows nothing yet of stores that fail."""
        return StripedObjects(self.each, parity=self.parity, read_anyway=read_anyway, patience=QUICK)

    def run(self, objects: StripedObjects | None = None) -> RunStore:
        return RunStore("ignored", objects=objects or self.objects(), retry=RetryPolicy(attempts=1))

    def shards(self, store: int) -> list[ShardName]:
        names = [ShardName.parse(key) for key in sorted(self.each[store].blobs)]
        return [name for name in names if name is not None]

    def damage(self, store: int, key: str, position: int) -> None:
        data, modified = self.each[store].blobs[key]
        changed = bytearray(data)
        changed[position] ^= 0x5A
        self.each[store].blobs[key] = bytes(changed), modified


class FakeSet(StripedObjects):
    """Three fake stores where a test has one: its clock, its failures, and its objects as a run sees them.

    ``calls`` are those of the run; what ``before`` is asked about are those of each store.
    """

    def __init__(self, *, honours_condition: bool = True, known_atomic: bool | None = True) -> None:
        self.each = [
            NamedFake(name, honours_condition=honours_condition, known_atomic=known_atomic) for name in "abc"
        ]
        self.calls: list[tuple[str, str]] = []
        self.gone: set[int] = set()
        super().__init__(
            self.each, patience=Patience()
        )  # none of them hangs: one that is late waits for a processor

    def put_if_absent(self, key: str, data: bytes) -> bool:
        self.calls.append(("put_if_absent", key))
        return super().put_if_absent(key, data)

    def put(self, key: str, data: bytes) -> None:
        self.calls.append(("put", key))
        super().put(key, data)

    def get(self, key: str, start: int | None = None, end: int | None = None, *, max_size: int) -> bytes:
        self.calls.append(("get", key))
        return super().get(key, start, end, max_size=max_size)

    def list(self, prefix: str, *, limit: int | None = None) -> "list[ObjectInfo]":
        self.calls.append(("list", prefix))
        return super().list(prefix, limit=limit)

    def delete(self, keys: Collection[str]) -> None:
        self.calls.extend(("delete", key) for key in keys)
        super().delete(keys)

    @property
    def lose_response_of(self) -> str | None:
        return self.each[0].lose_response_of

    @lose_response_of.setter
    def lose_response_of(self, prefix: str | None) -> None:
        for each in self.each:
            each.lose_response_of = prefix

    @property
    def now(self) -> float:
        return self.each[0].now

    @now.setter
    def now(self, value: float) -> None:
        for each in self.each:
            each.now = value

    @property
    def before(self) -> Callable[[str, str], None]:
        return self.each[0].before

    @before.setter
    def before(self, value: Callable[[str, str], None]) -> None:
        for each in self.each:
            each.before = value

    def fail_at(self, call: int) -> None:
        """Let every store fail from its own ``call``-th operation on, the last of three one operation later.

        Each counts its own, so that what fails does not depend on which thread came first.
        """
        there = [each for store, each in enumerate(self.each) if store not in self.gone]
        for place, each in enumerate(there):
            each.fail_at(call + (place == 2))

    def lose(self, store: int) -> None:
        """Let a store refuse everything until it comes back."""
        self.gone.add(store)
        self.each[store].lose()

    def come_back(self, store: int) -> None:
        """As it was when it went."""
        self.gone.discard(store)
        self.heal()

    def heal(self) -> None:
        for store, each in enumerate(self.each):
            if store not in self.gone:
                each.heal()
                self.group.health.answered(store)

    @property
    def blobs(self) -> "MutableMapping[str, tuple[bytes, float]]":
        return _Seen(self)


def forget(fake: FakeObjects | FakeSet, *prefixes: str) -> None:
    """Delete below what is being asked now, as another process does."""
    for each in fake.each if isinstance(fake, FakeSet) else [fake]:
        for name in [name for name in each.blobs if name.startswith(prefixes)]:
            each.blobs.pop(name, None)


class _Seen(MutableMapping[str, tuple[bytes, float]]):
    """The objects of a set under their own keys; what is set is set in every copy, with its time stamp."""

    def __init__(self, owner: FakeSet) -> None:
        self._owner = owner

    def __getitem__(self, key: str) -> tuple[bytes, float]:
        try:
            data = self._owner.get(key, max_size=2**30)
        except MissingKeyError:
            raise KeyError(key) from None
        [info] = [info for info in self._owner.list(key) if info.key == key]
        assert info.modified is not None
        return data, info.modified

    def __setitem__(self, key: str, value: tuple[bytes, float]) -> None:
        data, modified = value
        if key.startswith("data/"):
            del self[key]
            now, self._owner.now = self._owner.now, modified
            self._owner.put(key, data)
            self._owner.now = now
            return
        for each in self._owner.each:
            each.blobs[key] = value

    def __delitem__(self, key: str) -> None:
        for each in self._owner.each:
            for name in [name for name in each.blobs if name == key or name.startswith(f"{key}.")]:
                del each.blobs[name]

    def __iter__(self) -> Iterator[str]:
        return iter([info.key for info in self._owner.list("")])

    def __len__(self) -> int:
        return len(list(iter(self)))
