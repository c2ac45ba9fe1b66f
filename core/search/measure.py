"""Degradations measured on the weights of one save."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import TypeAlias

from shrinkpoint.search.space import Configuration

__all__ = ["Evaluate", "Measurements", "relative_rise"]

Evaluate: TypeAlias = Callable[[Configuration | None], float]
"""The loss with the weights that a reader would restore under a configuration; with the true ones for None."""


def relative_rise(loss: float, baseline: float) -> float:
    """``(loss - baseline) / |baseline|``; ``inf`` when either is not finite, and never ``-inf``.

    Over a baseline of 0 no rise has a size: none at all is 0, any other is ``inf``.
    """
    if not (math.isfinite(loss) and math.isfinite(baseline)):
        return math.inf
    if baseline == 0:
        return 0.0 if loss <= 0 else math.inf
    return max((loss - baseline) / abs(baseline), -sys.float_info.max)


class Measurements:
    """Evaluates configurations on the present weights, each at most once, and keeps what the last one cost.

    The loss of the true weights is measured at once.

    Args:
        evaluate: measures a loss; expensive.
        cost_clock: seconds taken from training so far.
    """

    def __init__(self, evaluate: Evaluate, cost_clock: Callable[[], float]) -> None:
        self._evaluate = evaluate
        self._cost_clock = cost_clock
        self._degradations: dict[Configuration, float] = {}
        self.last_seconds = 0.0
        self.baseline = self._timed(None)

    def __len__(self) -> int:
        return len(self._degradations)

    def find(self, configuration: Configuration) -> float | None:
        """The degradation of a configuration, if it was measured on these weights."""
        return self._degradations.get(configuration)

    def measure(self, configuration: Configuration) -> float:
        """The degradation of a configuration on these weights, measured unless it was already."""
        if configuration not in self._degradations:
            self._degradations[configuration] = relative_rise(self._timed(configuration), self.baseline)
        return self._degradations[configuration]

    def _timed(self, configuration: Configuration | None) -> float:
        started = self._cost_clock()
        loss = float(self._evaluate(configuration))
        self.last_seconds = self._cost_clock() - started
        return loss
