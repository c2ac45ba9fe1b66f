"""The training state: tensors with roles, and a tree of plain data (design: "Words")."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch

from shrinkpoint.errors import CannotRepresentError, FormatError
from shrinkpoint.state.blocks import Block, joined
from shrinkpoint.state.dtypes import dtype_from_name, dtype_name
from shrinkpoint.state.tree import JSON, Path, decode_tree, encode_tree, join_path

__all__ = ["Describe", "LayerType", "Role", "Tag", "TensorSpec", "TrainingState", "plain"]


_MAX_DIMS = 1024


class Role(str, Enum):
    """A tensor's function in training (weight, moment, buffer ...); decides which codecs may be assigned to it."""

    WEIGHT = "weight"
    EXP_AVG = "exp_avg"
    EXP_AVG_SQ = "exp_avg_sq"
    SQUARES = "squares"
    STATE = "state"
    MASTER = "master"
    AVERAGE = "average"
    BUFFER = "buffer"
    OTHER = "other"


class LayerType(str, Enum):
    """The kind of layer a weight belongs to; thresholds are taken per layer type (Inshrinkerator, 4.2)."""

    EMBEDDING = "embedding"
    LINEAR = "linear"
    ATTENTION = "attention"
    CONV = "conv"
    NORM = "norm"
    OTHER = "other"


@dataclass(frozen=True, kw_only=True)
class Tag:
    """A framework's knowledge about a tensor that its bytes do not show: role, layer type, parameter."""

    role: Role = Role.OTHER
    layer_type: LayerType = LayerType.OTHER
    parameter: str | None = None
    """For a weight, a moment or a buffer: its name in the model; it pairs moments and averages with their weight."""
    frozen: bool = field(default=False, compare=False)
    """Whether it is a weight that training does not change (``requires_grad=False``); not stored, only reported."""
    why: str | None = field(default=None, compare=False)
    """For optimizer state that must be stored exactly: the reason, as a message; no part of a checkpoint."""


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """Everything about a tensor but its elements."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    tag: Tag = field(default_factory=Tag)
    block: Block | None = None
    """Where it is only a part of a tensor: which."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Size of the tensor in memory, in bytes."""
        return self.numel * self.dtype.itemsize

    def to_json(self) -> JSON:
        """The spec in the form of a container's header."""
        return {
            "name": self.name,
            "dtype": dtype_name(self.dtype),
            "shape": list(self.shape),
            "role": self.tag.role.value,
            "layer_type": self.tag.layer_type.value,
            "parameter": self.tag.parameter,
            **({} if self.block is None else {"block": self.block.to_json(self.shape)}),
        }

    @classmethod
    def from_json(cls, node: JSON) -> "TensorSpec":
        """Read a spec from a container's header.

        Raises:
            FormatError: a field is missing or of the wrong kind.
        """
        try:
            name, shape, parameter = node["name"], node["shape"], node["parameter"]
            if type(name) is not str or not (parameter is None or type(parameter) is str):
                raise FormatError("a tensor's name and parameter must be strings")
            (
                name.encode(),
                (parameter or "").encode(),
            )  # lone surrogates are a ValueError; digests are over UTF-8
            if (
                type(shape) is not list
                or len(shape) > _MAX_DIMS
                or any(type(n) is not int or not 0 <= n < 2**48 for n in shape)
            ):
                raise FormatError(f"tensor {name!r}: {shape!r} is not a shape")
            tag = Tag(role=Role(node["role"]), layer_type=LayerType(node["layer_type"]), parameter=parameter)
            if math.prod(n or 1 for n in shape) >= 2**59:  # torch counts bytes in signed 64-bit integers
                raise FormatError(f"tensor {name!r}: the shape {shape!r} has too many elements")
            block = Block.from_json(node["block"]) if "block" in node else None
            by_rows = block is not None and type(node["block"][1]) is int
            if block is not None and (not block.holds(shape) or (by_rows and not block.is_rows(shape))):
                raise FormatError(f"tensor {name!r}: {shape!r} is no block of {block.shape!r}")
            return cls(
                name=name, dtype=dtype_from_name(node["dtype"]), shape=tuple(shape), tag=tag, block=block
            )
        except (KeyError, TypeError, ValueError) as error:
            raise FormatError(f"a tensor's entry in the header is malformed: {error!r}") from error


Describe = Callable[[Path, torch.Tensor], Tag]
"""Gives the tag of the tensor at a path of the state."""


def plain(path: Path, tensor: torch.Tensor) -> Tag:
    """The `Describe` that gives no tensor a role: every tensor is stored exactly."""
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
    def capture(cls, state: object, describe: Describe = plain) -> "TrainingState":
        """Split a nested state into tensors and plain data, without copying any tensor.

        Args:
            state: what a framework would give to ``torch.save``: nested dicts, lists, numbers, tensors.
            describe: gives each tensor's role.

        Raises:
            CannotRepresentError: `state` contains an object that cannot be stored without pickle.
        """
        tensors: dict[str, torch.Tensor] = {}
        specs: dict[str, TensorSpec] = {}
        names: dict[tuple[object, ...], str] = {}

        def put(path: Path, tensor: torch.Tensor) -> str:
            if type(tensor).__name__ == "DTensor":
                raise CannotRepresentError(
                    f"{join_path(path)} is a DTensor, of which each rank has a shard: give the model to a Checkpointer on every"
                    " rank, which saves shards (docs/sharded.md), or gather a full state dict first"
                )
            view = (tensor.dtype, tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg())
            place = (tensor.device, tensor.data_ptr(), *view)
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

        return cls(encode_tree(state, put), tensors, specs)

    def to_object(self) -> Any:
        """The nested state again, with this state's own tensors in their places."""

        tensors, _ = joined(self.tensors, self.specs)

        def get(name: str) -> torch.Tensor:
            try:
                return tensors[name]
            except KeyError:
                raise FormatError(
                    f"the tree refers to the tensor {name!r}, which is not in the checkpoint"
                ) from None

        return decode_tree(self.tree, get)

    def whole(self) -> "TrainingState":
        """The same with long tensors in one piece that are stored as blocks of rows."""
        tensors, specs = joined(self.tensors, self.specs)
        return self if specs is self.specs else TrainingState(self.tree, tensors, specs)

    @property
    def nbytes(self) -> int:
        """Size of all tensors in memory, in bytes."""
        return sum(spec.nbytes for spec in self.specs.values())
