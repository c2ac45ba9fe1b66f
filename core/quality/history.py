"""Predicts the next save's rise of the loss from earlier ones: a scalar Kalman filter, quadratic in the step size."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from shrinkpoint.errors import ConfigError
from shrinkpoint.quality.measurement import Rise

__all__ = ["History"]

_DRIFT = 0.3  # of the rise, from one save to the next: checkpoints differ, not only measurements of them
_OCTAVE = 0.5  # of the rise, for each octave between two scales: the square is no law far from where it was measured


@dataclass(frozen=True)
class History:
    """The pooled rise of all measurements so far, as it would be at one scale.

    A scalar Kalman filter with a random-walk model: from one save to the next its variance grows by a share of the rise
    (`aged`); a measurement is averaged in by its precision (`shrinkpoint.quality.measurement.pooled`).
    """

    scale: float
    mean: float
    error: float
    """Standard error of the mean."""

    @classmethod
    def of(cls, scale: float, rise: Rise, before: "History | None" = None) -> "History | None":
        """The estimate after a pooled measurement; `before` where the measurement carries no information."""
        if rise.batches == 0 or not (math.isfinite(rise.mean) and math.isfinite(rise.error)):
            return before
        return cls(scale, max(0.0, rise.mean), rise.error)

    def aged(self) -> "History":
        """The estimate one save later: the same mean, a larger error."""
        return replace(self, error=math.hypot(self.error, _DRIFT * self.mean))

    def predicted(self, scale: float) -> Rise:
        """The rise predicted at a scale."""
        ratio = scale / self.scale
        error = math.hypot(self.error, _OCTAVE * abs(math.log2(ratio)) * self.mean)
        return Rise(self.mean * ratio**2, error * ratio**2)

    def to_json(self) -> list[float]:
        """In JSON primitives."""
        return [self.scale, self.mean, self.error]

    @classmethod
    def from_json(cls, value: Any) -> "History | None":
        """The history that `to_json` wrote; None for None.

        Raises:
            ConfigError: it is neither.
        """
        if value is None:
            return None
        right = isinstance(value, list) and len(value) == 3
        if not right or not all(isinstance(item, float) and 0 <= item < math.inf for item in value):
            raise ConfigError(f"the measurements {value!r} of a search are malformed: start a new search")
        if value[0] == 0:
            raise ConfigError(f"the measurements {value!r} of a search are malformed: start a new search")
        return cls(*value)

    @classmethod
    def load(cls, state: Mapping[str, Any]) -> "History | None":
        """The entry ``history`` of a stored state.

        Raises:
            ConfigError: it is malformed.
        """
        return cls.from_json(state.get("history"))
