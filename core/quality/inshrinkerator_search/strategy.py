"""Strategy of ``inshrinkerator``: its search over configurations
(`shrinkpoint.quality.inshrinkerator_search.driver`)."""

from collections.abc import Callable, Mapping

from shrinkpoint.quality.comparison import Comparison
from shrinkpoint.quality.inshrinkerator_search.driver import SearchConfig, SearchDriver
from shrinkpoint.quality.inshrinkerator_search.outcome import Predict
from shrinkpoint.quality.measurement import Rise
from shrinkpoint.quality.strategy import Plan, exactly
from shrinkpoint.quality.trial import true_model
from shrinkpoint.schemes.base import SaveContext
from shrinkpoint.schemes.inshrinkerator.prediction import PredictedSizes, SizePredictor
from shrinkpoint.schemes.inshrinkerator.scheme import (
    Inshrinkerator,
    InshrinkeratorOptions,
    Weights,
    weights_of,
)
from shrinkpoint.schemes.inshrinkerator.space import Configuration
from shrinkpoint.schemes.recipe import is_weight
from shrinkpoint.state.training import TensorSpec

__all__ = ["ConfigurationStrategy"]


class ConfigurationStrategy:
    """Chooses bins, prune and protect fractions.

    Args:
        options: the scheme's settings.
        max_degradation: the bound to start with.
        overhead: share of the training time that searches may take.
        spent_s: seconds that evaluations have taken from training so far.
    """

    def __init__(
        self,
        options: InshrinkeratorOptions,
        max_degradation: float,
        overhead: float,
        spent_s: Callable[[], float],
    ) -> None:
        self._options = options
        search = SearchConfig(max_degradation=max_degradation, overhead=overhead)
        self._space = search.space
        self._driver = SearchDriver(search, cost_clock=spent_s)

    def takes(self, spec: TensorSpec) -> bool:
        """See `Strategy.takes`."""
        return is_weight(spec, self._options.min_elements)

    def unmeasured(self, save_context: SaveContext) -> Plan:
        """See `Strategy.unmeasured`."""
        return self._plan(
            weights_of(save_context, self._options),
            self._space.mildest,
            "the mildest configuration: nothing to measure the degradation with",
        )

    def measured(self, save_context: SaveContext, comparison: Comparison, allowed: float) -> Plan:
        """See `Strategy.measured`."""
        weights = weights_of(save_context, self._options)
        predict: Predict = SizePredictor(weights, self._options)
        if save_context.scores is not None:  # other processes have weights too
            predict = PredictedSizes(self._space, lambda: comparison.summed(lambda: self.sizes(save_context)))

        true = true_model(save_context.state)  # averages too: the live ones change between two evaluations

        def rise(configuration: Configuration) -> Rise:
            return comparison.rise(configuration, lambda: true | weights.restored(configuration))

        self._driver.bound(allowed)
        choice = self._driver.choose(predict, rise)
        if choice.configuration is None:
            return exactly(choice.reason)
        return self._plan(weights, choice.configuration, choice.reason, choice.rise)

    def sizes(self, save_context: SaveContext) -> list[float]:
        """Predicted bytes of this process's weights, for `PredictedSizes`."""
        return SizePredictor(weights_of(save_context, self._options), self._options).table(self._space)

    def _plan(
        self, weights: Weights, configuration: Configuration, reason: str, rise: Rise | None = None
    ) -> Plan:
        scheme = Inshrinkerator(self._options, weights, configuration)
        settings = f"inshrinkerator {self._options} {configuration}"
        return Plan(scheme, str(configuration), reason, rise, options=settings)

    def state_dict(self) -> dict[str, object]:
        """See `Strategy.state_dict`."""
        return self._driver.state_dict()

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """See `Strategy.load_state_dict`."""
        self._driver.load_state_dict(state)
