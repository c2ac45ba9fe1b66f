"""The ladders of all schemes: scales of step sizes (`auto`), configurations (`inshrinkerator`), or the one setting that was given."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from shrinkpoint.config import SaverConfig
from shrinkpoint.errors import ConfigError
from shrinkpoint.quality.comparison import Comparison, restored_model, true_model
from shrinkpoint.quality.measurement import History, Rise, pooled
from shrinkpoint.quality.plan import Ladder, Plan, Refusal, exactly
from shrinkpoint.schemes.auto.options import MILD_SCALE, AutoOptions
from shrinkpoint.schemes.auto.scheme import Auto
from shrinkpoint.schemes.base import SaveContext
from shrinkpoint.schemes.catalogue import Choice, build, entry_of
from shrinkpoint.schemes.inshrinkerator.prediction import SizePredictor, predicted_sizes
from shrinkpoint.schemes.inshrinkerator.scheme import (
    Inshrinkerator,
    InshrinkeratorOptions,
    Weights,
    weights_of,
)
from shrinkpoint.schemes.inshrinkerator.search import ConfigurationSearch, Predict
from shrinkpoint.schemes.inshrinkerator.space import Configuration

STATE_VERSION = 2

_PER_OCTAVE = 4
_NARROWEST, _WIDEST = -8 * _PER_OCTAVE, 0
_START = -1 * _PER_OCTAVE
_AIM = (
    0.9  # of the allowed rise, at the upper end: the next checkpoint of the chain may cost more than this one
)
_FARTHEST = 2 * _PER_OCTAVE
_TRIES = 3
_SAME = 1.1
_FEWEST = 3  # rungs: in a delta, rows whose steps are less than half an octave too wide keep them

# Once a scale has been below this one, moments lose less than usual, too. A scale is how much of its movement the loss lets a weight
# lose, and what moments lose shows at no restore, but in the updates of as many steps as they remember. Such weights take most of the
# bytes. Chosen on the equation of heat, and below the scales of all trainings of docs/results.md at evenly spread checkpoints but the
# ResNet's.
_SENSITIVE = 1 / 32
_FINEST = 3.0  # grade of moments; finer levels would be too many for a byte


@dataclass
class _Save:
    """What a ladder knows of the present save."""

    past: History | None = None
    """Of the measurements before it."""
    rises: dict[float, Rise] = field(default_factory=dict)
    """By scale, each pooled with the prediction from the nearest known scale."""
    grade: float = 0.0
    """Of its moments, since coarser ones were refused."""
    exact: frozenset[int] = frozenset()
    """Optimizers whose moments are exact."""


class ScaleLadder(Ladder):
    """Chooses the scale factor of the weights' step sizes for ``auto``: the widest that keeps the bound, within a few evaluations a save.

    The rise of the loss grows with the square of the step size where it is more than noise, so that one measurement
    predicts the next, and those of all saves are pooled (`shrinkpoint.quality.measurement`). A scale is accepted if the upper
    end of its measured rise is within the bound. Step sizes shrink whenever the bound requires it, and grow in a base
    and in a delta to an earlier checkpoint than the last, where that costs few bytes; else by an octave at least, if the pooled
    measurements allow it.

    Args:
        options: the scheme's settings; a ``weight_scale`` among them is the only one to be considered.
        whole: whether the stored state holds the chain's limits too, so that a resumed search makes the very choices
            that an undisturbed one would have made. Such chains are long, and none is begun for the sake of wider steps:
            the limit of a chain therefore rises by an octave in every four saves.
        threads: that quantize what is measured.
    """

    def __init__(self, options: AutoOptions, *, whole: bool = False, threads: int = 1) -> None:
        super().__init__("auto", options)
        self._whole, self._threads = whole, threads
        self._rung = _START
        self._history: History | None = None
        self._out_of_reach = False  # whether the narrowest steps broke the bound at the last save
        self._limit = _START + _PER_OCTAVE  # widest rung until the next base while all rises are within noise
        self._may_widen = True  # until the next base
        self._unmeasured = MILD_SCALE  # the scale where nothing can be measured
        self._sensitive = False  # whether a scale of this training has been below that
        self._save = _Save()

    def unmeasured(self, save_context: SaveContext) -> Plan:
        """Choose as `Ladder.unmeasured` says."""
        self._save = _Save()
        self._unmeasured = self._options.weight_scale or MILD_SCALE
        reason = "mild steps: nothing to measure the degradation with"
        return self._plan(save_context, self._unmeasured, reason)

    def measured(self, save_context: SaveContext, comparison: Comparison, allowed: float) -> Plan:
        """Choose as `Ladder.measured` says."""
        base = save_context.reference is None or save_context.is_anchor
        begins, fixed = self._begins(comparison), self._options.weight_scale is not None
        if begins:
            self._save = _Save(self._history.aged() if self._history is not None else None)
            if base:
                self._may_widen = True
            elif self._whole:
                self._limit = min(_WIDEST, max(self._limit, self._rung) + 1)
        if allowed <= 0:
            return exactly("no part of the bound is left for a restore: stored exactly")
        rise, rung = partial(self._rise, save_context, comparison), self._rung
        if not fixed:
            if self._out_of_reach and not rise(_NARROWEST).within(allowed):
                return self._refused(rise(_NARROWEST), allowed)
            if begins:
                rung = self._start(rise, allowed, base=base)
            rung = self._hold(rung, rise, allowed, fewest=1 if base else _FEWEST)
        if not rise(rung).within(allowed):
            return self._refused(rise(rung), allowed)
        if self._history is None and begins and not fixed:
            rung = self._explore(rung, rise, allowed)
        self._rung, self._out_of_reach = rung, False
        if base:
            self._limit = rung + _PER_OCTAVE
        scale, found = self._scale(rung), rise(rung)
        self._history = History.of(scale, found, self._history)
        return self._plan(save_context, scale, f"scale {scale:.3g} raises {_compared(found, allowed)}", found)

    def milder(
        self, save_context: SaveContext, comparison: Comparison | None, allowed: float, refusal: Refusal
    ) -> Plan | None:
        """Choose as `Ladder.milder` says."""
        if refusal.moments:
            if self._options.first_moment_step is not None or not self._refined(refusal):
                return None
        else:
            if self._options.weight_scale is not None or self._rung == _NARROWEST:
                return None
            self._rung = max(_NARROWEST, self._rung - _PER_OCTAVE)
            scale = _scale(self._rung)
            self._unmeasured = scale if comparison is not None else min(scale, self._unmeasured / 2)
        if comparison is None:
            scale = self._unmeasured
            return self._plan(save_context, scale, f"scale {scale:.3g}, not measured")
        plan = self.measured(save_context, comparison, allowed)
        return None if plan.is_exact else plan

    def _scale(self, rung: int) -> float:
        given: float | None = self._options.weight_scale
        return _scale(rung) if given is None else given

    def _rise(self, save_context: SaveContext, comparison: Comparison, rung: int) -> Rise:
        scale, rises = self._scale(rung), self._save.rises
        if scale not in rises:
            own = comparison.rise(
                scale,
                lambda: restored_model(
                    save_context.state,
                    self._scheme(save_context, scale),
                    save_context.reference,
                    self._threads,
                ),
            )
            known = [found for at, rise in rises.items() if (found := History.of(at, rise)) is not None]
            past = min(known, key=lambda found: abs(math.log2(found.scale / scale)), default=self._save.past)
            rises[scale] = pooled(own, past.predicted(scale) if past is not None else None)
        return rises[scale]

    def _start(self, rise: Callable[[int], Rise], allowed: float, *, base: bool) -> int:
        """Return the rung in use, or a wider one if earlier measurements predict that it keeps the bound and this one
        agrees."""
        wider = self._wider(allowed, base=base)
        if wider == self._rung or rise(wider).within(allowed):
            return wider
        if not base:
            self._may_widen = False  # one try a base: it costs two evaluations
        return self._rung

    def _wider(self, allowed: float, *, base: bool) -> int:
        """Return the rung that all measurements together allow.

        In a base any rung; else only one an octave wider at least, since smaller changes do not
        pay for new step sizes. Where the measurements are within noise, an octave above the rung of then at most.
        """
        past = self._save.past
        if past is None:
            return self._rung
        expected = past.predicted(_scale(self._rung))
        shift = _shift(expected, allowed)
        if base:
            most = _FARTHEST if expected.is_significant else _PER_OCTAVE
            return min(_WIDEST, self._rung + max(0, min(shift, most)))
        wider = min(_WIDEST, self._rung + shift)
        if not expected.is_significant:
            wider = min(wider, self._limit)
        worth = self._may_widen and expected.mean > 0 and wider >= self._rung + _PER_OCTAVE
        return wider if worth else self._rung

    def _hold(self, rung: int, rise: Callable[[int], Rise], allowed: float, *, fewest: int) -> int:
        """Return the rung, or the next narrower one that keeps the bound; after some tries the narrowest of all."""
        for _ in range(_TRIES):
            if rise(rung).within(allowed) or rung == _NARROWEST:
                return rung
            rung = max(_NARROWEST, rung + min(-fewest, _shift(rise(rung), allowed)))
        return rung if rise(rung).within(allowed) else _NARROWEST

    def _explore(self, rung: int, rise: Callable[[int], Rise], allowed: float) -> int:
        """Try at once the rung that the first save's measurement, the only one, predicts.

        A rise within noise predicts nothing: on such measurements step sizes grow by an octave at most.
        """
        for _ in range(_TRIES):
            shift = _shift(rise(rung), allowed)
            if not rise(rung).is_significant:
                shift = min(shift, _START + _PER_OCTAVE - rung)
            wider = min(_WIDEST, rung + shift)
            if wider <= rung or not rise(wider).within(allowed):
                break
            narrow, wide = rise(rung), rise(wider)
            if narrow == wide or 0 < wide.distance < _SAME * narrow.distance:
                break  # steps are limited by something else than the scale
            rung = wider
        return rung

    def _refused(self, rise: Rise, allowed: float) -> Plan:
        """Store exactly; the next save asks the narrowest steps first, and the others only if these hold."""
        self._out_of_reach = True
        return exactly(f"the smallest scale tried raises {_compared(rise, allowed)}: stored exactly")

    def _scheme(self, save_context: SaveContext, scale: float) -> Auto:
        return Auto(
            options=self._options,
            save_context=save_context,
            scale=scale,
            finer_moments=self._finer_moments,
            exact_optimizers=self._save.exact,
        )

    @property
    def _finer_moments(self) -> float:
        fixed = self._options.first_moment_step is not None
        return max(self._save.grade, 1.0 if self._sensitive and not fixed else 0.0)

    def _refined(self, refusal: Refusal) -> bool:
        """Make this save's moments finer, or exact those of the optimizers at fault; False where that is done already."""
        times = refusal.times
        more = 1.0 if times is None else max(1, math.ceil(math.log2(times))) / 2
        if self._finer_moments < (1.0 if times is None else _FINEST):
            self._save.grade = min(self._finer_moments + more, _FINEST)
            return True
        exact, self._save.exact = self._save.exact, self._save.exact | refusal.at_fault
        return self._save.exact != exact

    def _plan(self, save_context: SaveContext, scale: float, reason: str, rise: Rise | None = None) -> Plan:
        self._sensitive = self._sensitive or scale < _SENSITIVE
        scheme = self._scheme(save_context, scale)
        return Plan(scheme, scheme.settings, reason, rise, options=f"auto {self._options}", scale=scale)

    def state_dict(self) -> dict[str, object]:
        """Return what is known, as `Ladder.state_dict`."""
        history = self._history.to_json() if self._history is not None else None
        state: dict[str, object] = {"version": STATE_VERSION, "rung": self._rung, "history": history}
        if self._whole:
            state["chain"] = [self._limit, self._may_widen, self._out_of_reach]
        return state | ({"sensitive": True} if self._sensitive else {})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue, as `Ladder.load_state_dict`."""
        if state.get("version") != STATE_VERSION:
            raise ConfigError(
                f"search state version {state.get('version')!r} is not {STATE_VERSION}: start a new search"
            )
        rung = state.get("rung")
        if type(rung) is not int or not _NARROWEST <= rung <= _WIDEST:
            raise ConfigError(f"the search state {dict(state)!r} is malformed: start a new search")
        self._rung, self._limit = rung, rung + _PER_OCTAVE
        self._history = History.from_json(state.get("history"))
        if self._whole and "chain" in state:
            chain = state["chain"]
            if not isinstance(chain, list) or [type(value) for value in chain] != [int, bool, bool]:
                raise ConfigError(f"the search state's chain {chain!r} is malformed: start a new search")
            self._limit, self._may_widen, self._out_of_reach = chain
        self._sensitive = state.get("sensitive") is True


def _scale(rung: int) -> float:
    return float(2.0 ** (rung / _PER_OCTAVE))


def _shift(rise: Rise, allowed: float) -> int:
    """Rungs until the upper end is predicted to be most of what is allowed."""
    if not math.isfinite(rise.high):
        return -_FARTHEST
    octaves = math.log2(_AIM * allowed / max(rise.high, 1e-3 * allowed)) / 2
    return max(-_FARTHEST, min(_FARTHEST, math.floor(_PER_OCTAVE * octaves)))


def _compared(rise: Rise, allowed: float) -> str:
    return f"the loss by {rise.mean:+.3g} ({rise.high:+.3g} at most), and a restore may cost {allowed:.3g}"


class GivenSettings(Ladder):
    """A ladder of one rung: the settings that the user gave, which are measured."""

    def __init__(self, name: str, options: Any) -> None:
        super().__init__(name, options)
        self._settings = f"{name} {options}"
        self._history: History | None = None
        self._expected: Rise | None = None  # at this save, by the history

    def unmeasured(self, save_context: SaveContext) -> Plan:
        """Choose as `Ladder.unmeasured` says."""
        return self._plan(save_context, "the settings given: nothing to measure the degradation with")

    def measured(self, save_context: SaveContext, comparison: Comparison, allowed: float) -> Plan:
        """Choose as `Ladder.measured` says."""
        if self._begins(comparison):
            self._expected = self._history.aged().predicted(1.0) if self._history is not None else None
        scheme = build(self._name, self._options, save_context)
        make = partial(restored_model, save_context.state, scheme, save_context.reference)
        rise = pooled(comparison.rise("as given", make), self._expected)
        self._history = History.of(1.0, rise, self._history)
        reason = f"the settings given raise {_compared(rise, allowed)}"
        if allowed <= 0 or not rise.within(allowed):
            return exactly(f"{reason}: stored exactly")
        return self._plan(save_context, reason, rise)

    def _plan(self, save_context: SaveContext, reason: str, rise: Rise | None = None) -> Plan:
        # built for each plan: some schemes pass a save to their codecs only once
        scheme = build(self._name, self._options, save_context)
        return Plan(scheme, "as given", reason, rise, options=self._settings)

    def state_dict(self) -> dict[str, object]:
        """Return the pooled measurements and the settings that they were made with."""
        history = self._history.to_json() if self._history is not None else None
        return {"settings": self._settings, "history": history}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned, if it was measured with the same settings."""
        same = state.get("settings") == self._settings
        self._history = History.from_json(state.get("history")) if same else None


class ConfigurationLadder(Ladder):
    """Chooses bins, prune and protect fractions.

    Args:
        options: the scheme's settings.
        search: that chooses, over as many saves as its budget takes.
    """

    def __init__(self, options: InshrinkeratorOptions, search: ConfigurationSearch) -> None:
        super().__init__("inshrinkerator", options)
        self._search = search

    def unmeasured(self, save_context: SaveContext) -> Plan:
        """Choose as `Ladder.unmeasured` says."""
        return self._plan(
            weights_of(save_context, self._options),
            self._search.space.mildest,
            "the mildest configuration: nothing to measure the degradation with",
        )

    def measured(self, save_context: SaveContext, comparison: Comparison, allowed: float) -> Plan:
        """Choose as `Ladder.measured` says."""
        weights = weights_of(save_context, self._options)
        own = SizePredictor(weights)
        predict: Predict = own
        if save_context.scores is not None:  # other processes have weights too
            space = self._search.space
            predict = predicted_sizes(space, comparison.summed(own.table(space)))
        true = true_model(save_context.state)  # averages too: the live ones change between two evaluations

        def rise(configuration: Configuration) -> Rise:
            return comparison.rise(configuration, lambda: true | weights.restored(configuration))

        choice = self._search.choose(predict, lambda configuration: rise(configuration).high, allowed)
        if choice.configuration is None:
            return exactly(choice.reason)
        return self._plan(weights, choice.configuration, choice.reason, rise(choice.configuration))

    def _plan(
        self, weights: Weights, configuration: Configuration, reason: str, rise: Rise | None = None
    ) -> Plan:
        scheme = Inshrinkerator(self._options, weights, configuration)
        settings = f"inshrinkerator {self._options} {configuration}"
        return Plan(scheme, str(configuration), reason, rise, options=settings)

    def state_dict(self) -> dict[str, object]:
        """Return what is known, as `Ladder.state_dict`."""
        return self._search.state_dict()

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Continue, as `Ladder.load_state_dict`."""
        self._search.load_state_dict(state)


def ladder_of(config: SaverConfig, spent_s: Callable[[], float], clock: Callable[[], float]) -> Ladder | None:
    """Return the scheme's ladder; None for a lossless scheme, which has nothing to choose.

    Args:
        config: the scheme and its options.
        spent_s: seconds that evaluations have taken from training so far.
        clock: seconds since any fixed moment.
    """
    options = config.scheme_options
    make: Mapping[Choice, Callable[[], Ladder | None]] = {
        "nothing": lambda: None,
        "scale": lambda: ScaleLadder(
            options,
            whole=bool(config.adopt),
            threads=config.waiting_threads if config.adopt else 1,  # else it is the training that has them
        ),
        "configurations": lambda: ConfigurationLadder(
            options, ConfigurationSearch(config.search_overhead, clock, spent_s)
        ),
        "settings": lambda: GivenSettings(config.scheme, options),
    }
    return make[entry_of(config.scheme).choice]()
