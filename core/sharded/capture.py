"""A state with shards as a tree and tensors, without copies: as `TrainingState.capture`, but ties are the ranks' common matter."""

import torch

from shrinkpoint.errors import CannotRepresentError
from shrinkpoint.state.dtypes import dtype_name
from shrinkpoint.state.training import Describe, TensorSpec, TrainingState
from shrinkpoint.state.tree import Path, encode_tree, join_path

__all__ = ["captured"]


def captured(state: object, describe: Describe, *, below: Path = ()) -> TrainingState:
    """Split a nested state into tensors, whole ones and shards, and plain data.

    Args:
        state: what a framework would give to ``torch.save``; its DTensors are this rank's.
        describe: gives each tensor's role, by whole shapes.
        below: what the names of all tensors begin with.

    Raises:
        CannotRepresentError: `state` contains an object that cannot be stored without pickle.
    """
    tensors: dict[str, torch.Tensor] = {}
    specs: dict[str, TensorSpec] = {}

    def put(path: Path, tensor: torch.Tensor) -> str:
        name = join_path(path)
        while name in tensors:
            name += "'"
        try:
            dtype_name(tensor.dtype)
        except CannotRepresentError as error:
            raise CannotRepresentError(f"tensor {name!r}: {error}") from None
        tensors[name] = tensor
        tag = describe(path, tensor)
        specs[name] = TensorSpec(name=name, dtype=tensor.dtype, shape=tuple(tensor.shape), tag=tag)
        return name

    return TrainingState(encode_tree(state, put, below), tensors, specs)
