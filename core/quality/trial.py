"""Encodes and decodes in memory: the restored models and states that the quality of a scheme is measured on."""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, MutableMapping

import torch

from shrinkpoint.coding.encode import restored_values
from shrinkpoint.schemes.base import ReferenceState, Scheme
from shrinkpoint.state.averages import average_key
from shrinkpoint.state.dtypes import PACKED, TRAINED
from shrinkpoint.state.scratch import DiskTensor
from shrinkpoint.state.training import Role, TensorSpec, TrainingState

__all__ = [
    "EVALUATED",
    "evaluated",
    "mirrored_model",
    "own_memory",
    "perturbed_model",
    "restored_model",
    "restored_state",
    "true_model",
]

_MODEL = (Role.WEIGHT, Role.BUFFER)
EVALUATED = (*_MODEL, Role.AVERAGE)
"""Roles of the tensors that an evaluation may get."""
_CHUNK = 1 << 18
"""Elements that are handled at a time, so that large tensors take no further memory."""


def true_model(state: TrainingState) -> dict[str, torch.Tensor]:
    """A snapshot's weights and buffers by their names in the model, and averaged weights by `average_key`.

    It includes tensors that are stored exactly: the live model keeps training between two evaluations.
    """
    return {key: state.tensors[spec.name] for key, spec in evaluated(state)}


def restored_model(
    state: TrainingState, scheme: Scheme, reference: Mapping[str, ReferenceState] | None, threads: int = 1
) -> dict[str, torch.Tensor]:
    """The model as a reader of the snapshot under a scheme would restore it.

    Args:
        state: the snapshot.
        scheme: set up for this save.
        reference: the decoder's state of the previous checkpoint; not changed.
        threads: parameters handled side by side; the values do not depend on it.
    """
    values = restored_values(state, scheme, reference, roles=(Role.MASTER, *EVALUATED), threads=threads)
    masters = {
        (spec.tag.parameter, spec.shape): values[spec.name]
        for spec in state.specs.values()
        if spec.tag.role is Role.MASTER and values[spec.name] is not state.tensors[spec.name]
    }

    def value(spec: TensorSpec) -> torch.Tensor:
        """For a weight stored exactly whose master copy is not: the weight that the first step rounds from the
        master."""
        kept = spec.tag.role in _MODEL and values[spec.name] is state.tensors[spec.name]
        master = masters.get((spec.tag.parameter, spec.shape)) if kept else None
        return values[spec.name] if master is None else master.to(spec.dtype)

    return {key: value(spec) for key, spec in evaluated(state)}


def restored_state(
    state: TrainingState, scheme: Scheme, reference: Mapping[str, ReferenceState] | None, threads: int = 1
) -> TrainingState:
    """The whole training state as a reader would restore it; arguments as `restored_model`."""
    values = restored_values(state, scheme, reference, threads=threads)
    return TrainingState(state.tree, values, state.specs)


def mirrored_model(
    state: TrainingState, restored: MutableMapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The model on the other side of the true one: ``2 * true - restored`` of each weight and average.

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
    """Names of the weights whose memory neither the snapshot uses, nor another of them."""
    tensors = (*state.tensors.values(), *weights.values())
    uses = Counter(
        tensor.untyped_storage().data_ptr() for tensor in tensors if not isinstance(tensor, DiskTensor)
    )
    return frozenset(name for name, value in weights.items() if uses[value.untyped_storage().data_ptr()] == 1)


def _mirror(true: torch.Tensor, restored: torch.Tensor) -> torch.Tensor:
    """The mirror image, in the memory of what was restored."""
    wide = torch.promote_types(true.dtype, torch.float32)  # half precision would lose the difference
    centres, flat = true.reshape(-1), restored.contiguous().view(-1)
    for start in range(0, flat.numel(), _CHUNK):
        part = slice(start, start + _CHUNK)
        centre = centres[part].to(wide)
        other = centre + (centre - flat[part].to(wide))
        flat[part] = torch.where(torch.isfinite(centre), other, centre).to(true.dtype)
    return flat.view(true.shape)


def perturbed_model(
    state: TrainingState,
    share: float,
    seed: int,
    *,
    averages: bool = True,
    names: Collection[str] | None = None,
) -> dict[str, torch.Tensor]:
    """The model with normal noise on each weight tensor, large enough that any evaluation of these weights reacts.

    Args:
        state: the snapshot.
        share: standard deviation of the noise, in root mean squares of the tensor; of a tensor of zeros, its value.
        seed: of the noise.
        averages: whether averaged weights get noise too.
        names: the only ones that get noise, by their names in the model; None takes all.
    """
    perturbed = true_model(state)
    generator = torch.Generator().manual_seed(seed)
    for name in _floating_weights(state, averages=averages):
        true = perturbed[name]
        size = float(true.float().square().mean().sqrt()) if true.numel() else 0.0
        noise = torch.randn(true.shape, generator=generator)
        if names is not None and name not in names:
            continue
        # In place: what is freed between tensors that stay is not returned to the system.
        wide = torch.promote_types(true.dtype, torch.float32)
        noisy = noise.mul_(share * (size or 1.0)).to(wide).add_(true.to(wide))
        perturbed[name] = noisy.to(true.dtype)
    return perturbed


def evaluated(state: TrainingState) -> Iterator[tuple[str, TensorSpec]]:
    """The tensors that an evaluation gets, by the names that it uses: all but packed ones, which no training changes."""
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
