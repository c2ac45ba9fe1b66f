"""The moving average of gradients for optimizers that do not hold one themselves."""

from collections.abc import Mapping

import torch
from lightning.pytorch import LightningModule, Trainer

from shrinkpoint.integrations.triggers import Trigger
from shrinkpoint.sensitivity import GradientEMA

__all__ = ["GradientCollector"]


class GradientCollector:
    """Averages the gradients of the last steps before a save, unless Adam's first moments do so already."""

    def __init__(self) -> None:
        self._average = GradientEMA()

    def before_step(self, trainer: Trainer, module: LightningModule, trigger: Trigger) -> None:
        """The optimizer is about to step: the gradients are complete, unscaled and not clipped yet."""
        remaining = trigger.steps_until_due(trainer.global_step)
        wanted = remaining is None or self._average.should_collect(remaining - 1)
        if wanted and not _averages_itself(trainer):
            named = module.named_parameters()
            self._average.update({name: p.grad for name, p in named if p.grad is not None})

    def take(self, trainer: Trainer) -> Mapping[str, torch.Tensor] | None:
        """The average by parameter name, and start a new one; None where the optimizer holds a better one."""
        average = self._average.result()
        self._average.reset()
        return None if _averages_itself(trainer) else average or None


def _averages_itself(trainer: Trainer) -> bool:
    # Adam has no state before its first step.
    return any("exp_avg" in state for optimizer in trainer.optimizers for state in optimizer.state.values())
