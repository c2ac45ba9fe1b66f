"""What is known of a tensor next to its elements: name, type, shape, function, and of which larger tensor it is a part."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

import torch

from shrinkpoint.errors import FormatError
from shrinkpoint.state.dtypes import dtype_from_name, dtype_name
from shrinkpoint.state.tree import JSON

__all__ = ["Block", "LayerType", "Role", "Tag", "TensorSpec"]

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
class Block:
    """Which part of a larger tensor a stored tensor is: a box of it, mostly some of its rows."""

    of: str
    """The larger tensor's name."""
    offset: tuple[int, ...]
    """The box's first index in each dimension of it."""
    shape: tuple[int, ...]
    """The larger tensor's shape."""
    parameter: str | None
    """The larger tensor's `Tag.parameter`; the block's own one has its place behind."""

    def is_rows(self, size: Sequence[int]) -> bool:
        """Return whether a block of this size is whole rows of the larger tensor."""
        return not any(self.offset[1:]) and tuple(size[1:]) == self.shape[1:]

    def to_json(self, size: Sequence[int]) -> JSON:
        """As in a container's header: of rows, the first one's number; of another box, the offset.

        Args:
            size: the block's shape.
        """
        at: JSON = self.offset[0] if self.is_rows(size) else list(self.offset)
        return [self.of, at, list(self.shape), self.parameter]

    @classmethod
    def from_json(cls, node: JSON) -> "Block":
        """Read what `to_json` gave.

        Raises:
            FormatError: it is something else.
        """
        if type(node) is not list or len(node) != 4:
            raise FormatError(f"{node!r:.80} is not a block of a tensor")
        of, at, shape, parameter = node
        sound = (
            type(of) is str
            and (parameter is None or type(parameter) is str)
            and type(shape) is list
            and 0 < len(shape) <= 1024
            and all(type(n) is int and 0 <= n < 2**48 for n in shape)
        )
        if sound and type(at) is int:
            at = [at, *(0 for _ in shape[1:])]
        if (
            not sound
            or type(at) is not list
            or len(at) != len(shape)
            or not all(type(n) is int and 0 <= n < 2**48 for n in at)
        ):
            raise FormatError(f"{node!r:.80} is not a block of a tensor")
        return cls(of=of, offset=tuple(at), shape=tuple(shape), parameter=parameter)

    def holds(self, size: Sequence[int]) -> bool:
        """Return whether a tensor of this shape may be such a block."""
        return (
            len(size) == len(self.shape)
            and all(at + n <= of for at, n, of in zip(self.offset, size, self.shape, strict=True))
            and math.prod(n or 1 for n in self.shape) < 2**59
        )


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
    def place(self) -> str:
        """Where it stands in the state: an optimizer's tensors of one parameter share it, and so do their blocks of the same
        elements."""
        if self.block is None:
            return self.name.rpartition("/")[0]
        return self.block.of.rpartition("/")[0] + self.name.removeprefix(self.block.of)

    @property
    def key(self) -> str:
        """What an optimizer calls it, or the tensor that it is a block of: the last part of its name."""
        return (self.name if self.block is None else self.block.of).rpartition("/")[2]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Size of the tensor in memory, in bytes."""
        return self.numel * self.dtype.itemsize

    def to_json(self) -> JSON:
        """Return the spec in the form of a container's header."""
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
