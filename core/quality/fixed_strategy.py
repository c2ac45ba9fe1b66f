"""Strategy of the schemes without a search: the given settings, or exact storage where these break the bound."""

from collections.abc import Mapping
from typing import Any

from shrinkpoint.quality.comparison import Comparison
from shrinkpoint.quality.history import History
from shrinkpoint.quality.measurement import pooled
from shrinkpoint.quality.strategy import Plan, exactly
from shrinkpoint.quality.trial import restored_model
from shrinkpoint.schemes.base import SaveContext
from shrinkpoint.schemes.catalogue import build
from shrinkpoint.state.training import Role, TensorSpec

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
        self._settings = f"{name} {options}"
        self._history: History | None = None

    def takes(self, spec: TensorSpec) -> bool:
        """See `Strategy.takes`."""
        if self._options is None:
            return spec.tag.role is Role.WEIGHT
        return bool(self._options.takes(spec))

    def unmeasured(self, save_context: SaveContext) -> Plan:
        """See `Strategy.unmeasured`."""
        scheme = build(self._name, self._options, save_context)
        return Plan(
            scheme,
            "as given",
            "the settings given: nothing to measure the degradation with",
            options=self._settings,
        )

    def measured(self, save_context: SaveContext, comparison: Comparison, allowed: float) -> Plan:
        """See `Strategy.measured`."""
        scheme = build(self._name, self._options, save_context)
        own = comparison.rise(
            "as given", lambda: restored_model(save_context.state, scheme, save_context.reference)
        )
        rise = pooled(own, self._history.aged().predicted(1.0) if self._history is not None else None)
        self._history = History.of(1.0, rise, self._history)
        reason = (
            f"the settings given raise the loss by {rise.mean:+.3g} ({rise.high:+.3g} at most), and a restore may cost"
            f" {allowed:.3g}"
        )
        if allowed <= 0 or not rise.within(allowed):
            return exactly(f"{reason}: stored exactly")
        # built again: some schemes pass a save to their codecs only once
        scheme = build(self._name, self._options, save_context)
        return Plan(scheme, "as given", reason, rise, options=self._settings)

    def state_dict(self) -> dict[str, object]:
        """The pooled measurements and the settings that they were made with."""
        history = self._history.to_json() if self._history is not None else None
        return {"settings": self._settings, "history": history}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Continue from what `state_dict` returned, if it was measured with the same settings."""
        self._history = History.load(state) if state.get("settings") == self._settings else None
