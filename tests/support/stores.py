"""Sets of stores in memory, each of which can be lost, blanked, held up, damaged or put back to an earlier day."""

import threading
from collections.abc import Iterable

from support.fake_objects import FakeObjects, InjectedError

from shrinkpoint.store.manifest import Manifest
from shrinkpoint.store.retry import RetryPolicy
from shrinkpoint.store.run import RunStore
from shrinkpoint.store.striped import Patience, StripedObjects
from shrinkpoint.store.striped.shards import ShardName

__all__ = ["QUICK", "NamedFake", "Stores", "take"]

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
        release, held = threading.Event(), set(operations)

        def before(operation: str, key: str) -> None:
            if operation in held:
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
