"""The weights of the last planned save, in an exact checkpoint whose chain does not hold them: what comes next is quantized by them."""

from collections.abc import Mapping

import torch

from shrinkpoint.state.training import Role, Tag, TensorSpec, TrainingState

__all__ = ["carried_in", "carrying"]

_PREFIX = "adopted before/"


def carrying(state: TrainingState, noted: Mapping[str, torch.Tensor]) -> TrainingState:
    """A state with these weights in addition, which its tree does not refer to: only `carried_in` finds them.

    Args:
        state: that is stored.
        noted: weights by name, as they were at the last planned save, or where training began.
    """
    tag = Tag(role=Role.OTHER)
    specs = {
        _PREFIX + name: TensorSpec(
            name=_PREFIX + name, dtype=tensor.dtype, shape=tuple(tensor.shape), tag=tag
        )
        for name, tensor in noted.items()
    }
    tensors = {_PREFIX + name: tensor for name, tensor in noted.items()}
    return TrainingState(state.tree, {**state.tensors, **tensors}, {**state.specs, **specs})


def carried_in(state: TrainingState) -> TrainingState | None:
    """The weights that `carrying` has added, by their own names; None where there are none."""
    tensors = {
        name.removeprefix(_PREFIX): tensor
        for name, tensor in state.tensors.items()
        if name.startswith(_PREFIX) and name.removeprefix(_PREFIX) in state.specs
    }
    return TrainingState(None, tensors, {name: state.specs[name] for name in tensors}) if tensors else None
