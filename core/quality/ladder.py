"""The ladders of all schemes: scales of step sizes (`auto`), configurations (`inshrinkerator`), or the one setting that was given."""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from shrinkpoint.config import SaverConfig
from shrinkpoint.quality.comparison import Comparison
from shrinkpoint.quality.configuration_search import ConfigurationLadder
from shrinkpoint.quality.measurement import History, Rise, pooled
from shrinkpoint.quality.scale_search import ScaleSearch
from shrinkpoint.quality.strategy import Ladder, Plan, Refusal, exactly
from shrinkpoint.quality.trial import restored_model
from shrinkpoint.schemes.auto.scheme import MILD_SCALE, Auto, AutoOptions
from shrinkpoint.schemes.base import SaveContext
from shrinkpoint.schemes.catalogue import Choice, build, entry_of

__all__ = ["ScaleLadder", "ladder_of"]

# Once a scale has been below this one, moments lose less than usual, too. A scale is how much of its movement the loss lets a weight
# lose, and what moments lose shows at no restore, but in the updates of as many steps as they remember. Such weights take most of the
# bytes. Chosen on the equation of heat, and below the scales of all trainings of docs/bound.md at evenly spread checkpoints but the
# ResNet's (docs/search.md, "What is guaranteed, and what is not").
_SENSITIVE = 1 / 32
_FINEST = 3.0  # grade of moments; finer levels would be too many for a byte


class ScaleLadder(Ladder):
    """Chooses the scale factor of the weights' step sizes for ``auto``: the widest that keeps the bound.

    Args:
        options: the scheme's settings; a ``weight_scale`` among them is the only one to be considered.
        whole: see `ScaleSearch`.
        threads: that quantize what is measured.
    """

    def __init__(self, options: AutoOptions, *, whole: bool = False, threads: int = 1) -> None:
        super().__init__("auto", options)
        self._threads = threads
        self._search = ScaleSearch(whole=whole)
        self._scale = MILD_SCALE  # without a measurement
        self._sensitive = False  # whether a scale of this training has been below that
        self._grade = 0.0  # of this save's moments, since coarser ones were refused
        self._exact: frozenset[int] = frozenset()  # optimizers whose moments of this save are exact

    def unmeasured(self, save_context: SaveContext) -> Plan:
        """See `Ladder.unmeasured`."""
        self._grade, self._exact = 0.0, frozenset()
        self._scale = self._options.weight_scale or MILD_SCALE
        return self._plan(save_context, self._scale, "mild steps: nothing to measure the degradation with")

    def measured(self, save_context: SaveContext, comparison: Comparison, allowed: float) -> Plan:
        """See `Ladder.measured`."""
        begins = self._begins(comparison)
        if begins:
            self._grade, self._exact = 0.0, frozenset()

        def rise(scale: float) -> Rise:
            scheme = self._scheme(save_context, scale)
            make = partial(restored_model, save_context.state, scheme, save_context.reference, self._threads)
            return comparison.rise(scale, make)

        choice = self._search.choose(
            rise,
            allowed,
            base=save_context.reference is None or save_context.is_anchor,
            fixed=self._options.weight_scale,
            again=not begins,
        )
        if choice.scale is None:
            return exactly(choice.reason)
        return self._plan(save_context, choice.scale, choice.reason, choice.rise)

    def milder(
        self, save_context: SaveContext, comparison: Comparison | None, allowed: float, refusal: Refusal
    ) -> Plan | None:
        """See `Ladder.milder`."""
        if refusal.moments:
            if self._options.first_moment_step is not None or not self._refined(refusal):
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

    def _refined(self, refusal: Refusal) -> bool:
        """Make this save's moments finer, or exact those of the optimizers at fault; False where that is done already."""
        times = refusal.times
        more = 1.0 if times is None else max(1, math.ceil(math.log2(times))) / 2
        if self._finer_moments < (1.0 if times is None else _FINEST):
            self._grade = min(self._finer_moments + more, _FINEST)
            return True
        exact, self._exact = self._exact, self._exact | refusal.at_fault
        return self._exact != exact

    def _plan(self, save_context: SaveContext, scale: float, reason: str, rise: Rise | None = None) -> Plan:
        self._sensitive = self._sensitive or scale < _SENSITIVE
        scheme = self._scheme(save_context, scale)
        return Plan(scheme, scheme.settings, reason, rise, options=f"auto {self._options}", scale=scale)

    def state_dict(self) -> dict[str, object]:
        """See `Ladder.state_dict`."""
        sensitive = {"sensitive": True} if self._sensitive else {}
        return {**self._search.state_dict(), **sensitive}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """See `Ladder.load_state_dict`."""
        self._search.load_state_dict(state)
        self._sensitive = state.get("sensitive") is True


class GivenSettings(Ladder):
    """A ladder of one rung: the settings that the user gave, which are measured."""

    def __init__(self, name: str, options: Any) -> None:
        super().__init__(name, options)
        self._settings = f"{name} {options}"
        self._history: History | None = None
        self._expected: Rise | None = None  # at this save, by the history

    def unmeasured(self, save_context: SaveContext) -> Plan:
        """See `Ladder.unmeasured`."""
        return self._plan(save_context, "the settings given: nothing to measure the degradation with")

    def measured(self, save_context: SaveContext, comparison: Comparison, allowed: float) -> Plan:
        """See `Ladder.measured`."""
        if self._begins(comparison):
            self._expected = self._history.aged().predicted(1.0) if self._history is not None else None
        scheme = build(self._name, self._options, save_context)
        make = partial(restored_model, save_context.state, scheme, save_context.reference)
        rise = pooled(comparison.rise("as given", make), self._expected)
        self._history = History.of(1.0, rise, self._history)
        reason = (
            f"the settings given raise the loss by {rise.mean:+.3g} ({rise.high:+.3g} at most), and a restore may cost"
            f" {allowed:.3g}"
        )
        if allowed <= 0 or not rise.within(allowed):
            return exactly(f"{reason}: stored exactly")
        return self._plan(save_context, reason, rise)

    def _plan(self, save_context: SaveContext, reason: str, rise: Rise | None = None) -> Plan:
        # built for each plan: some schemes pass a save to their codecs only once
        scheme = build(self._name, self._options, save_context)
        return Plan(scheme, "as given", reason, rise, options=self._settings)

    def state_dict(self) -> dict[str, object]:
        """The pooled measurements and the settings that they were made with."""
        history = self._history.to_json() if self._history is not None else None
        return {"settings": self._settings, "history": history}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned, if it was measured with the same settings."""
        self._history = History.load(state) if state.get("settings") == self._settings else None


def ladder_of(config: SaverConfig, spent_s: Callable[[], float]) -> Ladder | None:
    """The scheme's ladder; None for a lossless scheme, which has nothing to choose."""
    options = config.scheme_options
    make: Mapping[Choice, Callable[[], Ladder | None]] = {
        "nothing": lambda: None,
        "scale": lambda: ScaleLadder(
            options,
            whole=config.adopt,
            threads=config.waiting_threads if config.adopt else 1,  # else it is the training that has them
        ),
        "configurations": lambda: ConfigurationLadder(options, config.search_overhead, spent_s),
        "settings": lambda: GivenSettings(config.scheme, options),
    }
    return make[entry_of(config.scheme).choice]()
