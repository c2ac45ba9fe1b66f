"""Specs of tensors: name, type, shape, function; and the blocks, rows or any boxes, that several ranks can code one in."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

import numpy as np
import torch

from shrinkpoint.errors import FormatError
from shrinkpoint.state.dtypes import as_bits, dtype_from_name, dtype_name, empty_tensor
from shrinkpoint.state.tree import JSON

_MAX_DIMS = 1024
BLOCK_ELEMENTS = 2**24
"""Elements of a block at most, unless a single row has more. A tensor's blocks depend on its shape alone."""


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
        """Return it as in a container's header, by its size: of rows, the first one's number; of another box, the offset."""
        at: JSON = self.offset[0] if self.is_rows(size) else list(self.offset)
        return [self.of, at, list(self.shape), self.parameter]

    @classmethod
    def from_json(cls, node: JSON) -> "Block":
        """Read what `to_json` gave, or raise a FormatError."""
        sound = type(node) is list and len(node) == 4 and _is_shape(node[2]) and node[2]
        of, at, shape, parameter = node if sound else (None, None, [], None)
        if type(at) is int:
            at = [at, *(0 for _ in shape[1:])]
        named = type(of) is str and (parameter is None or type(parameter) is str)
        if not (named and _is_shape(at) and len(at) == len(shape)):
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
    def whole(self) -> str:
        """The name of the tensor that it is a block of; its own where it is none."""
        return self.name if self.block is None else self.block.of

    @property
    def place(self) -> str:
        """Its place in the state: an optimizer's tensors of one parameter share it, and so do their blocks of the same
        elements."""
        return self.whole.rpartition("/")[0] + self.name.removeprefix(self.whole)

    @property
    def key(self) -> str:
        """What an optimizer calls it, or the tensor that it is a block of: the last part of its name."""
        return self.whole.rpartition("/")[2]

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
        """Read a spec from a container's header, or raise a FormatError where a field is missing or of the wrong kind."""
        try:
            name, shape, parameter = node["name"], node["shape"], node["parameter"]
            if type(name) is not str or not (parameter is None or type(parameter) is str):
                raise FormatError("a tensor's name and parameter must be strings")
            f"{name}{parameter}".encode()  # lone surrogates are a ValueError; digests are over UTF-8
            if not _is_shape(shape):
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


def _is_shape(node: JSON) -> bool:
    whole = type(node) is list and all(type(n) is int and 0 <= n < 2**48 for n in node)
    return whole and len(node) <= _MAX_DIMS


def blocks_of(spec: TensorSpec, limit: int = BLOCK_ELEMENTS) -> list[TensorSpec]:
    """Return what a tensor is stored as: itself, or blocks of its rows of so many elements at most."""
    if spec.numel <= limit:
        return [spec]
    rows, width = spec.shape[0], math.prod(spec.shape[1:])
    height = max(1, limit // width)
    return [
        block_of(
            spec, f"@{number}", (at, *(0 for _ in spec.shape[1:])), (min(height, rows - at), *spec.shape[1:])
        )
        for number, at in enumerate(range(0, rows, height))
    ]


def block_of(spec: TensorSpec, place: str, offset: tuple[int, ...], shape: tuple[int, ...]) -> TensorSpec:
    """Return one block of a tensor, by its offset and shape; `place` is what its name and parameter have behind the
    tensor's own."""
    parameter = spec.tag.parameter
    own = replace(spec.tag, parameter=None if parameter is None else parameter + place)
    block = Block(of=spec.name, offset=offset, shape=spec.shape, parameter=parameter)
    return replace(spec, name=spec.name + place, shape=shape, tag=own, block=block)


def whole_specs(specs: Iterable[TensorSpec]) -> dict[str, TensorSpec]:
    """Return the tensors that these belong to, by name: themselves, or the longer ones of which they are blocks."""
    found: dict[str, TensorSpec] = {}
    for spec in specs:
        block = spec.block
        if block is not None:
            tag = replace(spec.tag, parameter=block.parameter)
            spec = replace(spec, name=block.of, shape=block.shape, tag=tag, block=None)
        if found.setdefault(spec.name, spec) != spec:
            raise FormatError(f"the blocks of {spec.name!r} contradict each other")
    return found


def joined(
    tensors: Mapping[str, torch.Tensor], specs: Mapping[str, TensorSpec]
) -> tuple[Mapping[str, torch.Tensor], Mapping[str, TensorSpec]]:
    """Return the same with all blocks put together; what is no block is passed on as it is.

    Raises:
        FormatError: blocks do not make up their tensor exactly.
    """
    cut = [spec for spec in specs.values() if spec.block is not None]
    if not cut:
        return tensors, specs
    pieces: dict[str, list[TensorSpec]] = {}
    for spec in cut:
        assert spec.block is not None
        pieces.setdefault(spec.block.of, []).append(spec)
    whole = {
        name: tensor for name, tensor in tensors.items() if name not in specs or specs[name].block is None
    }
    for name, blocks in pieces.items():
        whole[name] = _joined(name, blocks, tensors)
    return whole, whole_specs(specs.values())


def _joined(name: str, blocks: list[TensorSpec], tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    places = [spec.block for spec in blocks if spec.block is not None]
    shape, found = places[0].shape, sum(spec.numel for spec in blocks if spec.name in tensors)
    if found != math.prod(shape):
        raise FormatError(f"the checkpoint has {found} of the {math.prod(shape)} elements of {name!r}")
    if boxes_meet([place.offset for place in places], [spec.shape for spec in blocks]):
        raise FormatError(f"blocks of {name!r} overlap")
    whole = empty_tensor(shape, blocks[0].dtype, tensors[blocks[0].name].device)
    for spec, place in zip(blocks, places, strict=True):
        cut = tuple(slice(at, at + n) for at, n in zip(place.offset, spec.shape, strict=True))
        as_bits(whole)[cut] = as_bits(tensors[spec.name])
    return whole


_PAIRS = 4096
"""Boxes that are compared each with each at once."""


def boxes_meet(offsets: Sequence[Sequence[int]], sizes: Sequence[Sequence[int]]) -> bool:
    """Return whether any two of some boxes have elements in common; there is at least one dimension, and no size is 0."""
    if len(offsets) < 2:
        return False
    low = np.array(offsets, dtype=np.int64).reshape(len(offsets), -1)
    high = low + np.array(sizes, dtype=np.int64).reshape(len(offsets), -1)
    for start in range(0, len(low), _PAIRS):
        some = slice(start, start + _PAIRS)
        meet = np.ones((len(low[some]), len(low)), bool)
        for axis in range(low.shape[1]):
            meet &= low[some, None, axis] < high[None, :, axis]
            meet &= low[None, :, axis] < high[some, None, axis]
        if meet.sum() != len(low[some]):  # each meets itself
            return True
    return False
