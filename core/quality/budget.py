"""Divides the bound of a whole run among its restores, and estimates how much of what each costs training recovers.

Restores add up: each contributes the rise that training does not recover (in the papers' failure experiments, ten
failures spread evenly over a run). The bound is therefore one for the run, of which each checkpoint gets an equal
share.

The loss at a restore misleads in both directions: noise in the weights is trained away within some steps, and a second
moment that was restored too small raises the loss only after some. The rise that is left after the steps is the cost of
the restore to the run.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shrinkpoint.config import SaverConfig
from shrinkpoint.errors import ConfigError
from shrinkpoint.quality.measurement import CONFIDENCE, LOSS_FLOOR, Rise, pooled

_MEASURED = 0.5
"""Share of `max_degradation` that the measured costs of all restores may use. Over 23 trainings that used it up, the
mean harm was as measured; the rest of a run's path, which no measurement at a save covers, carried one run in thirty
beyond the bound."""
_DELAYS = 3  # restores that what is left of the reserve is divided among
_MEASURED_OF_ADOPTIONS = 0.25
"""The same share with ``adopt``, where every checkpoint is restored for certain, since training adopts every checkpoint: what no measurement covers then adds up with
each of them (docs/resuming.md): rows that are rarely trained, as a recommender's, hardly recover from it."""


@dataclass(frozen=True)
class RestoreCost:
    """What restores cost the run, as far as it is known at their saves. Costs of several restores are added by ``+``.

    A training that is set back by s steps is behind by what the loss falls by in s steps. Half of that is expected,
    because the loss mostly falls more slowly later.
    """

    rise: float
    """The expected rise of the final loss, relative, without what lost progress costs."""
    measured_high: float
    """Upper end of what was measured of it."""
    delay: float = 0.0
    """Upper end of what lost progress costs: the fall of the loss over the lost steps, see `fall_of`."""
    reserve: float = 0.0
    """For what no measurement at a save sees. It counts once, however many restores there are: where a run leads
    after it was disturbed is mostly settled by the first time."""

    @property
    def mean(self) -> float:
        """The expected rise of the final loss, relative."""
        return self.rise + self.delay / 2

    @property
    def high(self) -> float:
        """Upper end of the rise. Lost progress is one of the effects that the reserve is for; where it alone is more, it replaces it."""
        return self.measured_high + max(self.reserve, self.delay)

    def __add__(self, other: "RestoreCost") -> "RestoreCost":
        return RestoreCost(
            self.rise + other.rise,
            self.measured_high + other.measured_high,
            self.delay + other.delay,
            max(self.reserve, other.reserve),
        )


NO_COST = RestoreCost(0.0, 0.0)
"""Of a restore that is exact."""


def fall_of(before: tuple[int, float], now: tuple[int, float]) -> float:
    """Return by how much the loss falls in a training step between two saves, relative to the later loss; 0 where it does not.

    Args:
        before: step and held-out loss of the earlier save.
        now: of the later one.
    """
    (begun, first), (ended, last) = before, now
    if ended <= begun or not (math.isfinite(first) and math.isfinite(last)):
        return 0.0
    return max(0.0, (first - last) / max(abs(last), LOSS_FLOOR) / (ended - begun))


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
        """Return the budget's state in JSON primitives, for a resumed training."""
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
    """Return the share of `max_degradation` that the measured costs of all restores may use."""
    return _MEASURED_OF_ADOPTIONS if config.adopt else _MEASURED


def reserve_of(config: SaverConfig) -> float:
    """Return the part of `max_degradation` that is for what no measurement at a save sees."""
    return (1 - _measured_share(config)) * config.max_degradation


def budget_of(config: SaverConfig) -> RestoreBudget:
    """Return a run's budget, of which no restore has used anything yet."""
    bound = _measured_share(config) * config.max_degradation
    return RestoreBudget(bound, config.restore_budget, reserve_of(config))


_LEAST, _MOST = 0.25, 16.0  # limits of the remaining share of a restore's rise, against noisy measurements
_UNKNOWN = 0.5  # standard error of the share that remains before anything was measured
_DRIFT = 0.1  # growth of that standard error from one probe to the next
_NOISE = 0.0002
_SURPRISE = 2.0  # standard errors
_MARGIN = 1.2  # duration of a resumed step in training steps: evaluations and copies of the state included
_SHORT = 2, 5  # steps: enough to distinguish a rise that recovers from one that grows
_CREDIT_S = 1800.0  # seconds of training whose share a probe may take in advance
_CREDIT_PROBES = 2


class RecoveryEstimate:
    """The share of a restore's rise that remains after the probe, and a budget of training time for measuring it.

    The budget grows by a share of the training time, and all evaluations and probes are charged to it. A probe of new
    settings may be paid on credit, once; until that is paid back there is no other.

    Args:
        steps: length of the long probe in optimizer steps; 0 measures nothing.
        overhead: share of the training time that may be taken.
        spent_s: seconds that evaluations and probes have taken from training so far.
        clock: seconds since any fixed moment.
    """

    def __init__(
        self, steps: int, overhead: float, spent_s: Callable[[], float], clock: Callable[[], float]
    ) -> None:
        self._short = tuple(sorted({min(mark, steps) for mark in _SHORT})) if steps > 0 else ()
        self._long = (self._short[-1], steps) if steps > _SHORT[-1] else self._short
        self.remains = 1.0
        """Share of the rise at a restore that is left after the last step."""
        self._error = _UNKNOWN
        self._onward = 1.0  # the rise after the long probe relative to that after the short one
        self._probed: tuple[str, float] | None = None
        self._overhead = overhead
        self._spent_s = spent_s
        self._clock = clock
        self._since = clock(), 0, spent_s()
        self._budget_s = 0.0
        self._step_s = math.inf

    def saw(self, step: int) -> None:
        """Credit the time and the steps since the last save; another one begins."""
        now, (then, before, _) = self._clock(), self._since
        self._budget_s = self._balance(now, earns=step > before)
        if step > before:
            self._step_s = (now - then) / (step - before)
        self._since = now, max(step, before), self._spent_s()

    def _balance(self, now: float, *, earns: bool = True) -> float:
        """Return the budget with what has been earned and spent since the last save began."""
        if not math.isfinite(self._overhead):
            return 0.0
        then, _, paid = self._since
        earned = self._overhead * (now - then) if earns else 0.0
        return self._budget_s + earned - (self._spent_s() - paid)

    def marks(self, options: str, scale: float) -> Sequence[int]:
        """After how many steps this save's probe measures the loss; empty where the budget does not allow a probe.

        Args:
            options: the settings other than the scale that determine the cost of a restore.
            scale: of the steps.
        """
        if not self._short or math.isinf(self._overhead):
            return self._long
        if self._budget_s >= self._price(self._long):
            return self._long
        probed, before = self._probed or (None, scale)
        if probed == options and abs(math.log2(scale / before)) <= 1:
            return ()  # the cost is hardly another one
        price = self._price(self._short)
        credit = min(self._overhead * _CREDIT_S, _CREDIT_PROBES * price)
        return self._short if math.isfinite(price) and self._budget_s - price >= -credit else ()

    @property
    def shortest(self) -> Sequence[int]:
        """The marks of the cheapest probe."""
        return self._short

    def _price(self, marks: Sequence[int]) -> float:
        return 2 * marks[-1] * _MARGIN * self._step_s

    def measured(self, at: Rise, resumed: Mapping[int, Rise], options: str, scale: float) -> Rise:
        """Take over a probe.

        Args:
            at: the rise of the loss at the restore.
            resumed: the rise after each of the marks.
            options: see `marks`.
            scale: see `marks`.

        Returns:
            The rise after all steps: the precision-weighted mean of the probe and of the prediction that earlier probes
            make from `at`. A probe that exceeds the prediction by more than both errors explain replaces it.
        """
        self._probed = options, scale
        left = self._at_the_end(at, resumed)
        if not math.isfinite(left.high):
            self.remains, self._error = max(1.0, self.remains), _UNKNOWN
            return Rise(math.inf)
        expected = at.times(self.remains)
        expected = Rise(max(0.0, expected.mean), expected.error)
        size = max(at.mean, _NOISE)
        ratio = max(0.0, left.mean) / size
        doubt = math.hypot(left.error, ratio * at.error) / size
        if_expected = math.hypot(left.error_of(expected.mean), self.remains * at.error) / size
        before = math.hypot(self._error, _DRIFT)
        if ratio - self.remains > _SURPRISE * math.hypot(if_expected, before):
            remains, self._error = ratio, doubt
        else:
            precision, known = doubt**-2, before**-2
            remains = (ratio * precision + self.remains * known) / (precision + known)
            self._error = (precision + known) ** -0.5
        self.remains = min(_MOST, max(_LEAST, remains))
        return pooled(left, expected)

    def _at_the_end(self, at: Rise, resumed: Mapping[int, Rise]) -> Rise:
        """Return the rise after all steps: as measured, or from that after the last mark.

        A rise that grows within a short probe is extrapolated at the same rate. Of one that does not grow, the share
        that earlier long probes have found is left at the end.
        """
        last, horizon = max(resumed), self._long[-1]
        left = resumed[last]
        if not math.isfinite(left.high):
            return left
        if last == horizon:
            earlier = resumed[min(resumed)]
            if len(resumed) > 1 and earlier.is_significant and left.is_significant:
                ratio = min(_MOST, max(_LEAST, left.mean / earlier.mean))
                self._onward = max(ratio, (self._onward + ratio) / 2)
            return left
        before = max(0.0, at.mean)
        if left.mean - before > CONFIDENCE * math.hypot(left.error, at.error):
            factor = (horizon - last) / last
            grown = left.mean + factor * (left.mean - before)
            return replace(left.times(1 + factor), mean=grown)
        return left.times(self._onward)

    def state_dict(self) -> dict[str, object]:
        """Return the estimate and the budget in JSON primitives, for a resumed training."""
        return {
            "remains": self.remains,
            "error": self._error,
            "onward": self._onward,
            "probed": list(self._probed) if self._probed is not None else None,
            "budget_s": self._balance(self._clock()),
            "step": self._since[1],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned.

        Raises:
            ConfigError: it is no such state.
        """
        remains, error, onward = (state.get(name) for name in ("remains", "error", "onward"))
        right = all(isinstance(value, float) for value in (remains, error, onward))
        if not right or not (_LEAST <= remains <= _MOST and 0 <= error < math.inf and onward > 0):  # type: ignore[operator]
            raise ConfigError(f"what remains after a restore, {dict(state)!r}, is malformed")
        probed = state.get("probed")
        if probed is not None:
            pair = isinstance(probed, list) and len(probed) == 2
            if not pair or not (
                isinstance(probed[0], str) and isinstance(probed[1], float) and probed[1] > 0
            ):
                raise ConfigError(f"what was probed, {probed!r}, is malformed")
        self.carry(state)
        self.remains, self._error, self._onward = remains, error, onward  # type: ignore[assignment]
        self._probed = (probed[0], probed[1]) if probed is not None else None

    def carry(self, state: Mapping[str, Any]) -> None:
        """Take over the time budget alone, with its debt.

        Raises:
            ConfigError: it is no such state.
        """
        budget, step = state.get("budget_s"), state.get("step")
        if not isinstance(budget, float) or not math.isfinite(budget) or type(step) is not int or step < 0:
            raise ConfigError(f"the time for probes, {budget!r} at step {step!r}, is malformed")
        self._budget_s = budget if math.isfinite(self._overhead) else 0.0
        self._since = self._clock(), step, self._spent_s()
