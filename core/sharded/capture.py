"""A state with shards as a tree and tensors, without copies: as `TrainingState.capture`, but ties are the ranks' common matter."""

from collections.abc import Collection, Mapping
from typing import Any

import torch

from shrinkpoint.errors import CannotRepresentError
from shrinkpoint.state.dtypes import dtype_name
from shrinkpoint.state.training import Describe, TensorSpec, TrainingState
from shrinkpoint.state.tree import JSON, Path, encode_tree, join_path

__all__ = ["captured", "renamed_tensors", "without_tensors"]

_NAMES = ("name", "indices", "values", "crow", "col")


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


def renamed_tensors(node: JSON, names: Mapping[str, str]) -> JSON:
    """A tree that refers to tensors by other names.

    Args:
        node: as `captured` made it.
        names: the new name of each that is renamed.
    """
    if not names:
        return node
    if isinstance(node, list):
        return [renamed_tensors(item, names) for item in node]
    if not isinstance(node, dict):
        return node
    renamed: dict[str, Any] = {key: renamed_tensors(item, names) for key, item in node.items()}
    if "$" in node:
        renamed |= {key: names.get(node[key], node[key]) for key in _NAMES if isinstance(node.get(key), str)}
    return renamed


def without_tensors(node: JSON, known: Collection[str]) -> JSON:
    """A tree without the entries whose tensors are not known.

    Args:
        node: as `captured` made it.
        known: names of tensors.
    """
    if isinstance(node, list):
        return [without_tensors(item, known) for item in node if not _lacks([item], known)]
    if not isinstance(node, dict):
        return node
    if "$" in node and isinstance(node.get("items"), list):
        # of a dict whose keys are no text, pairs
        pairs = node["$"] in ("dict", "odict")
        kept = [item for item in node["items"] if not _lacks(item if pairs else [item], known)]
        return {**node, "items": [without_tensors(item, known) for item in kept]}
    return {key: without_tensors(item, known) for key, item in node.items() if not _lacks([item], known)}


def _lacks(items: JSON, known: Collection[str]) -> bool:
    if not isinstance(items, list):
        return False
    nodes = [item for item in items if isinstance(item, dict) and "$" in item]
    return any(isinstance(node.get(key), str) and node[key] not in known for node in nodes for key in _NAMES)
