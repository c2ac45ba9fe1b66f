"""Threads that share the work of one state: its parameters, and the parts of a large one where no parameter is left to begin.

A thread that has parts to share goes through them itself, and the others of its team take some where they have nothing else to do.
So nobody waits for work that nobody has begun, and one parameter of a third of the model does not keep the others waiting.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
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

    @property
    def is_waiting(self) -> bool:
        """Whether a part has not been begun."""
        return bool(self._waiting)

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


class _Team:
    """Threads that work on one state."""

    def __init__(self) -> None:
        self._busy = 0
        self._open: list[_Parts] = []
        self._changed = threading.Condition()

    def join(self) -> None:
        """Begin to have work of one's own; who has not begun is waited for by nobody, since it may never start."""
        with self._changed:
            self._busy += 1

    def share(self, parts: _Parts) -> list[Any]:
        """Do all parts, with those who have time."""
        with self._changed:
            self._open.append(parts)
            self._changed.notify_all()
        parts.work()
        with self._changed:
            self._open.remove(parts)
        return parts.finish()

    def help_others(self) -> None:
        """Help until nobody has work of their own."""
        with self._changed:
            self._busy -= 1
            self._changed.notify_all()
        while (parts := self._next()) is not None:
            parts.work()

    def _next(self) -> _Parts | None:
        with self._changed:
            while True:
                for parts in self._open:
                    if parts.is_waiting:
                        return parts
                if self._busy == 0:
                    return None
                self._changed.wait()


def map_in_threads(function: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
    """``[function(item) for item in items]``, shared with the team that the calling thread belongs to.

    Args:
        function: done for each item; it should leave the interpreter's lock alone for most of its time.
        items: all of them.
    """
    work = list(items)
    team: _Team | None = getattr(_local, "team", None)
    if team is None or len(work) < 2:
        return [function(item) for item in work]
    return team.share(_Parts(function, work))


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
    futures: dict[int, Future[Result]] = {index: Future() for index in range(len(items))}
    waiting = deque(
        (futures[index], items[index]) for index in sorted(futures, key=lambda i: -size(items[i]))
    )
    team = _Team()

    def work() -> None:
        _local.team = team
        team.join()
        while waiting:
            try:
                future, item = waiting.popleft()
            except IndexError:
                break
            try:
                future.set_result(function(item))
            except BaseException as error:  # noqa: BLE001 - raised in the caller's thread
                future.set_exception(error)
            del future, item  # a result may be large
        team.help_others()

    with ThreadPoolExecutor(threads, thread_name_prefix="shrinkpoint-code") as pool:
        try:
            for _ in range(threads):
                pool.submit(work)
            for index in range(len(items)):
                yield futures.pop(index).result()
        finally:
            waiting.clear()
