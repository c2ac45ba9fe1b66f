"""Decides, for one snapshot, which scheme with which configuration stores it; runs in the background thread."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from shrinkpoint.config import SaverConfig
from shrinkpoint.errors import ShrinkpointWarning
from shrinkpoint.evaluation import EvaluationUnavailableError
from shrinkpoint.schemes.base import Scheme
from shrinkpoint.schemes.inshrinkerator import Inshrinkerator, Weights
from shrinkpoint.schemes.lossless import Lossless
from shrinkpoint.schemes.prediction import SizePredictor
from shrinkpoint.search.driver import SearchConfig, SearchDriver
from shrinkpoint.search.space import Configuration
from shrinkpoint.state import TrainingState

__all__ = ["Measure", "Plan", "Planner"]

_NAMED = 5

Measure = Callable[[Mapping[str, torch.Tensor]], float]
"""The held-out loss with the given parameters and buffers, by name, in the model's place."""


@dataclass(frozen=True)
class Plan:
    """What to store a snapshot with, and why."""

    scheme: Scheme
    configuration: str
    reason: str
    degradation: float | None = None
    baseline: float | None = None
    evaluations: int = 0


class Planner:
    """Chooses the scheme of every save; keeps the search's state between saves.

    Args:
        config: scheme, bound and budget.
        spent_s: seconds that evaluations have taken from training so far: what the search's budget is charged with.
    """

    def __init__(self, config: SaverConfig, spent_s: Callable[[], float]) -> None:
        self._config = config
        search = SearchConfig(max_degradation=config.max_degradation, overhead=config.search_overhead)
        self._space = search.space
        self._driver = SearchDriver(search, cost_clock=spent_s)
        self._warned = False
        self._told_not_finite = False

    def plan(
        self,
        state: TrainingState,
        measure: Measure | None,
        gradients: Mapping[str, torch.Tensor] | None,
        *,
        exact: bool = False,
    ) -> Plan:
        """Choose for one snapshot.

        Args:
            state: host tensors.
            measure: None where the user gave no way to evaluate the model.
            gradients: EMA of the gradients by parameter name; None takes Adam's first moments.
            exact: the user wants this checkpoint bit-exact.
        """
        if exact or self._config.scheme == "lossless":
            return Plan(Lossless(), "exact", "bit-exact storage was asked for", degradation=0.0)
        weights = Weights(state, self._config.options, gradients)
        self._tell_not_finite(weights.not_finite)
        if not weights.specs:
            return Plan(
                Lossless(), "exact", "the state holds no weight that could be quantized", degradation=0.0
            )
        if measure is None:
            return self._unmeasured(weights)
        try:
            return self._measured(weights, measure)
        except EvaluationUnavailableError as error:
            return Plan(
                Lossless(), "exact", f"the degradation could not be measured ({error})", degradation=0.0
            )

    def _tell_not_finite(self, names: Sequence[str]) -> None:
        if names and not self._told_not_finite:
            self._told_not_finite = True
            more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
            warnings.warn(
                f"NaN or infinity in the weights {', '.join(names[:_NAMED])}{more}: they are stored exactly, which makes"
                " checkpoints large. Has the training diverged? Then go back to a checkpoint from before",
                ShrinkpointWarning,
                stacklevel=2,
            )

    def _unmeasured(self, weights: Weights) -> Plan:
        if not self._warned:
            self._warned = True
            warnings.warn(
                "there is no way to evaluate the model, so max_degradation cannot be checked: weights are stored with"
                " the mildest configuration, unmeasured. Give evaluate=, or validation data, or scheme='lossless'",
                ShrinkpointWarning,
                stacklevel=2,
            )
        mildest = self._space.mildest
        scheme = Inshrinkerator(self._config.options, weights, mildest)
        return Plan(
            scheme, str(mildest), "the mildest configuration: nothing to measure the degradation with"
        )

    def _measured(self, weights: Weights, measure: Measure) -> Plan:
        predict = SizePredictor(weights, self._config.options)

        def evaluate(configuration: Configuration | None) -> float:
            return measure(weights.true() if configuration is None else weights.restored(configuration))

        choice = self._driver.choose(predict, evaluate)
        told = (choice.baseline, choice.evaluations)
        if choice.configuration is None:
            return Plan(Lossless(), "exact", choice.reason, 0.0, *told)
        scheme = Inshrinkerator(self._config.options, weights, choice.configuration)
        return Plan(scheme, str(choice.configuration), choice.reason, choice.degradation, *told)

    def state_dict(self) -> dict[str, object]:
        """The search's state in JSON primitives, for the manifest."""
        return self._driver.state_dict()

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Go on from a stored state of the search."""
        self._driver.load_state_dict(state)
