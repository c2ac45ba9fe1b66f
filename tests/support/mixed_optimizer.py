"""An optimizer that keeps fp32 copies and moments of its half-precision parameters."""

from typing import Any

import torch

__all__ = ["MixedSGD"]


class MixedSGD(torch.optim.Optimizer):
    """SGD with momentum on fp32 copies of its parameters; counts its steps in integers and nests what it keeps."""

    def __init__(self, parameters: Any, lr: float = 0.05) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group["lr"])
        return loss

    def _update(self, parameter: torch.Tensor, rate: float) -> None:
        state = self.state[parameter]
        if not state:
            state["master"] = parameter.float()
            state["more"] = {"mean": [torch.zeros(parameter.shape), None, True]}
            state["count"] = torch.zeros((), dtype=torch.int64)
        assert parameter.grad is not None
        state["count"] += 1
        mean = state["more"]["mean"][0].mul_(0.9).add_(parameter.grad, alpha=0.1)
        parameter.copy_(state["master"].sub_(mean, alpha=rate))
