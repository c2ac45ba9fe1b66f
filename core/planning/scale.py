"""``auto``: the search for the widest steps that keep the bound (`shrinkpoint.search.scale`)."""

from collections.abc import Mapping

from shrinkpoint.planning.base import Measure, Plan, exactly
from shrinkpoint.schemes.auto import Auto, AutoOptions
from shrinkpoint.schemes.base import Occasion
from shrinkpoint.search.scale import ScaleSearch
from shrinkpoint.state import TensorSpec
from shrinkpoint.trial import restored_model, true_model

__all__ = ["ScaleStrategy"]


class ScaleStrategy:
    """Chooses the scale of the weights' steps.

    Args:
        options: the scheme's settings; a ``weight_scale`` among them is the only one to be considered.
    """

    def __init__(self, options: AutoOptions) -> None:
        self._options = options
        self._search = ScaleSearch()

    def takes(self, spec: TensorSpec) -> bool:
        """See `Strategy.takes`."""
        return self._options.takes(spec)

    def unmeasured(self, occasion: Occasion) -> Plan:
        """See `Strategy.unmeasured`."""
        scheme = Auto(options=self._options, occasion=occasion)
        return Plan(scheme, scheme.settings, "mild steps: nothing to measure the degradation with")

    def measured(self, occasion: Occasion, measure: Measure, allowed: float) -> Plan:
        """See `Strategy.measured`."""

        def loss(scale: float | None) -> float:
            if scale is None:
                return measure(true_model(occasion.state))
            scheme = Auto(options=self._options, occasion=occasion, scale=scale)
            return measure(restored_model(occasion.state, scheme, occasion.reference))

        base, fixed = occasion.reference is None, self._options.weight_scale
        choice = self._search.choose(loss, allowed, base=base, fixed=fixed)
        if choice.scale is None:
            return exactly(choice.reason, choice.baseline, choice.evaluations)
        scheme = Auto(options=self._options, occasion=occasion, scale=choice.scale)
        told = (choice.degradation, choice.baseline, choice.evaluations)
        return Plan(scheme, scheme.settings, choice.reason, *told)

    def state_dict(self) -> dict[str, object]:
        """See `Strategy.state_dict`."""
        return self._search.state_dict()

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """See `Strategy.load_state_dict`."""
        self._search.load_state_dict(state)
