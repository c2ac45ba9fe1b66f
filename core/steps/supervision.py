"""What all logs share: their time is counted, and no error of theirs ends a training."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from shrinkpoint.errors import ShrinkpointError
from shrinkpoint.warn import warn

__all__ = ["CannotLogError", "Supervised"]


class CannotLogError(ShrinkpointError):
    """This training's steps cannot be logged; the message gives the reason. Never raised into the training."""


class Supervised:
    """A log that is turned off, with one warning, when it fails."""

    def __init__(self) -> None:
        self.off: str | None = None
        """Why the log is off; None while it is on."""
        self.blocked_s = 0.0
        """Seconds that the training's thread has spent in the log so far: copies, digests and waiting, everything."""
        self.blocked_cpu_s = 0.0
        """The CPU seconds of `blocked_s`, without waiting: what other programs do on the machine has no influence on it."""
        self._is_counting = False

    def _stop(self) -> None:
        """Release everything that the log needs while it is on."""
        raise NotImplementedError

    def _turn_off(self, reason: str) -> None:
        if self.off is not None:
            return
        self.off = reason
        self._stop()
        warn(f"the step log is off: {reason}. Training continues, and its checkpoints are saved as before")

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count the time of the block; of nested blocks the outermost counts."""
        if self._is_counting:
            yield
            return
        self._is_counting = True
        started, cpu = time.perf_counter(), time.thread_time()
        try:
            yield
        finally:
            self.blocked_s += time.perf_counter() - started
            self.blocked_cpu_s += time.thread_time() - cpu
            self._is_counting = False

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Count the time, and let no error of the log end the training."""
        try:
            with self.counted():
                yield
        except Warning:
            raise
        except Exception as error:  # noqa: BLE001 - any error of the log
            reason = str(error) if isinstance(error, CannotLogError) else f"{type(error).__name__}: {error}"
            self._turn_off(reason)
