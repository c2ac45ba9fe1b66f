"""How often a log of updates is written: as often as its share of the training's time allows."""

import math
import time

from shrinkpoint.runtime.processors import processors

__all__ = ["Cadence"]

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
