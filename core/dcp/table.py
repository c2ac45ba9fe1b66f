"""Which boxes of which tensors a checkpoint has, and in which parts: a table in its first part, so that few headers are read."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from shrinkpoint.coding.parts import PartsHeader
from shrinkpoint.container.reader import Header
from shrinkpoint.dcp.items import box_name, path_of
from shrinkpoint.errors import FormatError, StoreError
from shrinkpoint.state.blocks import whole_specs
from shrinkpoint.state.dtypes import dtype_from_name, dtype_name
from shrinkpoint.state.training import TensorSpec
from shrinkpoint.state.tree import JSON, join_path

__all__ = ["Offset", "Table", "Whole", "place_of", "table_of", "table_of_headers", "table_to_store"]

_KEY = "boxes"
Offset = tuple[int, ...]


@dataclass(frozen=True)
class Whole:
    """How a tensor lies in a checkpoint; tensors that lie alike share one."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    boxes: Mapping[Offset, tuple[tuple[int, ...], int]]
    """Size and part of each box that makes it up, by its first indices."""


@dataclass(frozen=True)
class Table:
    """What one checkpoint has of tensors."""

    tensors: Mapping[str, Whole]
    """By name of the whole tensor."""
    more: Mapping[str, int]
    """Tensors in plain data, such as numpy's arrays, and the parts that have them."""
    names: Mapping[tuple[str, Offset], str] = field(default_factory=dict)
    """Under which names boxes are stored, where these are not `box_name`'s."""

    def name_of(self, of: str, at: Offset | None) -> str:
        """The name under which a box is stored.

        Args:
            of: the whole tensor.
            at: its first indices; None for a tensor in plain data.
        """
        if at is None:
            return of
        whole = self.tensors[of]
        return self.names.get((of, at)) or box_name(of, at, whole.boxes[at][0], whole.shape)

    def part_of(self, of: str, at: Offset | None) -> int | None:
        """The part that has a box; None where the checkpoint has none that begins there."""
        if at is None:
            return self.more.get(of)
        found = self.tensors[of].boxes.get(at) if of in self.tensors else None
        return None if found is None else found[1]

    def check(self, parts: int) -> None:
        """Refuse a table that names parts that there are not.

        Raises:
            FormatError: it does.
        """
        named = {id(whole): whole for whole in self.tensors.values()}.values()
        greatest = max((part for whole in named for _, part in whole.boxes.values()), default=0)
        if max([greatest, *self.more.values()]) >= parts:
            raise FormatError(f"the table of boxes names part {greatest}, and there are {parts}")


# ---- at a save


def table_to_store(
    metadata: Metadata, stored: Sequence[Sequence[MetadataIndex]], more: Mapping[str, int]
) -> JSON:
    """The table of a checkpoint, for the header of its first part (docs/format.md, "Boxes").

    Tensors that lie alike, as those of equal shape mostly do, share a row: its size hardly depends on their number.

    Args:
        metadata: as torch's planner made it of all ranks' plans.
        stored: what each rank has stored; part 0 is no rank's.
        more: as `Table.more`.

    Raises:
        StoreError: no rank has stored one of the boxes.
    """
    parts = {
        (index.fqn, tuple(index.offset or ())): number
        for number, own in enumerate(stored, 1)
        for index in own
    }
    rows: dict[str, int] = {}
    layouts: list[JSON] = []
    tensors: dict[str, int] = {}
    for fqn, found in metadata.state_dict_metadata.items():
        if not isinstance(found, TensorStorageMetadata):
            continue
        name = join_path(tuple(map(str, path_of(fqn, metadata.planner_data))))
        layout: JSON = [dtype_name(found.properties.dtype), list(found.size), _boxes(fqn, found, parts)]
        row = rows.setdefault(repr(layout), len(layouts))
        if row == len(layouts):
            layouts.append(layout)
        tensors[name] = row
    return {_KEY: {"layouts": layouts, "tensors": tensors, "more": dict(more)}}


def _boxes(fqn: str, found: TensorStorageMetadata, parts: Mapping[tuple[str, Offset], int]) -> JSON:
    if found.size.numel() == 0:
        return [[[0] * len(found.size), list(found.size), 0]]
    boxes: list[JSON] = []
    for chunk in found.chunks:
        if chunk.sizes.numel() == 0:
            continue
        part = parts.get((fqn, tuple(chunk.offsets)), parts.get((fqn, ())))
        if part is None:
            raise StoreError(f"no rank has stored {tuple(chunk.sizes)} at {tuple(chunk.offsets)} of {fqn!r}")
        boxes.append([list(chunk.offsets), list(chunk.sizes), part])
    return boxes


# ---- at a load


def table_of(header: Header) -> Table | None:
    """The table in the header of a checkpoint's first part; None where it has none.

    Raises:
        FormatError: it is malformed.
    """
    own = header.own.get(0) if isinstance(header, PartsHeader) else None
    if not isinstance(own, dict) or _KEY not in own:
        return None
    try:
        node = own[_KEY]
        layouts = [_layout(*row) for row in node["layouts"]]
        tensors = {str(name): layouts[_number(row)] for name, row in node["tensors"].items()}
        return Table(tensors, {str(name): _number(part) for name, part in node["more"].items()})
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise FormatError(
            f"the table of boxes in the checkpoint's first part is malformed: {error!r}"
        ) from error


def _layout(dtype: str, shape: list[int], boxes: list[tuple[list[int], list[int], int]]) -> Whole:
    found = {_numbers(at): (_numbers(size), _number(part)) for at, size, part in boxes}
    if len(found) != len(boxes) or sum(math.prod(size) for size, _ in found.values()) != math.prod(shape):
        raise ValueError(f"boxes of {found!r:.80} do not make up {shape!r:.80}")
    return Whole(dtype_from_name(dtype), _numbers(shape), found)


def _numbers(values: list[int]) -> tuple[int, ...]:
    return tuple(map(_number, values))


def _number(value: int) -> int:
    if type(value) is not int or not 0 <= value < 2**48:
        raise ValueError(f"{value!r:.80} is no size, index or number of a part")
    return value


def table_of_headers(header: Header) -> Table:
    """The same of a run that another writer made, from the headers of all its parts."""
    places = header.places if isinstance(header, PartsHeader) else {}
    boxes: dict[str, dict[Offset, tuple[tuple[int, ...], int]]] = {}
    names: dict[tuple[str, Offset], str] = {}
    for name, record in header.tensors.items():
        of, at = place_of(record.spec)
        boxes.setdefault(of, {})[at] = record.spec.shape, places.get(name, 0)
        names[of, at] = name
    whole = whole_specs(record.spec for record in header.tensors.values())
    tensors = {name: Whole(spec.dtype, spec.shape, boxes[name]) for name, spec in whole.items()}
    more = {name: places.get(name, 0) for name, record in header.tensors.items() if record.spec.block is None}
    return Table(tensors, more, names)


def place_of(spec: TensorSpec) -> tuple[str, Offset]:
    """Of which whole tensor a stored one is which box, by its first indices."""
    block = spec.block
    return (spec.name, (0,) * len(spec.shape)) if block is None else (block.of, block.offset)
