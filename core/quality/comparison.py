"""Paired comparison: the loss with each candidate's restored weights against that with the true ones, same batches."""

import math
from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace

import torch

from shrinkpoint.errors import ShrinkpointError
from shrinkpoint.quality.candidates import Candidates
from shrinkpoint.quality.measurement import EXACT, LOSS_FLOOR, Rise, absolute_error, pair_rise

__all__ = ["BlindEvaluationError", "Comparison"]

_NOISE = 0.1  # root mean squares: far more than any scheme changes, and far from destroying what was learned


class BlindEvaluationError(ShrinkpointError):
    """The evaluation does not see the weights: noise in them leaves the loss as it is in every digit."""


class Comparison:
    """The measurements of one save; the loss of the true weights is measured at once.

    Args:
        candidates: of the snapshot.
        share: what one restore may cost, which says how exactly it must be known.
        floor: losses nearer to zero count as this one, see `relative_rise`.

    Raises:
        EvaluationUnavailableError: raised by every measurement once training can no longer evaluate.
    """

    def __init__(self, candidates: Candidates, *, share: float, floor: float = LOSS_FLOOR) -> None:
        self._candidates = candidates
        self._floor = floor
        self._absolute = absolute_error(share)
        self._rises: dict[Hashable, Rise] = {}
        self._seen: set[frozenset[str] | None] = set()
        self.baseline = candidates.true()
        """The losses of the true weights."""

    @property
    def evaluations(self) -> int:
        """Evaluations made so far."""
        return self._candidates.evaluations

    @property
    def loss(self) -> float:
        """Mean loss of the true weights."""
        return sum(self.baseline) / len(self.baseline)

    def summed(self, numbers: Callable[[], list[float]]) -> list[float]:
        """Numbers that this process has of its tensors, added to those of other processes that have parts of the snapshot."""
        return self._candidates.summed(numbers)

    def rise(self, key: Hashable, restored: Callable[[], Mapping[str, torch.Tensor]]) -> Rise:
        """The rise of the loss after a restore, measured at true + error and true - error; each candidate once.

        Args:
            key: names the candidate.
            restored: makes the model that a reader would get; its tensors are overwritten, unless they are the snapshot's.

        Raises:
            BlindEvaluationError: the evaluation does not see the weights.
        """
        if key not in self._rises:
            self._rises[key] = self._pair(key, restored)
        return self._rises[key]

    def _pair(self, key: Hashable, restored: Callable[[], Mapping[str, torch.Tensor]]) -> Rise:
        change = self._candidates.take(key, restored)
        if not change.names:
            return EXACT
        plus = self._candidates.restored()
        if not all(map(math.isfinite, plus)):
            return Rise(math.inf)
        minus = self._candidates.mirrored()
        if plus == minus == self.baseline:
            self._look(change.names)
        rise = pair_rise(plus, minus, self.baseline, floor=self._floor, absolute=self._absolute)
        return replace(rise, distance=change.distance)

    def look(self) -> None:
        """Check once that noise in the weights changes the measured loss.

        Raises:
            BlindEvaluationError: it does not.
        """
        self._look(None)

    def _look(self, changed: frozenset[str] | None) -> None:
        """Check once for each set of changed weights; None takes all.

        An evaluation of a frozen copy within the model reacts to noise in all weights but not to noise in the trained ones.
        """
        if changed in self._seen:
            return
        if self._candidates.noisy(_NOISE, changed=changed is not None) == self.baseline:
            which_weights = "all weights" if changed is None else "all weights that this checkpoint changes"
            raise BlindEvaluationError(
                f"noise of {_NOISE:.0%} in {which_weights} leaves the measured loss, {self.loss:.6g}, exactly as it is"
            )
        self._seen.add(changed)

    def sees_network(self) -> bool:
        """Whether noise in the network's own weights, and not in their averages, changes what is measured."""
        return self._candidates.noisy(_NOISE, averages=False) != self.baseline
