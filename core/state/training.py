"""The training state: tensors with roles, and a tree of plain data; and what each rank has for itself, such as its generators."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import xxhash

from shrinkpoint.errors import CannotRepresentError, FormatError
from shrinkpoint.state.digest import tensor_digest
from shrinkpoint.state.dtypes import dtype_name
from shrinkpoint.state.specs import LayerType, Role, Tag, TensorSpec, joined
from shrinkpoint.state.tree import JSON, Path, decode_tree, encode_tree, join_path

__all__ = [
    "Describe",
    "LayerType",
    "OwnState",
    "Role",
    "Tag",
    "TensorSpec",
    "TrainingState",
    "merged_tree",
    "plain",
]

Describe = Callable[[Path, torch.Tensor], Tag]
"""Gives the tag of the tensor at a path of the state."""


def plain(path: Path, tensor: torch.Tensor) -> Tag:
    """Return the `Describe` that gives no tensor a role: every tensor is stored exactly."""
    return Tag()


@dataclass(frozen=True)
class TrainingState:
    """Everything needed to continue a training run.

    The tensors may be live references (`capture`) or a snapshot's copies (`shrinkpoint.state.snapshot`).

    Examples:
        >>> from shrinkpoint.state.training import TrainingState
        >>> state = TrainingState.capture({"model": model.state_dict(), "epoch": 3})
        >>> list(state.tensors)
        ['model/0.weight', 'model/0.bias', 'model/2.weight', 'model/2.bias']
        >>> state.to_object()["epoch"]
        3
    """

    tree: JSON
    """Plain data, with references to tensors by name (`shrinkpoint.state.tree`)."""
    tensors: Mapping[str, torch.Tensor]
    """Dense tensors by name; tied ones once."""
    specs: Mapping[str, TensorSpec]
    """One spec for each of `tensors`, same names, same order."""

    @classmethod
    def capture(
        cls, state: object, describe: Describe = plain, *, shards: bool = False, below: Path = ()
    ) -> "TrainingState":
        """Split a nested state into tensors and plain data, without copying any tensor.

        Args:
            state: what a framework would give to ``torch.save``: nested dicts, lists, numbers, tensors.
            describe: gives each tensor's role.
            shards: whether DTensors, of which each rank has a part, are accepted; tied tensors stay apart then.
            below: what the names of all tensors begin with.

        Raises:
            CannotRepresentError: `state` contains an object that cannot be stored without pickle.
        """
        tensors: dict[str, torch.Tensor] = {}
        specs: dict[str, TensorSpec] = {}
        names: dict[tuple[object, ...], str] = {}

        def put(path: Path, tensor: torch.Tensor) -> str:
            place = (len(tensors),) if shards else _place(tensor, path)
            if tensor.numel() and place in names:  # tied: the same memory read the same way is stored once
                return names[place]
            name = join_path(path)
            while name in tensors:  # keys 1 and "1" of one dict
                name += "'"
            try:
                dtype_name(tensor.dtype)
            except CannotRepresentError as error:
                raise CannotRepresentError(f"tensor {name!r}: {error}") from None
            names[place] = name
            tensors[name] = tensor
            tag = describe(path, tensor)
            specs[name] = TensorSpec(name=name, dtype=tensor.dtype, shape=tuple(tensor.shape), tag=tag)
            return name

        return cls(encode_tree(state, put, below), tensors, specs)

    def to_object(self, *, own_tensors: bool = False) -> Any:
        """Return the nested state again, with this state's tensors in their places.

        Tensors whose dimensions had another order in memory, such as channels last, are copied into that order: fused optimizers
        depend on it. Blocks are joined where the tree refers to the tensor that they make up: a rank's part of a state has some of a tensor's
        blocks, and a tree without it.

        Args:
            own_tensors: put in the very tensors of `tensors`, to recognise them; their order in memory may be another one.

        Raises:
            FormatError: a tensor that the tree refers to is not there, or not all of it.
        """
        blocks: dict[str, dict[str, TensorSpec]] = {}
        for spec in self.specs.values():
            if spec.block is not None:
                blocks.setdefault(spec.block.of, {})[spec.name] = spec
        whole: dict[str, torch.Tensor] = {}

        def get(name: str) -> torch.Tensor:
            if name in blocks and name not in whole:
                tensors = {block: self.tensors[block] for block in blocks[name] if block in self.tensors}
                whole.update(joined(tensors, blocks[name])[0])
            try:
                return whole[name] if name in blocks else self.tensors[name]
            except KeyError:
                raise FormatError(
                    f"the tree refers to the tensor {name!r}, which is not in the checkpoint"
                ) from None

        return decode_tree(self.tree, get, as_given=own_tensors)

    def whole(self) -> "TrainingState":
        """Return the same with long tensors in one piece that are stored as blocks of rows."""
        tensors, specs = joined(self.tensors, self.specs)
        return self if specs is self.specs else TrainingState(self.tree, tensors, specs)

    @property
    def weights(self) -> dict[str | None, torch.Tensor]:
        """The model's weights, by their parameters' names."""
        named = self.specs.items()
        return {
            spec.tag.parameter: self.tensors[name] for name, spec in named if spec.tag.role is Role.WEIGHT
        }

    @property
    def nbytes(self) -> int:
        """Size of all tensors in memory, in bytes."""
        return sum(spec.nbytes for spec in self.specs.values())


def _place(tensor: torch.Tensor, path: Path) -> tuple[object, ...]:
    """Return which memory a tensor reads, and how."""
    if type(tensor).__name__ == "DTensor":
        raise CannotRepresentError(
            f"{join_path(path)} is a DTensor, of which each rank has a shard: give the model to a Checkpointer on every"
            " rank, which saves shards (docs/sharded.md), or gather a full state dict first"
        )
    view = (tensor.dtype, tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg())
    return (tensor.device, _address(tensor, path), *view)


def _address(tensor: torch.Tensor, path: Path) -> int:
    """Return where a tensor's elements are, by which tied tensors are recognised; nowhere is a CannotRepresentError."""
    try:
        address = tensor.data_ptr()
    except RuntimeError:
        address = 0
    if address or not tensor.numel():
        return address
    kind = type(tensor)
    if kind in (torch.Tensor, torch.nn.Parameter):
        raise CannotRepresentError(
            f"{join_path(path)} has no memory at the moment: its elements were freed, or are elsewhere. Gather it before the save"
        )
    raise CannotRepresentError(
        f"{join_path(path)} is a {kind.__module__}.{kind.__qualname__}, a tensor that is made of others and has no memory of its own:"
        " return the tensors that it is made of from your state_dict() instead, or an ordinary tensor"
    )


@dataclass(frozen=True)
class OwnState:
    """One rank's own data: groups of named values, each split in plain data and host tensors.

    It is stored in the rank's own part where it differs from the first rank's.
    """

    parts: Mapping[tuple[str, str], TrainingState] = field(default_factory=dict)

    def digests(self) -> dict[str, str]:
        """Return one for each value, by which other ranks see that theirs are the same."""
        return {f"{group}/{name}": _digest(part) for (group, name), part in self.parts.items()}

    def without(self, known: Mapping[str, Any]) -> "OwnState":
        """Return what differs from the first rank's, whose `digests` these are."""
        own = self.digests()
        kept = {
            key: part for key, part in self.parts.items() if own["/".join(key)] != known.get("/".join(key))
        }
        return OwnState(kept)

    @property
    def tree(self) -> JSON:
        """The plain data, by group and name; refers to the tensors by name."""
        found: dict[str, dict[str, JSON]] = {}
        for (group, name), part in self.parts.items():
            found.setdefault(group, {})[name] = part.tree
        return found

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors."""
        return {name: tensor for part in self.parts.values() for name, tensor in part.tensors.items()}

    @property
    def specs(self) -> dict[str, TensorSpec]:
        """Their specs."""
        return {name: spec for part in self.parts.values() for name, spec in part.specs.items()}


def _digest(part: TrainingState) -> str:
    digest = xxhash.xxh3_128()
    for name, tensor in part.tensors.items():
        _, _, place = name.split("/", 2)  # behind the rank's number
        digest.update(f"{place}{tensor_digest(tensor)}".encode())
    digest.update(repr(anonymous(part.tree)).encode())
    return digest.hexdigest()


def anonymous(node: JSON) -> JSON:
    """Return a tree without the names of its tensors."""
    if isinstance(node, list):
        return [anonymous(item) for item in node]
    if isinstance(node, dict):
        return {key: anonymous(item) for key, item in node.items() if not ("$" in node and key == "name")}
    return node


def merged_tree(tree: JSON, own: JSON) -> JSON:
    """Return the state's plain data, with a rank's `OwnState.tree` in the place of the first rank's; None has none."""
    if not isinstance(own, dict) or not isinstance(tree, dict):
        return tree
    merged = dict(tree)
    for group, values in own.items():
        if isinstance(values, dict) and isinstance(merged.get(group), dict):
            merged[group] = merged[group] | {
                name: node for name, node in values.items() if name in merged[group]
            }
    return merged
