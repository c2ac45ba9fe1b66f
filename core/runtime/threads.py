"""Threads: how many there may be, a team that shares the work of one state, the background thread, and calls that take turns."""

import concurrent.futures.thread  # noqa: F401 - registers its exit hook first, so that it runs after this module's
import math
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from functools import partial, wraps
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np

from shrinkpoint.errors import ConfigError
from shrinkpoint.warn import naming_this_line

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")
Item = TypeVar("Item")
Result = TypeVar("Result")

_QUOTA = Path("/sys/fs/cgroup/cpu.max")
"""Of cgroup v2, as containers see their own: microseconds of CPU time in a period, and the period; ``max`` is no limit."""


def processors() -> int:
    """Processors that this process may use: those it is bound to, and no more than its container's CPU time allows.

    Examples:
        >>> from shrinkpoint.runtime.threads import processors
        >>> processors() >= 1
        True
    """
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _quota()
    return bound if quota is None else max(1, min(bound, math.ceil(quota)))


def _quota() -> float | None:
    try:
        used, period = _QUOTA.read_text(encoding="ascii").split()
        return int(used) / int(period)
    except (OSError, ValueError, ZeroDivisionError):  # no limit, no cgroup v2, or another system
        return None


_local = threading.local()
_PART = 1 << 20  # elements: a part of some milliseconds


def map_in_threads(function: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
    """``[function(item) for item in items]``, shared with the team that the calling thread belongs to.

    The caller goes through the items itself, and the others of its team take some once every item of `map_in_order` is begun. So nobody
    waits for work that nobody has begun, and one parameter of a third of the model does not keep the others waiting.

    Args:
        function: done for each item; it should leave the interpreter's lock alone for most of its time.
        items: all of them.
    """
    work = list(items)
    pool, threads = getattr(_local, "team", (None, 1))
    if pool is None or len(work) < 2:
        return [function(item) for item in work]
    results: list[Future[Result]] = [Future() for _ in work]
    waiting = deque(zip(results, work, strict=True))

    def take() -> None:
        while True:
            try:
                result, item = waiting.popleft()
            except IndexError:
                return
            try:
                result.set_result(function(item))
            except BaseException as error:  # noqa: BLE001 - raised where the items came from
                result.set_exception(error)

    with suppress(RuntimeError):  # the caller of `map_in_order` has gone away, and nothing new begins
        for _ in work[1:threads]:
            pool.submit(_help, weakref.ref(take))
    take()
    wait(results)
    return [result.result() for result in results]


def map_in_parts(function: Callable[[slice], Result], count: int, each: int = 1) -> list[Result]:
    """``[function(part) for part in parts]`` of elements or rows, shared as of `map_in_threads`; parts do not depend on the threads.

    Args:
        function: done for each part, which is not empty.
        count: of elements, or of rows.
        each: how many elements each is.
    """
    most = max(_PART // max(each, 1), 1)
    if 0 < count <= most:  # most tensors, of which there may be thousands
        return [function(slice(0, count))]
    return map_in_threads(
        function, [slice(start, min(start + most, count)) for start in range(0, count, most)]
    )


FIRST: Any = object()
"""In arguments of `in_parts`: the number of a part's first element."""


def in_parts(kernel: Callable[..., Result], *arguments: Any) -> list[Result]:
    """Call a kernel, which works element by element, for each of the parts of `map_in_parts`.

    Args:
        kernel: called with a part of each array, and with other arguments as they are.
        arguments: flat arrays that are as long as the first of them are cut. A short table that is as long is no matter, since short
            arrays are one part.
    """
    count = next(given.size for given in arguments if isinstance(given, np.ndarray))

    def call(part: slice) -> Result:
        cut = (
            given[part] if isinstance(given, np.ndarray) and given.size == count else given
            for given in arguments
        )
        return kernel(*(part.start if given is FIRST else given for given in cut))

    return map_in_parts(call, count)


def _help(take: "weakref.ref[Callable[[], None]]") -> None:
    there = take()
    if there is not None:  # else all was done before this thread had time, and its arrays are given back
        there()


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
    # once the main thread has ended, as in a last save at exit, the interpreter allows no further threads
    if threads <= 1 or not threading.main_thread().is_alive():
        yield from map(function, items)
        return
    order = sorted(range(len(items)), key=lambda index: -size(items[index]))
    pool: ThreadPoolExecutor = ThreadPoolExecutor(
        threads,
        thread_name_prefix="shrinkpoint-code",
        initializer=lambda: setattr(_local, "team", (pool, threads)),
    )
    try:
        begun = {index: pool.submit(partial(function, items[index])) for index in order}
        for index in range(len(items)):
            yield begun.pop(index).result()  # a result may be large
    finally:
        pool.shutdown(cancel_futures=True)


_HEAD_START_S = 0.001
"""Seconds by which a job lets the thread that has submitted it run first."""


class Worker:
    """Runs at most one job in a background thread, which lives only while there is a job.

    A job that has begun is finished even when the interpreter is about to exit.

    Args:
        name: the thread's.
        before_exit: called when the interpreter is about to exit, before a running job is waited for.
    """

    def __init__(self, name: str, before_exit: Callable[[], None] | None = None) -> None:
        self._name = name
        self._before_exit = before_exit
        self._thread: threading.Thread | None = None
        _workers.add(self)

    @property
    def busy(self) -> bool:
        """Whether a job is running."""
        return self._thread is not None and self._thread.is_alive()

    def submit(self, job: Callable[[], None]) -> None:
        """Start a job, which must handle its own errors; only while not `busy`."""
        if self.busy:
            raise RuntimeError(f"{self._name} was given a job while it has one")
        self._thread = threading.Thread(
            target=_run, args=(naming_this_line(job),), name=self._name, daemon=False
        )
        try:
            self._thread.start()
        except RuntimeError:  # the system allows no further thread
            self._thread = None
            if threading.main_thread().is_alive():
                raise
            job()  # from Python 3.12 on, the interpreter allows none either once it ends

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait for the job; False if it is still running after `timeout_s` seconds."""
        if self._thread is None:
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def finish(self) -> None:
        """Finish the running job, if any, because the interpreter exits."""
        if self.busy:
            if self._before_exit is not None:
                self._before_exit()
            self.join()


def _run(job: Callable[[], None]) -> None:
    # Sleeping releases the GIL; else the thread that has started this one would wait for `sys.getswitchinterval()`, 5 ms.
    time.sleep(_HEAD_START_S)
    job()


_workers: "weakref.WeakSet[Worker]" = weakref.WeakSet()


def _finish_jobs() -> None:
    for worker in list(_workers):
        worker.finish()


# The interpreter would wait for the thread by itself, but only after it has shut all thread pools down, and a job needs
# them. This hook, which the pools use too, is private but the only one that comes before that; callbacks run last in,
# first out. Without it an unfinished job of a process that exits is lost, as in a crash.
_register = getattr(threading, "_register_atexit", None)
if _register is not None:
    _register(_finish_jobs)


_LOOK_EVERY_S = 0.005


class Turns:
    """A lock for public methods, which raises where one calls another of the same object on the same thread.

    Signals' handlers may interrupt at any place, and call methods themselves. So the lock is taken by a ``with`` of its own, which no
    handler can split, and never by `acquire` or a context manager in Python. A handler that comes before or after the call proper takes the
    lock again: its call counts as one before or after.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._inside: tuple[int, str] | None = None
        """Which thread is in which call."""

    def take(self, call: str, function: Callable[[], T]) -> T:
        """Call a function while no other thread is in one.

        Args:
            call: the method's name, for the message.
            function: what it does.

        Raises:
            ConfigError: this thread is in a call already.
        """
        me = threading.get_ident(), call
        with self._lock:
            self.refuse(call)
            try:
                self._inside = me
                return function()
            finally:
                self._inside = None

    def take_within(self, timeout_s: float, call: str, function: Callable[[], T]) -> T | None:
        """Return the same, if other threads' calls end in time.

        Args:
            timeout_s: seconds to wait for them at most.
            call: as of `take`.
            function: as of `take`.

        Returns:
            None where they did not.

        Raises:
            ConfigError: as `take`.
        """
        self.refuse(call)
        deadline = time.monotonic() + timeout_s
        while self._inside is not None:
            if time.monotonic() >= deadline:
                return None
            time.sleep(_LOOK_EVERY_S)
        return self.take(call, function)

    def refuse(self, call: str) -> None:
        """Raise where this thread is in a call already.

        Args:
            call: as of `take`.

        Raises:
            ConfigError: it is.
        """
        inside = self._inside
        if inside is not None and inside[0] == threading.get_ident():
            raise ConfigError(
                f"{call} was called within {inside[1]}, by a function that this calls (evaluate=, say) or by a signal handler: call it"
                " between two training steps"
            )


def in_turn(method: F) -> F:
    """Make a method one of those of an object's `Turns`, its attribute ``_turns``, that wait for each other."""

    @wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self._turns.take(method.__name__, partial(method, self, *args, **kwargs))

    return cast("F", call)
