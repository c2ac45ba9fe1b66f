"""What the step sizes of weights follow: how the gradients' squares differ between tensors, and how large weights are."""

import math
from typing import NamedTuple

import torch

from shrinkpoint.arrays import widened

__all__ = ["Curvature", "curvature_of", "mean_levels", "size_of", "square"]

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
    from shrinkpoint.quantize import matrix_kernels  # numba

    squares = [(float(matrix_kernels.square_sum(widened(tensor))), tensor.numel()) for tensor in tensors]
    finite = [(total, count) for total, count in squares if math.isfinite(total)]
    return math.sqrt(sum(s for s, _ in finite) / max(1, sum(n for _, n in finite)))


def mean_levels(found: list[tuple[Curvature | None, int]]) -> dict[str, float]:
    """The mean level over all elements, for each kind: kinds are not measured in the same unit."""
    totals: dict[str, tuple[float, int]] = {}
    for curvature, count in found:
        if curvature is not None:
            total, before = totals.get(curvature.kind, (0.0, 0))
            totals[curvature.kind] = total + count * curvature.level, before + count
    return {kind: total / count for kind, (total, count) in totals.items()}
