"""One background thread that takes one job at a time, and finishes it before the interpreter exits."""

import concurrent.futures.thread  # noqa: F401 - registers its exit hook first, so that it runs after this module's
import threading
import time
import weakref
from collections.abc import Callable

from shrinkpoint.warn import naming_this_line

__all__ = ["Worker"]

_HEAD_START_S = 0.001
"""Seconds that a job lets the thread go on first that has submitted it."""


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
    # A new thread holds the interpreter's lock, and the one that has started it would wait for that: up to
    # `sys.getswitchinterval()`, 5 ms. Whoever sleeps lets it go.
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
