"""Two optimizers that torch 2.7 does not have: Lion and Muon, as published, without tricks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

__all__ = ["Lion", "Muon"]


class Lion(Optimizer):
    """Moves every weight by the learning rate in the direction of the sign of an average of gradients (arXiv 2302.06675).

    Args:
        params: as of any optimizer.
        lr: a third to a tenth of what Adam would take.
        betas: of the average whose sign is taken, and of the one that is kept.
        weight_decay: decoupled, as AdamW's.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        """One step; `closure` is not called."""
        for group in self.param_groups:
            fast, slow = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["exp_avg"] = torch.zeros_like(parameter)
                average = state["exp_avg"]
                direction = average.mul(fast).add_(parameter.grad, alpha=1 - fast).sign_()
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(direction, alpha=-group["lr"])
                average.mul_(slow).add_(parameter.grad, alpha=1 - slow)


class Muon(Optimizer):
    """Momentum whose update is made orthogonal, for matrices (Jordan et al. 2024); a stack of matrices one by one.

    Args:
        params: matrices, or stacks of them.
        lr: how far the singular values move at a step.
        momentum: of the average of gradients; Nesterov's form.
        weight_decay: decoupled.
    """

    def __init__(
        self, params: Iterable[Any], lr: float = 0.02, momentum: float = 0.95, weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        """One step; `closure` is not called."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(parameter)
                buffer = state["momentum_buffer"]
                buffer.lerp_(parameter.grad, 1 - group["momentum"])
                update = _orthogonal(parameter.grad.lerp(buffer, group["momentum"]))
                scale = max(1.0, parameter.shape[-2] / parameter.shape[-1]) ** 0.5
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(update, alpha=-group["lr"] * scale)


def _orthogonal(matrix: Tensor, rounds: int = 5) -> Tensor:
    """The nearest matrix whose singular values are near 1, by Newton and Schulz's iteration of the fifth order."""
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = matrix.shape[-2] > matrix.shape[-1]
    x = matrix.mT if tall else matrix
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(rounds):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return x.mT if tall else x
