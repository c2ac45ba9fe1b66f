"""A token bucket that limits the share of the training time for optional evaluations."""

from __future__ import annotations

import math
from collections.abc import Callable

__all__ = ["Budget"]


class Budget:
    """A token bucket that fills with training time: ``spent <= fraction * trained`` holds at all times.

    A save lasts from :meth:`enter` to :meth:`leave`. The advance of the cost clock meanwhile is charged; the rest of
    the time is training.

    Args:
        fraction: seconds that may be spent per second of training; ``inf`` for no limit.
        clock: seconds since any fixed moment.
        cost_clock: seconds taken from training so far; ``clock`` itself where training is stopped during a save.
        trained: seconds of training so far.
        spent: seconds spent so far.
    """

    def __init__(
        self,
        fraction: float,
        clock: Callable[[], float],
        cost_clock: Callable[[], float],
        *,
        trained: float = 0.0,
        spent: float = 0.0,
    ) -> None:
        self.trained = trained
        self.spent = spent
        self._fraction = fraction
        self._clock = clock
        self._cost_clock = cost_clock
        self._counted_to = clock()
        self._cost_at_entry = cost_clock()

    def enter(self) -> None:
        """A save begins."""
        now = self._clock()
        self.trained += now - self._counted_to
        self._counted_to = now
        self._cost_at_entry = self._cost_clock()

    def leave(self) -> None:
        """A save ends."""
        taken = self._cost_clock() - self._cost_at_entry
        now = self._clock()
        self.trained += max(0.0, now - self._counted_to - taken)
        self._counted_to = now

    def affords(self, seconds: float) -> bool:
        """Whether something that is expected to take so long may be started."""
        return math.isinf(self._fraction) or self.spent + seconds <= self._fraction * self.trained

    def spend(self, seconds: float) -> None:
        """Take seconds out."""
        self.spent += seconds
