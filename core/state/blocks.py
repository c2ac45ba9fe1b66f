"""Long tensors stored as blocks of rows, so that several ranks can code one: how they are cut and joined."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from shrinkpoint.errors import FormatError
from shrinkpoint.state.tree import JSON

if TYPE_CHECKING:
    from shrinkpoint.state.training import TensorSpec

__all__ = ["BLOCK_ELEMENTS", "RowBlock", "blocks_of", "joined", "whole_specs"]

BLOCK_ELEMENTS = 2**24
"""Elements of a block at most, unless a single row has more. A tensor's blocks depend on its shape alone."""


@dataclass(frozen=True, kw_only=True)
class RowBlock:
    """Which rows of a longer tensor a stored tensor is."""

    of: str
    """The longer tensor's name."""
    start: int
    """Its first row in there."""
    shape: tuple[int, ...]
    """The longer tensor's shape."""
    parameter: str | None
    """The longer tensor's `Tag.parameter`; the block's own one has its number behind."""

    def to_json(self) -> JSON:
        """As in a container's header."""
        return [self.of, self.start, list(self.shape), self.parameter]

    @classmethod
    def from_json(cls, node: JSON) -> "RowBlock":
        """Read what `to_json` gave.

        Raises:
            FormatError: it is something else.
        """
        if type(node) is not list or len(node) != 4:
            raise FormatError(f"{node!r:.80} is not a block of rows")
        of, start, shape, parameter = node
        sound = (
            type(of) is str
            and type(start) is int
            and (parameter is None or type(parameter) is str)
            and type(shape) is list
            and 0 < len(shape) <= 1024
            and all(type(n) is int and 0 <= n < 2**48 for n in shape)
            and 0 <= start < 2**48
        )
        if not sound:
            raise FormatError(f"{node!r:.80} is not a block of rows")
        return cls(of=of, start=start, shape=tuple(shape), parameter=parameter)

    def holds(self, shape: Sequence[int]) -> bool:
        """Whether rows of this shape may be such a block."""
        return (
            len(shape) == len(self.shape)
            and tuple(shape[1:]) == self.shape[1:]
            and self.start + shape[0] <= self.shape[0]
            and math.prod(n or 1 for n in self.shape) < 2**59
        )


def blocks_of(spec: "TensorSpec", limit: int = BLOCK_ELEMENTS) -> list["TensorSpec"]:
    """What a tensor is stored as: itself, or blocks of its rows.

    Args:
        spec: of the whole tensor.
        limit: elements of a block at most.
    """
    if spec.numel <= limit:
        return [spec]
    rows, width = spec.shape[0], math.prod(spec.shape[1:])
    height = max(1, limit // width)
    parameter = spec.tag.parameter
    blocks = []
    for number, start in enumerate(range(0, rows, height)):
        own = None if parameter is None else f"{parameter}@{number}"
        blocks.append(
            replace(
                spec,
                name=f"{spec.name}@{number}",
                shape=(min(height, rows - start), *spec.shape[1:]),
                tag=replace(spec.tag, parameter=own),
                block=RowBlock(of=spec.name, start=start, shape=spec.shape, parameter=parameter),
            )
        )
    return blocks


def whole_specs(specs: Iterable["TensorSpec"]) -> dict[str, "TensorSpec"]:
    """The tensors that these belong to, by name: themselves, or the longer ones of which they are blocks."""
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
    tensors: Mapping[str, torch.Tensor], specs: Mapping[str, "TensorSpec"]
) -> tuple[Mapping[str, torch.Tensor], Mapping[str, "TensorSpec"]]:
    """The same with all blocks put together; what is no block is passed on as it is.

    Args:
        tensors: by name.
        specs: of some of these.

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


def _joined(name: str, blocks: list["TensorSpec"], tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    ordered = sorted(blocks, key=lambda spec: spec.block.start if spec.block else 0)
    at = 0
    for spec in ordered:
        assert spec.block is not None
        if spec.block.start != at or spec.name not in tensors:
            raise FormatError(f"the checkpoint lacks rows {at} to {spec.block.start} of {name!r}")
        at += spec.shape[0]
    last = ordered[-1].block
    if last is None or at != last.shape[0]:
        raise FormatError(f"the checkpoint lacks the rows of {name!r} from {at} on")
    return torch.cat([tensors[spec.name] for spec in ordered])
