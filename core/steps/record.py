"""The inputs of one training step: in memory, and as JSON with a table of tensors (core/steps/FORMAT.md).

No pickle: plain data goes through `shrinkpoint.state.tree`, tensors are raw little-endian elements. The sizes that a
file declares are checked against its length before anything is decoded.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from shrinkpoint.arrays import UInt8s
from shrinkpoint.errors import FormatError
from shrinkpoint.state.dtypes import dtype_from_name, dtype_name, tensor_from_bytes, tensor_to_bytes
from shrinkpoint.state.training import TrainingState
from shrinkpoint.state.tree import JSON, Path, decode_tree, encode_tree

__all__ = [
    "Dense",
    "Event",
    "Gradient",
    "Record",
    "Sparse",
    "TensorTable",
    "Tensors",
    "checked_spec",
    "decode_record",
    "drop_zeros",
    "encode_record",
    "put_zeros_back",
]

_MAX_DIMS = 64
_MAX_NUMEL = 2**48


@dataclass(frozen=True)
class Dense:
    """A gradient that is a strided tensor."""

    values: torch.Tensor
    """Its elements in the order of its dimensions, on the host."""
    order: tuple[int, ...] | None = None
    """The dimensions from the slowest to the fastest in memory; None where that is their own order. Some optimizers sum over a
    gradient, and the sum depends on it."""


@dataclass(frozen=True)
class Sparse:
    """A gradient in torch's sparse COO layout, as embeddings with ``sparse=True`` have."""

    indices: torch.Tensor
    values: torch.Tensor
    shape: tuple[int, ...]
    coalesced: bool


Gradient: TypeAlias = Dense | Sparse | None
"""None is a parameter without a gradient, which an optimizer does not update; a zero gradient could change it."""


@dataclass(frozen=True, kw_only=True)
class Event:
    """One call of one optimizer's ``step``."""

    optimizer: int
    """Its place among the training's optimizers."""
    groups: Sequence[Mapping[str, Any]]
    """Its hyperparameters at that moment, by group."""
    attributes: Mapping[str, Any] = field(default_factory=dict)
    """``grad_scale`` and ``found_inf``, where a gradient scaler has set them on the optimizer."""
    closure: bool = False
    """Whether ``step`` was given a closure."""
    loss: Any = None
    """The closure's return value, if that is a number."""
    gradients: Sequence[Gradient]
    """The gradient of each of its parameters, in the groups' order."""


@dataclass(frozen=True, kw_only=True)
class Record:
    """The optimizer steps between two calls of `Checkpointer.step`; mostly one training step."""

    begin: int
    """Training steps done before."""
    end: int
    events: Sequence[Event]
    """Every ``step`` of every optimizer, in order; without those that a gradient scaler has skipped."""
    remainder: TrainingState | None = None
    """The rest of the state at the end; None where a later record has it."""


class TensorTable:
    """Collects the tensors of a segment; JSON refers to them by their numbers."""

    def __init__(self) -> None:
        self.specs: list[JSON] = []
        """``[dtype, shape]`` of each."""
        self.parts: list[memoryview] = []
        """Their bytes."""

    def add(self, tensor: torch.Tensor) -> int:
        """Take a host tensor; its bytes are not copied."""
        return self._add(dtype_name(tensor.dtype), list(tensor.shape), tensor_to_bytes(tensor))

    def add_array(self, array: np.ndarray[Any, Any]) -> int:
        """Add an array of integers."""
        return self._add(array.dtype.name, [array.size], np.ascontiguousarray(array).view(np.uint8))

    def put(self, path: Path, tensor: torch.Tensor) -> str:
        """For `encode_tree`."""
        return str(self.add(tensor.detach().cpu()))

    def _add(self, dtype: str, shape: list[int], data: UInt8s) -> int:
        self.specs.append([dtype, shape])
        self.parts.append(data.data)
        return len(self.specs) - 1


class Tensors:
    """The tensors of a segment that was read.

    Args:
        specs: as `TensorTable` collected them, from a file.
        payload: their bytes.

    Raises:
        FormatError: they do not take exactly these bytes.
    """

    def __init__(self, specs: JSON, payload: memoryview) -> None:
        if not isinstance(specs, list):
            raise FormatError("a segment's tensors are not a list")
        self._specs = [checked_spec(spec) for spec in specs]
        ends = np.cumsum([0] + [_nbytes(*spec) for spec in self._specs], dtype=object).tolist()
        if ends[-1] != len(payload):
            raise FormatError(f"a segment's tensors take {ends[-1]} bytes, and it has {len(payload)}")
        self._ends: list[int] = ends
        self._payload = payload

    def __call__(self, number: JSON) -> torch.Tensor:
        """The tensor of this number, in memory of its own.

        Raises:
            FormatError: there is none.
        """
        index = self._index(number)
        data = self._bytes(index)
        # torch aligns memory of its own: elsewhere some kernels may sum in another order
        owned: UInt8s = torch.empty(data.size, dtype=torch.uint8).numpy()
        owned[:] = data
        return tensor_from_bytes(owned, *self._specs[index])

    def named(self, name: str) -> torch.Tensor:
        """For `decode_tree`, whose names are the numbers in decimal."""
        if not (isinstance(name, str) and name.isascii() and name.isdecimal() and len(name) < 10):
            raise FormatError(f"a segment refers to a tensor as {str(name)[:40]!r}")
        return self(int(name))

    def _index(self, number: JSON) -> int:
        if type(number) is not int or not 0 <= number < len(self._specs):
            raise FormatError(f"a segment refers to tensor {str(number)[:40]}, and has {len(self._specs)}")
        return number

    def _bytes(self, index: int) -> UInt8s:
        return np.frombuffer(self._payload[self._ends[index] : self._ends[index + 1]], dtype=np.uint8)

    def without_gaps(self, gaps: JSON, values: JSON, shape: tuple[int, ...]) -> torch.Tensor:
        """A dense tensor of which the zeros were left out; the caller has compared the shape with a parameter's."""
        index = self._index(values)
        dtype = self._specs[index][0]
        elements = math.prod(shape)
        data = put_zeros_back(self(gaps).numpy(), self._bytes(index), dtype.itemsize, elements)
        return tensor_from_bytes(data, dtype, shape)


def checked_spec(spec: JSON) -> tuple[torch.dtype, tuple[int, ...]]:
    """The dtype and the shape of a tensor that a file declares.

    Raises:
        FormatError: it is none, or has too many elements.
    """
    try:
        name, shape = spec
    except (TypeError, ValueError):
        raise FormatError(f"{str(spec)[:80]} is not a dtype with a shape") from None
    if type(shape) is not list or len(shape) > _MAX_DIMS or any(type(n) is not int or n < 0 for n in shape):
        raise FormatError(f"{str(shape)[:80]} is not a shape")
    if any(n > _MAX_NUMEL for n in shape) or math.prod(n or 1 for n in shape) > _MAX_NUMEL:
        raise FormatError(f"the shape {str(shape)[:80]} has too many elements")
    return dtype_from_name(name), tuple(shape)


def _nbytes(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    return math.prod(shape) * dtype.itemsize


def encode_record(record: Record, table: TensorTable) -> JSON:
    """The record as JSON; its tensors go to the table.

    Raises:
        CannotRepresentError: a hyperparameter cannot be stored without pickle.
    """
    remainder = record.remainder
    return {
        "begin": record.begin,
        "end": record.end,
        "events": [_encode_event(event, table) for event in record.events],
        "remainder": None
        if remainder is None
        else {
            "tree": remainder.tree,
            "tensors": {name: table.add(tensor) for name, tensor in remainder.tensors.items()},
        },
    }


def _encode_event(event: Event, table: TensorTable) -> JSON:
    return {
        "optimizer": event.optimizer,
        "groups": encode_tree([dict(group) for group in event.groups], table.put, ("groups",)),
        "attributes": encode_tree(dict(event.attributes), table.put, ("attributes",)),
        "closure": event.closure,
        "loss": encode_tree(event.loss, table.put, ("loss",)),
        "gradients": [_encode_gradient(gradient, table) for gradient in event.gradients],
    }


def _encode_gradient(gradient: Gradient, table: TensorTable) -> JSON:
    if gradient is None:
        return None
    if isinstance(gradient, Sparse):
        return {
            "indices": table.add(gradient.indices),
            "values": table.add(gradient.values),
            "shape": list(gradient.shape),
            "coalesced": gradient.coalesced,
        }
    order = {} if gradient.order is None else {"order": list(gradient.order)}
    # complex numbers, of which one half may be zero, are stored unchanged
    complex_ = gradient.values.is_complex()
    size = gradient.values.element_size()
    parts = None if complex_ else drop_zeros(tensor_to_bytes(gradient.values), size)
    if parts is None:
        number = table.add(gradient.values)
        return {"dense": number, **order} if order else number
    gaps, values = parts
    kept = tensor_from_bytes(values, gradient.values.dtype, (values.size // size,))
    return {
        "gaps": table.add_array(gaps),
        "values": table.add(kept),
        "shape": list(gradient.values.shape),
        **order,
    }


def decode_record(node: JSON, tensors: Tensors, shapes: Callable[[int], Sequence[tuple[int, ...]]]) -> Record:
    """The inverse of `encode_record`, for JSON from anywhere.

    Args:
        node: the JSON.
        tensors: of the same segment.
        shapes: of the parameters of the optimizer with this number; raises FormatError where there is none.

    Raises:
        FormatError: not such JSON, or a gradient of another shape than its parameter.
    """
    try:
        begin, end, events, rest = node["begin"], node["end"], node["events"], node["remainder"]
        if type(begin) is not int or type(end) is not int or not 0 <= begin <= end:
            raise FormatError(f"a record goes from step {str(begin)[:40]} to {str(end)[:40]}")
        return Record(
            begin=begin,
            end=end,
            events=[_decode_event(event, tensors, shapes) for event in events],
            remainder=None if rest is None else _decode_remainder(rest, tensors),
        )
    except (
        KeyError,
        TypeError,
        ValueError,
        IndexError,
        AttributeError,
        OverflowError,
        RuntimeError,
    ) as error:
        raise FormatError(f"a record is malformed: {error!r}") from error


def _decode_remainder(node: JSON, tensors: Tensors) -> TrainingState:
    found = {name: tensors(number) for name, number in node["tensors"].items()}
    return TrainingState(node["tree"], found, {})


def _decode_event(node: JSON, tensors: Tensors, shapes: Callable[[int], Sequence[tuple[int, ...]]]) -> Event:
    which = node["optimizer"]
    if type(which) is not int:
        raise FormatError(f"a record names optimizer {str(which)[:40]!r}")
    expected, gradients = shapes(which), node["gradients"]
    if len(expected) != len(gradients):
        raise FormatError(
            f"a record contains gradients of {len(gradients)} parameters, and optimizer {which} has {len(expected)}"
        )
    groups = decode_tree(node["groups"], tensors.named)
    attributes = decode_tree(node["attributes"], tensors.named)
    if not isinstance(groups, list) or any(not isinstance(group, dict) for group in groups):
        raise FormatError("a record's groups are not a list of dicts")
    if not isinstance(attributes, dict) or set(attributes) - {"grad_scale", "found_inf"}:
        raise FormatError("a record has attributes other than grad_scale and found_inf")
    return Event(
        optimizer=which,
        groups=groups,
        attributes=attributes,
        closure=bool(node["closure"]),
        loss=decode_tree(node["loss"], tensors.named),
        gradients=[
            _decode_gradient(gradient, tensors, shape)
            for gradient, shape in zip(gradients, expected, strict=True)
        ],
    )


def _decode_gradient(node: JSON, tensors: Tensors, shape: tuple[int, ...]) -> Gradient:
    if node is None:
        return None
    if type(node) is int:
        node = {"dense": node}
    if "dense" in node:
        values = tensors(node["dense"])
        _check_shape(tuple(values.shape), shape)
        return Dense(values, _checked_order(node.get("order"), len(shape)))
    _check_shape(tuple(node["shape"]), shape)
    if "gaps" in node:
        values = tensors.without_gaps(node["gaps"], node["values"], shape)
        return Dense(values, _checked_order(node.get("order"), len(shape)))
    return Sparse(
        indices=tensors(node["indices"]),
        values=tensors(node["values"]),
        shape=shape,
        coalesced=bool(node["coalesced"]),
    )


def _check_shape(found: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if found != expected:
        raise FormatError(
            f"a record contains a gradient of shape {found} for a parameter of shape {expected}"
        )


def _checked_order(order: JSON, dims: int) -> tuple[int, ...] | None:
    if order is None:
        return None
    if sorted(order) != list(range(dims)):
        raise FormatError(f"{str(order)[:80]} is not an order of {dims} dimensions")
    return tuple(order)


_SAMPLE = 4096
_WORDS: Mapping[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_WORTH = 0.75  # of the dense bytes: above, the gaps' bytes are not worth their time


# ---- Sparse coding of dense gradients that are mostly zeros (from gradient compression): nonzero values and gaps.
#
# LowDiff (arXiv 2509.04084, section III) stores such gradients as indices and values. Zero means all bits zero: minus
# zero is stored, since the replay must be exact.


def drop_zeros(data: UInt8s, itemsize: int) -> tuple[npt.NDArray[Any], UInt8s] | None:
    """The elements that are not zero.

    Args:
        data: the elements' bytes.
        itemsize: bytes of one: 1, 2, 4 or 8.

    Returns:
        For each such element the number of zeros before it, in the smallest sufficient integer type, and the elements'
        bytes; None where that takes about as much as `data`.
    """
    words = data.view(_WORDS[itemsize])
    sample = words[:: max(1, words.size // _SAMPLE)]
    if not words.size or np.count_nonzero(sample) > _WORTH * sample.size:
        return None
    places = np.flatnonzero(words)
    gaps = np.diff(places, prepend=-1) - 1
    widest = int(gaps.max(initial=0))
    gap_type = next(kind for kind in _WORDS.values() if widest <= np.iinfo(kind).max)
    if places.size * (np.dtype(gap_type).itemsize + itemsize) > _WORTH * data.size:
        return None
    return gaps.astype(gap_type), words[places].view(np.uint8)


def put_zeros_back(gaps: npt.NDArray[Any], values: UInt8s, itemsize: int, elements: int) -> UInt8s:
    """The inverse of `drop_zeros`.

    Args:
        gaps: zeros before each element.
        values: the elements' bytes.
        itemsize: bytes of one.
        elements: how many there are with the zeros; the caller has checked that so much memory may be taken.

    Raises:
        FormatError: the parts do not fit together.
    """
    if gaps.dtype.kind != "u" or gaps.size * itemsize != values.size or gaps.size > elements:
        raise FormatError(
            f"a gradient of {elements} elements has {gaps.size} gaps and {values.size} bytes of values"
        )
    if gaps.size and int(gaps.max()) > elements:
        raise FormatError(f"a gradient of {elements} elements has a gap of {int(gaps.max())}")
    words = np.zeros(elements, dtype=_WORDS[itemsize])
    places = np.cumsum(gaps.astype(np.int64) + 1) - 1
    if places.size and not 0 <= int(places[-1]) < elements:
        raise FormatError(f"a gradient of {elements} elements has a value at place {int(places[-1])}")
    words[places] = np.ascontiguousarray(values).view(_WORDS[itemsize])
    return words.view(np.uint8)
