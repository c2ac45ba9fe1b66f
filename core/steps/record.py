"""The inputs of one training step: in memory, and as JSON with a table of tensors (core/steps/FORMAT.md).

No pickle: plain data goes through `shrinkpoint.state.tree`.
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
from shrinkpoint.state.dtypes import tensor_from_bytes, tensor_to_bytes
from shrinkpoint.state.training import TrainingState
from shrinkpoint.state.tree import JSON, decode_tree, encode_tree
from shrinkpoint.steps.segment import Tensors, TensorTable

_SAMPLE = 4096
_WORDS: Mapping[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_WORTH = 0.75  # of the dense bytes: above, the gaps' bytes are not worth their time


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


def encode_record(record: Record, table: TensorTable) -> JSON:
    """Give the record as JSON; its tensors go to the table.

    Raises:
        CannotRepresentError: a hyperparameter cannot be stored without pickle.
    """
    events = [_encode_event(event, table) for event in record.events]
    rest, remainder = record.remainder, None
    if rest is not None:
        tensors = {name: table.add(tensor) for name, tensor in rest.tensors.items()}
        remainder = {"tree": rest.tree, "tensors": tensors}
    return {"begin": record.begin, "end": record.end, "events": events, "remainder": remainder}


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
    dense = gradient.values
    order = {} if gradient.order is None else {"order": list(gradient.order)}
    # complex numbers, of which one half may be zero, are stored unchanged
    parts = None if dense.is_complex() else drop_zeros(tensor_to_bytes(dense), dense.element_size())
    if parts is None:
        number = table.add(dense)
        return {"dense": number, **order} if order else number
    gaps, values = parts
    kept = tensor_from_bytes(values, dense.dtype, (gaps.size,))
    return {"gaps": table.add_array(gaps), "values": table.add(kept), "shape": list(dense.shape), **order}


def decode_record(node: JSON, tensors: Tensors, shapes: Callable[[int], Sequence[tuple[int, ...]]]) -> Record:
    """Read a record from JSON from anywhere: the inverse of `encode_record`.

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
        remainder = None
        if rest is not None:
            found = {name: tensors(number) for name, number in rest["tensors"].items()}
            remainder = TrainingState(rest["tree"], found, {})
        return Record(
            begin=begin,
            end=end,
            events=[_decode_event(event, tensors, shapes) for event in events],
            remainder=remainder,
        )
    except (
        KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError, RuntimeError,
    ) as error:  # fmt: skip
        raise FormatError(f"a record is malformed: {error!r}") from error


def _decode_event(node: JSON, tensors: Tensors, shapes: Callable[[int], Sequence[tuple[int, ...]]]) -> Event:
    which = node["optimizer"]
    if type(which) is not int:
        raise FormatError(f"a record names optimizer {str(which)[:40]!r}")
    expected, gradients = shapes(which), node["gradients"]
    if len(expected) != len(gradients):
        raise FormatError(
            f"a record contains gradients of {len(gradients)} parameters, and optimizer {which} has {len(expected)}"
        )
    groups, attributes, loss = (
        decode_tree(node[name], tensors.named) for name in ("groups", "attributes", "loss")
    )
    if not isinstance(groups, list) or any(not isinstance(group, dict) for group in groups):
        raise FormatError("a record's groups are not a list of dicts")
    if not isinstance(attributes, dict) or set(attributes) - {"grad_scale", "found_inf"}:
        raise FormatError("a record has attributes other than grad_scale and found_inf")
    return Event(
        optimizer=which,
        groups=groups,
        attributes=attributes,
        closure=bool(node["closure"]),
        loss=loss,
        gradients=[_decode_gradient(*each, tensors) for each in zip(gradients, expected, strict=True)],
    )


def _decode_gradient(node: JSON, expected: tuple[int, ...], tensors: Tensors) -> Gradient:
    if node is None:
        return None
    if type(node) is int:
        node = {"dense": node}
    values = tensors(node["dense"]) if "dense" in node else None
    found = tuple(node["shape"] if values is None else values.shape)
    if found != expected:
        raise FormatError(
            f"a record contains a gradient of shape {found} for a parameter of shape {expected}"
        )
    if values is None and "gaps" not in node:
        indices, values = tensors(node["indices"]), tensors(node["values"])
        return Sparse(indices, values, expected, bool(node["coalesced"]))
    if values is None:
        dtype, _, kept = tensors.raw(node["values"])
        data = put_zeros_back(tensors(node["gaps"]).numpy(), kept, dtype.itemsize, math.prod(expected))
        values = tensor_from_bytes(data, dtype, expected)
    order = node.get("order")
    if order is not None and sorted(order) != list(range(len(expected))):
        raise FormatError(f"{str(order)[:80]} is not an order of {len(expected)} dimensions")
    return Dense(values, None if order is None else tuple(order))


# ---- dense gradients that are mostly zeros, as gradient compression leaves them: nonzero values and gaps
#
# LowDiff (arXiv 2509.04084, section III) stores such gradients as indices and values. Zero means all bits zero: minus
# zero is stored, since the replay must be exact.


def drop_zeros(data: UInt8s, itemsize: int) -> tuple[npt.NDArray[Any], UInt8s] | None:
    """Select the elements, of 1, 2, 4 or 8 bytes, that are not zero.

    Returns:
        For each the number of zeros before it, in the smallest sufficient integer type, and the elements' bytes; None where that
        takes about as much as `data`.
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
    """Undo `drop_zeros`; the caller has checked that memory for so many `elements` may be taken.

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
