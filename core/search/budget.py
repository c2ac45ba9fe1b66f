"""How much of the training time may go into evaluations that are not mandatory."""

from __future__ import annotations

import math
from collections.abc import Callable

__all__ = ["Budget"]


class Budget:
    """A token bucket that fills with training time: ``spent <= fraction * trained`` holds at all times.

    Time between :meth:`leave` and :meth:`enter` is training; what happens from :meth:`enter` to :meth:`leave` is not.

    Args:
        fraction: seconds that may be spent per second of training; ``inf`` for no limit.
        clock: seconds since any fixed moment.
        trained: seconds of training so far.
        spent: seconds spent so far.
    """

    def __init__(
        self, fraction: float, clock: Callable[[], float], *, trained: float = 0.0, spent: float = 0.0
    ) -> None:
        self.trained = trained
        self.spent = spent
        self._fraction = fraction
        self._clock = clock
        self._left_at = clock()

    def enter(self) -> None:
        """Training pauses for a save."""
        now = self._clock()
        self.trained += now - self._left_at
        self._left_at = now

    def leave(self) -> None:
        """Training goes on."""
        self._left_at = self._clock()

    def affords(self, seconds: float) -> bool:
        """Whether something that is expected to take so long may be started."""
        return math.isinf(self._fraction) or self.spent + seconds <= self._fraction * self.trained

    def spend(self, seconds: float) -> None:
        """Take seconds out."""
        self.spent += seconds
