"""Optimizers that torch 2.7 does not have: Lion, Muon and AdEMAMix as published, and Adams of other layouts."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

Named = dict[str, Any]


class _Each(Optimizer):
    """An optimizer that updates each parameter by itself."""

    OPTIONS: ClassVar[dict[str, Any]] = {"lr": 1e-3}

    def __init__(self, params: Iterable[Any], **options: Any) -> None:
        super().__init__(params, {**self.OPTIONS, **options})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        """Make one step; `closure` is not called."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.update(parameter, parameter.grad, self.state[parameter], group)

    def update(self, parameter: Tensor, gradient: Tensor, state: Named, group: Named) -> None:
        """Move one parameter."""
        raise NotImplementedError


class Lion(_Each):
    """Moves every weight by the learning rate in the direction of the sign of an average of gradients (arXiv 2302.06675)."""

    OPTIONS: ClassVar[dict[str, Any]] = {"lr": 1e-4, "betas": (0.9, 0.99), "weight_decay": 0.0}

    def update(self, parameter: Tensor, gradient: Tensor, state: Named, group: Named) -> None:
        fast, slow = group["betas"]
        if not state:
            state["exp_avg"] = torch.zeros_like(parameter)
        average = state["exp_avg"]
        direction = average.mul(fast).add_(gradient, alpha=1 - fast).sign_()
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_(direction, alpha=-group["lr"])
        average.mul_(slow).add_(gradient, alpha=1 - slow)


class Muon(_Each):
    """Momentum whose update is made orthogonal, for matrices (Jordan et al. 2024); a stack of matrices one by one."""

    OPTIONS: ClassVar[dict[str, Any]] = {"lr": 0.02, "momentum": 0.95, "weight_decay": 0.0}

    def update(self, parameter: Tensor, gradient: Tensor, state: Named, group: Named) -> None:
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        buffer = state["momentum_buffer"]
        buffer.lerp_(gradient, 1 - group["momentum"])
        update = _orthogonal(gradient.lerp(buffer, group["momentum"]))
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


class AdEMAMix(_Each):
    """Adam with a second, slow average of gradients beside the first (arXiv 2409.03137), without its warm-ups."""

    OPTIONS: ClassVar[dict[str, Any]] = {"lr": 1e-3, "betas": (0.9, 0.999, 0.999), "alpha": 2.0}

    def update(self, parameter: Tensor, gradient: Tensor, state: Named, group: Named) -> None:
        fast, second, slow = group["betas"]
        if not state:
            state["step"] = 0
            for name in ("exp_avg", "exp_avg_slow", "exp_avg_sq"):
                state[name] = torch.zeros_like(parameter)
        state["step"] += 1
        state["exp_avg"].lerp_(gradient, 1 - fast)
        state["exp_avg_slow"].lerp_(gradient, 1 - slow)
        state["exp_avg_sq"].lerp_(gradient.square(), 1 - second)
        mean = state["exp_avg"] / (1 - fast ** state["step"]) + group["alpha"] * state["exp_avg_slow"]
        root = (state["exp_avg_sq"] / (1 - second ** state["step"])).sqrt_().add_(1e-8)
        parameter.addcdiv_(mean, root, value=-group["lr"])


class RenamedAdam(_Each):
    """An optimizer of nobody's, with a first and a second moment of its own names and the updates of Adam."""

    def update(self, parameter: Tensor, gradient: Tensor, state: Named, group: Named) -> None:
        if not state:
            state["mu"], state["nu"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        state["mu"].lerp_(gradient, 0.1)
        state["nu"].lerp_(gradient.square(), 0.01)
        parameter.addcdiv_(state["mu"], state["nu"].sqrt().add_(1e-8), value=-group["lr"])


_BLOCK = 256


def _map(signed: bool) -> Tensor:
    """The values of 8-bit codes, in units of a block's largest: denser towards zero, as in 8-bit optimizers (arXiv 2110.02861)."""
    positive = torch.logspace(-6.0 if signed else -7.0, 0.0, 127 if signed else 255)
    return torch.cat([*([-positive.flip(0)] if signed else []), torch.zeros(1), positive])


class Adam8bit(_Each):
    """Adam whose moments are 8-bit codes of blocks of 256 elements, laid out and named as bitsandbytes' ``AdamW8bit`` has them.

    bitsandbytes itself makes steps on GPUs only.
    """

    def update(self, parameter: Tensor, gradient: Tensor, state: Named, group: Named) -> None:
        if not state:
            state["step"] = 0
            for number, signed in ((1, True), (2, False)):
                zero, blocks = 127 if signed else 0, -(-parameter.numel() // _BLOCK)
                state[f"qmap{number}"] = _map(signed)
                state[f"state{number}"] = torch.full_like(parameter, zero, dtype=torch.uint8)
                state[f"absmax{number}"] = torch.zeros(blocks)
        state["step"] += 1
        first = self._moment(state, 1, gradient, 0.9)
        second = self._moment(state, 2, gradient.square(), 0.999)
        mean = first / (1 - 0.9 ** state["step"])
        root = (second / (1 - 0.999 ** state["step"])).sqrt_().add_(1e-8)
        parameter.addcdiv_(mean, root, value=-group["lr"])

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As bitsandbytes does it: torch turns all state into the parameter's dtype, and codes stay bytes."""
        super().load_state_dict(state_dict)
        for state in self.state.values():
            for name in ("state1", "state2"):
                state[name] = state[name].to(torch.uint8)

    def _moment(self, state: dict[str, Any], number: int, new: Tensor, beta: float) -> Tensor:
        """Decode a moment, take a gradient into it, and code it again."""
        codes, points = state[f"state{number}"], state[f"qmap{number}"]
        scale = state[f"absmax{number}"].repeat_interleave(_BLOCK)[: codes.numel()].view_as(codes)
        value = points[codes.long()].mul_(scale).lerp_(new, 1 - beta)
        flat = torch.nn.functional.pad(value.flatten(), (0, -codes.numel() % _BLOCK)).view(-1, _BLOCK)
        largest = flat.abs().amax(1)
        relative = (flat / largest.clamp(min=1e-30)[:, None]).flatten()[: codes.numel()]
        edges = (points[1:] + points[:-1]) / 2
        state[f"absmax{number}"].copy_(largest)
        codes.copy_(torch.bucketize(relative, edges).view_as(codes))
        return value
