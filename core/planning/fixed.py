"""The published schemes that have no search: their settings as given, stored exactly where these break the bound."""

from collections.abc import Mapping
from typing import Any

from shrinkpoint.planning.base import Measure, Plan, exactly
from shrinkpoint.schemes.base import Occasion
from shrinkpoint.schemes.catalogue import build
from shrinkpoint.schemes.recipe import is_weight
from shrinkpoint.search.measure import relative_rise
from shrinkpoint.state import TensorSpec
from shrinkpoint.trial import restored_model, true_model

__all__ = ["FixedStrategy"]


class FixedStrategy:
    """Takes one scheme with the settings that the user gave.

    Args:
        name: the scheme's.
        options: its settings.
    """

    def __init__(self, name: str, options: Any) -> None:
        self._name = name
        self._options = options

    def takes(self, spec: TensorSpec) -> bool:
        """See `Strategy.takes`."""
        return is_weight(spec, self._options.min_elements)

    def unmeasured(self, occasion: Occasion) -> Plan:
        """See `Strategy.unmeasured`."""
        scheme = build(self._name, self._options, occasion)
        return Plan(scheme, "as given", "the settings given: nothing to measure the degradation with")

    def measured(self, occasion: Occasion, measure: Measure, allowed: float) -> Plan:
        """See `Strategy.measured`."""
        scheme = build(self._name, self._options, occasion)
        baseline = measure(true_model(occasion.state))
        rise = relative_rise(measure(restored_model(occasion.state, scheme, occasion.reference)), baseline)
        told = (
            f"the settings given change the loss by {rise:+.3g}, the bound for one restore is {allowed:.3g}"
        )
        if rise > allowed or allowed <= 0:
            return exactly(f"{told}: stored exactly", baseline, 1)
        # made again: some schemes tell their codecs of a save once
        return Plan(build(self._name, self._options, occasion), "as given", told, rise, baseline, 1)

    def state_dict(self) -> dict[str, object]:
        """Nothing is learned."""
        return {}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Nothing to go on from."""
