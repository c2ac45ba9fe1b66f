"""Decides, for one snapshot, which scheme with which settings stores it; runs in the background thread."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from shrinkpoint.config import SaverConfig
from shrinkpoint.errors import ConfigError
from shrinkpoint.evaluation import EvaluationUnavailableError, ResumedSteps
from shrinkpoint.planning.base import Measure, Plan, Strategy, exactly
from shrinkpoint.planning.configurations import ConfigurationStrategy
from shrinkpoint.planning.fixed import FixedStrategy
from shrinkpoint.planning.scale import ScaleStrategy
from shrinkpoint.schemes.base import Occasion
from shrinkpoint.search.healing import Healing
from shrinkpoint.search.measure import relative_rise
from shrinkpoint.search.restores import RestoreBudget
from shrinkpoint.state import TrainingState
from shrinkpoint.telling import tell
from shrinkpoint.trial import restored_state

__all__ = ["Measure", "Plan", "Planner"]

_NAMED = 5
_AIM = 0.7  # of what should hold by proportion


class Planner:
    """Chooses the scheme of every save; keeps the search's state between saves.

    Args:
        config: scheme, bound and budget.
        spent_s: seconds that evaluations have taken from training so far: what the search's budget is charged with.
    """

    def __init__(self, config: SaverConfig, spent_s: Callable[[], float]) -> None:
        self._config = config
        self._spent_s = spent_s
        self._budget = RestoreBudget(config.max_degradation, config.restore_budget)
        self._healing = Healing(config.probe_steps, config.search_overhead)
        self._strategy = _strategy(config, spent_s)
        self._cost = 0.0
        self._warned = False
        self._told_not_finite = False

    def plan(
        self,
        occasion: Occasion,
        measure: Measure | None,
        resume: ResumedSteps | None = None,
        *,
        exact: bool = False,
    ) -> Plan:
        """Choose for one snapshot.

        Args:
            occasion: the snapshot, and what a reader holds before it.
            measure: None where the user gave no way to evaluate the model.
            resume: None where there is no way to go on from a state and back.
            exact: the user wants this checkpoint bit-exact.
        """
        self._healing.saw(occasion.step)
        remains = self._remains(resume)
        plan = self._choose(occasion, measure, resume, exact)
        left = plan.resumed[max(plan.resumed)] if plan.resumed else remains * (plan.degradation or 0.0)
        self._cost = max(0.0, left)
        return plan

    def _choose(
        self, occasion: Occasion, measure: Measure | None, resume: ResumedSteps | None, exact: bool
    ) -> Plan:
        if exact or self._strategy is None:
            return exactly("bit-exact storage was asked for")
        finite, not_finite = _weights(occasion.state, self._strategy)
        self._tell_not_finite(not_finite)
        if not finite:
            return exactly("the state holds no weight that could be quantized")
        if self._budget.left <= 0:
            return exactly("nothing is left of max_degradation that a restore may cost: stored exactly")
        if measure is None:
            self._warn_unmeasured()
            return self._strategy.unmeasured(occasion)
        try:
            return self._bounded(self._strategy, occasion, measure, resume)
        except EvaluationUnavailableError as error:
            return exactly(f"the degradation could not be measured ({error})")

    def _bounded(
        self, strategy: Strategy, occasion: Occasion, measure: Measure, resume: ResumedSteps | None
    ) -> Plan:
        """At a restore the loss may rise by all that is left, if training makes good all but the share of one restore."""
        allowed = min(self._budget.left, self._budget.share / self._remains(resume))
        plan = strategy.measured(occasion, measure, allowed)
        if resume is None or plan.configuration == "exact" or not self._healing.due:
            return plan
        plan = replace(plan, resumed=self._resumed(plan, occasion, resume))
        if self._holds(plan):
            return plan
        left = plan.resumed[max(plan.resumed)]
        told = f"after {max(plan.resumed)} resumed steps the loss was {left:+.3g}"
        cost = (
            plan.degradation if plan.degradation is not None and plan.degradation > 0 else self._budget.share
        )
        stricter = strategy.measured(occasion, measure, _AIM * cost * self._budget.share / left)
        stricter = replace(stricter, evaluations=plan.evaluations + stricter.evaluations)
        if stricter.configuration == "exact":
            return replace(stricter, reason=f"{told}; {stricter.reason}")
        stricter = replace(stricter, resumed=self._resumed(stricter, occasion, resume))
        if self._holds(stricter):
            return replace(stricter, reason=f"{told}; {stricter.reason}")
        told = f"{told}, and with milder settings too: stored exactly"
        return exactly(told, plan.baseline, stricter.evaluations)

    def _remains(self, resume: ResumedSteps | None) -> float:
        """The share of a restore's cost that counts; all of it where nothing shows that training makes the rest good."""
        return self._healing.remains if resume is not None else 1.0

    def _holds(self, plan: Plan) -> bool:
        return plan.resumed[max(plan.resumed)] <= self._budget.share

    def _resumed(self, plan: Plan, occasion: Occasion, resume: ResumedSteps) -> dict[int, float]:
        """The rise of the loss after some steps from a restore, beside the same steps from the true state."""
        started, marks = self._spent_s(), self._healing.marks
        threads = self._config.encoder_threads
        restored = restored_state(occasion.state, plan.scheme, occasion.reference, threads)
        true = resume(occasion.state.to_object(), marks)
        tried = resume(restored.to_object(), marks)
        rises = {
            mark: relative_rise(loss, beside) for mark, loss, beside in zip(marks, tried, true, strict=True)
        }
        self._healing.measured(plan.degradation or 0.0, rises, self._spent_s() - started)
        return rises

    def _tell_not_finite(self, names: Sequence[str]) -> None:
        if names and not self._told_not_finite:
            self._told_not_finite = True
            more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
            tell(
                f"NaN or infinity in the weights {', '.join(names[:_NAMED])}{more}: they are stored exactly, which makes"
                " checkpoints large. Has the training diverged? Then go back to a checkpoint from before"
            )

    def _warn_unmeasured(self) -> None:
        if not self._warned:
            self._warned = True
            tell(
                "there is no way to evaluate the model, so max_degradation cannot be checked: weights are stored with"
                f" {self._config.scheme}'s mildest settings, or those given, unmeasured. Give evaluate=, or validation data,"
                " or scheme='lossless'"
            )

    def state_dict(self) -> dict[str, object]:
        """The search's state in JSON primitives, for the manifest."""
        return {
            "scheme": self._config.scheme,
            "strategy": self._strategy.state_dict() if self._strategy is not None else {},
            "restores": {**self._budget.state_dict(), "cost": self._cost},
            "healing": self._healing.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Go on from a stored state of the search: a restore of the checkpoint that it stands in.

        Raises:
            ConfigError: it is no such state; what could be read of it is kept.
        """
        self._load_restores(state.get("restores"))
        if self._strategy is None or state.get("scheme") != self._config.scheme:
            return  # how training makes good what another scheme has cost says nothing of this one
        healing, strategy = state.get("healing"), state.get("strategy")
        if not isinstance(healing, dict) or not isinstance(strategy, dict):
            raise ConfigError("the search state is malformed: start a new search")
        self._healing.load_state_dict(healing)
        self._strategy.load_state_dict(strategy)

    def _load_restores(self, stored: object) -> None:
        """What was spent before, and this restore; one of a checkpoint that tells nothing counts too."""
        self._budget = RestoreBudget(self._config.max_degradation, self._config.restore_budget)
        told: dict[str, object] = stored if isinstance(stored, dict) else {"spent": 0.0, "restores": 0}
        cost = told.get("cost")
        try:
            self._budget.load_state_dict(told)
        finally:
            self._budget.restored(float(cost) if isinstance(cost, int | float) else 0.0)


def _strategy(config: SaverConfig, spent_s: Callable[[], float]) -> Strategy | None:
    """None for the scheme that chooses nothing and changes nothing."""
    options = config.scheme_options
    if config.scheme == "lossless":
        return None
    if config.scheme == "auto":
        return ScaleStrategy(options)
    if config.scheme == "inshrinkerator":
        return ConfigurationStrategy(options, config.max_degradation, config.search_overhead, spent_s)
    return FixedStrategy(config.scheme, options)


def _weights(state: TrainingState, strategy: Strategy) -> tuple[list[str], list[str]]:
    """Names of the weights to be coded that hold numbers only, and of those that do not."""
    names: dict[bool, list[str]] = {True: [], False: []}
    for name, spec in state.specs.items():
        if strategy.takes(spec):
            names[bool(torch.isfinite(state.tensors[name]).all())].append(name)
    return names[True], names[False]
