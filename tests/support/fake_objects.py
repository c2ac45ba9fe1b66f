"""An object store in memory with a clock that tests turn, and operations that fail on demand."""

import threading
from collections.abc import Callable, Collection

from shrinkpoint.errors import CorruptionError, StoreError
from shrinkpoint.store.objects import MissingKeyError, ObjectInfo, TransientStoreError

__all__ = ["FakeObjects", "InjectedError"]


class InjectedError(StoreError):
    """The failure that a test asked for."""


class FakeObjects:
    """Implements `ObjectStore` from its documentation alone, so that no store is tested through itself."""

    def __init__(self, *, honours_condition: bool = True, known_atomic: bool | None = True) -> None:
        self.blobs: dict[str, tuple[bytes, float]] = {}
        self.now = 1_000_000.0
        self.calls: list[tuple[str, str]] = []
        self.before: Callable[[str, str], None] = lambda operation, key: None
        self.lose_response_of: str | None = None
        self.honours_condition = honours_condition
        self.create_is_atomic = known_atomic
        self._lock = threading.RLock()

    @property
    def display(self) -> str:
        return "fake://run"

    def show(self, key: str) -> str:
        return f"fake://run/{key}"

    def fail_at(self, call: int) -> None:
        """Let the ``call``-th operation from now (counted from 0), and all after it, fail without effect."""
        remaining = [call]

        def before(operation: str, key: str) -> None:
            if remaining[0] <= 0:
                raise InjectedError(f"injected failure of {operation} {key}")
            remaining[0] -= 1

        self.before = before

    def heal(self) -> None:
        """Let everything work again."""
        self.before = lambda operation, key: None

    def put_if_absent(self, key: str, data: bytes) -> bool:
        with self._lock:
            self._note("put_if_absent", key)
            if key in self.blobs and self.honours_condition:
                return False
            self.blobs[key] = (bytes(data), self.now)
            self._maybe_lose("put_if_absent", key)
            return True

    def put(self, key: str, data: bytes) -> None:
        with self._lock:
            self._note("put", key)
            self.blobs[key] = (bytes(data), self.now)
            self._maybe_lose("put", key)

    def get(self, key: str, start: int | None = None, end: int | None = None, *, max_size: int) -> bytes:
        with self._lock:
            self._note("get", key)
            if key not in self.blobs:
                raise MissingKeyError(f"no {key}")
            data = self.blobs[key][0]
            if end is not None and end > len(data):
                raise CorruptionError(f"{key} ends early")
            data = data[start:end]
            if len(data) > max_size:
                raise CorruptionError(f"{key} is too large")
            return data

    def list(self, prefix: str, *, limit: int | None = None) -> list[ObjectInfo]:
        with self._lock:
            self._note("list", prefix)
            keys = sorted(key for key in self.blobs if key.startswith(prefix))[:limit]
            return [
                ObjectInfo(key=key, size=len(self.blobs[key][0]), modified=self.blobs[key][1]) for key in keys
            ]

    def delete(self, keys: Collection[str]) -> None:
        with self._lock:
            for key in keys:
                self._note("delete", key)
                self.blobs.pop(key, None)

    def server_time(self) -> float:
        return self.now

    def sweep(self, before: float) -> int:
        self._note("sweep", "")
        return 0

    def _note(self, operation: str, key: str) -> None:
        self.calls.append((operation, key))
        self.before(operation, key)

    def _maybe_lose(self, operation: str, key: str) -> None:
        if self.lose_response_of is not None and key.startswith(self.lose_response_of):
            self.lose_response_of = None
            raise TransientStoreError(f"the response to {operation} {key} was lost")
