"""Threads that share the work of one state: its parameters, and the parts of a large one where no parameter is left to begin.

A thread that has parts to share goes through them itself, and the others of its team take some once every parameter is begun.
So nobody waits for work that nobody has begun, and one parameter of a third of the model does not keep the others waiting.
"""

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from shrinkpoint.runtime.processors import usable_threads

__all__ = ["map_in_order", "map_in_threads"]

Item = TypeVar("Item")
Result = TypeVar("Result")

_local = threading.local()


class _Parts:
    """Parts of one piece of work, for whoever has time.

    Args:
        function: does one of them.
        parts: all of them.
    """

    def __init__(self, function: Callable[[Any], Any], parts: Sequence[Any]) -> None:
        self._function = function
        self._waiting = deque(enumerate(parts))
        self._results: list[Any] = [None] * len(parts)
        self._left = len(parts)
        self._error: BaseException | None = None
        self._changed = threading.Condition()

    def work(self) -> None:
        """Do parts until none is waiting."""
        while True:
            try:
                index, part = self._waiting.popleft()
            except IndexError:
                return
            try:
                self._results[index] = self._function(part)
            except BaseException as error:  # noqa: BLE001 - raised where the parts came from
                self._error = error
            with self._changed:
                self._left -= 1
                self._changed.notify_all()

    def finish(self) -> list[Any]:
        """Wait for those that others have begun; the results in order, or the error of one of the parts."""
        with self._changed:
            self._changed.wait_for(lambda: self._left == 0)
        if self._error is not None:
            raise self._error
        return self._results


def _help(parts: "weakref.ref[_Parts]") -> None:
    there = parts()
    if there is not None:  # else all was done before this thread had time, and its arrays are given back
        there.work()


def map_in_threads(function: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
    """``[function(item) for item in items]``, shared with the team that the calling thread belongs to.

    Args:
        function: done for each item; it should leave the interpreter's lock alone for most of its time.
        items: all of them.
    """
    work = list(items)
    pool: ThreadPoolExecutor | None = getattr(_local, "pool", None)
    if pool is None or len(work) < 2:
        return [function(item) for item in work]
    parts = _Parts(function, work)
    with suppress(RuntimeError):  # the caller of `map_in_order` has gone away, and nothing new begins
        for _ in work[1:]:
            pool.submit(_help, weakref.ref(parts))
    parts.work()
    return parts.finish()


def map_in_order(
    function: Callable[[Item], Result],
    items: Sequence[Item],
    threads: int,
    size: Callable[[Item], int] = lambda item: 0,
) -> Iterator[Result]:
    """``map(function, items)`` by a team of threads.

    Args:
        function: done for each item; what it gives to `map_in_threads` is shared among the team.
        items: all of them.
        threads: how many there are.
        size: of an item: the largest are begun first.
    """
    threads = usable_threads(threads)
    if threads <= 1:
        yield from map(function, items)
        return
    order = sorted(range(len(items)), key=lambda index: -size(items[index]))
    pool: ThreadPoolExecutor = ThreadPoolExecutor(
        threads, thread_name_prefix="shrinkpoint-code", initializer=lambda: setattr(_local, "pool", pool)
    )
    try:
        begun = {index: pool.submit(partial(function, items[index])) for index in order}
        for index in range(len(items)):
            yield begun.pop(index).result()  # a result may be large
    finally:
        pool.shutdown(cancel_futures=True)
