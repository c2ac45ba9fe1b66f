"""The schemes' strategies; that of ``auto`` searches the widest step sizes that keep the bound (`shrinkpoint.quality.scale_search`)."""

import math
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from shrinkpoint.config import SaverConfig
from shrinkpoint.quality.comparison import Comparison
from shrinkpoint.quality.configuration_search import ConfigurationStrategy
from shrinkpoint.quality.measurement import History, Rise, pooled
from shrinkpoint.quality.scale_search import ScaleSearch
from shrinkpoint.quality.strategy import Plan, Strategy, exactly
from shrinkpoint.quality.trial import restored_model
from shrinkpoint.schemes.auto.scheme import MILD_SCALE, Auto, AutoOptions
from shrinkpoint.schemes.base import SaveContext
from shrinkpoint.schemes.catalogue import Choice, build, entry_of
from shrinkpoint.state.training import Role, TensorSpec

__all__ = ["ScaleStrategy", "strategy_of"]

# Once a scale has been below this one, moments lose less than usual, too. A scale is how much of its movement the loss lets a weight
# lose, and what moments lose shows at no restore, but in the updates of as many steps as they remember. Such weights take most of the
# bytes. Chosen on the equation of heat, and below the scales of all trainings of docs/bound.md at evenly spread checkpoints but the
# ResNet's (docs/search.md, "What is guaranteed, and what is not").
_SENSITIVE = 1 / 32
_FINEST = 3.0  # grade of moments; finer levels would be too many for a byte


class ScaleStrategy:
    """Chooses the scale factor of the weights' step sizes.

    Args:
        options: the scheme's settings; a ``weight_scale`` among them is the only one to be considered.
        whole: see `ScaleSearch`.
        threads: that quantize what is measured.
    """

    def __init__(self, options: AutoOptions, *, whole: bool = False, threads: int = 1) -> None:
        self._options = options
        self._threads = threads
        self._search = ScaleSearch(whole=whole)
        self._scale = MILD_SCALE  # without a measurement
        self._sensitive = False  # whether a scale of this training has been below that
        self._grade = 0.0  # of this save's moments, since coarser ones were refused
        self._exact: frozenset[int] = frozenset()  # optimizers whose moments of this save are exact
        self._comparison: weakref.ref[Comparison] | None = None  # which holds the whole snapshot

    def takes(self, spec: TensorSpec) -> bool:
        """See `Strategy.takes`."""
        return self._options.takes(spec)

    def unmeasured(self, save_context: SaveContext) -> Plan:
        """See `Strategy.unmeasured`."""
        self._grade, self._exact = 0.0, frozenset()
        self._scale = self._options.weight_scale or MILD_SCALE
        return self._plan(save_context, self._scale, "mild steps: nothing to measure the degradation with")

    def measured(self, save_context: SaveContext, comparison: Comparison, allowed: float) -> Plan:
        """See `Strategy.measured`."""
        again = self._comparison is not None and self._comparison() is comparison
        self._comparison = weakref.ref(comparison)
        if not again:
            self._grade, self._exact = 0.0, frozenset()
        choice = self._search.choose(
            lambda scale: self._rise(save_context, comparison, scale),
            allowed,
            base=save_context.reference is None or save_context.is_anchor,
            fixed=self._options.weight_scale,
            again=again,
        )
        if choice.scale is None:
            return exactly(choice.reason)
        return self._plan(save_context, choice.scale, choice.reason, choice.rise)

    def milder(
        self,
        save_context: SaveContext,
        comparison: Comparison | None,
        allowed: float,
        *,
        moments: bool,
        at_fault: frozenset[int] = frozenset(),
        times: float | None = None,
    ) -> Plan | None:
        """See `Strategy`."""
        if moments:
            if self._options.first_moment_step is not None or not self._refined(at_fault, times):
                return None
        else:
            scale = self._search.narrower() if self._options.weight_scale is None else None
            if scale is None:
                return None
            self._scale = scale if comparison is not None else min(scale, self._scale / 2)
        if comparison is None:
            return self._plan(save_context, self._scale, f"scale {self._scale:.3g}, not measured")
        plan = self.measured(save_context, comparison, allowed)
        return None if plan.is_exact else plan

    def _rise(self, save_context: SaveContext, comparison: Comparison, scale: float) -> Rise:
        scheme = self._scheme(save_context, scale)
        return comparison.rise(
            scale,
            lambda: restored_model(save_context.state, scheme, save_context.reference, self._threads),
        )

    def _scheme(self, save_context: SaveContext, scale: float) -> Auto:
        return Auto(
            options=self._options,
            save_context=save_context,
            scale=scale,
            finer_moments=self._finer_moments,
            exact_optimizers=self._exact,
        )

    @property
    def _finer_moments(self) -> float:
        fixed = self._options.first_moment_step is not None
        return max(self._grade, 1.0 if self._sensitive and not fixed else 0.0)

    def _refined(self, at_fault: frozenset[int], times: float | None) -> bool:
        """Make this save's moments finer, or exact those of the optimizers at fault; False where that is done already."""
        more = 1.0 if times is None else max(1, math.ceil(math.log2(times))) / 2
        if self._finer_moments < (1.0 if times is None else _FINEST):
            self._grade = min(self._finer_moments + more, _FINEST)
            return True
        exact, self._exact = self._exact, self._exact | at_fault
        return self._exact != exact

    def _plan(self, save_context: SaveContext, scale: float, reason: str, rise: Rise | None = None) -> Plan:
        self._sensitive = self._sensitive or scale < _SENSITIVE
        scheme = self._scheme(save_context, scale)
        return Plan(scheme, scheme.settings, reason, rise, options=f"auto {self._options}", scale=scale)

    def state_dict(self) -> dict[str, object]:
        """See `Strategy.state_dict`."""
        sensitive = {"sensitive": True} if self._sensitive else {}
        return {**self._search.state_dict(), **sensitive}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """See `Strategy.load_state_dict`."""
        self._search.load_state_dict(state)
        self._sensitive = state.get("sensitive") is True


def strategy_of(config: SaverConfig, spent_s: Callable[[], float]) -> Strategy | None:
    """The scheme's strategy; None for a lossless scheme, which has nothing to choose."""
    options = config.scheme_options
    make: Mapping[Choice, Callable[[], Strategy | None]] = {
        "nothing": lambda: None,
        "scale": lambda: ScaleStrategy(
            options,
            whole=config.adopt,
            threads=config.waiting_threads if config.adopt else 1,  # else it is the training that has them
        ),
        "configurations": lambda: ConfigurationStrategy(options, config.search_overhead, spent_s),
        "settings": lambda: FixedStrategy(config.scheme, options),
    }
    return make[entry_of(config.scheme).choice]()


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
