"""The probe of a Lightning run: some steps from a saved state, which are undone completely.

The trainer's own loop cannot be used: it counts, logs, calls all hooks and reads the loaders. So the module's training
step is called on recent batches, and the rest of a step is implemented here, for trainings where that is simple enough.
"""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities.model_helpers import is_overridden

from shrinkpoint.errors import ConfigError
from shrinkpoint.integrations.common.probe import RecentBatches, as_many, to_host
from shrinkpoint.integrations.lightning.probe import LossProbe, arguments, around, captured_logs
from shrinkpoint.integrations.lightning.state import trained_key
from shrinkpoint.loop.alone import alone, wrapper_obstacle
from shrinkpoint.quality.evaluation import Loss, ResumedSteps
from shrinkpoint.quality.resumed_steps import ResumedRun, obstacle
from shrinkpoint.sharded.targets import reshard, unreduced

__all__ = ["StepProbe"]

_PRECISIONS = (Precision, MixedPrecision, HalfPrecision, DoublePrecision)
_OWN_STEPS = ("optimizer_step", "backward", "manual_backward")


class StepProbe:
    """Keeps batches for the steps of a probe, and makes these steps.

    Args:
        losses: measures the loss after the steps.
        steps: how many batches to keep, in host memory; 0 keeps none and makes none.
        shards: whether each rank has shards of the module, and all make the steps together.
    """

    def __init__(self, losses: LossProbe, *, steps: int, shards: bool = False) -> None:
        self._losses = losses
        self._shards = shards
        self._recent = RecentBatches(steps)

    def starts(self, trainer: Trainer, module: LightningModule) -> None:
        """Keep no batches in a training that does not allow probes."""
        if self._obstacle(trainer, module) is not None:
            self._recent.stop()

    def see(self, trainer: Trainer, batch: Any, batch_idx: int) -> None:
        """A batch is about to be trained on."""
        self._recent.see(batch, first=batch_idx % trainer.accumulate_grad_batches == 0)

    def resumed(self, trainer: Trainer, module: LightningModule) -> ResumedSteps | None:
        """Resumed steps from a present checkpoint in Lightning's form; None where that is impossible. Of shards a collective.

        Gradients are clipped as in training. The hooks of callbacks, and those of the module that belong to the trainer's
        loop, are not called.
        """
        batches, together = self._recent.take(), None
        if self._shards:
            batches, together = as_many(batches), self._losses.kept.agreed()
        if not batches or self._obstacle(trainer, module) is not None:
            return None
        (optimizer,) = trainer.optimizers
        run = ResumedRun(
            module=module,
            optimizers=[optimizer],
            losses=lambda index: _losses(trainer, module, batches[index % len(batches)], index),
            evaluate=self._losses.measurement(trainer, module, together),
            clip=lambda: _clip(trainer, module, optimizer),
            scale=_scale(trainer),
            settle=lambda: reshard(module) if self._shards else None,
            around=around(trainer),
        )

        def resumed(checkpoint: Any, marks: Sequence[int]) -> Sequence[Loss]:
            weights = checkpoint[trained_key(checkpoint)]
            reason = self._obstacle(trainer, module)
            if reason is not None:
                raise ConfigError(reason)
            with nullcontext() if self._shards else alone():
                return run.steps(weights, checkpoint["optimizer_states"], marks)

        return resumed

    def _obstacle(self, trainer: Trainer, module: LightningModule) -> str | None:
        known = (ModelParallelStrategy,) if self._shards else (SingleDeviceStrategy, DDPStrategy)
        reason = _obstacle(trainer, module, known)
        if reason is not None:
            return reason
        if self._shards:
            return obstacle(module, trainer.optimizers, shards=True) or unreduced(module)
        return wrapper_obstacle(trainer.strategy.model) or obstacle(module, trainer.optimizers, alone=True)


def _obstacle(trainer: Trainer, module: LightningModule, known: Sequence[type]) -> str | None:
    precision = trainer.precision_plugin
    if type(trainer.strategy) not in known:
        return f"the strategy is none of {', '.join(kind.__name__ for kind in known)}"
    if type(precision) not in _PRECISIONS:
        return "the precision is a library's"
    if not module.automatic_optimization or len(trainer.optimizers) != 1:
        return "the module optimizes by itself, or has several optimizers"
    own = any(is_overridden(name, module) for name in _OWN_STEPS)
    if own or "dataloader_iter" in inspect.signature(module.training_step).parameters:
        return "the module makes its steps in a way of its own"
    return None


def _scale(trainer: Trainer) -> float:
    """The present scale of the losses, where half-precision training has a scaler; not changed."""
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    return 1.0 if scaler is None or not scaler.is_enabled() else float(scaler.get_scale())


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
