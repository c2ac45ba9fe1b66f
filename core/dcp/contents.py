"""The tree of a state of which `torch.distributed.checkpoint` knows flat names alone: put together at a save, taken apart at a load."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from shrinkpoint.dcp.items import FlatPath, path_of
from shrinkpoint.errors import CannotRepresentError, FormatError, StoreError
from shrinkpoint.state.training import TensorSpec, TrainingState
from shrinkpoint.state.tree import JSON, decode_tree, encode_tree, join_path

__all__ = ["flat_nodes", "whole_state"]


@dataclass(frozen=True)
class _Leaf:
    node: JSON


def whole_state(metadata: Metadata, plain: Mapping[str, JSON]) -> TrainingState:
    """The tree of a whole checkpoint, and its tensors without elements, which no rank has stored.

    Args:
        metadata: as torch's planner made it of all ranks' plans.
        plain: what the ranks have stored that is no tensor, by name in the flat state.

    Raises:
        StoreError: no rank has stored one of the values.
        CannotRepresentError: the state is nested, and the planner has not flattened it.
    """
    leaves: dict[str, _Leaf] = {}
    paths: dict[str, FlatPath] = {}
    empty: dict[str, TensorSpec] = {}
    for fqn, found in metadata.state_dict_metadata.items():
        paths[fqn] = path_of(fqn, metadata.planner_data)
        if isinstance(found, TensorStorageMetadata):
            name = join_path(tuple(map(str, paths[fqn])))
            leaves[fqn] = _Leaf({"$": "tensor", "name": name})
            if found.size.numel() == 0:
                empty[name] = TensorSpec(name=name, dtype=found.properties.dtype, shape=tuple(found.size))
        elif fqn not in plain:
            raise StoreError(f"no rank has stored {fqn!r}")
        elif metadata.planner_data is None and isinstance(plain[fqn], dict) and "$" not in plain[fqn]:
            raise CannotRepresentError(
                f"{fqn!r} is a dict that the planner has not flattened: use DefaultSavePlanner(flatten_state_dict=True)"
            )
        else:
            leaves[fqn] = _Leaf(plain[fqn])
    tensors = {name: torch.empty(spec.shape, dtype=spec.dtype) for name, spec in empty.items()}
    return TrainingState(_joined(unflatten_state_dict(leaves, paths)), tensors, empty)


def _joined(value: Any) -> JSON:
    """Nested dicts and lists of leaves as a tree."""
    if isinstance(value, _Leaf):
        return value.node
    if isinstance(value, list):
        return [_joined(item) for item in value]
    if not isinstance(value, dict):
        return value  # None in the place of a list's item that the state does not have
    # the form of the keys is the tree's own matter
    form = encode_tree(dict.fromkeys(value), _no_tensor)
    if "$" not in form:
        return {key: _joined(item) for key, item in value.items()}
    pairs = zip(form["items"], value.values(), strict=True)
    return {**form, "items": [[key, _joined(item)] for (key, _), item in pairs]}


def _no_tensor(path: tuple[str, ...], tensor: torch.Tensor) -> str:
    raise FormatError(f"a tensor as a key, in {'/'.join(path)}")


def flat_nodes(tree: JSON) -> Iterator[tuple[FlatPath, JSON]]:
    """The values of a tree as torch flattens nested states: each one's place and its own tree.

    Args:
        tree: of a checkpoint.

    Raises:
        FormatError: it is malformed.
    """
    members = _members(tree)
    if members is None:
        raise FormatError("the checkpoint's state is not a dict, as torch.distributed.checkpoint needs it")
    for key, node in members:
        yield from _flat((key,), node)


def _flat(path: FlatPath, node: JSON) -> Iterator[tuple[FlatPath, JSON]]:
    members = _members(node)
    if members is not None:
        for key, item in members:
            yield from _flat((*path, key), item)
    elif isinstance(node, list) and not _ends(node):
        for index, item in enumerate(node):
            yield from _flat((*path, index), item)
    else:
        yield path, node


def _members(node: JSON) -> list[tuple[str, JSON]] | None:
    """Keys and values of a dict; None of anything else."""
    if not isinstance(node, dict):
        return None
    if "$" not in node:
        return list(node.items())
    if node["$"] not in ("dict", "odict"):
        return None
    try:
        return [(str(decode_tree(key, _no_name)), item) for key, item in node["items"]]
    except (KeyError, TypeError, ValueError) as error:
        raise FormatError(f"the tree of plain data is malformed: {error!r}") from error


def _no_name(name: str) -> torch.Tensor:
    raise FormatError(f"the tensor {name!r} as a key of a dict")


def _ends(node: JSON) -> bool:
    """Whether torch takes a value as a whole: one that is no dict, and no list with tensors or deeper values in it."""
    if _members(node) is not None:
        return False
    if not isinstance(node, list):
        return True
    for item in node:
        if isinstance(item, dict) and item.get("$") == "tensor":
            return False
        if (isinstance(item, list) or _members(item) is not None) and not _ends(item):
            return False
    return True
