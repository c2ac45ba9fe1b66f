"""Stores behind links of so many bytes a second, for the benchmarks of several stores."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shrinkpoint.store.local import LocalObjects
from shrinkpoint.store.objects import ObjectStore
from shrinkpoint.store.run import RunStore
from shrinkpoint.store.striped import StripedObjects

__all__ = ["Distant", "Slow", "timed", "timed_run"]


class Distant:
    """A store of which every answer takes so many seconds."""

    def __init__(self, inner: ObjectStore, seconds: float) -> None:
        self._inner, self._seconds = inner, seconds

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if name not in ("put", "put_if_absent", "get", "list", "delete"):
            return found

        def answer(*arguments: Any, **options: Any) -> Any:
            time.sleep(self._seconds)
            return found(*arguments, **options)

        return answer


class Slow:
    """A store behind a link of so many bytes a second."""

    def __init__(self, inner: ObjectStore, rate: float) -> None:
        self._inner, self._rate = inner, rate

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def put(self, key: str, data: bytes) -> None:
        time.sleep(len(data) / self._rate)
        self._inner.put(key, data)

    def put_if_absent(self, key: str, data: bytes) -> bool:
        time.sleep(len(data) / self._rate)
        return self._inner.put_if_absent(key, data)

    def get(self, key: str, start: int | None = None, end: int | None = None, *, max_size: int) -> bytes:
        data = self._inner.get(key, start, end, max_size=max_size)
        time.sleep(len(data) / self._rate)
        return data


def timed(folder: Path, data: bytes, stores: int, rate: float) -> tuple[float, float]:
    """Seconds of one commit to new stores of so many bytes a second each, and of reading it back."""
    slow = [Slow(LocalObjects(str(folder / str(i))), rate) for i in range(stores)]

    def opened() -> RunStore:
        objects: Any = slow[0] if stores == 1 else StripedObjects(slow, parity=1)
        return RunStore("ignored", objects=objects)

    return timed_run(opened, data)


def timed_run(opened: Callable[[], RunStore], data: bytes) -> tuple[float, float]:
    """Seconds of one commit to a new run, and of reading it back as another process would."""
    with opened().writer() as writer:
        began = time.perf_counter()
        manifest = writer.commit(data, step=1, kind="base", parent=None, state_digest="", meta={})
        saved = time.perf_counter() - began
    fresh = opened()
    began = time.perf_counter()
    assert fresh.fetch(manifest) == [data]
    return saved, time.perf_counter() - began
