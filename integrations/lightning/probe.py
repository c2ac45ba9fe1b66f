"""Evaluates other weights between two batches of a Lightning run, without side effects on it.

``Trainer.validate`` cannot run inside a hook, so a few recent batches are kept, and the module's own
validation step is called on them with its ``log`` replaced.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities.model_helpers import is_overridden

from shrinkpoint.errors import ConfigError
from shrinkpoint.integrations.lightning.state import trained_key
from shrinkpoint.session import probe as common
from shrinkpoint.session.probe import number_of, to_host

__all__ = ["LossProbe", "StepProbe", "arguments", "around", "captured_logs"]


class LossProbe(common.LossProbe):
    """Evaluates a module on a few batches: see the base class, whose runs are a trainer between two batches and its module.

    Args:
        metric: name under which the validation step logs the loss; by default ``val_loss`` or what it returns.
        together: see the base class.
    """

    def __init__(self, *, metric: str | None = None, together: bool = False) -> None:
        super().__init__(together=together)
        self._metric = metric

    def see_validation(self, batch: Any, dataloader_idx: int, batch_idx: int | None = None) -> None:
        """Keep a validation batch if more are needed; the module gets it after this."""
        if dataloader_idx == 0:
            self.kept.see_validation(batch, batch_idx)

    def live(self, trainer: Trainer, module: LightningModule) -> Any:
        """See the base class."""
        return module, lambda weights: weights, around(trainer)

    def measurement(
        self, trainer: Trainer, module: LightningModule, *, together: list[Any] | None = None
    ) -> common.Measured:
        """See the base class."""
        batches = list(self.kept.batches) if together is None else together
        step, context = _step(trainer, module, held_out=self.kept.held_out)

        def measure() -> tuple[float, ...]:
            if not batches or step is None:
                raise ConfigError(
                    "there is nothing to measure the loss with: no batch has been seen, or no step is usable"
                )
            values = []
            for index, kept in enumerate(batches):
                batch = move_data_to_device(to_host(kept), module.device)
                with (
                    captured_logs(trainer, module, by_itself=together is None) as logged,
                    context(),
                ):
                    returned = step(*arguments(step, batch, index))
                values.append(_loss(logged, returned, self._metric))
            return tuple(values)

        return measure


@contextmanager
def captured_logs(
    trainer: Trainer, module: LightningModule, *, by_itself: bool = True
) -> Iterator[dict[str, Any]]:
    """Redirect a step's logging into a dict, away from the trainer's loggers, metrics and progress bars.

    Args:
        trainer: its loggers are replaced and silenced meanwhile, since a step may write to them itself.
        module: its logging methods are replaced meanwhile.
        by_itself: whether one process measures for all, so that none may wait for others.
    """
    logged: dict[str, Any] = {}

    def log(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        logged[name] = value

    def log_dict(values: Mapping[str, Any], *args: Any, **kwargs: Any) -> None:
        logged.update(values)

    def all_gather(*args: Any, **kwargs: Any) -> None:
        raise ConfigError(
            "the step calls all_gather, but quality is measured by the first process alone: gather in"
            " on_validation_epoch_end instead"
        )

    shadows: dict[str, Callable[..., None]] = {"log": log, "log_dict": log_dict}
    if trainer.world_size > 1 and by_itself:
        shadows["all_gather"] = all_gather
    before = {name: module.__dict__[name] for name in shadows if name in module.__dict__}
    module.__dict__.update(shadows)
    loggers = trainer.loggers
    trainer.loggers = [DummyLogger() for _ in loggers]
    silenced = [(vars(each), name) for each in loggers for name in _methods(each) if name not in vars(each)]
    for own, name in silenced:  # the module may have kept the logger itself
        own[name] = _nowhere
    try:
        yield logged
    finally:
        trainer.loggers = loggers
        for own, name in silenced:
            del own[name]
        for name in shadows:
            del module.__dict__[name]
        module.__dict__.update(before)


def _methods(logger: object) -> list[str]:
    kind = type(logger)
    return [name for name in dir(kind) if name.startswith("log_") and callable(getattr(kind, name))]


def _nowhere(*args: Any, **kwargs: Any) -> None:
    pass


def _step(
    trainer: Trainer, module: LightningModule, *, held_out: bool
) -> tuple[Callable[..., Any] | None, Any]:
    if held_out:
        return module.validation_step, trainer.precision_plugin.val_step_context
    # With manual optimization the training step would train.
    if module.automatic_optimization and is_overridden("training_step", module):
        return module.training_step, trainer.precision_plugin.train_step_context
    return None, None


def around(trainer: Trainer) -> tuple[object, ...]:
    """What a step may change in addition to the module, as of `preserved_state`."""
    return trainer, trainer.optimizers, [config.scheduler for config in trainer.lr_scheduler_configs]


def arguments(step: Callable[..., Any], batch: Any, index: int) -> list[Any]:
    """The arguments of a training or validation step.

    Raises:
        ConfigError: it reads its batches itself.
    """
    names = list(inspect.signature(step).parameters)
    if "dataloader_iter" in names:
        raise ConfigError("a step that takes dataloader_iter cannot be used to measure the loss")
    return [batch, index, 0][: len(names)]


def _loss(logged: Mapping[str, Any], returned: Any, metric: str | None) -> float:
    if isinstance(returned, Mapping):
        returned = returned.get("loss")
    by_name = [value for name, value in logged.items() if "loss" in name]
    for value in (logged.get(metric) if metric else None, logged.get("val_loss"), returned, *by_name):
        number = number_of(value)
        if number is not None:
            return number
    raise ConfigError(
        f"no loss to measure quality by: the step logged {sorted(logged) or 'nothing'} and returned none; log 'val_loss'"
        " or return the loss from validation_step"
    )


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
            losses=lambda parts, index: _step_losses(trainer, module, parts, index),
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


def _step_losses(
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
