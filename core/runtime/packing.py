"""Many tensors in few blocks of memory.

Pinned memory is allocated in powers of two of bytes, each by a call that takes long: one allocation for each tensor takes up to
twice the memory.
"""

from collections.abc import Mapping, Sequence

import torch

__all__ = ["empty_tensors"]

_ALIGNED = 64
_LEAST = 1 << 20
_LARGER = 6
"""Doublings of the least possible block that are tried."""


def empty_tensors(like: Mapping[str, torch.Tensor], *, pinned: bool) -> dict[str, torch.Tensor]:
    """Contiguous tensors without values, in host memory.

    Args:
        like: with the dtypes and shapes.
        pinned: whether a GPU is to copy to them.

    Returns:
        A tensor for each of `like`, in the same order.

    Examples:
        >>> from shrinkpoint.runtime.packing import empty_tensors
        >>> made = empty_tensors({"a": torch.zeros(3, 4), "b": torch.zeros(5, dtype=torch.int64)}, pinned=False)
        >>> {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in made.items()}
        {'a': ((3, 4), torch.float32), 'b': ((5,), torch.int64)}
    """
    rooms = {name: -(-tensor.nbytes // _ALIGNED) * _ALIGNED for name, tensor in like.items()}
    order = sorted(rooms, key=lambda name: (-rooms[name], name))
    blocks = _best([(name, rooms[name]) for name in order if rooms[name]])
    made = {
        name: torch.empty(like[name].shape, dtype=like[name].dtype, device="cpu")
        for name in order
        if not rooms[name]
    }
    for block in blocks:
        size = _rounded(sum(rooms[name] for name in block))
        memory = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=pinned)
        at = 0
        for name in block:
            tensor = like[name]
            made[name] = memory[at : at + tensor.nbytes].view(tensor.dtype).reshape(tensor.shape)
            at += rooms[name]
    return {name: made[name] for name in like}


def _best(rooms: Sequence[tuple[str, int]]) -> list[list[str]]:
    """Return the names by block, for the size of blocks that takes the least memory."""
    if not rooms:
        return []
    least = _rounded(max(rooms[0][1], _LEAST))
    found = [_packed(rooms, least << doublings) for doublings in range(_LARGER)]
    sizes = dict(rooms)
    return min(found, key=lambda blocks: sum(_rounded(sum(sizes[n] for n in names)) for names in blocks))


def _packed(rooms: Sequence[tuple[str, int]], size: int) -> list[list[str]]:
    """First fit, of descending sizes."""
    blocks: list[list[str]] = []
    free: list[int] = []
    for name, room in rooms:
        place = next((index for index, left in enumerate(free) if room <= left), None)
        if place is None:
            place = len(blocks)
            blocks.append([])
            free.append(size)
        blocks[place].append(name)
        free[place] -= room
    return blocks


def _rounded(size: int) -> int:
    """To the next power of two, as torch's allocator of pinned memory does."""
    return 1 << max(0, size - 1).bit_length()
