"""The probe of a Lightning run: some steps from a saved state, which are undone completely."""

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities.model_helpers import is_overridden

from shrinkpoint.errors import ConfigError
from shrinkpoint.integrations.common import probe as common
from shrinkpoint.integrations.common.probe import to_host
from shrinkpoint.integrations.lightning.probe import arguments, around, captured_logs
from shrinkpoint.integrations.lightning.state import trained_key

__all__ = ["StepProbe"]

_PRECISIONS = (Precision, MixedPrecision, HalfPrecision, DoublePrecision)
_OWN_STEPS = ("optimizer_step", "backward", "manual_backward")


class StepProbe(common.StepProbe):
    """See the base class; runs are as of `LossProbe`."""

    def see(self, trainer: Trainer, batch: Any, batch_idx: int) -> None:
        """A batch is about to be trained on."""
        self._recent.see(batch, first=batch_idx % trainer.accumulate_grad_batches == 0)

    def parts(self, trainer: Trainer, module: LightningModule) -> common.StepParts:
        """See the base class."""
        (optimizer,) = trainer.optimizers
        return common.StepParts(
            module=module,
            optimizers=[optimizer],
            wrapped=trainer.strategy.model,
            losses=lambda parts, index: _losses(trainer, module, parts, index),
            clip=lambda: _clip(trainer, module, optimizer),
            scaler=getattr(trainer.precision_plugin, "scaler", None),
            around=around(trainer),
            states=lambda checkpoint: (checkpoint[trained_key(checkpoint)], checkpoint["optimizer_states"]),
        )

    def obstacle(self, trainer: Trainer, module: LightningModule) -> str | None:
        """See the base class."""
        known = (ModelParallelStrategy,) if self._shards else (SingleDeviceStrategy, DDPStrategy)
        if type(trainer.strategy) not in known:
            return f"the strategy is none of {', '.join(kind.__name__ for kind in known)}"
        if type(trainer.precision_plugin) not in _PRECISIONS:
            return "the precision is a library's"
        if not module.automatic_optimization or len(trainer.optimizers) != 1:
            return "the module optimizes by itself, or has several optimizers"
        own = any(is_overridden(name, module) for name in _OWN_STEPS)
        if own or "dataloader_iter" in inspect.signature(module.training_step).parameters:
            return "the module makes its steps in a way of its own"
        return None


def _losses(
    trainer: Trainer, module: LightningModule, parts: Sequence[Any], index: int
) -> Iterator[torch.Tensor]:
    for part in parts:
        batch = move_data_to_device(to_host(part), module.device)  # a copy: some modules change their batch
        with captured_logs(trainer, module), trainer.precision_plugin.train_step_context():
            returned = module.training_step(*arguments(module.training_step, batch, index))
        loss = returned["loss"] if isinstance(returned, dict) else returned
        if not isinstance(loss, torch.Tensor):
            raise ConfigError(f"training_step returned no loss but {type(loss).__name__}")
        yield loss / trainer.accumulate_grad_batches


def _clip(trainer: Trainer, module: LightningModule, optimizer: torch.optim.Optimizer) -> None:
    with captured_logs(trainer, module):
        module.configure_gradient_clipping(
            optimizer,
            gradient_clip_val=trainer.gradient_clip_val,
            gradient_clip_algorithm=trainer.gradient_clip_algorithm,
        )
