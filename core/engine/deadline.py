"""Chooses the way of saving that fits into the time that is left at a signal, by the times of this run's own saves."""

from collections.abc import Mapping, Sequence

import torch

from shrinkpoint.engine.slimming import without_optimizer
from shrinkpoint.reports import SaveReport
from shrinkpoint.state.training import TrainingState
from shrinkpoint.warn import warn

__all__ = ["Deadline"]

_EXACTLY, _LOSSILY, _WEIGHTS = (
    "bit-exactly",
    "with the settings of planned saves",
    "without the optimizer's state",
)


class Deadline:
    """The seconds that a save at a signal may take.

    Args:
        seconds: None for any number.
    """

    def __init__(self, seconds: float | None) -> None:
        self._seconds, self._warned = seconds, False

    def choose(
        self, state: TrainingState, reports: Sequence[SaveReport], *, exact: bool
    ) -> tuple[bool, bool]:
        """How to save now; warns beforehand where no way would fit.

        Args:
            state: to be saved.
            reports: of this run's saves so far.
            exact: whether a bit-exact save is asked for, as at a signal.

        Returns:
            Whether to save bit-exactly, and whether the weights alone.
        """
        if self._seconds is None or not reports:
            return exact, False
        needed = _needed(state, reports)
        fitting = [way for way, seconds in needed.items() if seconds <= self._seconds]
        fastest = min(needed, key=lambda way: needed[way])
        way = fitting[0] if fitting else fastest
        if not fitting and not self._warned:
            self._warned = True
            warn(
                f"a save at a signal will not fit into deadline_s={self._seconds:g}: this run's saves show that a state of this size takes"
                f" {needed[fastest]:.3g} s, {fastest}. Save more often, so that a planned save is near, or to a faster store"
            )
        if exact and way != _EXACTLY:
            warn(
                f"deadline_s={self._seconds:g}: {_EXACTLY} would take {needed[_EXACTLY]:.3g} s; this save is made {way}"
            )
        return exact and way != _LOSSILY, exact and way == _WEIGHTS


def _needed(state: TrainingState, reports: Sequence[SaveReport]) -> dict[str, float]:
    last = {report.measured == "exact": report.encode_s + report.write_s for report in reports}
    newest = reports[-1]
    raw_s = newest.encode_s + newest.raw_bytes * newest.write_s / max(newest.bytes, 1)
    exactly = last.get(True, raw_s)
    share = _bytes(without_optimizer(state).tensors) / max(_bytes(state.tensors), 1)
    lossily = {_LOSSILY: last[False]} if False in last else {}
    return {_EXACTLY: exactly, **lossily, _WEIGHTS: share * exactly}


def _bytes(tensors: Mapping[str, torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
