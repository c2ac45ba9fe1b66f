"""Paired comparison: the loss with each candidate's restored weights against that with the true ones, same batches."""

import math
from collections.abc import Callable, Collection, Mapping, MutableMapping
from dataclasses import replace

import torch

from shrinkpoint.errors import ShrinkpointError
from shrinkpoint.quality.evaluation import Measure, losses_of
from shrinkpoint.quality.measurement import EXACT, LOSS_FLOOR, Losses, Rise, absolute_error, pair_rise
from shrinkpoint.quality.trial import mirrored_model, own_memory, perturbed_model, true_model
from shrinkpoint.runtime.memory import Returns
from shrinkpoint.state.candidate import Candidate
from shrinkpoint.state.training import TrainingState

__all__ = ["BlindEvaluationError", "Comparison"]

_NOISE = 0.1  # root mean squares: far more than any scheme changes, and far from destroying what was learned
_SEED = 17


class BlindEvaluationError(ShrinkpointError):
    """The evaluation does not see the weights: noise in them leaves the loss as it is in every digit."""


class Comparison:
    """The measurements of one save; the loss of the true weights is measured at once.

    Args:
        state: the snapshot.
        measure: the losses with given weights.
        share: what one restore may cost, which says how exactly it must be known.
        floor: losses nearer to zero count as this one, see `relative_rise`.

    Raises:
        EvaluationUnavailableError: raised by every measurement once training can no longer evaluate.
    """

    def __init__(
        self, state: TrainingState, measure: Measure, *, share: float, floor: float = LOSS_FLOOR
    ) -> None:
        self._state = state
        self._measure = measure
        self._floor = floor
        self._absolute = absolute_error(share)
        self._memory = Returns(state.nbytes)
        self._rises: dict[object, Rise] = {}
        self._seen: set[frozenset[str] | None] = set()
        self.evaluations = 0
        """Evaluations made so far."""
        self.baseline = self._losses(true_model(state))
        """The losses of the true weights."""

    @property
    def loss(self) -> float:
        """Mean loss of the true weights."""
        return sum(self.baseline) / len(self.baseline)

    def rise(self, key: object, restored: Callable[[], Mapping[str, torch.Tensor]]) -> Rise:
        """The rise of the loss after a restore, measured at true + error and true - error; each candidate once.

        Args:
            key: names the candidate.
            restored: makes the model that a reader would get; its tensors are overwritten, unless they are the snapshot's.

        Raises:
            BlindEvaluationError: the evaluation does not see the weights.
        """
        if key not in self._rises:
            self._rises[key] = self._pair(dict(restored()))
        return self._rises[key]

    def _pair(self, restored: MutableMapping[str, torch.Tensor]) -> Rise:
        changed = self._changed(restored)
        if not changed:
            return EXACT
        plus = self._losses(self._lent(restored))
        if not all(map(math.isfinite, plus)):
            return Rise(math.inf)
        distance = self._distance(restored)
        minus = self._losses(self._lent(mirrored_model(self._state, restored)))
        if plus == minus == self.baseline:
            self.look(changed)
        rise = pair_rise(plus, minus, self.baseline, floor=self._floor, absolute=self._absolute)
        return replace(rise, distance=distance)

    def _lent(self, weights: Mapping[str, torch.Tensor]) -> Candidate:
        """With all that is not the snapshot's own, which goes into the checkpoint."""
        return Candidate(weights, own_memory(self._state, weights))

    def _distance(self, restored: Mapping[str, torch.Tensor]) -> float:
        true = true_model(self._state)
        squares = [
            float(torch.linalg.vector_norm(value.float() - true[name].float())) ** 2
            for name, value in restored.items()
            if value is not true[name] and value.is_floating_point()
        ]
        return math.sqrt(math.fsum(squares))

    def look(self, names: Collection[str] | None = None) -> None:
        """Check, once per set of names, that noise in the weights changes the measured loss.

        Args:
            names: of the weights that get noise, as in the model; None takes all. An evaluation of a frozen copy within
                the model reacts to noise in all weights but not to noise in the trained ones.

        Raises:
            BlindEvaluationError: it does not.
        """
        which = None if names is None else frozenset(names)
        if which in self._seen:
            return
        noisy = self._lent(perturbed_model(self._state, _NOISE, _SEED, names=which))
        if self._losses(noisy) == self.baseline:
            which_weights = "all weights" if which is None else "all weights that this checkpoint changes"
            raise BlindEvaluationError(
                f"noise of {_NOISE:.0%} in {which_weights} leaves the measured loss, {self.loss:.6g}, exactly as it is"
            )
        self._seen.add(which)

    def sees_network(self) -> bool:
        """Whether noise in the network's own weights, and not in their averages, changes what is measured."""
        noisy = self._lent(perturbed_model(self._state, _NOISE, _SEED, averages=False))
        return self._losses(noisy) != self.baseline

    def _changed(self, restored: Mapping[str, torch.Tensor]) -> list[str]:
        true = true_model(self._state)
        return [
            name
            for name, value in restored.items()
            if value is not true[name] and not torch.equal(value, true[name])
        ]

    def _losses(self, weights: Mapping[str, torch.Tensor]) -> Losses:
        self.evaluations += 1
        losses = losses_of(self._measure(weights))
        self._memory.after(
            self._state.nbytes
        )  # what the model's own weights took meanwhile, if they were copied
        return losses
