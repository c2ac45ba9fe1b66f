"""What all logs share: their time is counted, and no error of theirs ends a training."""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from shrinkpoint.errors import ShrinkpointError
from shrinkpoint.runtime.processors import processors
from shrinkpoint.warn import warn

__all__ = ["Cadence", "CannotLogError", "Patience", "Supervised"]


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
        self._writer: Any = None  # of its segments, from the first one on

    @property
    def bytes(self) -> int:
        """Bytes written so far by this process."""
        return self._writer.bytes if self._writer is not None else 0

    @property
    def written(self) -> int | None:
        """The step up to which all is written; None before the first segment."""
        return self._writer.written if self._writer is not None else None

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


_AT_ONCE_S = 1.0


class Patience:
    """Bounds all waiting so far by a share of the training's time, and one second.

    Args:
        share: of the training's time; None: any.
    """

    def __init__(self, share: float | None) -> None:
        self._share = share
        self._began = time.monotonic()
        self._waited = 0.0

    @property
    def left_s(self) -> float:
        """Seconds that the training may wait now."""
        if self._share is None:
            return math.inf
        return max(0.0, _AT_ONCE_S + self._share * (time.monotonic() - self._began) - self._waited)

    @contextmanager
    def spent(self) -> Iterator[None]:
        """Count the time of the block."""
        started = time.monotonic()
        try:
            yield
        finally:
            self._waited += time.monotonic() - started


_STEPS = 20  # of a measurement
_MOST = 10_000


class Cadence:
    """Measures the cost of a log, and raises the interval between its records until it is within its share.

    The cost is the time that training waits, and the log's CPU time divided among the processors: what it takes from a training
    that uses them all.

    Args:
        every: steps between two records at least.
        overhead: the share of the training's time that the log may take; None: any.
    """

    def __init__(self, every: int, overhead: float | None) -> None:
        self.every = every
        self.share: float | None = None
        """The share measured last; None before the first measurement."""
        self._overhead = overhead
        self._cores = processors()
        self._started: tuple[float, float] | None = None
        self._steps = self._records = 0

    def is_due(self, step: int, last: int | None) -> bool:
        """Whether a record of this step is due.

        Args:
            step: training steps done.
            last: the step before.
        """
        before = step - 1 if last is None else last
        return step // self.every > before // self.every

    def restart(self) -> None:
        """Begin a new measurement, as after a pause."""
        self._started = None

    def step(self, *, blocked_s: float, cpu_s: float, records: int) -> int | None:
        """To be called after each training step.

        Args:
            blocked_s: seconds that training has waited for the log so far.
            cpu_s: CPU seconds of the log's thread so far, without those that each checkpoint costs once.
            records: written so far.

        Returns:
            The new interval if it was raised; else None.
        """
        now, cost = time.perf_counter(), blocked_s + cpu_s / self._cores
        if self._started is None:
            self._started, self._steps, self._records = (now, cost), 0, records
            return None
        self._steps += 1
        if self._steps < _STEPS or records - self._records < 2:
            return None
        began, spent = self._started
        self._started, self._steps, self._records = (now, cost), 0, records
        self.share = (cost - spent) / max(now - began, 1e-9)
        if self._overhead is None or self.share <= self._overhead or self.every >= _MOST:
            return None
        self.every = min(_MOST, math.ceil(self.every * self.share / self._overhead))
        return self.every
