"""Paired comparison: the loss with each candidate's restored weights against that with the true ones, same batches."""

import math
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace

import torch

from shrinkpoint.errors import ShrinkpointError
from shrinkpoint.quality.evaluation import Measure, losses_of
from shrinkpoint.quality.measurement import EXACT, LOSS_FLOOR, Losses, Rise, absolute_error, measured_rise
from shrinkpoint.quality.trial import mirrored_model, own_memory, perturbed_model, true_model
from shrinkpoint.runtime.memory import Returns
from shrinkpoint.state.averages import Candidate
from shrinkpoint.state.training import TrainingState

__all__ = ["BlindEvaluationError", "Candidates", "Change", "Comparison"]

_SEED = 17


@dataclass(frozen=True)
class Change:
    """What restoring a snapshot changes."""

    names: frozenset[str] = field(default_factory=frozenset)
    """Of the weights, as in the model, whose restored values are not the true ones."""
    squares: float = 0.0
    """Sum of the squares of all differences."""

    @property
    def distance(self) -> float:
        """Euclidean distance of the restored weights from the true ones."""
        return math.sqrt(self.squares)


class Candidates:
    """Makes the models of one snapshot, one at a time, and measures their losses.

    Args:
        state: the snapshot.
        measure: the losses with given weights.

    Every measurement raises `EvaluationUnavailableError` once training can no longer evaluate.
    """

    def __init__(self, state: TrainingState, measure: Measure) -> None:
        self._state = state
        self._measure = measure
        self._memory = Returns(state.nbytes)
        self._restored: dict[str, torch.Tensor] = {}
        self._changed = Change()
        self.evaluations = 0
        """Evaluations made so far."""

    def true(self) -> Losses:
        """The losses of the true weights."""
        return self._losses(true_model(self._state))

    def take(self, key: Hashable, restored: Callable[[], Mapping[str, torch.Tensor]]) -> Change:
        """Make the model that a reader would get, and keep it for `restored` and `mirrored`.

        Args:
            key: names the candidate: the scale of ``auto``, or its like.
            restored: makes it; its tensors are overwritten, unless they are the snapshot's.
        """
        self._restored = {}  # the candidate before need not be in memory any more
        self._restored = dict(restored())
        true = true_model(self._state)
        names = [
            name
            for name, value in self._restored.items()
            if value is not true[name] and not torch.equal(value, true[name])
        ]
        squares = [
            float(torch.linalg.vector_norm(value.float() - true[name].float())) ** 2
            for name, value in self._restored.items()
            if value is not true[name] and value.is_floating_point()
        ]
        self._changed = Change(frozenset(names), math.fsum(squares))
        return self._changed

    def restored(self) -> Losses:
        """The losses of what was taken."""
        return self._losses(self._lent(self._restored))

    def mirrored(self) -> Losses:
        """The losses of its mirror image on the other side of the true weights; what was taken is used up."""
        mirrored = mirrored_model(self._state, self._restored)
        self._restored = {}
        return self._losses(self._lent(mirrored))

    def noisy(self, share: float, *, changed: bool = False, averages: bool = True) -> Losses:
        """The losses with noise in the weights.

        Args:
            share: see `perturbed_model`.
            changed: only in those that the candidate taken last has changed.
            averages: whether averaged weights get noise too.
        """
        names = self._changed.names if changed else None
        return self._losses(
            self._lent(perturbed_model(self._state, share, _SEED, averages=averages, names=names))
        )

    def summed(self, numbers: Callable[[], list[float]]) -> list[float]:
        """As of `Comparison.summed`."""
        return numbers()

    def _lent(self, weights: Mapping[str, torch.Tensor]) -> Candidate:
        """With all that is not the snapshot's own, which goes into the checkpoint."""
        return Candidate(weights, own_memory(self._state, weights))

    def _losses(self, weights: Mapping[str, torch.Tensor]) -> Losses:
        self.evaluations += 1
        losses = losses_of(self._measure(weights))
        self._memory.after(
            self._state.nbytes
        )  # what the model's own weights took meanwhile, if they were copied
        return losses


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
        rise = measured_rise(self.baseline, plus, minus, floor=self._floor, absolute=self._absolute)
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
