"""The order of a tensor's dimensions in memory, such as channels last.

Files have every tensor in the order of its dimensions. A fused optimizer passes over parameter, gradient and moments as they
lie in memory, without looking at their strides: a moment that comes back in another order than its parameter's is applied to
the wrong elements. So the order is noted, and put back as ``torch.load`` does.
"""

from collections.abc import Sequence

import torch

from shrinkpoint.state.dtypes import PACKED, as_bits

__all__ = ["in_memory_order", "memory_order"]


def memory_order(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """The dimensions of a tensor without holes, from the slowest to the fastest; None where that is their own order.

    It is None, too, of a tensor that overlaps itself or has holes, whose copy may be in any order.

    Examples:
        >>> from shrinkpoint.state.memory_order import memory_order
        >>> memory_order(torch.empty(2, 3, 4, 4).to(memory_format=torch.channels_last))
        (0, 2, 3, 1)
    """
    if tensor.is_contiguous():
        return None
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda dim: (-strides[dim], dim))
    expected = 1
    for dim in reversed(order):
        if tensor.shape[dim] != 1 and strides[dim] != expected:
            return None
        expected *= tensor.shape[dim]
    return tuple(order)


def in_memory_order(tensor: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    """The same elements with the dimensions in that order in memory; the tensor itself where they are already.

    Args:
        tensor: of any strides.
        order: as `memory_order` gives it.

    Raises:
        ValueError: `order` does not name each of the tensor's dimensions once.
    """
    if sorted(order) != list(range(tensor.dim())):
        raise ValueError(f"{list(order)[:9]} is no order of {tensor.dim()} dimensions")
    back = sorted(range(len(order)), key=order.__getitem__)
    sorted_dimensions = as_bits(tensor).permute(list(order))
    if sorted_dimensions.is_contiguous():
        return tensor
    ordered = sorted_dimensions.contiguous().permute(back)
    return ordered.view(tensor.dtype) if tensor.dtype in PACKED else ordered
