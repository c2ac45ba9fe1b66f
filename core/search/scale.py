"""The search of ``auto``: one number, the scale of all weights' steps, found within two or three evaluations a save.

The rise of the loss grows with the square of the steps where it is more than noise, so that one measurement predicts the
next. Steps become wider only at the start of a chain, where that costs no bytes; they become narrower whenever the bound asks for it.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from shrinkpoint.errors import ConfigError
from shrinkpoint.search.measure import relative_rise

__all__ = ["ScaleChoice", "ScaleSearch"]

STATE_VERSION = 1

_PER_OCTAVE = 4
_NARROWEST, _WIDEST = -8 * _PER_OCTAVE, 2 * _PER_OCTAVE
_START = -1 * _PER_OCTAVE
_AIM = 0.7  # of what is allowed: the next checkpoint of the chain may cost more than this one
_NOISE = 0.0002  # a rise that is less tells nothing of the next step
_FARTHEST = 2 * _PER_OCTAVE
_REMEMBERED = 8
_TRIES = 3
_FEWEST = 3  # rungs: in a chain, rows whose steps are less than half an octave too wide keep them


@dataclass(frozen=True, kw_only=True)
class ScaleChoice:
    """What to store at this save."""

    scale: float | None
    """None to store bit-exactly."""
    degradation: float | None
    """Measured on this save's weights."""
    baseline: float
    evaluations: int
    """Beside the one of the baseline."""
    reason: str


class ScaleSearch:
    """Chooses the scale of every save; keeps what it learned between saves."""

    def __init__(self) -> None:
        self._rung = _START
        self._seen: list[float] = []
        self._out_of_reach = False  # whether the narrowest steps broke the bound at the last save

    @property
    def started(self) -> bool:
        """Whether anything was measured yet."""
        return bool(self._seen)

    def choose(
        self,
        loss: Callable[[float | None], float],
        allowed: float,
        *,
        base: bool,
        fixed: float | None = None,
    ) -> ScaleChoice:
        """Choose for one save.

        Args:
            loss: the held-out loss of what a reader would restore at a scale, of the true weights for None; expensive.
            allowed: the most that the loss may rise, relative.
            base: whether the save starts a chain.
            fixed: the only scale to be considered, where the user wants this one.
        """
        baseline = loss(None)
        measured: dict[int, float] = {}

        def rise(rung: int) -> float:
            if rung not in measured:
                scale = _scale(rung) if fixed is None else fixed
                measured[rung] = relative_rise(loss(scale), baseline)
            return measured[rung]

        if not math.isfinite(baseline):
            return _exact(baseline, measured, "the loss of the true weights is not finite: stored exactly")
        if allowed <= 0:
            return _exact(baseline, measured, "nothing is left that a restore may cost: stored exactly")
        if fixed is None and self._out_of_reach and rise(_NARROWEST) > allowed:
            return self._refused(baseline, measured, rise(_NARROWEST), allowed)
        first = not self._seen
        rung = self._wider(allowed) if base else self._rung
        if rung != self._rung and rise(rung) > allowed:
            rung = self._rung
        if fixed is None:
            rung = self._hold(rung, rise, allowed, fewest=1 if base else _FEWEST)
        if rise(rung) > allowed:
            return self._refused(baseline, measured, rise(rung), allowed)
        if first and fixed is None:
            rung = self._explore(rung, rise, allowed)
        self._note(rung, rise(rung))
        scale = _scale(rung) if fixed is None else fixed
        reason = f"scale {scale:.3g} changes the loss by {rise(rung):+.3g}, the bound for one restore is {allowed:.3g}"
        return ScaleChoice(
            scale=scale, degradation=rise(rung), baseline=baseline, evaluations=len(measured), reason=reason
        )

    def _refused(
        self, baseline: float, measured: Mapping[int, float], rise: float, allowed: float
    ) -> ScaleChoice:
        """Store exactly; the next save asks the narrowest steps first, and the others only if these hold."""
        self._out_of_reach = True
        reason = (
            f"the mildest steps tried would change the loss by {rise:+.3g}, the bound for one restore is {allowed:.3g}:"
            " stored exactly"
        )
        return _exact(baseline, measured, reason)

    def _hold(self, rung: int, rise: Callable[[int], float], allowed: float, *, fewest: int) -> int:
        """The rung, or one so much narrower that it holds; after some tries the narrowest of all."""
        for _ in range(_TRIES):
            if rise(rung) <= allowed or rung == _NARROWEST:
                return rung
            rung = max(_NARROWEST, rung + min(-fewest, _shift(rise(rung), allowed)))
        return rung if rise(rung) <= allowed else _NARROWEST

    def _explore(self, rung: int, rise: Callable[[int], float], allowed: float) -> int:
        """At the first save there is only one measurement to go by: the rung that it predicts is tried at once."""
        for _ in range(_TRIES):
            wider = min(_WIDEST, rung + _shift(rise(rung), allowed))
            if wider <= rung or rise(wider) > allowed:
                break
            rung = wider
        return rung

    def _wider(self, allowed: float) -> int:
        """The rung for a new chain by what the last one cost."""
        if not self._seen:
            return self._rung
        shift = _shift(sum(self._seen) / len(self._seen), allowed)
        return min(_WIDEST, self._rung + max(0, min(shift, _PER_OCTAVE)))

    def _note(self, rung: int, degradation: float) -> None:
        if rung != self._rung:
            self._seen = []
        self._out_of_reach = False
        self._rung = rung
        self._seen = [*self._seen, degradation][-_REMEMBERED:]

    def state_dict(self) -> dict[str, object]:
        """What a resumed training needs, in JSON primitives."""
        return {"version": STATE_VERSION, "rung": self._rung, "seen": list(self._seen)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned.

        Raises:
            ConfigError: it is no such state.
        """
        if state.get("version") != STATE_VERSION:
            raise ConfigError(
                f"search state version {state.get('version')!r} is not {STATE_VERSION}: start a new search"
            )
        rung, seen = state.get("rung"), state.get("seen")
        right = type(rung) is int and _NARROWEST <= rung <= _WIDEST and isinstance(seen, list)
        if not right or not all(isinstance(rise, float) and math.isfinite(rise) for rise in seen):  # type: ignore[union-attr]
            raise ConfigError(f"the search state {dict(state)!r} is malformed: start a new search")
        self._rung, self._seen = rung, seen  # type: ignore[assignment]


def _scale(rung: int) -> float:
    return float(2.0 ** (rung / _PER_OCTAVE))


def _shift(rise: float, allowed: float) -> int:
    """Rungs until the loss is predicted to rise by most of what is allowed."""
    if not math.isfinite(rise):
        return -_FARTHEST
    octaves = math.log2(_AIM * allowed / max(rise, min(_NOISE, _AIM * allowed / 2))) / 2
    return max(-_FARTHEST, min(_FARTHEST, math.floor(_PER_OCTAVE * octaves)))


def _exact(baseline: float, measured: Mapping[int, float], reason: str) -> ScaleChoice:
    return ScaleChoice(
        scale=None, degradation=None, baseline=baseline, evaluations=len(measured), reason=reason
    )
