"""The models of one snapshot that are evaluated: the true one, what a reader would restore, its mirror image, and noisy ones."""

import math
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field

import torch

from shrinkpoint.quality.evaluation import Measure, losses_of
from shrinkpoint.quality.measurement import Losses
from shrinkpoint.quality.trial import mirrored_model, own_memory, perturbed_model, true_model
from shrinkpoint.runtime.memory import Returns
from shrinkpoint.state.averages import Candidate
from shrinkpoint.state.training import TrainingState

__all__ = ["Candidates", "Change"]

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
