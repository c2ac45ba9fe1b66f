"""Chooses the plan (scheme and settings) of each save so that the bound is kept; runs in the background thread."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from shrinkpoint.config import SaverConfig
from shrinkpoint.errors import ConfigError
from shrinkpoint.quality.comparison import BlindEvaluationError, Comparison
from shrinkpoint.quality.evaluation import EvaluationUnavailableError, ResumedSteps
from shrinkpoint.quality.measurement import CONFIDENCE, EXACT, Rise
from shrinkpoint.quality.preserve import TraceError
from shrinkpoint.quality.probe import Probe, stricter
from shrinkpoint.quality.recovery import RecoveryEstimate
from shrinkpoint.quality.restore_budget import (
    NO_COST,
    RestoreCost,
    budget_of,
    fall_of,
    reserve_of,
    restore_cost,
)
from shrinkpoint.quality.scale_strategy import strategy_of
from shrinkpoint.quality.snapshots import PlannedSnapshot
from shrinkpoint.quality.strategy import Guard, Measure, Plan, Strategy, exactly
from shrinkpoint.schemes.base import SaveContext
from shrinkpoint.warn import warn

__all__ = ["Planner"]


_NAMED = 5
_AVERAGES_ONLY = "averaged weights alone are measured, so that the network's own have mild steps"
_MILDER = 4  # how many milder settings are tried where a guard refuses


class _Refusal(NamedTuple):
    """Why a plan must not be used as it is."""

    reason: str
    moments: bool  # whether the optimizer's state is to be milder, and not the weights
    times: float | None = None  # less that it is to lose
    is_firm: bool = True  # whether the plan must not be used even where nothing is milder


class Planner:
    """Chooses the scheme of every save; keeps the search's state between saves.

    Args:
        config: scheme, bound and budget.
        spent_s: seconds that evaluations have taken from training so far; charged to the search's budget.
        guard: asked about every lossy plan; None accepts all.
        clock: seconds since any fixed moment.
        warns: whether to warn; False where another rank does.
        advice: what a user does who wants losses measured.
    """

    def __init__(
        self,
        config: SaverConfig,
        spent_s: Callable[[], float],
        *,
        guard: Guard | None = None,
        clock: Callable[[], float] = time.perf_counter,
        warns: bool = True,
        advice: str = "Give evaluate=, or validation data, or scheme='lossless'",
    ) -> None:
        self._config = config
        self._advice = advice
        self._warns = warns
        self._spent_s = spent_s
        self.guard = guard
        self._clock = clock
        self._started = clock(), spent_s()
        self._budget = budget_of(config)
        self._recovery = RecoveryEstimate(config.probe_steps, config.search_overhead, spent_s, clock)
        self._strategy = strategy_of(config, spent_s)
        self._cost, self._costs_delay = EXACT, 0.0
        self._baseline: tuple[int, float] | None = None  # step and loss of the last save that measured it
        self._fall = 0.0  # of the loss in a step, as far as it is known at this save
        self._sighted = False  # whether an evaluation was seen to change with the weights
        self._sees_network: bool | None = (
            None  # whether it sees the weights and not only their averages; None: not tried
        )
        self._warned: set[str] = set()

    @property
    def strategy(self) -> Strategy | None:
        """What chooses the scheme's settings; None for a lossless scheme."""
        return self._strategy

    @property
    def overhead(self) -> float:
        """Share of the time since this planner was made that evaluations and probes have taken."""
        passed = self._clock() - self._started[0]
        return (self._spent_s() - self._started[1]) / passed if passed > 0 else 0.0

    def plan(
        self,
        save_context: SaveContext,
        measure: Measure | None,
        resume: ResumedSteps | None = None,
        *,
        exact: bool = False,
        snapshot: PlannedSnapshot | None = None,
    ) -> Plan:
        """Choose for one snapshot.

        Args:
            save_context: the snapshot, and the reference of the previous checkpoint.
            measure: None where the user gave no way to evaluate the model.
            resume: None where the training cannot be resumed from a state and put back.
            exact: the user wants this checkpoint bit-exact.
            snapshot: where other processes have parts of it: how all of it is measured, instead of by `measure`.
        """
        self._recovery.saw(save_context.step)
        share, self._fall = self._budget.share, 0.0
        whole = snapshot or PlannedSnapshot(save_context.state, measure)
        plan = self._choose(save_context, whole, resume, exact)
        self._cost = plan.cost or plan.rise or EXACT
        cost = self._whole_cost(plan)
        self._costs_delay = cost.delay if cost is not None else 0.0
        if plan.baseline is not None and math.isfinite(plan.baseline):
            self._baseline = save_context.step, plan.baseline
        return replace(plan, allowed=share, whole=cost, overhead=self.overhead)

    def _whole_cost(self, plan: Plan) -> RestoreCost | None:
        """What a restore may cost in all: as measured at the restore or as it lasts, whichever may be more, and what is not measured."""
        if plan.rise is None:
            return None
        if plan.is_exact:
            return NO_COST
        measured = max(plan.rise, plan.lasting, key=lambda rise: rise.high)
        return restore_cost(measured.mean, measured.high, delay=self._delay, reserve=reserve_of(self._config))

    @property
    def _delay(self) -> float:
        """What the progress costs that a restore under the last plan checked would lose."""
        return self.guard.lost_steps * self._fall if self.guard is not None else 0.0

    def _choose(
        self,
        save_context: SaveContext,
        snapshot: PlannedSnapshot,
        resume: ResumedSteps | None,
        exact: bool,
    ) -> Plan:
        if exact or self._strategy is None:
            why = ", as a signal to end does" if exact else ""
            return exactly(f"exact storage was asked for{why}", is_explained=True)
        finite, not_finite = snapshot.weights(self._strategy)
        self._warn_not_finite(not_finite)
        if not finite:
            return exactly("the state holds no weight that could be quantized", is_explained=bool(not_finite))
        if self._budget.left <= 0:
            return exactly("no part of max_degradation is left for a restore: stored exactly")
        candidates = snapshot.candidates()
        if candidates is None:
            self._warn_once(
                "unmeasured",
                "there is no way to evaluate the model, so max_degradation cannot be checked: weights are stored with"
                f" {self._config.scheme}'s mildest settings, or those given, unmeasured. {self._advice}",
            )
            return self._guarded(self._strategy, save_context, self._strategy.unmeasured(save_context))
        try:
            share, floor = self._budget.share, self._config.loss_floor
            comparison = Comparison(candidates, share=share, floor=floor)
            if self._baseline is not None:
                self._fall = fall_of(self._baseline, (save_context.step, comparison.loss), floor)
            plan = self._measured(self._strategy, save_context, snapshot, comparison, resume)
        except EvaluationUnavailableError as error:
            if isinstance(error.__cause__, TraceError):
                self._warn_once(
                    "trace",
                    "the quality of checkpoints is not measured any more, and weights are stored with"
                    f" {self._config.scheme}'s mildest settings, or those given: {error.__cause__}",
                )
                return self._guarded(self._strategy, save_context, self._strategy.unmeasured(save_context))
            return exactly(f"the degradation could not be measured ({error})", is_explained=True)
        return replace(plan, baseline=comparison.loss, evaluations=comparison.evaluations)

    def _measured(
        self,
        strategy: Strategy,
        save_context: SaveContext,
        snapshot: PlannedSnapshot,
        comparison: Comparison,
        resume: ResumedSteps | None,
    ) -> Plan:
        if not math.isfinite(comparison.loss):
            self._warn_once(
                "loss",
                f"the held-out loss is {comparison.loss:g}, so the quality of checkpoints cannot be measured: they are"
                " stored exactly, which makes them large. Has the training diverged?",
            )
            return exactly("the loss of the true weights is not finite: stored exactly", is_explained=True)
        try:
            if not self._sighted:
                comparison.look()
                self._sighted = True
            averages_only = self._sees_averages_only(strategy, snapshot, comparison)
            save_context = replace(save_context, averages_only=averages_only)
            plan = self._bounded(strategy, save_context, snapshot, comparison, resume)
            if save_context.averages_only and not plan.is_exact:
                plan = replace(plan, reason=f"{plan.reason}; {_AVERAGES_ONLY}")
            return plan
        except BlindEvaluationError as error:
            self._sighted = False
            self._warn_once(
                "blind",
                f"the evaluation does not see the weights that are stored: {error}. So max_degradation cannot be checked, and"
                f" {self._config.scheme}'s mildest settings, or those given, are taken, unmeasured. Evaluate the model that is"
                " trained, not a copy of it, or choose scheme='lossless'",
            )
            plan = self._guarded(strategy, save_context, strategy.unmeasured(save_context))
            if plan.is_exact:
                return plan
            return replace(plan, reason=f"unmeasured: {error}", is_blind=True)

    def _sees_averages_only(
        self, strategy: Strategy, snapshot: PlannedSnapshot, comparison: Comparison
    ) -> bool:
        """Whether the evaluation measures averages of the weights and not the weights.

        Raises:
            BlindEvaluationError: it does, and the scheme stores averages exactly: nothing that it changes is seen.
        """
        there, taken = snapshot.averages(strategy)
        if not there:
            return False
        if self._sees_network is None:
            self._sees_network = comparison.sees_network()
        if not self._sees_network and not taken:
            raise BlindEvaluationError(
                "it measures averages of the weights, which this scheme stores exactly"
            )
        return not self._sees_network

    def _bounded(
        self,
        strategy: Strategy,
        save_context: SaveContext,
        snapshot: PlannedSnapshot,
        comparison: Comparison,
        resume: ResumedSteps | None,
    ) -> Plan:
        """Plan so that the rise at the restore stays within all that is left, and the rise that training does not
        recover within the share of one restore."""
        remains = self._recovery.remains if resume is not None else 1.0
        share, allowed = self._budget.share, min(self._budget.left, self._budget.share / remains)
        plan = self._settled(strategy, save_context, comparison, allowed, remains)
        if resume is None or plan.is_exact or not self._recovery.marks(plan.options, plan.scale):
            return plan
        probe = Probe(self._config, self._recovery, share, self.guard)
        plan = probe.of(plan, save_context, snapshot, resume)
        if self._baseline is None and plan.fall > 0:  # nothing else says yet how fast the loss falls
            self._fall, probed = plan.fall, plan
            plan = self._guarded(strategy, save_context, plan, comparison, allowed)
            if plan.is_exact:
                return plan
            plan = replace(
                plan, resumed=probed.resumed, fall=probed.fall, cost=probed.cost, baseline=probed.baseline
            )
        if plan.lasting.within(share):
            return plan
        outcome = f"after {max(plan.resumed)} resumed steps the loss was {plan.resumed[max(plan.resumed)].mean:+.3g}"
        allowed = stricter(plan, share)
        plan = self._settled(strategy, save_context, comparison, allowed, self._recovery.remains)
        plan = replace(plan, reason=f"{outcome}; {plan.reason}")
        if plan.is_exact:
            return plan
        plan = probe.of(plan, save_context, snapshot, resume)
        if plan.lasting.within(share):
            return plan
        return exactly(f"{outcome}, and with milder settings too: stored exactly")

    def _settled(
        self,
        strategy: Strategy,
        save_context: SaveContext,
        comparison: Comparison,
        allowed: float,
        remains: float,
    ) -> Plan:
        """The strategy's choice that the guard accepts, with its cost as predicted without a probe."""
        plan = strategy.measured(save_context, comparison, allowed)
        plan = replace(
            self._guarded(strategy, save_context, plan, comparison, allowed), baseline=comparison.loss
        )
        if plan.rise is not None and 2 * _half(plan.rise) > allowed:
            plan = replace(
                plan,
                reason=f"{plan.reason}; this is known from {_batches(plan.rise)} to ±{_half(plan.rise):.2g} only",
            )
        return replace(plan, cost=plan.rise.times(remains) if plan.rise is not None else None)

    def _guarded(
        self,
        strategy: Strategy,
        save_context: SaveContext,
        plan: Plan,
        comparison: Comparison | None = None,
        allowed: float = 0.0,
    ) -> Plan:
        if self.guard is None or plan.is_exact:
            return plan
        milder = getattr(strategy, "milder", None)
        first = refusal = self._refusal(self.guard, save_context, plan)
        for _ in range(_MILDER if milder is not None else 0):
            if refusal is None:
                break
            how = {"moments": refusal.moments, "at_fault": self.guard.at_fault, "times": refusal.times}
            found = milder(save_context, comparison, allowed, **how)  # type: ignore[misc]
            if found is None:
                break
            plan = found
            refusal = self._refusal(self.guard, save_context, plan)
        if refusal is not None and refusal.is_firm:
            return exactly(f"{refusal.reason}: stored exactly")
        return (
            plan if first is None else replace(plan, reason=f"{plan.reason}; with wider steps {first.reason}")
        )

    def _refusal(self, guard: Guard, save_context: SaveContext, plan: Plan) -> "_Refusal | None":
        """Why a plan must not be used as it is: the guard refuses it, or the progress that it loses costs too much."""
        reason = guard(save_context, plan.scheme)
        if reason is not None:
            return _Refusal(reason, guard.refuses_moments)
        delay, share = self._delay, self._budget.delay_share
        if delay <= share or plan.rise is None:
            return None
        high = max(plan.rise.high, plan.lasting.high)
        reason = f"a restore would lose progress that costs {delay:+.3g}, and {share:.3g} may be lost"
        times = delay / max(share, 1e-9 * delay)
        return _Refusal(reason, moments=True, times=times, is_firm=high + delay > self._budget.delay_left)

    def _warn_not_finite(self, names: Sequence[str]) -> None:
        if names:
            more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
            self._warn_once(
                "weights",
                f"NaN or infinity in the weights {', '.join(names[:_NAMED])}{more}: they are stored exactly, which makes"
                " checkpoints large. Has the training diverged? Then go back to a checkpoint from before",
            )

    def _warn_once(self, subject: str, message: str) -> None:
        if subject not in self._warned:
            self._warned.add(subject)
            if self._warns:
                warn(message)

    def state_dict(self) -> dict[str, object]:
        """The search's state in JSON primitives, for the manifest."""
        cost, high = (
            value if math.isfinite(value) else 0.0
            for value in (max(0.0, self._cost.mean), max(0.0, self._cost.high))
        )
        return {
            "scheme": self._config.scheme,
            "strategy": self._strategy.state_dict() if self._strategy is not None else {},
            "restores": {
                **self._budget.state_dict(),
                "cost": cost,
                "cost_high": high,
                "cost_delay": self._costs_delay,
            },
            "baseline": list(self._baseline) if self._baseline is not None else None,
            "recovery": self._recovery.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, object], *, restored: bool = True) -> None:
        """Continue from the search state stored in the restored checkpoint.

        Args:
            state: as `state_dict` gave it.
            restored: whether that counts as a restore.

        Raises:
            ConfigError: it is no such state; what could be read of it is kept.
        """
        self._load_restores(state.get("restores"), restored=restored)
        self._baseline = _baseline_of(state.get("baseline"))
        recovery, strategy = state.get("recovery"), state.get("strategy")
        if self._strategy is None or state.get("scheme") != self._config.scheme:
            if isinstance(
                recovery, dict
            ):  # recovery from another scheme's errors does not predict recovery from this one's
                self._recovery.carry(recovery)
            return
        if not isinstance(recovery, dict) or not isinstance(strategy, dict):
            raise ConfigError("the search state is malformed: start a new search")
        self._recovery.load_state_dict(recovery)
        self._strategy.load_state_dict(strategy)

    def begin_again(self, state: Mapping[str, object], *, restored: bool) -> None:
        """Go on as a process does that has loaded this state; which warnings were given is kept.

        Args:
            state: as of `load_state_dict`.
            restored: as of `load_state_dict`; what is known of the evaluation is kept then.

        Raises:
            ConfigError: as `load_state_dict`.
        """
        if not restored:
            self._sighted, self._sees_network = False, None
        config = self._config
        self._recovery = RecoveryEstimate(
            config.probe_steps, config.search_overhead, self._spent_s, self._clock
        )
        self._strategy = strategy_of(config, self._spent_s)
        self.load_state_dict(state, restored=restored)

    def _load_restores(self, stored: object, *, restored: bool) -> None:
        """Add a restore to the budget spent before; it counts even where its checkpoint stores no cost."""
        self._budget = budget_of(self._config)
        known: dict[str, object] = (
            stored if isinstance(stored, dict) else {"spent": 0.0, "spent_high": 0.0, "restores": 0}
        )
        cost, high, delay = (
            float(value) if isinstance(value := known.get(name), int | float) else 0.0
            for name in ("cost", "cost_high", "cost_delay")
        )
        try:
            self._budget.load_state_dict(known)
        finally:
            if restored:
                self._budget.restored(cost, high, delay)


def _baseline_of(stored: object) -> tuple[int, float] | None:
    """Step and loss of the last save that measured it; None where it is not known."""
    if isinstance(stored, list) and len(stored) == 2:
        step, loss = stored
        if type(step) is int and isinstance(loss, float) and math.isfinite(loss):
            return step, loss
    return None


def _half(rise: Rise) -> float:
    return CONFIDENCE * rise.error


def _batches(rise: Rise) -> str:
    return "one number" if rise.batches < 2 else f"{rise.batches} batches"
