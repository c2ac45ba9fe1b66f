"""The search of ``auto``: finds the scale factor of all weights' step sizes within a few evaluations a save.

The rise of the loss grows with the square of the step size where it is more than noise, so that one measurement
predicts the next, and those of all saves are pooled (`shrinkpoint.quality.measurement`). A scale is accepted if the upper
end of its measured rise is within the bound. Step sizes shrink whenever the bound requires it, and grow in a base
and in a delta to an earlier checkpoint than the last, where that costs few bytes; else by an octave at least, if the pooled
measurements allow it.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from shrinkpoint.errors import ConfigError
from shrinkpoint.quality.measurement import History, Rise, pooled

__all__ = ["ScaleChoice", "ScaleSearch"]

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


@dataclass(frozen=True, kw_only=True)
class ScaleChoice:
    """The scale to store this save with."""

    scale: float | None
    """None to store bit-exactly."""
    rise: Rise | None
    """Measured on this save's weights, and pooled with earlier measurements."""
    reason: str


class ScaleSearch:
    """Chooses the scale of every save, and keeps its measurements between saves.

    Args:
        whole: whether the stored state holds the chain's limits too, so that a resumed search makes the very choices
            that an undisturbed one would have made. Such chains are long, and none is begun for the sake of wider steps:
            the limit of a chain therefore rises by an octave in every four saves.
    """

    def __init__(self, *, whole: bool = False) -> None:
        self._whole = whole
        self._rung = _START
        self._history: History | None = None
        self._out_of_reach = False  # whether the narrowest steps broke the bound at the last save
        self._limit = _START + _PER_OCTAVE  # widest rung until the next base while all rises are within noise
        self._may_widen = True  # until the next base
        self._save = _Save(None)

    def choose(
        self,
        measure: Callable[[float], Rise],
        allowed: float,
        *,
        base: bool,
        fixed: float | None = None,
        again: bool = False,
    ) -> ScaleChoice:
        """Choose for one save.

        Args:
            measure: the rise of the loss after a restore at a scale; expensive.
            allowed: the most that the loss may rise at the upper end of the interval, relative.
            base: whether the save is a base, or builds on an earlier checkpoint than the last.
            fixed: the only scale to be considered, if the user gave one.
            again: whether this is the save of the last call, with another `allowed`.
        """
        if not again:
            self._save = _Save(self._history.aged() if self._history is not None else None)
        save = self._save
        if base and not again:
            self._may_widen = True
        elif self._whole and not again:
            self._limit = min(_WIDEST, max(self._limit, self._rung) + 1)

        def rise(rung: int) -> Rise:
            scale = _scale(rung) if fixed is None else fixed
            return save.rise(scale, measure)

        if allowed <= 0:
            return _exact("no part of the bound is left for a restore: stored exactly")
        if fixed is not None:
            rung = self._rung
        else:
            if self._out_of_reach and not rise(_NARROWEST).within(allowed):
                return self._refused(rise(_NARROWEST), allowed)
            rung = self._start(rise, allowed, base=base, again=again)
            rung = self._hold(rung, rise, allowed, fewest=1 if base else _FEWEST)
        if not rise(rung).within(allowed):
            return self._refused(rise(rung), allowed)
        if self._history is None and fixed is None and not again:
            rung = self._explore(rung, rise, allowed)
        scale = _scale(rung) if fixed is None else fixed
        self._rung, self._out_of_reach = rung, False
        if base:
            self._limit = rung + _PER_OCTAVE
        self._history = History.of(scale, rise(rung), self._history)
        reason = f"scale {scale:.3g} {_compared(rise(rung), allowed)}"
        return ScaleChoice(scale=scale, rise=rise(rung), reason=reason)

    def narrower(self) -> float | None:
        """Switch to the scale an octave below the one in use and return it; None if there is none."""
        if self._rung == _NARROWEST:
            return None
        self._rung = max(_NARROWEST, self._rung - _PER_OCTAVE)
        return _scale(self._rung)

    def _start(self, rise: Callable[[int], Rise], allowed: float, *, base: bool, again: bool) -> int:
        """The rung in use, or a wider one if earlier measurements predict that it keeps the bound and this one
        agrees."""
        wider = self._wider(allowed, base=base) if not again else self._rung
        if wider == self._rung or rise(wider).within(allowed):
            return wider
        if not base:
            self._may_widen = False  # one try a base: it costs two evaluations
        return self._rung

    def _wider(self, allowed: float, *, base: bool) -> int:
        """The rung that all measurements together allow.

        Any rung where `base` of `choose` says so; else only one an octave wider at least, since smaller changes do not
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
        """The rung, or the next narrower one that keeps the bound; after some tries the narrowest of all."""
        for _ in range(_TRIES):
            if rise(rung).within(allowed) or rung == _NARROWEST:
                return rung
            rung = max(_NARROWEST, rung + min(-fewest, _shift(rise(rung), allowed)))
        return rung if rise(rung).within(allowed) else _NARROWEST

    def _explore(self, rung: int, rise: Callable[[int], Rise], allowed: float) -> int:
        """At the first save there is only one measurement to go by: the rung that it predicts is tried at once.

        A rise within noise predicts nothing: on such measurements step sizes grow by an octave at most.
        """
        for _ in range(_TRIES):
            shift = _shift(rise(rung), allowed)
            if not rise(rung).is_significant:
                shift = min(shift, _START + _PER_OCTAVE - rung)
            wider = min(_WIDEST, rung + shift)
            if wider <= rung or not rise(wider).within(allowed):
                break
            if self._save.same(_scale(rung), _scale(wider)):
                break  # steps are limited by something else than the scale
            rung = wider
        return rung

    def _refused(self, rise: Rise, allowed: float) -> ScaleChoice:
        """Store exactly; the next save asks the narrowest steps first, and the others only if these hold."""
        self._out_of_reach = True
        return _exact(f"the smallest scale tried {_compared(rise, allowed)}: stored exactly")

    def state_dict(self) -> dict[str, object]:
        """The search's state in JSON primitives, for a resumed training."""
        history = self._history.to_json() if self._history is not None else None
        state: dict[str, object] = {"version": STATE_VERSION, "rung": self._rung, "history": history}
        if self._whole:
            state["chain"] = [self._limit, self._may_widen, self._out_of_reach]
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned.

        Raises:
            ConfigError: it is no such state.
        """
        if state.get("version") != STATE_VERSION:
            raise ConfigError(
                f"search state version {state.get('version')!r} is not {STATE_VERSION}: start a new search"
            )
        rung = state.get("rung")
        if type(rung) is not int or not _NARROWEST <= rung <= _WIDEST:
            raise ConfigError(f"the search state {dict(state)!r} is malformed: start a new search")
        self._rung, self._limit = rung, rung + _PER_OCTAVE
        self._history = History.load(state)
        if self._whole and "chain" in state:
            self._load_chain(state["chain"])

    def _load_chain(self, stored: Any) -> None:
        kinds = [type(value) for value in stored] if isinstance(stored, list) else []
        if kinds != [int, bool, bool]:
            raise ConfigError(f"the search state's chain {stored!r} is malformed: start a new search")
        self._limit, self._may_widen, self._out_of_reach = stored


class _Save:
    """The measurements of one save, each pooled with the prediction from the nearest known scale."""

    def __init__(self, past: History | None) -> None:
        self.past = past
        self._measured: dict[float, Rise] = {}
        self._pooled: dict[float, Rise] = {}

    def rise(self, scale: float, measure: Callable[[float], Rise]) -> Rise:
        if scale not in self._pooled:
            self._measured[scale] = measure(scale)
            past = self._nearest(scale)
            expected = past.predicted(scale) if past is not None else None
            self._pooled[scale] = pooled(self._measured[scale], expected)
        return self._pooled[scale]

    def _nearest(self, scale: float) -> History | None:
        known = [found for at, rise in self._pooled.items() if (found := History.of(at, rise)) is not None]
        return min(known, key=lambda found: abs(math.log2(found.scale / scale)), default=self.past)

    def same(self, narrow: float, wide: float) -> bool:
        """Whether a wider scale changes the weights' error by next to nothing: something else limits the step sizes."""
        one, other = self._measured[narrow], self._measured[wide]
        return one == other or 0 < other.distance < _SAME * one.distance


def _scale(rung: int) -> float:
    return float(2.0 ** (rung / _PER_OCTAVE))


def _shift(rise: Rise, allowed: float) -> int:
    """Rungs until the upper end is predicted to be most of what is allowed."""
    if not math.isfinite(rise.high):
        return -_FARTHEST
    octaves = math.log2(_AIM * allowed / max(rise.high, 1e-3 * allowed)) / 2
    return max(-_FARTHEST, min(_FARTHEST, math.floor(_PER_OCTAVE * octaves)))


def _compared(rise: Rise, allowed: float) -> str:
    return f"raises the loss by {rise.mean:+.3g} ({rise.high:+.3g} at most), and a restore may cost {allowed:.3g}"


def _exact(reason: str) -> ScaleChoice:
    return ScaleChoice(scale=None, rise=None, reason=reason)
