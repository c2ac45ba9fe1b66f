"""Chooses the plan (scheme and settings) of each save so that the bound is kept; runs in the background thread."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from shrinkpoint.config import SaverConfig
from shrinkpoint.errors import ConfigError
from shrinkpoint.quality.budget import NO_COST, RecoveryEstimate, RestoreCost, budget_of, fall_of, reserve_of
from shrinkpoint.quality.comparison import (
    BlindEvaluationError,
    Combine,
    Comparison,
    alone,
    joined,
    restored_state,
)
from shrinkpoint.quality.evaluation import Evaluate, EvaluationUnavailableError, ResumedSteps, losses_of
from shrinkpoint.quality.guards import Guard
from shrinkpoint.quality.ladder import ladder_of
from shrinkpoint.quality.measurement import (
    CONFIDENCE,
    EXACT,
    Losses,
    absolute_error,
    lasting_rises,
    measured_rise,
    relative_rise,
)
from shrinkpoint.quality.plan import Ladder, Plan, Refusal, exactly
from shrinkpoint.quality.preserve import TraceError
from shrinkpoint.schemes.base import SaveContext, Scheme
from shrinkpoint.state.scratch import in_memory
from shrinkpoint.state.training import Role
from shrinkpoint.warn import warn

_NAMED = 5
_AVERAGES_ONLY = "averaged weights alone are measured, so that the network's own have mild steps"
_MILDER = 4  # how many milder settings are tried where a guard refuses


# Of updates, where the optimizer could not be stepped: what most trainings of docs/results.md have.
_USUAL_ERROR = 0.25
_AIM = 0.7  # safety factor on a cost predicted by proportion


@dataclass
class _Save:
    """One save, as the planner sees it; fields as the arguments of `Planner.plan`."""

    ladder: Ladder
    context: SaveContext
    measure: Evaluate | None
    resume: ResumedSteps | None
    guard: Guard | None
    combine: Combine

    def weights(self) -> tuple[list[str], list[str]]:
        """Return names of the weights to be coded whose values are all finite (of a few of them), and of the others."""
        names: dict[bool, list[str]] = {True: [], False: []}
        for name, spec in self.context.state.specs.items():
            if self.ladder.takes(spec):
                names[bool(torch.isfinite(self.context.state.tensors[name]).all())].append(name)
        found = self.combine({"finite": names[True][:1], "not_finite": names[False]}, joined)
        return found["finite"], found["not_finite"]

    def averages(self) -> tuple[bool, bool]:
        """Return whether there are averages of the weights, and whether the scheme codes some of them as weights."""
        averages = [spec for spec in self.context.state.specs.values() if spec.tag.role is Role.AVERAGE]
        taken = [spec.name for spec in averages if self.ladder.takes(spec)]
        found = self.combine({"there": [len(averages)], "taken": [len(taken)]}, joined)
        return any(found["there"]), any(found["taken"])

    def losses_after(self, marks: Sequence[int], scheme: Scheme | None, threads: int) -> list[Losses]:
        """Return the held-out losses after some steps from the snapshot, or from what a scheme restores of it.

        Args:
            marks: after how many.
            scheme: None takes the true state.
            threads: parameters handled side by side.
        """
        assert self.resume is not None
        state = self.context.state
        if scheme is not None:
            state = restored_state(state, scheme, self.context.reference, threads)
        state = in_memory(state)  # read here, and not by the training thread, on which steps are taken
        given = state.to_object() if self.combine is alone else state.tensors
        return [losses_of(loss) for loss in self.resume(given, marks)]


class Planner:
    """Chooses the scheme of every save; keeps the search's state between saves.

    Args:
        config: scheme, bound and budget.
        spent_s: seconds that evaluations have taken from training so far; charged to the search's budget.
        clock: seconds since any fixed moment.
        warns: whether to warn; False where another rank does.
        advice: what a user does who wants losses measured.
    """

    def __init__(
        self,
        config: SaverConfig,
        spent_s: Callable[[], float],
        *,
        clock: Callable[[], float] = time.perf_counter,
        warns: bool = True,
        advice: str = "Give evaluate=, or validation data, or scheme='lossless'",
    ) -> None:
        self._config = config
        self._advice = advice
        self._warns = warns
        self._spent_s = spent_s
        self._clock = clock
        self._started = clock(), spent_s()
        self._begin()
        self._baseline: tuple[int, float] | None = None  # step and loss of the last save that measured it
        self._fall = 0.0  # of the loss in a step, as far as it is known at this save
        # What a restore under the last plan checked would do: steps that it loses, and the error of the first update.
        self._lost_steps = self._update_error = 0.0
        self._sighted = False  # whether an evaluation was seen to change with the weights
        self._sees_network: bool | None = (
            None  # whether it sees the weights and not only their averages; None: not tried
        )
        self._warned: set[str] = set()

    def plan(
        self,
        save_context: SaveContext,
        measure: Evaluate | None,
        resume: ResumedSteps | None = None,
        *,
        exact: bool = False,
        guard: Guard | None = None,
        combine: Combine = alone,
    ) -> Plan:
        """Choose for one snapshot.

        Args:
            save_context: the snapshot, and the reference of the previous checkpoint.
            measure: None where the user gave no way to evaluate the model.
            resume: None where the training cannot be resumed from a state and put back. It gets the state as it was saved; where
                processes have parts, the tensors of this one by name.
            exact: the user wants this checkpoint bit-exact.
            guard: asked about every lossy plan; None accepts all.
            combine: where several processes have parts of the snapshot, joins what they know; all plan the same then.
        """
        self._recovery.saw(save_context.step)
        share = self._budget.share
        self._fall = self._lost_steps = self._update_error = 0.0
        if exact or self._ladder is None:
            why = ", as a signal to end does" if exact else ""
            plan = exactly(f"exact storage was asked for{why}", is_explained=True)
        else:
            save = _Save(self._ladder, save_context, measure, resume, guard, combine)
            plan = self._without_measuring(save) or self._measured(save)
        lasting, cost = plan.cost or plan.rise or EXACT, self._whole_cost(plan)
        self._budget.last = lasting.mean, lasting.high, cost.delay if cost is not None else 0.0
        if plan.baseline is not None and math.isfinite(plan.baseline):
            self._baseline = save_context.step, plan.baseline
        passed = self._clock() - self._started[0]
        overhead = (self._spent_s() - self._started[1]) / passed if passed > 0 else 0.0
        return replace(plan, allowed=share, whole=cost, overhead=overhead)

    def _whole_cost(self, plan: Plan) -> RestoreCost | None:
        """Return what a restore may cost: as measured or as it lasts, whichever may be more, and what is not measured."""
        if plan.rise is None:
            return None
        if plan.is_exact:
            return NO_COST
        measured = max(plan.rise, plan.lasting, key=lambda rise: rise.high)
        return RestoreCost(measured.mean, measured.high, self._delay, reserve_of(self._config))

    @property
    def _delay(self) -> float:
        """What the progress costs that a restore under the last plan checked would lose."""
        return self._lost_steps * self._fall

    def _without_measuring(self, save: _Save) -> Plan | None:
        """Return the plan where there is nothing to be measured, or no way to; None where it is to be measured."""
        finite, not_finite = save.weights()
        self._warn_not_finite(not_finite)
        if not finite:
            return exactly("the state holds no weight that could be quantized", is_explained=bool(not_finite))
        if self._budget.left <= 0:
            return exactly("no part of max_degradation is left for a restore: stored exactly")
        if save.measure is not None:
            return None
        self._warn_once(
            "unmeasured",
            "there is no way to evaluate the model, so max_degradation cannot be checked: weights are stored with"
            f" {self._config.scheme}'s mildest settings, or those given, unmeasured. {self._advice}",
        )
        return self._guarded(save, save.ladder.unmeasured(save.context))

    def _measured(self, save: _Save) -> Plan:
        """Return the plan by measurements; unmeasured where the evaluation does not see the weights, and exact where it fails."""
        assert save.measure is not None
        context, state = save.context, save.context.state
        share = self._budget.share
        try:
            comparison = Comparison(state, save.measure, share=share, combine=save.combine)
            if self._baseline is not None:
                self._fall = fall_of(self._baseline, (context.step, comparison.loss))
            plan = self._seen(save, comparison)
        except EvaluationUnavailableError as error:
            if not isinstance(error.__cause__, TraceError):
                return exactly(f"the degradation could not be measured ({error})", is_explained=True)
            self._warn_once(
                "trace",
                "the quality of checkpoints is not measured any more, and weights are stored with"
                f" {self._config.scheme}'s mildest settings, or those given: {error.__cause__}",
            )
            save.context = context
            return self._guarded(save, save.ladder.unmeasured(context))
        return replace(plan, baseline=comparison.loss, evaluations=comparison.evaluations)

    def _seen(self, save: _Save, comparison: Comparison) -> Plan:
        if not math.isfinite(comparison.loss):
            self._warn_once(
                "loss",
                f"the held-out loss is {comparison.loss:g}, so the quality of checkpoints cannot be measured: they are"
                " stored exactly, which makes them large. Has the training diverged?",
            )
            return exactly("the loss of the true weights is not finite: stored exactly", is_explained=True)
        try:
            if not self._sighted:
                comparison.require_effect()
                self._sighted = True
            averages_only = self._sees_averages_only(save, comparison)
            save.context = replace(save.context, averages_only=averages_only)
            plan = self._bounded(save, comparison)
        except BlindEvaluationError as error:
            self._sighted = False
            self._warn_once(
                "blind",
                f"the evaluation does not see the weights that are stored: {error}. So max_degradation cannot be checked, and"
                f" {self._config.scheme}'s mildest settings, or those given, are taken, unmeasured. Evaluate the model that is"
                " trained, not a copy of it, or choose scheme='lossless'",
            )
            plan = self._guarded(save, save.ladder.unmeasured(save.context))
            return plan if plan.is_exact else replace(plan, reason=f"unmeasured: {error}", is_blind=True)
        if averages_only and not plan.is_exact:
            return replace(plan, reason=f"{plan.reason}; {_AVERAGES_ONLY}")
        return plan

    def _sees_averages_only(self, save: _Save, comparison: Comparison) -> bool:
        """Return whether the evaluation measures averages of the weights and not the weights.

        Raises:
            BlindEvaluationError: it does, and the scheme stores averages exactly: nothing that it changes is seen.
        """
        there, taken = save.averages()
        if not there:
            return False
        if self._sees_network is None:
            self._sees_network = comparison.sees_network()
        if not self._sees_network and not taken:
            raise BlindEvaluationError(
                "it measures averages of the weights, which this scheme stores exactly"
            )
        return not self._sees_network

    def _bounded(self, save: _Save, comparison: Comparison) -> Plan:
        """Plan so that the rise at the restore stays within all that is left, and the rise that training does not
        recover within the share of one restore."""
        remains = self._recovery.remains if save.resume is not None else 1.0
        share, allowed = self._budget.share, min(self._budget.left, self._budget.share / remains)
        plan = self._settled(save, comparison, allowed, remains)
        if save.resume is None or plan.is_exact or not self._recovery.marks(plan.options, plan.scale):
            return plan
        plan, fall = self._probed(save, plan, comparison)
        if self._baseline is None and fall > 0:  # nothing else says yet how fast the loss falls
            self._fall = fall
            found = self._guarded(save, plan, comparison, allowed)
            if found.is_exact:
                return found
            plan = replace(found, resumed=plan.resumed, cost=plan.cost)
        if plan.lasting.within(share):
            return plan
        outcome = f"after {max(plan.resumed)} resumed steps the loss was {plan.resumed[max(plan.resumed)].mean:+.3g}"
        plan = self._settled(save, comparison, _stricter(plan, share), self._recovery.remains)
        plan = replace(plan, reason=f"{outcome}; {plan.reason}")
        if plan.is_exact:
            return plan
        plan, _ = self._probed(save, plan, comparison)
        if plan.lasting.within(share):
            return plan
        return exactly(f"{outcome}, and with milder settings too: stored exactly")

    def _settled(self, save: _Save, comparison: Comparison, allowed: float, remains: float) -> Plan:
        """Return the ladder's choice that the guard accepts, with its cost as predicted without a probe."""
        plan = save.ladder.measured(save.context, comparison, allowed)
        plan = self._guarded(save, plan, comparison, allowed)
        rise = plan.rise
        if rise is None:
            return replace(plan, cost=None)
        half = CONFIDENCE * rise.error
        if 2 * half > allowed:
            known_from = "one number" if rise.batches < 2 else f"{rise.batches} batches"
            plan = replace(plan, reason=f"{plan.reason}; this is known from {known_from} to ±{half:.2g} only")
        return replace(plan, cost=rise.times(remains))

    def _probed(self, save: _Save, plan: Plan, comparison: Comparison) -> tuple[Plan, float]:
        """Return the plan with the rise of the loss after some steps from what it restores, above as many steps from the true state, and
        with the cost of a restore that follows from it; and the relative fall of the loss in a step."""
        marks = self._recovery.marks(plan.options, plan.scale) or self._recovery.shortest
        threads = self._config.encoder_threads
        true = save.losses_after(marks, None, threads)
        tried = save.losses_after(marks, plan.scheme, threads)
        at, absolute = plan.rise or EXACT, absolute_error(self._budget.share)
        fall = max(0.0, -relative_rise(sum(true[-1]) / len(true[-1]), comparison.loss)) / marks[-1]
        rises = {
            mark: measured_rise(baseline, losses, absolute=absolute)
            for mark, losses, baseline in zip(marks, tried, true, strict=True)
        }
        rises = lasting_rises(
            rises, at, fall=fall, lost_steps=self._lost_steps, update_error=self._update_error
        )
        cost = self._recovery.measured(at, rises, plan.options, plan.scale)
        return replace(plan, resumed=rises, cost=cost), fall

    def _guarded(
        self, save: _Save, plan: Plan, comparison: Comparison | None = None, allowed: float = 0.0
    ) -> Plan:
        """Return the plan, or a milder one that the guard accepts, or an exact one."""
        if save.guard is None or plan.is_exact:
            return plan
        plan, first = self._checked(save, save.guard, plan)
        refusal = first
        for _ in range(_MILDER):
            if refusal is None:
                break
            found = save.ladder.milder(save.context, comparison, allowed, refusal)
            if found is None:
                break
            plan, refusal = self._checked(save, save.guard, found)
        if refusal is not None and refusal.is_firm:
            return exactly(f"{refusal.reason}: stored exactly")
        return (
            plan if first is None else replace(plan, reason=f"{plan.reason}; with wider steps {first.reason}")
        )

    def _checked(self, save: _Save, guard: Guard, plan: Plan) -> tuple[Plan, Refusal | None]:
        """Return the plan with the guard's verdict, and why it must not be used as it is: by the verdict, or because the
        progress that it loses costs too much."""
        verdict = guard(save.context, plan.scheme)
        plan = replace(plan, verdict=verdict)
        own = {
            "refused": [] if verdict.reason is None else [[verdict.moments, verdict.reason]],
            "at_fault": sorted(verdict.at_fault(len(guard.kinds))),
            "lost_steps": [verdict.lost_steps],
            "update_error": [] if verdict.updates is None else [verdict.updates.error],
        }
        found = save.combine(own, joined)
        at_fault = frozenset(found["at_fault"])
        self._lost_steps = max(found["lost_steps"])
        self._update_error = max(found["update_error"], default=_USUAL_ERROR)
        if found["refused"]:
            moments, reason = min(found["refused"], key=lambda one: bool(one[0]))  # one for the weights first
            return plan, Refusal(reason, bool(moments), at_fault)
        delay, share = self._delay, self._budget.delay_share
        if delay <= share or plan.rise is None:
            return plan, None
        high = max(plan.rise.high, plan.lasting.high)
        reason = f"a restore would lose progress that costs {delay:+.3g}, and {share:.3g} may be lost"
        times = delay / max(share, 1e-9 * delay)
        return plan, Refusal(reason, True, at_fault, times, is_firm=high + delay > self._budget.delay_left)

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
        """Return the search's state in JSON primitives, for the manifest."""
        return {
            "scheme": self._config.scheme,
            "strategy": self._ladder.state_dict() if self._ladder is not None else {},
            "restores": self._budget.state_dict(),
            "baseline": list(self._baseline) if self._baseline is not None else None,
            "recovery": self._recovery.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, object], *, restored: bool = True) -> None:
        """Load the search's state, as after a restore of its checkpoint; which warnings were given is kept.

        Args:
            state: as `state_dict` gave it.
            restored: whether that counts as a restore; what is known of the evaluation is kept then.

        Raises:
            ConfigError: it is no such state; what could be read of it is kept.
        """
        if not restored:
            self._sighted, self._sees_network = False, None
        self._begin()
        self._budget.load_state_dict(state.get("restores"), restored=restored)
        self._baseline = _baseline_of(state.get("baseline"))
        recovery, strategy = state.get("recovery"), state.get("strategy")
        if self._ladder is None or state.get("scheme") != self._config.scheme:
            if isinstance(recovery, dict):  # its share of another scheme's errors predicts nothing
                self._recovery.carry(recovery)
            return
        if not isinstance(recovery, dict) or not isinstance(strategy, dict):
            raise ConfigError("the search state is malformed: start a new search")
        self._recovery.load_state_dict(recovery)
        self._ladder.load_state_dict(strategy)

    def _begin(self) -> None:
        """Know nothing of earlier saves."""
        config = self._config
        self._budget = budget_of(config)
        self._recovery = RecoveryEstimate(
            config.probe_steps, config.search_overhead, self._spent_s, self._clock
        )
        self._ladder = ladder_of(config, self._spent_s, self._clock)


def _stricter(plan: Plan, share: float) -> float:
    """Return the rise allowed at the restore so that the lasting rise is `share`, by proportion."""
    at, cost = plan.rise or EXACT, plan.lasting
    if not math.isfinite(cost.high):
        return _AIM * share / 4  # four times narrower steps at least
    return _AIM * at.high * share / cost.high


def _baseline_of(stored: object) -> tuple[int, float] | None:
    """Step and loss of the last save that measured it; None where it is not known."""
    if isinstance(stored, list) and len(stored) == 2:
        step, loss = stored
        if type(step) is int and isinstance(loss, float) and math.isfinite(loss):
            return step, loss
    return None
