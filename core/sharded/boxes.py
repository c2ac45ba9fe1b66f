"""Which part of a whole tensor a rank holds, as a box; everything that asks torch about shards is here."""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from shrinkpoint.errors import CannotRepresentError
from shrinkpoint.state.specs import boxes_meet


@dataclass(frozen=True)
class Box:
    """A range of indices in every dimension of a tensor."""

    offset: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.size)

    def cut(self, tensor: torch.Tensor, inner: "Box") -> torch.Tensor:
        """Return a view of `inner`, which lies in this box.

        Args:
            tensor: what this box holds.
            inner: in indices of the whole tensor.
        """
        if not self.offset:
            return tensor
        starts = [at - own for at, own in zip(inner.offset, self.offset, strict=True)]
        return tensor[tuple(slice(at, at + n) for at, n in zip(starts, inner.size, strict=True))]


def intersection(one: Box, other: Box) -> Box | None:
    """Return what two boxes of one tensor have in common; None if that has no elements."""
    low = tuple(map(max, one.offset, other.offset))
    ends = (
        min(a + n, b + m) for a, n, b, m in zip(one.offset, one.size, other.offset, other.size, strict=True)
    )
    size = tuple(end - start for end, start in zip(ends, low, strict=True))
    return Box(low, size) if all(n > 0 for n in size) else None


Pieces = Mapping[str, Mapping[Box, torch.Tensor]]
"""The memory that a rank has for boxes of tensors, by the tensors' names."""


def is_sharded(tensor: object) -> bool:
    """Return whether a tensor is one whose ranks hold parts, or copies, of a whole one that they all know."""
    return type(tensor).__name__ in ("DTensor", "ShardedTensor")


def ranks_of(tensor: Any) -> str:
    """Return which ranks share a tensor, as torch knows: those of a DTensor's mesh, as a digest; ``""`` where it does not say.

    Ranks of one mesh that hold the same box of a tensor hold copies of it. Those of different meshes may, or may not.
    """
    mesh = getattr(tensor, "device_mesh", None)
    return "" if mesh is None else _ranks_of_mesh(mesh)


@lru_cache(maxsize=64)
def _ranks_of_mesh(mesh: Any) -> str:
    numbers = sorted(mesh.mesh.flatten().tolist())
    return hashlib.sha256(repr(numbers).encode()).hexdigest()[:16]


def pieces_of(name: str, tensor: Any) -> dict[Box, torch.Tensor]:
    """Return what this rank holds of a tensor, the training's own memory; pieces without elements are left out.

    Args:
        name: for messages.
        tensor: a DTensor, a ShardedTensor, or a plain tensor, which every rank holds in whole.

    Raises:
        CannotRepresentError: what it holds is no box, or torch cannot say which.
    """
    if type(tensor).__name__ == "ShardedTensor":
        found = {
            Box(tuple(s.metadata.shard_offsets), tuple(s.metadata.shard_sizes)): s.tensor.detach()
            for s in tensor.local_shards()
        }
    elif type(tensor).__name__ == "DTensor":
        found = _of_dtensor(name, tensor)
    else:
        if not _has_memory(tensor):
            raise CannotRepresentError(
                f"{name} is a {type(tensor).__module__}.{type(tensor).__qualname__}, of which it is not known which box of a"
                " tensor each rank holds: convert it to a plain tensor or DTensor in its state_dict()"
            )
        found = {Box((0,) * tensor.dim(), tuple(tensor.shape)): tensor.detach()}
    return {box: local for box, local in found.items() if box.numel}


def _has_memory(tensor: torch.Tensor) -> bool:
    try:
        return bool(tensor.data_ptr()) or not tensor.numel()
    except RuntimeError:
        return False


def _of_dtensor(name: str, tensor: Any) -> dict[Box, torch.Tensor]:
    if any(placement.is_partial() for placement in tensor.placements):
        raise CannotRepresentError(
            f"{name} has the placements {tensor.placements}: a partial sum is no state; redistribute it first"
        )
    if tensor.device_mesh.get_coordinate() is None:
        return {}
    with torch.no_grad():  # outside it, a local tensor takes part in a graph, which takes time
        local = tensor.to_local()
    if local.requires_grad:
        local = local.detach()
    if hasattr(local, "wait"):  # the result of a collective that has not arrived
        local = local.wait()
    box = _box_of(name, tensor)
    if box.size != tuple(local.shape):
        raise CannotRepresentError(
            f"{name}: this rank holds a shard of shape {tuple(local.shape)}, and its layout says {box.size}: such a layout must"
            " implement __create_chunk_list__"
        )
    return {box: local}


def _box_of(name: str, tensor: Any) -> Box:
    own = getattr(tensor._local_tensor, "__create_chunk_list__", None)
    if own is not None:  # the protocol by which uneven layouts describe themselves
        [chunk] = own()
        return Box(tuple(chunk.offsets), tuple(chunk.sizes))
    try:
        mesh = tensor.device_mesh
        place = tuple(mesh.get_coordinate())
        return _computed_box(tuple(tensor.shape), mesh, tuple(tensor.placements), place)
    except NotImplementedError as error:
        raise CannotRepresentError(
            f"{name} is sharded unevenly by FSDP and tensor parallelism together, and torch {torch.__version__} does not say"
            f" which rows each rank has ({error}): upgrade torch, or make its size divisible"
        ) from error


@lru_cache(maxsize=4096)
def _computed_box(
    shape: tuple[int, ...], mesh: Any, placements: tuple[Any, ...], place: tuple[int, ...]
) -> Box:
    """Return what torch says; asked once for all tensors that are cut alike, since it takes a while and training waits.

    Args:
        shape: of the whole tensor.
        mesh: that it is on.
        placements: one for each dimension of the mesh.
        place: of this rank in the mesh, on which the answer depends.
    """
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    size, offset = compute_local_shape_and_global_offset(torch.Size(shape), mesh, placements)
    return Box(tuple(offset), tuple(size))


def check_tiling(name: str, whole: tuple[int, ...], boxes: Sequence[Box]) -> None:
    """Make sure that the different ones of these boxes make up a tensor exactly.

    Args:
        name: the tensor's, for messages.
        whole: its shape.
        boxes: what all ranks hold of it; copies are allowed.

    Raises:
        CannotRepresentError: they leave gaps, overlap, or lie outside.
    """
    different = sorted(set(boxes), key=lambda box: box.offset)
    for box in different:
        ends = (a + n for a, n in zip(box.offset, box.size, strict=True))
        if len(box.offset) != len(whole) or any(end > n for end, n in zip(ends, whole, strict=True)):
            raise _refused(name, whole, f"one is {box.size} at {box.offset}")
    found, total = sum(box.numel for box in different), math.prod(whole)
    if found != total:
        raise _refused(name, whole, f"they hold {found} of its {total} elements")
    if whole and boxes_meet([box.offset for box in different], [box.size for box in different]):
        raise _refused(name, whole, "some overlap")


def _refused(name: str, whole: tuple[int, ...], why: str) -> CannotRepresentError:
    return CannotRepresentError(
        f"the ranks' shards of {name} do not make up a tensor of shape {tuple(whole)}: {why}. Pipeline stages that use one"
        " name for different tensors, and layouts that do not describe themselves, cannot be saved"
    )
