"""Paired comparison: the loss with each candidate's restored weights against that with the true ones, same batches."""

import math
from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import replace
from typing import Any, TypeAlias

import torch

from shrinkpoint.errors import ShrinkpointError
from shrinkpoint.quality.evaluation import Measure, losses_of
from shrinkpoint.quality.measurement import EXACT, LOSS_FLOOR, Losses, Rise, absolute_error, measured_rise
from shrinkpoint.quality.trial import mirrored_model, own_memory, perturbed_model, true_model
from shrinkpoint.runtime.memory import Returns
from shrinkpoint.state.averages import Candidate
from shrinkpoint.state.training import TrainingState

__all__ = ["BlindEvaluationError", "Combine", "Comparison", "alone", "joined"]

_SEED = 17
_NOISE = 0.1  # root mean squares: far more than any scheme changes, and far from destroying what was learned

_Message: TypeAlias = dict[str, Any]

Combine: TypeAlias = Callable[[_Message, Callable[[list[_Message]], _Message]], _Message]
"""Makes one message of those of all processes that have parts of a snapshot; all make the same calls in the same order."""


def alone(own: _Message, reduce: Callable[[list[_Message]], _Message]) -> _Message:
    """Combine the messages of a process that has the whole snapshot."""
    return reduce([own])


def joined(messages: list[_Message]) -> _Message:
    """Join the lists of all messages, by name."""
    return {name: [value for one in messages for value in one[name]] for name in messages[0]}


class BlindEvaluationError(ShrinkpointError):
    """The evaluation does not see the weights: noise in them leaves the loss as it is in every digit."""


class Comparison:
    """The measurements of one save; the loss of the true weights is measured at once.

    Args:
        state: the snapshot, or this process's part of it.
        measure: the losses with given weights.
        share: what one restore may cost, which says how exactly it must be known.
        floor: losses nearer to zero count as this one, see `relative_rise`.
        combine: joins what the processes know of their parts.

    Raises:
        EvaluationUnavailableError: raised by every measurement once training can no longer evaluate.
    """

    def __init__(
        self,
        state: TrainingState,
        measure: Measure,
        *,
        share: float,
        floor: float = LOSS_FLOOR,
        combine: Combine = alone,
    ) -> None:
        self._state, self._measure, self._combine = state, measure, combine
        self._floor, self._absolute = floor, absolute_error(share)
        self._memory = Returns(state.nbytes)
        self._rises: dict[Hashable, Rise] = {}
        self._seen: set[frozenset[str] | None] = set()
        self.evaluations = 0
        """Evaluations made so far."""
        self.baseline = self._losses(true_model(state))
        """The losses of the true weights."""

    @property
    def loss(self) -> float:
        """Mean loss of the true weights."""
        return sum(self.baseline) / len(self.baseline)

    def summed(self, numbers: list[float]) -> list[float]:
        """Numbers that this process has of its tensors, added to those of the other processes."""
        found = self._combine({"all": [numbers]}, joined)
        return [sum(column) for column in zip(*found["all"], strict=True)]

    def rise(self, key: Hashable, make: Callable[[], Mapping[str, torch.Tensor]]) -> Rise:
        """The rise of the loss after a restore, measured at true + error and true - error; each candidate once.

        Args:
            key: names the candidate: the scale of ``auto``, or its like.
            make: makes the model that a reader would get; its tensors are overwritten, unless they are the snapshot's.

        Raises:
            BlindEvaluationError: the evaluation does not see the weights.
        """
        if key in self._rises:
            return self._rises[key]
        restored = dict(make())
        names, distance = self._change(restored)
        if not names:
            rise = EXACT
        elif not all(map(math.isfinite, plus := self._losses(restored))):
            rise = Rise(math.inf)
        else:
            mirrored = mirrored_model(self._state, restored)
            restored.clear()  # what is not mirrored need not be in memory any more
            minus = self._losses(mirrored)
            del mirrored
            if plus == minus == self.baseline:
                self._look(names)
            found = measured_rise(self.baseline, plus, minus, floor=self._floor, absolute=self._absolute)
            rise = replace(found, distance=distance)
        self._rises[key] = rise
        return rise

    def _change(self, restored: Mapping[str, torch.Tensor]) -> tuple[frozenset[str], float]:
        """Names of the weights whose restored values are not the true ones, and the Euclidean distance of all."""
        true = true_model(self._state)
        others = [(name, value) for name, value in restored.items() if value is not true[name]]
        names = [name for name, value in others if not torch.equal(value, true[name])]
        squares = [
            float(torch.linalg.vector_norm(value.float() - true[name].float())) ** 2
            for name, value in others
            if value.is_floating_point()
        ]
        found = self._combine({"names": names, "squares": [math.fsum(squares)]}, joined)
        return frozenset(found["names"]), math.sqrt(sum(found["squares"]))

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
        if self._noisy(changed) == self.baseline:
            which_weights = "all weights" if changed is None else "all weights that this checkpoint changes"
            raise BlindEvaluationError(
                f"noise of {_NOISE:.0%} in {which_weights} leaves the measured loss, {self.loss:.6g}, exactly as it is"
            )
        self._seen.add(changed)

    def sees_network(self) -> bool:
        """Whether noise in the network's own weights, and not in their averages, changes what is measured."""
        return self._noisy(None, averages=False) != self.baseline

    def _noisy(self, names: Collection[str] | None, *, averages: bool = True) -> Losses:
        """The losses with noise in the weights, as of `perturbed_model`."""
        return self._losses(perturbed_model(self._state, _NOISE, _SEED, averages=averages, names=names))

    def _losses(self, weights: Mapping[str, torch.Tensor]) -> Losses:
        """The losses with these weights; all that is not the snapshot's own, which goes into the checkpoint, is lent."""
        self.evaluations += 1
        losses = losses_of(self._measure(Candidate(weights, own_memory(self._state, weights))))
        self._memory.after(
            self._state.nbytes
        )  # what the model's own weights took meanwhile, if they were copied
        return losses
