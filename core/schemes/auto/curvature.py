"""What the step sizes of weights follow: how the gradients' squares differ between tensors, and how large weights are."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from shrinkpoint.arrays import widened
from shrinkpoint.schemes.sums import WeightSums

__all__ = ["Curvature", "curvature_of", "size_of", "square", "sums_of"]

_LEAST = 1e-30


class Curvature(NamedTuple):
    """Of one tensor."""

    kind: str
    """What it was read off: levels of different kinds cannot be compared."""
    tensor: torch.Tensor
    """What grows with it, of the weight's shape."""
    level: float
    """Natural logarithm of the mean."""


def curvature_of(kind: str, tensor: torch.Tensor) -> Curvature | None:
    """The curvature from a tensor of squares; None if it is not finite, negative or all zeros.

    Args:
        kind: see `Curvature`.
        tensor: not negative, on the host.
    """
    from shrinkpoint.quantize import matrix_kernels  # numba

    if tensor.is_complex() or tensor.numel() == 0:
        return None
    least, most = torch.aminmax(tensor)
    if not (bool(least >= 0) and bool(most > 0) and bool(torch.isfinite(most))):  # NaN is neither
        return None
    mean = matrix_kernels.total(widened(tensor)) / tensor.numel()
    return Curvature(kind, tensor, math.log(max(mean, _LEAST)))


def square(tensor: torch.Tensor) -> torch.Tensor:
    """The squares of a moment or a gradient, in fp32."""
    return tensor.float().square()


def size_of(tensors: list[torch.Tensor]) -> float:
    """Root of the mean square of all elements that are finite in sum."""
    return sums_of([(tensor, None) for tensor in tensors]).size


def sums_of(found: Sequence[tuple[torch.Tensor, Curvature | None]]) -> WeightSums:
    """Of weights with their curvatures, those alone whose squares are finite in sum."""
    from shrinkpoint.quantize import matrix_kernels  # numba

    squares, elements = 0.0, 0
    levels: dict[str, tuple[float, int]] = {}
    for tensor, curvature in found:
        own = float(matrix_kernels.square_sum(widened(tensor)))
        if math.isfinite(own):
            squares, elements = squares + own, elements + tensor.numel()
        if curvature is not None:
            total, before = levels.get(curvature.kind, (0.0, 0))
            levels[curvature.kind] = total + tensor.numel() * curvature.level, before + tensor.numel()
    return WeightSums(squares=squares, count=elements, levels=levels)
