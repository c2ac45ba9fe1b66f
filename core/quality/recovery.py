"""Estimates how much of the rise at a restore training recovers within some steps, and when to measure it again.

The loss at a restore misleads in both directions: noise in the weights is trained away within some steps, and a second
moment that was restored too small raises the loss only after some. The rise that is left after the steps is the cost of
the restore to the run.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from shrinkpoint.errors import ConfigError
from shrinkpoint.quality.measurement import CONFIDENCE, Rise, pooled

__all__ = ["RecoveryEstimate"]

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
        self,
        steps: int,
        overhead: float,
        spent_s: Callable[[], float] = lambda: 0.0,
        clock: Callable[[], float] = time.perf_counter,
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
        """A save begins: credit the time and the steps since the last one."""
        now, spent = self._clock(), self._spent_s()
        then, before, paid = self._since
        if step > before:
            if math.isfinite(self._overhead):
                self._budget_s += self._overhead * (now - then)
            self._step_s = (now - then) / (step - before)
        self._pay(spent - paid)
        self._since = now, max(step, before), spent

    def _pay(self, seconds: float) -> None:
        if math.isfinite(self._overhead):
            self._budget_s -= seconds

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
        if not self._is_new(options, scale):
            return ()
        price = self._price(self._short)
        credit = min(self._overhead * _CREDIT_S, _CREDIT_PROBES * price)
        return self._short if math.isfinite(price) and self._budget_s - price >= -credit else ()

    @property
    def shortest(self) -> Sequence[int]:
        """The marks of the cheapest probe."""
        return self._short

    def _is_new(self, options: str, scale: float) -> bool:
        """Whether the settings differ enough from those of the last probe that the cost may differ."""
        if self._probed is None or self._probed[0] != options:
            return True
        return abs(math.log2(scale / self._probed[1])) > 1

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
        """The rise after all steps: as measured, or from that after the last mark.

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
        """The estimate and the budget in JSON primitives, for a resumed training."""
        return {
            "remains": self.remains,
            "error": self._error,
            "onward": self._onward,
            "probed": list(self._probed) if self._probed is not None else None,
            **self._budget_state(),
        }

    def _budget_state(self) -> dict[str, object]:
        """The budget, including what has been earned and spent since the last save began."""
        earned = self._overhead * (self._clock() - self._since[0]) if math.isfinite(self._overhead) else 0.0
        owed = self._spent_s() - self._since[2] if math.isfinite(self._overhead) else 0.0
        return {"budget_s": self._budget_s + earned - owed, "step": self._since[1]}

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
