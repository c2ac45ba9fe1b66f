"""The hyperparameters of an optimizer: everything in its groups but the parameters."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from shrinkpoint.optimizers.updates import frozen

__all__ = ["frozen_groups", "parameters_of", "set_groups"]


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """All parameters, in the groups' order."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def frozen_groups(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The present hyperparameters of every group."""
    return [
        {name: frozen(value) for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]


def set_groups(optimizer: torch.optim.Optimizer, groups: Sequence[Mapping[str, Any]]) -> None:
    """Give every group the hyperparameters that it had; tensors (a learning rate for CUDA graphs) keep their identity.

    Raises:
        ValueError: the optimizer has another number of groups.
    """
    for live, logged in zip(optimizer.param_groups, groups, strict=True):
        for name, value in logged.items():
            if name == "params":
                continue
            present = live.get(name)
            if isinstance(present, torch.Tensor) and isinstance(value, torch.Tensor | float | int):
                with torch.no_grad():
                    present.copy_(torch.as_tensor(value))
            else:
                live[name] = frozen(value)
