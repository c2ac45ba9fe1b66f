"""Optimizers of every kind whose first moments are coded, in their variants: torch's own, and small ones of other libraries."""

from collections.abc import Callable
from typing import Any

import torch
from support.training import OPTIMIZERS
from torch import nn


class Lion(torch.optim.Optimizer):
    """The sign of a mixture of momentum and gradient."""

    def __init__(self, params: Any, lr: float = 1e-4, betas: tuple[float, float] = (0.9, 0.99)) -> None:
        super().__init__(params, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    moment = state.setdefault("exp_avg", torch.zeros_like(p))
                    first, second = group["betas"]
                    p.add_(torch.lerp(p.grad, moment, first).sign(), alpha=-group["lr"])
                    moment.lerp_(p.grad, 1 - second)


class Muon(torch.optim.Optimizer):
    """Orthogonalised momentum for matrices."""

    def __init__(self, params: Any, lr: float = 0.02, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    buffer = state.setdefault("momentum_buffer", torch.zeros_like(p))
                    buffer.lerp_(p.grad, 1 - group["momentum"])
                    x = buffer / (buffer.norm() + 1e-7)
                    for _ in range(8):
                        x = 1.5 * x - 0.5 * x @ x.T @ x
                    p.add_(x, alpha=-group["lr"])


def matrices(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.dim() == 2]


KINDS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    **{name: OPTIMIZERS[name] for name in ("AdamW", "AdamW-fused-groups", "AdamW-amsgrad", "SGD", "Adamax")},
    "Adam": lambda model: torch.optim.Adam(model.parameters(), lr=1e-3),
    "AdamW-tensor-rate": lambda model: torch.optim.AdamW(
        model.parameters(), lr=torch.tensor(1e-3), foreach=False
    ),
    "AdamW-foreach": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True),
    "Nesterov": lambda model: torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, nesterov=True),
    "RMSprop-momentum": lambda model: torch.optim.RMSprop(model.parameters(), lr=1e-3, momentum=0.9),
    "Lion": lambda model: Lion(model.parameters()),
    "Muon": lambda model: Muon(matrices(model)),
}
"""By name; all have first moments."""
