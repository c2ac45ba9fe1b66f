"""One background thread that takes one job at a time."""

import threading
from collections.abc import Callable

__all__ = ["Worker"]


class Worker:
    """Runs at most one job beside the caller's thread; the thread lives only while there is a job.

    The thread is not a daemon: a job that has begun is finished even when the interpreter is about to exit.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread: threading.Thread | None = None

    @property
    def busy(self) -> bool:
        """Whether a job is running."""
        return self._thread is not None and self._thread.is_alive()

    def submit(self, job: Callable[[], None]) -> None:
        """Start a job, which must handle its own errors; only while not `busy`."""
        if self.busy:
            raise RuntimeError(f"{self._name} was given a job while it has one")
        self._thread = threading.Thread(target=job, name=self._name, daemon=False)
        self._thread.start()

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait for the job; False if it is still running after `timeout_s` seconds."""
        if self._thread is None:
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()
