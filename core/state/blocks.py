"""Tensors stored in several blocks, so that several ranks can code one: rows of it, or any boxes; how they are cut and joined."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from shrinkpoint.errors import FormatError
from shrinkpoint.state.dtypes import as_bits
from shrinkpoint.state.specs import Block, TensorSpec

__all__ = ["BLOCK_ELEMENTS", "block_of", "blocks_of", "boxes_meet", "joined", "whole_specs"]

BLOCK_ELEMENTS = 2**24
"""Elements of a block at most, unless a single row has more. A tensor's blocks depend on its shape alone."""


def blocks_of(spec: TensorSpec, limit: int = BLOCK_ELEMENTS) -> list[TensorSpec]:
    """Return what a tensor is stored as: itself, or blocks of its rows.

    Args:
        spec: of the whole tensor.
        limit: elements of a block at most.
    """
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
    """Return one block of a tensor.

    Args:
        spec: of the whole tensor.
        place: what the block's name and parameter have behind the tensor's own.
        offset: its first index in each dimension.
        shape: its own.
    """
    parameter = spec.tag.parameter
    own = replace(spec.tag, parameter=None if parameter is None else parameter + place)
    block = Block(of=spec.name, offset=offset, shape=spec.shape, parameter=parameter)
    return replace(spec, name=spec.name + place, shape=shape, tag=own, block=block)


def whole_specs(specs: Iterable[TensorSpec]) -> dict[str, TensorSpec]:
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
    tensors: Mapping[str, torch.Tensor], specs: Mapping[str, TensorSpec]
) -> tuple[Mapping[str, torch.Tensor], Mapping[str, TensorSpec]]:
    """Return the same with all blocks put together; what is no block is passed on as it is.

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


def _joined(name: str, blocks: list[TensorSpec], tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    places = [spec.block for spec in blocks if spec.block is not None]
    shape, found = places[0].shape, sum(spec.numel for spec in blocks if spec.name in tensors)
    if found != math.prod(shape):
        raise FormatError(f"the checkpoint has {found} of the {math.prod(shape)} elements of {name!r}")
    if boxes_meet([place.offset for place in places], [spec.shape for spec in blocks]):
        raise FormatError(f"blocks of {name!r} overlap")
    whole = torch.empty(shape, dtype=blocks[0].dtype, device=tensors[blocks[0].name].device)
    for spec, place in zip(blocks, places, strict=True):
        cut = tuple(slice(at, at + n) for at, n in zip(place.offset, spec.shape, strict=True))
        as_bits(whole)[cut] = as_bits(tensors[spec.name])
    return whole


_PAIRS = 4096
"""Boxes that are compared each with each at once."""


def boxes_meet(offsets: Sequence[Sequence[int]], sizes: Sequence[Sequence[int]]) -> bool:
    """Return whether any two of some boxes have elements in common.

    Args:
        offsets: of each in every dimension, of which there is at least one.
        sizes: likewise; none is 0.
    """
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
