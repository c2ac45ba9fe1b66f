"""``auto``: the search for the widest steps that keep the bound (`shrinkpoint.search.scale`)."""

import weakref
from collections.abc import Mapping

from shrinkpoint.planning.base import Plan, exactly
from shrinkpoint.planning.comparison import Comparison
from shrinkpoint.schemes.auto import MILD_SCALE, Auto, AutoOptions
from shrinkpoint.schemes.base import Occasion
from shrinkpoint.search.measure import Rise
from shrinkpoint.search.scale import ScaleSearch
from shrinkpoint.state import TensorSpec
from shrinkpoint.trial import restored_model

__all__ = ["ScaleStrategy"]


class ScaleStrategy:
    """Chooses the scale of the weights' steps.

    Args:
        options: the scheme's settings; a ``weight_scale`` among them is the only one to be considered.
    """

    def __init__(self, options: AutoOptions) -> None:
        self._options = options
        self._search = ScaleSearch()
        self._comparison: weakref.ref[Comparison] | None = None  # which holds the whole snapshot

    def takes(self, spec: TensorSpec) -> bool:
        """See `Strategy.takes`."""
        return self._options.takes(spec)

    def unmeasured(self, occasion: Occasion) -> Plan:
        """See `Strategy.unmeasured`."""
        scale = self._options.weight_scale or MILD_SCALE
        return self._plan(occasion, scale, "mild steps: nothing to measure the degradation with")

    def measured(self, occasion: Occasion, comparison: Comparison, allowed: float) -> Plan:
        """See `Strategy.measured`."""
        again = self._comparison is not None and self._comparison() is comparison
        self._comparison = weakref.ref(comparison)
        choice = self._search.choose(
            lambda scale: self._rise(occasion, comparison, scale),
            allowed,
            base=occasion.reference is None,
            fixed=self._options.weight_scale,
            again=again,
        )
        if choice.scale is None:
            return exactly(choice.reason)
        return self._plan(occasion, choice.scale, choice.reason, choice.rise)

    def milder(self, occasion: Occasion, comparison: Comparison | None, allowed: float) -> Plan | None:
        """See `Strategy`."""
        scale = self._search.narrower() if self._options.weight_scale is None else None
        if scale is None:
            return None
        if comparison is None:
            return self._plan(occasion, scale, f"scale {scale:.3g}, not measured")
        plan = self.measured(occasion, comparison, allowed)
        return None if plan.is_exact else plan

    def _rise(self, occasion: Occasion, comparison: Comparison, scale: float) -> Rise:
        scheme = self._scheme(occasion, scale)
        return comparison.rise(scale, lambda: restored_model(occasion.state, scheme, occasion.reference))

    def _scheme(self, occasion: Occasion, scale: float) -> Auto:
        return Auto(options=self._options, occasion=occasion, scale=scale)

    def _plan(self, occasion: Occasion, scale: float, reason: str, rise: Rise | None = None) -> Plan:
        scheme = self._scheme(occasion, scale)
        return Plan(scheme, scheme.settings, reason, rise, options=f"auto {self._options}", scale=scale)

    def state_dict(self) -> dict[str, object]:
        """See `Strategy.state_dict`."""
        return self._search.state_dict()

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """See `Strategy.load_state_dict`."""
        self._search.load_state_dict(state)
