"""What a session asks of a Lightning run: its state, and its losses without side effects.

``Trainer.validate`` cannot run inside a hook, so the module's own validation step is called on kept batches, with its ``log``
replaced.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch import LightningModule, Trainer, callbacks
from lightning.pytorch.loggers import Logger
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities.model_helpers import is_overridden

from shrinkpoint.errors import CannotRepresentError, ConfigError
from shrinkpoint.group.group import world
from shrinkpoint.integrations.lightning.io import CAPTURED, NAMES_KEY, RunCheckpointIO, storable, trained_key
from shrinkpoint.integrations.lightning.position import OWN_KEYS, POSITION_KEY
from shrinkpoint.reports import SaveReport
from shrinkpoint.session.adapter import TrainingAdapter
from shrinkpoint.session.batches import to_host
from shrinkpoint.session.reports import configuration, finite, number_of, numbers
from shrinkpoint.session.settings import RunSettings
from shrinkpoint.session.triggers import Schedule
from shrinkpoint.state.roles import describe_training
from shrinkpoint.state.stateful import named_parameters, own_names, plain_names, state_of
from shrinkpoint.state.training import Describe, TensorSpec

_PRECISIONS = (Precision, MixedPrecision, HalfPrecision, DoublePrecision)
_OWN_STEPS = ("optimizer_step", "backward", "manual_backward")
_AVERAGING = getattr(callbacks, "WeightAveraging", ())
_TAKE_TEXT = {"CSVLogger", "WandbLogger"}  # loggers whose log_metrics stores strings too
_GRADIENTS = "gradients"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The options of `CompressedCheckpoint`; see there."""

    run: RunSettings
    schedule: Schedule

    @classmethod
    def build(cls, **more: Any) -> "Settings":
        """Check and divide the callback's arguments."""
        schedule = Schedule.taken_from(more)
        return cls(run=RunSettings.build(**more), schedule=schedule)


class LightningAdapter(TrainingAdapter):
    """One trainer and its module; see the base class. With `shards` each rank has its own state and position."""

    model_key, optimizers_key, writer = "state_dict", "optimizer_states", "Lightning's callback"

    def __init__(self, settings: Settings, *, shards: bool = False) -> None:
        saver = settings.run.saver
        self._settings, self._shards = settings, shards
        self._metric = saver.monitor if saver.mode == "min" else None
        self._measured: dict[str, tuple[torch.Tensor, int, int]] = {}
        self._shows_saving = False
        self.trainer: Trainer
        """The trainer, from its setup on."""

    @property
    def step(self) -> int:
        return int(self.trainer.global_step)

    @property
    def model(self) -> LightningModule:
        return self.trainer.lightning_module

    @property
    def optimizers(self) -> Sequence[Any]:
        optimizers: list[Any] = self.trainer.optimizers
        return optimizers

    @property
    def wrapped(self) -> Any:
        return self.trainer.strategy.model

    def schedulers(self) -> Mapping[str, Any]:
        """See the base class; by their numbers, in whose order Lightning gives them their states."""
        configs = enumerate(self.trainer.lr_scheduler_configs)
        return {f"scheduler {number}": config.scheduler for number, config in configs}

    # ---- state

    def state(self) -> dict[str, Any]:
        """Let Lightning collect its whole state on every rank; see the base class."""
        trainer = self.trainer
        capturing = RunCheckpointIO.install(trainer.strategy).capturing(trainer)
        with capturing as captured, plainly_named(trainer, self.model):
            trainer.save_checkpoint(CAPTURED, weights_only=False)
        found = world().on_every(lambda: self._stored(captured))
        if self._shards:
            self.apart = {POSITION_KEY: {key: found[POSITION_KEY][key] for key in OWN_KEYS}}
        return found

    def _stored(self, captured: list[dict[str, Any]]) -> dict[str, Any]:
        if not captured and not world().is_first:
            return {}
        if not captured:
            raise CannotRepresentError(
                "Lightning's strategy did not pass the checkpoint on to its checkpoint plugin: this strategy is not supported"
            )
        checkpoint = captured[-1]
        if world().is_first and (names := own_names(self.model)):
            checkpoint[NAMES_KEY] = names
        return storable(checkpoint)

    def bare_state(self) -> dict[str, Any]:
        """See the base class; hooks see a checkpoint that is not written."""
        with plainly_named(self.trainer, self.model):
            return storable(self.trainer._checkpoint_connector.dump_checkpoint(weights_only=False))

    def describe(self, state: Mapping[str, Any]) -> Describe:
        path = (trained_key(state),)
        return describe_training(
            self.model, self.optimizers, model_path=path, optimizers_path=("optimizer_states",)
        )

    def parts(self, state: Mapping[str, Any]) -> tuple[Any, Sequence[Any]]:
        return state[trained_key(state)], state["optimizer_states"]

    def rehearsed(self, state: Mapping[str, Any]) -> tuple[Any, Sequence[Any]]:
        weights, states = self.parts(state)
        translates = is_overridden("on_load_checkpoint", self.model) or not self.model.strict_loading
        return state_of(self.model) if translates else weights, states

    def followed(self) -> dict[str, Any]:
        trainer, module = self.trainer, self.model
        with plainly_named(trainer, module):
            checkpoint: dict[str, Any] = {"state_dict": module.state_dict()}
            for callback in trainer.callbacks:
                if isinstance(callback, _AVERAGING):
                    callback.on_save_checkpoint(trainer, module, checkpoint)
        return checkpoint

    def live(self) -> dict[str, Any]:
        return {**self.followed(), "optimizer_states": [each.state_dict() for each in self.optimizers]}

    def targets(self, specs: Mapping[str, TensorSpec], others: Any = None) -> dict[str, torch.Tensor]:
        start = f"{POSITION_KEY}/{_GRADIENTS}/"
        gradients = {
            name: torch.zeros_like(parameter.detach())
            for name, parameter in named_parameters(self.model)
            if f"{start}{name}" in specs
        }
        return super().targets(specs, {POSITION_KEY: {_GRADIENTS: gradients}})

    # ---- measuring

    def loss(self, batch: Any, index: int, *, held_out: bool, together: bool) -> float:
        """See the base class; of a training batch with manual optimization there is none, since its step would train."""
        trainer, module = self.trainer, self.model
        step, context = module.validation_step, trainer.precision_plugin.val_step_context
        if not held_out:
            step, context = module.training_step, trainer.precision_plugin.train_step_context
            if not (module.automatic_optimization and is_overridden("training_step", module)):
                raise ConfigError(
                    "there is nothing to measure the loss with: no validation batch has been seen, and training_step optimizes by itself"
                )
        moved = move_data_to_device(batch, module.device)
        with captured_logs(trainer, module, by_itself=not together) as logged, context():
            returned = step(*_arguments(step, moved, index))
        return _loss(logged, returned, self._metric)

    def step_losses(self, parts: Sequence[Any], index: int) -> Iterator[torch.Tensor]:
        trainer, module = self.trainer, self.model
        for part in parts:
            batch = move_data_to_device(to_host(part), module.device)  # a copy: some modules change theirs
            with captured_logs(trainer, module), trainer.precision_plugin.train_step_context():
                returned = module.training_step(*_arguments(module.training_step, batch, index))
            loss = returned["loss"] if isinstance(returned, dict) else returned
            if not isinstance(loss, torch.Tensor):
                raise ConfigError(f"training_step returned no loss but {type(loss).__name__}")
            yield loss / trainer.accumulate_grad_batches

    def clip(self) -> None:
        trainer, module = self.trainer, self.model
        with captured_logs(trainer, module):
            module.configure_gradient_clipping(
                trainer.optimizers[0],
                gradient_clip_val=trainer.gradient_clip_val,
                gradient_clip_algorithm=trainer.gradient_clip_algorithm,
            )

    @property
    def scaler(self) -> Any:
        return getattr(self.trainer.precision_plugin, "scaler", None)

    def around(self) -> Sequence[object]:
        trainer = self.trainer
        return trainer, trainer.optimizers, [*self.schedulers().values()]

    def obstacle(self, *, shards: bool) -> str | None:
        trainer, module = self.trainer, self.model
        known = (ModelParallelStrategy,) if shards else (SingleDeviceStrategy, DDPStrategy)
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

    # ---- numbers

    def metrics(self) -> dict[str, float]:
        self.note_metrics()
        values = {name: value for name, (value, _, at) in self._measured.items() if at == self.step}
        return finite({"epoch": self.trainer.current_epoch, **values})

    def note_metrics(self, *, at: int | None = None) -> None:
        """Look for new values, which may be summed over all ranks here; called wherever metrics may have been logged.

        They belong to the present step, unless another is given. Lightning goes on showing a metric until it is
        logged again.
        """
        step = self.step if at is None else at
        for name, value in self.trainer.callback_metrics.items():
            known = self._measured.get(name)  # that its tensor is kept, no other one can be at the same place
            if known is None or (known[0].data_ptr(), known[1]) != (value.data_ptr(), value._version):
                self._measured[name] = (value, value._version, step)

    def path_settings(self) -> dict[str, Any]:
        schedule = self._settings.schedule
        return {
            "every_n_train_steps": schedule.every_n_train_steps,
            "every_n_epochs": schedule.every_n_epochs,
            "gradient_clip_val": self.trainer.gradient_clip_val,
        }

    def log(self, reports: Sequence[SaveReport]) -> None:
        """See the base class; at the saves' own steps, bypassing Lightning's collection of metrics."""
        for report in reports:
            for logger in self.trainer.loggers:
                _log_to(logger, report)

    def show_saving(self, step: int | None) -> None:
        bar = self.trainer.progress_bar_callback
        if bar is None:
            return
        own = vars(bar)
        if self._shows_saving:
            del own["get_metrics"]
        self._shows_saving = step is not None and "get_metrics" not in own  # which may be the user's
        if self._shows_saving:
            metrics = bar.get_metrics
            own["get_metrics"] = lambda *args: {**metrics(*args), "saving": f"step {step}"}


def _log_to(logger: Logger, report: SaveReport) -> None:
    name, words = configuration(report)
    kinds = {base.__name__ for base in type(logger).__mro__}
    text: dict[str, Any] = {name: words} if kinds & _TAKE_TEXT else {}
    logger.log_metrics(numbers(report) | text, step=report.step)
    if "TensorBoardLogger" in kinds:
        logger.experiment.add_text(name, words, report.step)


@contextmanager
def plainly_named(trainer: Trainer, module: LightningModule) -> Iterator[None]:
    """Inside the block the module, and an average of it, have names without those of wrappers."""
    averages = [getattr(part, "_average_model", None) for part in trainer.callbacks]
    with ExitStack() as stack:
        for model in (module, *averages):
            if model is not None:
                stack.enter_context(plain_names(model))
        yield


@contextmanager
def captured_logs(
    trainer: Trainer, module: LightningModule, *, by_itself: bool = True
) -> Iterator[dict[str, Any]]:
    """Redirect a step's logging into a dict, away from the trainer's loggers, metrics and progress bars.

    The module's logging methods are replaced meanwhile, and the loggers, which a step may write to itself, silenced.
    Where one process measures for all (`by_itself`), none may wait for others.
    """
    logged: dict[str, Any] = {}

    def log(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        logged[name] = value

    def log_dict(values: Mapping[str, Any], *args: Any, **kwargs: Any) -> None:
        logged.update(values)

    def all_gather(*args: Any, **kwargs: Any) -> None:
        raise ConfigError(
            "the step calls all_gather, but each process measures by itself: gather in"
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


def _arguments(step: Callable[..., Any], batch: Any, index: int) -> list[Any]:
    """Return the arguments of a training or validation step, or raise a ConfigError where it reads its batches itself."""
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
