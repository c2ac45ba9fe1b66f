"""Divides the bound of a whole run among the restores that it may need.

Restores add up: each contributes the rise that training does not recover (in the papers' failure experiments, ten
failures spread evenly over a run). The bound is therefore one for the run, of which each checkpoint gets an equal
share.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shrinkpoint.config import SaverConfig
from shrinkpoint.errors import ConfigError

__all__ = [
    "NO_COST",
    "RestoreBudget",
    "RestoreCost",
    "budget_of",
    "fall_of",
    "reserve_of",
    "restore_cost",
]

_MEASURED = 0.5
"""Share of `max_degradation` that the measured costs of all restores may use. Over 23 trainings that used it up, the
mean harm was as measured; the rest of a run's path, which no measurement at a save covers, carried one run in thirty
beyond the bound."""
_DELAYS = 3  # restores that what is left of the reserve is divided among
_MEASURED_OF_ADOPTIONS = 0.25
"""The same where all of them are certain, since training adopts every checkpoint: what no measurement covers then adds up with
each of them (docs/resuming.md): rows that are rarely trained, as a recommender's, hardly recover from it."""


@dataclass(frozen=True)
class RestoreCost:
    """What restores cost the run, as far as it is known at their saves. Costs of several restores are added by ``+``."""

    mean: float
    """The expected rise of the final loss, relative."""
    measured_high: float
    """Upper end of what was measured of it."""
    delay: float = 0.0
    """Upper end of what lost progress costs of it."""
    reserve: float = 0.0
    """For what no measurement at a save sees. Where a run leads after it was disturbed is mostly settled by the first time, so it counts
    once, and whole, however many restores there are."""

    @property
    def high(self) -> float:
        """Upper end of the rise. Lost progress is one of the effects that the reserve is for; where it alone is more, it replaces it."""
        return self.measured_high + max(self.reserve, self.delay)

    def __add__(self, other: "RestoreCost") -> "RestoreCost":
        return RestoreCost(
            self.mean + other.mean,
            self.measured_high + other.measured_high,
            self.delay + other.delay,
            max(self.reserve, other.reserve),
        )


NO_COST = RestoreCost(0.0, 0.0)
"""Of a restore that is exact."""


def restore_cost(mean: float, high: float, *, delay: float, reserve: float) -> RestoreCost:
    """The cost of a restore from a measurement, with what no measurement at a save sees.

    What lost steps of the moments cost can be estimated: a training that is set back by s steps is behind by what the loss falls by
    in s steps. This is the upper end, because the loss mostly falls more slowly later; half of it is expected.

    Args:
        mean: of the measured rise of the loss, relative.
        high: its upper end.
        delay: the fall of the loss over the steps that the restore loses, see `fall_of`.
        reserve: the part of `max_degradation` that measurements may not use.
    """
    return RestoreCost(mean + delay / 2, high, delay, reserve)


def fall_of(before: tuple[int, float], now: tuple[int, float], floor: float) -> float:
    """By how much the loss falls in a training step between two saves, relative to the later loss; 0 where it does not.

    Args:
        before: step and held-out loss of the earlier save.
        now: of the later one.
        floor: losses nearer to zero count as this one.
    """
    (begun, first), (ended, last) = before, now
    if ended <= begun or not (math.isfinite(first) and math.isfinite(last)):
        return 0.0
    return max(0.0, (first - last) / max(abs(last), floor) / (ended - begun))


class RestoreBudget:
    """Shares `max_degradation` among the restores that a run may need.

    Each cost has a confidence interval. Means add up; the distances of the upper ends from the means add up in
    quadrature, since it is unlikely that all restores reach their upper ends: ``spent_high = sum(mean) + sqrt(sum((high
    - mean) ** 2))``. As this is never more than the sum of the upper ends, restores that each keep their share together
    keep the bound.

    Lost progress, which costs most at the beginning, may take a third of what is left of a reserve of its own.

    Args:
        max_degradation: how much all of them together may raise the held-out loss, relative.
        restores: how many there may be.
        reserve: how much more lost progress may.
    """

    def __init__(self, max_degradation: float, restores: int, reserve: float = 0.0) -> None:
        self._bound = max_degradation
        self._restores = restores
        self._reserve = reserve
        self.delays = 0.0
        """Upper end of what lost progress has cost in the restores so far."""
        self.spent = 0.0
        """Sum of the mean costs of the restores so far, as measured when their checkpoints were stored."""
        self.made = 0
        """Restores so far."""
        self.last = 0.0, 0.0, 0.0
        """Mean, upper end and delay of what a restore of the last checkpoint costs."""
        self._doubt = 0.0

    @property
    def spent_high(self) -> float:
        """The upper end of `spent`."""
        return self.spent + self._doubt

    @property
    def left(self) -> float:
        """Allowed cost of all further restores together: the bound less the upper end of the cost so far."""
        return max(0.0, self._bound - self.spent_high)

    @property
    def share(self) -> float:
        """Allowed cost of the next restore. After more restores than planned, the rest is divided as finely as
        before."""
        planned = self._restores - self.made
        return self.left / (planned if planned > 0 else self._restores)

    @property
    def delay_share(self) -> float:
        """Allowed cost of the next restore's lost progress."""
        planned = self._restores - self.made
        among = min(_DELAYS, planned if planned > 0 else self._restores)
        return max(0.0, self._reserve - self.delays) / among

    @property
    def delay_left(self) -> float:
        """What lost progress may cost at the very most: all that `left` does not need."""
        return max(0.0, self._bound + self._reserve - self.spent_high - self.delays)

    def restored(self, cost: float, high: float | None = None, delay: float = 0.0) -> None:
        """Count a restore; one that improved the loss pays for no other.

        Args:
            cost: the mean of what it costs.
            high: the upper end; None where it is the mean.
            delay: of what lost progress costs.
        """
        self.made += 1
        self.delays += delay
        mean = max(0.0, cost) if math.isfinite(cost) else 0.0
        self.spent += mean
        if high is not None and math.isfinite(high):
            self._doubt = math.hypot(self._doubt, max(0.0, high - mean))

    def state_dict(self) -> dict[str, object]:
        """The budget's state in JSON primitives, for a resumed training."""
        names = "spent", "spent_high", "delays", "restores", "cost", "cost_high", "cost_delay"
        ends = (max(0.0, end) if math.isfinite(end) else 0.0 for end in self.last[:2])
        known = self.spent, self.spent_high, self.delays, self.made, *ends, self.last[2]
        return dict(zip(names, known, strict=True))

    def load_state_dict(self, state: object, *, restored: bool = False) -> None:
        """Continue from what `state_dict` returned.

        Args:
            state: None where the checkpoint stores none.
            restored: whether its checkpoint was restored: then that counts, too, even where no cost of it is known.

        Raises:
            ConfigError: it is no such state.
        """
        known: Mapping[str, Any] = (
            state if isinstance(state, dict) else {"spent": 0.0, "spent_high": 0.0, "restores": 0}
        )
        try:
            self._load(known)
        finally:
            if restored:
                self.restored(
                    *(_number(known.get(name)) or 0.0 for name in ("cost", "cost_high", "cost_delay"))
                )

    def _load(self, state: Mapping[str, Any]) -> None:
        spent, high, delays = (
            _number(state.get(name, default))
            for name, default in (("spent", None), ("spent_high", None), ("delays", 0.0))
        )
        made = state.get("restores")
        if (
            type(made) is not int
            or made < 0
            or None in (spent, high, delays)
            or not (0 <= spent <= high < math.inf and 0 <= delays < math.inf)  # type: ignore[operator]
        ):
            raise ConfigError(f"the restore budget {dict(state)!r} is malformed: it starts over")
        self.spent, self.made, self._doubt, self.delays = spent, made, high - spent, delays  # type: ignore[assignment, operator]


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _measured_share(config: SaverConfig) -> float:
    """The share of `max_degradation` that the measured costs of all restores may use."""
    return _MEASURED_OF_ADOPTIONS if config.adopt else _MEASURED


def reserve_of(config: SaverConfig) -> float:
    """The part of `max_degradation` that is for what no measurement at a save sees."""
    return (1 - _measured_share(config)) * config.max_degradation


def budget_of(config: SaverConfig) -> RestoreBudget:
    """A run's budget, of which no restore has used anything yet."""
    bound = _measured_share(config) * config.max_degradation
    return RestoreBudget(bound, config.restore_budget, reserve_of(config))
