"""Paired comparison: the loss with restored weights against that with the true ones, on the same batches.

Candidates are made in memory: what a reader would restore, its mirror image, and the model with noise.
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, MutableMapping
from dataclasses import replace
from typing import Any, TypeAlias

import torch

from shrinkpoint.coding.encode import restored_values
from shrinkpoint.errors import ShrinkpointError
from shrinkpoint.quality.evaluation import Evaluate, losses_of
from shrinkpoint.quality.measurement import EXACT, Losses, Rise, absolute_error, measured_rise
from shrinkpoint.runtime.memory import Returns
from shrinkpoint.schemes.base import ReferenceState, Scheme
from shrinkpoint.state.averages import Candidate, average_key
from shrinkpoint.state.dtypes import PACKED, TRAINED
from shrinkpoint.state.scratch import DiskTensor
from shrinkpoint.state.training import Role, TensorSpec, TrainingState

_MODEL = (Role.WEIGHT, Role.BUFFER)
_EVALUATED = (*_MODEL, Role.AVERAGE)
"""Roles of the tensors that an evaluation may get."""
_CHUNK = 1 << 18
"""Elements that are handled at a time, so that large tensors take no further memory."""
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
        combine: joins what the processes know of their parts.

    Raises:
        EvaluationUnavailableError: raised by every measurement once training can no longer evaluate.
    """

    def __init__(
        self, state: TrainingState, measure: Evaluate, *, share: float, combine: Combine = alone
    ) -> None:
        self._state, self._measure, self._combine = state, measure, combine
        self._absolute = absolute_error(share)
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
        """Return numbers that this process has of its tensors, added to those of the other processes."""
        found = self._combine({"all": [numbers]}, joined)
        return [sum(column) for column in zip(*found["all"], strict=True)]

    def rise(self, key: Hashable, make: Callable[[], Mapping[str, torch.Tensor]]) -> Rise:
        """Return the rise of the loss after a restore, measured at true + error and true - error; each candidate once.

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
                self.require_effect(names)
            found = measured_rise(self.baseline, plus, minus, absolute=self._absolute)
            rise = replace(found, distance=distance)
        self._rises[key] = rise
        return rise

    def _change(self, restored: Mapping[str, torch.Tensor]) -> tuple[frozenset[str], float]:
        """Return names of the weights whose restored values are not the true ones, and the Euclidean distance of all."""
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

    def require_effect(self, changed: frozenset[str] | None = None) -> None:
        """Check that noise in the weights changes the measured loss; once for each set of weights.

        An evaluation of a frozen copy within the model reacts to noise in all weights but not to noise in the trained ones.

        Args:
            changed: the names of those that get noise; None takes all.

        Raises:
            BlindEvaluationError: it does not.
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
        """Return whether noise in the network's own weights, and not in their averages, changes what is measured."""
        return self._noisy(None, averages=False) != self.baseline

    def _noisy(self, names: Collection[str] | None, *, averages: bool = True) -> Losses:
        """Return the losses with noise in the weights, as of `perturbed_model`."""
        return self._losses(perturbed_model(self._state, averages=averages, names=names))

    def _losses(self, weights: Mapping[str, torch.Tensor]) -> Losses:
        """Return the losses with these weights; all that is not the snapshot's own, which goes into the checkpoint, is lent."""
        self.evaluations += 1
        losses = losses_of(self._measure(Candidate(weights, own_memory(self._state, weights))))
        self._memory.after(
            self._state.nbytes
        )  # what the model's own weights took meanwhile, if they were copied
        return losses


def true_model(state: TrainingState) -> dict[str, torch.Tensor]:
    """Return a snapshot's weights and buffers by their names in the model, and averaged weights by `average_key`.

    It includes tensors that are stored exactly: the live model keeps training between two evaluations.
    """
    return {key: state.tensors[spec.name] for key, spec in evaluated(state)}


def restored_model(
    state: TrainingState, scheme: Scheme, reference: Mapping[str, ReferenceState] | None, threads: int = 1
) -> dict[str, torch.Tensor]:
    """Return the model as a reader of the snapshot under a scheme would restore it.

    Args:
        state: the snapshot.
        scheme: set up for this save.
        reference: the decoder's state of the previous checkpoint; not changed.
        threads: parameters handled side by side; the values do not depend on it.
    """
    values = restored_values(state, scheme, reference, roles=(Role.MASTER, *_EVALUATED), threads=threads)
    masters = {
        (spec.tag.parameter, spec.shape): values[spec.name]
        for spec in state.specs.values()
        if spec.tag.role is Role.MASTER and values[spec.name] is not state.tensors[spec.name]
    }

    def value(spec: TensorSpec) -> torch.Tensor:
        """Return, for a weight stored exactly whose master copy is not, the weight that the first step rounds from the
        master."""
        kept = spec.tag.role in _MODEL and values[spec.name] is state.tensors[spec.name]
        master = masters.get((spec.tag.parameter, spec.shape)) if kept else None
        return values[spec.name] if master is None else master.to(spec.dtype)

    return {key: value(spec) for key, spec in evaluated(state)}


def restored_state(
    state: TrainingState, scheme: Scheme, reference: Mapping[str, ReferenceState] | None, threads: int = 1
) -> TrainingState:
    """Return the whole training state as a reader would restore it; arguments as `restored_model`."""
    values = restored_values(state, scheme, reference, threads=threads)
    return TrainingState(state.tree, values, state.specs)


def mirrored_model(
    state: TrainingState, restored: MutableMapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return the model on the other side of the true one: ``2 * true - restored`` of each weight and average.

    Buffers and integer tensors are the true ones, and so are tensors that were restored exactly.

    Args:
        state: the snapshot.
        restored: the restored tensors, by their names in the model. Those that are mirrored are removed from it, and their memory
            is used for their mirror images.
    """
    mirrored, free = true_model(state), own_memory(state, restored)
    for name in _floating_weights(state):
        true, value = mirrored[name], restored.pop(name, None)
        if value is not None and value is not true and not torch.equal(value, true):
            mirrored[name] = _mirror(true, value if name in free else value.clone())
    return mirrored


def own_memory(state: TrainingState, weights: Mapping[str, torch.Tensor]) -> frozenset[str]:
    """Return names of the weights whose memory neither the snapshot uses, nor another of them."""
    tensors = (*state.tensors.values(), *weights.values())
    uses = Counter(
        tensor.untyped_storage().data_ptr() for tensor in tensors if not isinstance(tensor, DiskTensor)
    )
    return frozenset(name for name, value in weights.items() if uses[value.untyped_storage().data_ptr()] == 1)


def _mirror(true: torch.Tensor, restored: torch.Tensor) -> torch.Tensor:
    """Return the mirror image, in the memory of what was restored."""
    wide = torch.promote_types(true.dtype, torch.float32)  # half precision would lose the difference
    centres, flat = true.reshape(-1), restored.contiguous().view(-1)
    for start in range(0, flat.numel(), _CHUNK):
        part = slice(start, start + _CHUNK)
        centre = centres[part].to(wide)
        other = centre + (centre - flat[part].to(wide))
        flat[part] = torch.where(torch.isfinite(centre), other, centre).to(true.dtype)
    return flat.view(true.shape)


def perturbed_model(
    state: TrainingState, *, averages: bool = True, names: Collection[str] | None = None
) -> dict[str, torch.Tensor]:
    """Return the model with normal noise on each weight tensor, large enough that any evaluation of these weights reacts.

    Its standard deviation is a tenth of the tensor's root mean square; of a tensor of zeros, a tenth.

    Args:
        state: the snapshot.
        averages: whether averaged weights get noise too.
        names: the only ones that get noise, by their names in the model; None takes all.
    """
    perturbed = true_model(state)
    generator = torch.Generator().manual_seed(_SEED)
    for name in _floating_weights(state, averages=averages):
        true = perturbed[name]
        size = float(true.float().square().mean().sqrt()) if true.numel() else 0.0
        noise = torch.randn(true.shape, generator=generator)
        if names is not None and name not in names:
            continue
        # In place: what is freed between tensors that stay is not returned to the system.
        wide = torch.promote_types(true.dtype, torch.float32)
        noisy = noise.mul_(_NOISE * (size or 1.0)).to(wide).add_(true.to(wide))
        perturbed[name] = noisy.to(true.dtype)
    return perturbed


def evaluated(state: TrainingState) -> Iterator[tuple[str, TensorSpec]]:
    """Yield the tensors that an evaluation gets, by the names that it uses: all but packed ones, which no training changes."""
    for spec in state.specs.values():
        if spec.dtype in PACKED:
            continue
        if spec.tag.role is Role.AVERAGE:
            yield average_key(spec.name), spec
        elif spec.tag.role in _MODEL and spec.tag.parameter is not None:
            yield spec.tag.parameter, spec


def _floating_weights(state: TrainingState, *, averages: bool = True) -> list[str]:
    roles = (Role.WEIGHT, Role.AVERAGE) if averages else (Role.WEIGHT,)
    return [key for key, spec in evaluated(state) if spec.tag.role in roles and spec.dtype in TRAINED]
