"""One run of Hugging Face's Trainer that is being saved: the handlers of the callback's events and of replaced
methods."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from shrinkpoint.engine.address import Address
from shrinkpoint.errors import ConfigError
from shrinkpoint.group.group import world
from shrinkpoint.integrations.transformers.adapter import TransformersAdapter
from shrinkpoint.integrations.transformers.data import DataPlace
from shrinkpoint.integrations.transformers.hooks import Override, overridden
from shrinkpoint.integrations.transformers.resume import (
    choose,
    is_complete,
    is_sharded,
    require_supported,
    require_supported_args,
    write_thin,
)
from shrinkpoint.integrations.transformers.settings import Settings
from shrinkpoint.integrations.transformers.state import (
    inside_epoch,
    load_callbacks,
    load_generated,
)
from shrinkpoint.session.continuing import load_model
from shrinkpoint.session.session import TrainingSession
from shrinkpoint.session.triggers import Trigger
from shrinkpoint.warn import warn

_log = logging.getLogger(__name__)


class Session:
    """Drives a `TrainingSession` from a trainer's events, by whose names its methods are; every one is called on every rank."""

    def __init__(self, settings: Settings) -> None:
        self._given = self.settings = settings
        self._set_up()

    def _set_up(self, *, shards: bool = False) -> None:
        self.adapter = TransformersAdapter(self.settings, DataPlace(self._sees))
        self.run = TrainingSession(self.settings.run, self.adapter, shards=shards)
        self._trainer: Any = None
        self._stored: Mapping[str, Any] | None = None
        self._seen_step = self._evaluated_batches = 0
        self._requested = self._epoch_over = self._best_loaded = self._evaluated = False
        self._best_metric: float | None = None
        self._best_step: int | None = None

    def renewed(self) -> "Session":
        """Return a fresh one with the same options, for another training."""
        return Session(self._given)

    # ---- before training

    def on_init_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Refuse a training that could not be saved; the trainer has been built."""
        require_supported_args(args)
        self.settings.for_trainer(args)

    @contextmanager
    def training(self, trainer: Any, given: Any) -> Iterator[Any]:
        """Wraps a whole call of ``Trainer.train``, also one that ends with an error; gives its
        ``resume_from_checkpoint``.

        Raises:
            ConfigError: this training cannot be saved.
            ShrinkpointError: as `choose`; the store cannot be reached or written.
        """
        require_supported(trainer)
        self.settings = self._given.for_trainer(trainer.args)
        self._set_up(shards=is_sharded(trainer))
        if self.run.path is not None:
            self.run.plan(self.settings.planned_for(trainer.args))
        self.run.is_monitor_asked_for = self._given.run.saver.monitor is not None
        self._trainer = self.adapter.trainer = trainer
        try:
            self.run.open()
            self.run.refer_to(trainer.model)
            with ExitStack() as stack:
                self._stored = choose(self.run, trainer, given)
                if self._stored is not None:
                    if not self.run.shards:
                        self._take(self._stored)
                    folder = Path(stack.enter_context(TemporaryDirectory(prefix="shrinkpoint-")))
                    complete = is_complete(self._stored, trainer.args)
                    given = write_thin(self._stored, folder, complete=complete)
                stack.enter_context(overridden(trainer, self._overrides()))
                yield given
        finally:
            self._close()

    def _take(self, stored: Mapping[str, Any]) -> None:
        if len(stored["processes"]) == world().size:
            self.adapter.data.load(stored["processes"][world().rank]["place"])
        self.run.note_restored(stored)

    def _followed(self, loader: Any) -> Any:
        trainer = self._trainer
        owners = [trainer.model, trainer, *trainer.callback_handler.callbacks]
        return self.adapter.data.follow(loader, owners)

    def _overrides(self) -> dict[str, Override]:
        return {
            "get_train_dataloader": lambda original: lambda: self._followed(original()),
            "_load_from_checkpoint": self._instead(self._load_model),
            "_load_optimizer_and_scheduler": self._instead(self._load_optimizer),
            "_load_rng_state": self._instead(lambda stored: self._place_is_found()),
            "_maybe_log_save_evaluate": self._around_moments,
            "_save_checkpoint": lambda original: self._request if self._takes_over else original,
            "prediction_step": self._before_evaluating,
            "_load_scaler": self._instead(lambda stored: None),  # loaded with the optimizer
            "_load_callback_state": self._instead(lambda stored: load_callbacks(stored, self._trainer)),
            "_load_best_model": lambda original: self._load_best if self._takes_over else original,
        }

    def _instead(self, load: Any) -> Override:
        """Load shrinkpoint's checkpoint where the trainer would load a part of its own, if it continues
        one."""

        def override(original: Any) -> Any:
            def replacement(*args: Any, **kwargs: Any) -> Any:
                return original(*args, **kwargs) if self._stored is None else load(self._stored)

            return replacement

        return override

    def _load_model(self, stored: Mapping[str, Any]) -> None:
        if "model" in stored:
            load_model(stored["model"], self._trainer.model, self.run.settings.url)

    def _load_optimizer(self, stored: Mapping[str, Any]) -> None:
        if self.run.shards:  # the model is sharded now, and the optimizer exists
            stored = self._restored(self.run.saved_step)
            self._take(stored)
            self._load_model(stored)
            self._stored = stored
        self.adapter.load_training(stored, shards=self.run.shards)

    def _restored(self, step: int, *, adopt: bool = True) -> Any:
        state = self.run.restore(step, adopt=adopt)
        if self.run.shards:
            state["optimizers"] = self.adapter.reordered(state["optimizers"])
        return state

    def _place_is_found(self) -> None:
        if inside_epoch(self._trainer.state) and not self._trainer.args.ignore_data_skip:
            self.adapter.data.in_epoch()
        else:
            self.adapter.data.between_epochs()

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Everything is built and loaded; refuses a trainer that trains in a way of its own by a ConfigError."""
        if self._trainer is None:
            if state.is_hyper_param_search:
                return
            raise ConfigError(
                "CompressedCheckpoint is in a trainer whose train() does not go through transformers.Trainer.train, and so can"
                " neither continue nor save it"
            )
        trainer = self._trainer
        if self._stored is not None:
            if len(self._stored["processes"]) == world().size:
                load_generated(self._stored["processes"][world().rank]["generated"], trainer)
            self.adapter.progress.restore(trainer, self._stored)
            if self._ranks:
                state.best_model_checkpoint = world().broadcast(self.run.best.best_path) or None
        self._best_metric = state.best_metric
        self._seen_step = state.global_step
        self.run.trigger = Trigger(self.settings.schedule_for(trainer.args, state.save_steps))
        self.run.trigger.start(step=state.global_step, epochs=int(state.epoch or 0))
        self.run.termination.watch()
        self.run.begin()
        if self._stored is not None and not trainer.args.auto_find_batch_size:  # which loads once more
            self._stored = {"format": self._stored["format"]}  # the rest has been loaded, and takes memory

    # ---- during training

    @property
    def _takes_over(self) -> bool:
        return not self.settings.keep_trainer_saves

    @property
    def _ranks(self) -> bool:
        """Whether the run's best checkpoint is the one that the trainer asks for."""
        saver, wanted = self.settings.run.saver, Settings.ranking(self._trainer.args)
        return self._takes_over and wanted == (saver.monitor, saver.mode)

    @property
    def _new_best(self) -> bool:
        """Whether the last evaluation was the best so far, and of the present weights."""
        return self._ranks and self._best_step == self._trainer.state.global_step

    def _sees(self, batch: Any, number: int) -> None:
        """Note that a batch is about to be trained on."""
        if self._trainer is not None:
            self.run.probe.kept.see_training(batch)
            accumulated = self._trainer.args.gradient_accumulation_steps
            self.run.steps.recent.see(batch, first=number % accumulated == 0)

    def _before_evaluating(self, original: Any) -> Any:
        def prediction_step(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            if self._trainer.is_in_train:
                self.run.probe.kept.see_validation(inputs, self._evaluated_batches)
                self._evaluated_batches += 1
            return original(model, inputs, *args, **kwargs)

        return prediction_step

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Note that an evaluation is over."""
        self._evaluated_batches = 0
        self._evaluated = True

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Note that the gradients of an optimizer step are complete."""
        if self._trainer is not None:
            remaining = self.run.trigger.steps_until_due(state.global_step)
            self.run.gradients_complete(None if remaining is None else remaining - 1)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The trainer has decided whether it saves after this step: the save is made by shrinkpoint."""
        if self._trainer is not None:
            self._requested |= bool(control.should_save) and self.settings.schedule is None
            if self._takes_over:
                control.should_save = False

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Note that all batches of an epoch have been trained on, or the training stops within it."""
        self.on_step_end(args, state, control)
        self._epoch_over = True

    def _request(self, *args: Any, **kwargs: Any) -> None:
        self._requested = True  # by a strategy that knows after the evaluation

    def _around_moments(self, original: Any) -> Any:
        def log_save_evaluate(tr_loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
            self.adapter.progress.add_pending(tr_loss)
            original(tr_loss, *args, **kwargs)
            self._moment(tr_loss)

        return log_save_evaluate

    def _moment(self, tr_loss: torch.Tensor) -> None:
        """After a step, or an epoch, has been logged and evaluated: the moment from which a run is continued; as
        `TrainingSession.moment`.

        After an epoch's last step the epoch's end is still to come, so its checkpoint is delayed until then.
        """
        state, control = self._trainer.state, self._trainer.control
        self.adapter.tr_loss = tr_loss
        epoch_over, self._epoch_over = self._epoch_over, False
        if state.global_step != self._seen_step:
            self.run.trigger.after_step(state.global_step, agree=world().broadcast)
            self._seen_step = state.global_step
            self.run.rehearse()
        if epoch_over and not inside_epoch(state):
            self.run.trigger.after_epoch(round(state.epoch))
        if state.best_metric != self._best_metric:
            self._best_metric, self._best_step = state.best_metric, state.global_step
        best = self._new_best and self._trainer.args.load_best_model_at_end
        if self._evaluated:
            self._requested |= world().broadcast(world().is_first and self.run.owes(self.adapter.metrics()))
            self._evaluated = False
        self.run.serve()
        if not epoch_over and not inside_epoch(state):
            return
        # what the trainer itself asks for follows from its arguments and from what it has measured
        planned = self.run.trigger.planned or self._requested or best
        due = self.run.trigger.due or self._requested
        saved = self.run.moment(due=due, planned=planned, last=bool(control.should_training_stop) or best)
        if due or best or control.should_training_stop:
            self._requested = False
        if saved and self._new_best:
            state.best_model_checkpoint = str(Address(url=self.run.settings.url, step=self.adapter.step))

    # ---- after training

    def _load_best(self) -> None:
        trainer = self._trainer
        self.adapter.tr_loss = None
        self.run.finish()
        address = Address.parse(self.run.best.best_path)
        # the trainer would look for a folder; `on_train_end` sets it again
        trainer.state.best_model_checkpoint = None
        if address is None:
            warn(
                "there is no best checkpoint to load: no evaluation has been saved. The model is not changed"
            )
            return
        step = address.step
        assert step is not None
        self._load_model(self._restored(step, adopt=False))
        self._best_loaded = True
        _log.info("the best model is loaded from %s", address)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Save the last steps unless they are saved, and wait until everything is committed, or raise a SaveFailedError."""
        if self._trainer is None:
            return
        self.adapter.tr_loss = None
        self.run.ends(saves=not self._best_loaded)
        if self._ranks:
            state.best_model_checkpoint = self.run.best.best_path or None

    def _close(self) -> None:
        """Finish a running save, after an error too; the other processes may have ended."""
        self.run.fail()
        self.run.release()
        self.run.start_over()
        self._trainer = self.adapter.trainer = self._stored = None
        self.adapter.data = DataPlace(self._sees)
