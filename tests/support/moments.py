"""First and second moments of made-up gradients, with what real ones have: rows without any, and numbers of every size."""

import torch
from hypothesis import strategies as st

from shrinkpoint.schemes.base import Context
from shrinkpoint.state.training import Role

SHAPES = st.sampled_from([(1,), (7,), (1, 1), (1, 30), (30, 1), (12, 40), (4, 3, 3, 3), (2, 1, 5), (5, 70)])
SCALES = st.sampled_from([1e-25, 1e-8, 1e-3, 1.0, 1e12])
KINDS = st.sampled_from(
    ["plain", "dead row", "dead column", "sparse", "zero", "subnormal", "far row", "one sign"]
)


def moments(
    *shape: int, seed: int = 0, scale: float = 1e-4, kind: str = "plain"
) -> tuple[torch.Tensor, torch.Tensor]:
    """A first and a second moment of one gradient whose size differs from row to row and column to column."""
    generator = torch.Generator().manual_seed(seed)
    rows, columns = shape[0], torch.Size(shape[1:]).numel()
    size = scale * torch.rand(rows, 1, generator=generator) * torch.rand(1, columns, generator=generator)
    gradients = size * torch.randn(20, rows, columns, generator=generator)
    if kind == "dead row":
        gradients[:, 0] = 0
    if kind == "dead column":
        gradients[:, :, -1] = 0
    if kind == "sparse":
        gradients *= torch.rand(rows, columns, generator=generator) > 0.5
    if kind == "zero":
        gradients *= 0
    if kind == "far row":
        gradients[:, 0] *= 1e-12
    if kind == "subnormal":
        gradients = 1e-41 * torch.randn(20, rows, columns, generator=generator)
    if kind == "one sign":
        gradients = gradients.abs()
    first, second = gradients.mean(dim=0), gradients.square().mean(dim=0)
    return first.reshape(shape), second.reshape(shape)


def given_second(second: torch.Tensor) -> Context:
    """The context of a first moment whose second moment is restored as this."""
    return Context(siblings={Role.EXP_AVG_SQ.value: second})
