"""The first logged steps, replayed on a copy while the training runs: whether a log is of use is known from the start."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import optimizer as optimizer_module

from shrinkpoint.steps.fingerprint import differing, fingerprints
from shrinkpoint.steps.hyperparameters import frozen_groups, parameters_of
from shrinkpoint.steps.record import Record
from shrinkpoint.steps.replay import make_step
from shrinkpoint.updates import OptimizerKind, holds_tensors

__all__ = ["Rehearsal"]


class Rehearsal:
    """A copy of weights and optimizer states, on which recorded steps can be made.

    Args:
        optimizers: of the training, before the first of these steps.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._copies = [_copy(optimizer) for optimizer in optimizers]

    @staticmethod
    def possible(optimizers: Sequence[torch.optim.Optimizer]) -> bool:
        """Whether copies can be stepped as the optimizers are: hooks after a step may hold the training's own weights."""
        if getattr(optimizer_module, "_global_optimizer_post_hooks", None):
            return False
        return all(
            len(getattr(one, "_optimizer_step_post_hooks", {})) <= 1 and not holds_tensors(type(one).step)
            for one in optimizers
        )

    def differences(
        self, records: Sequence[Record], optimizers: Sequence[torch.optim.Optimizer]
    ) -> list[str]:
        """Make the steps on the copy.

        Args:
            records: what was recorded since; of the host, or still on the way from a GPU: the caller has waited.
            optimizers: of the training, after the last of these steps.

        Returns:
            What differs from the training's own state, as `fingerprints` calls it.
        """
        for record in records:
            for event in record.events:
                make_step(self._copies[event.optimizer], event)
        return differing(fingerprints(optimizers), fingerprints(self._copies))


def _copy(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    parameters = parameters_of(optimizer)
    copies = {
        id(p): torch.nn.Parameter(p.detach().clone(), requires_grad=p.requires_grad) for p in parameters
    }
    groups = [
        {**hyper, "params": [copies[id(p)] for p in group["params"]]}
        for hyper, group in zip(frozen_groups(optimizer), optimizer.param_groups, strict=True)
    ]
    state: dict[torch.Tensor, dict[str, Any]] = {
        copies[id(p)]: {name: _cloned(value) for name, value in optimizer.state[p].items()}
        for p in parameters
        if p in optimizer.state
    }
    return OptimizerKind.of(optimizer).with_state(groups, state)


def _cloned(value: object) -> object:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _cloned(item) for key, item in value.items()}
    return [_cloned(item) for item in value] if isinstance(value, list) else value
