"""One Lightning run that is being saved: the handlers of the callback's hooks."""

import math
import signal
from collections.abc import Mapping
from functools import partial
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.precision import DoublePrecision
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException

from shrinkpoint.engine.address import Address
from shrinkpoint.engine.fitting import quantized_as
from shrinkpoint.errors import ConfigError, StateMismatchError
from shrinkpoint.group.group import world
from shrinkpoint.integrations.lightning.adapter import LightningAdapter, Settings
from shrinkpoint.integrations.lightning.io import RunCheckpointIO, load_checkpoint, require_supported
from shrinkpoint.integrations.lightning.position import POSITION_KEY, Position
from shrinkpoint.integrations.lightning.resume import (
    continue_run,
    is_tuning,
    replay,
    requeueing,
    require_module,
)
from shrinkpoint.optimizers.objects import put_back_objects
from shrinkpoint.runtime.termination import TerminationRequest, signals_of
from shrinkpoint.saver import Saver
from shrinkpoint.session.adapter import SESSION
from shrinkpoint.session.continuing import require_same_training
from shrinkpoint.session.gradients import require_fresh_gradients
from shrinkpoint.session.identity import rounded_weights, scheduler_classes
from shrinkpoint.session.session import TrainingSession
from shrinkpoint.session.trained import load_trained
from shrinkpoint.session.triggers import Trigger
from shrinkpoint.sharded.placement import ShardedPlacement
from shrinkpoint.state.stateful import load_optimizer, plain_names, put_back_dtypes

_SCHEDULERS = "schedulers"  # the classes of schedulers, in its position
_STOPPED = "stopped"  # whether early stopping has ended training here


class Session:
    """Drives a `TrainingSession` from a trainer's hooks, by whose names its methods are; every one is called on every rank.

    Raises:
        ConfigError: an option is not for sharded models.
    """

    def __init__(self, settings: Settings, *, shards: bool = False) -> None:
        self.settings = settings
        self.adapter = adapter = LightningAdapter(settings, shards=shards)
        self.run = TrainingSession(settings.run, adapter, shards=shards)
        self.run.trigger = Trigger(settings.schedule)
        more = signals_of(settings.run.saver.signals)
        self._interruption = TerminationRequest(  # Lightning handles SIGTERM itself
            [signal.SIGINT], more=more, answered=lambda: self._training
        )
        # Of a sharded model: Lightning's own handler broadcasts, which is another collective than the other ranks are at.
        preempting = [signal.SIGTERM] if shards else []
        self._preemption = TerminationRequest(preempting, answered=lambda: self._training, replaces=True)
        self._requeue = TerminationRequest(())
        self._training = False
        self._active = False
        self._seen_step = 0
        self._stepped = False
        self._last_batch = False
        self._ending = False
        self._stored_optimizers: list[dict[str, Any]] = []
        self._loaded_optimizers: list[dict[str, Any]] = []
        self._stored_session: Mapping[str, Any] = {}
        self._stored_schedulers: dict[str, str] = {}
        self._validation_pending = False
        self._continues = self._began = self._stopped = False

    # ---- before training

    def setup(self, trainer: Trainer, stage: str) -> None:
        """Check the store before training starts, and make the run continue.

        Raises:
            ConfigError: the strategy is not supported, or two callbacks save to one run.
            StoreError: the store cannot be read or written.
        """
        self.adapter.trainer = trainer
        require_supported(trainer.strategy)
        if trainer.world_size != world().size:
            raise ConfigError(
                f"strategy={type(trainer.strategy).__name__} trains with {trainer.world_size} processes, of which"
                f" torch.distributed knows {world().size}: use a single device or 'ddp', or let Lightning set torch.distributed"
                " up"
            )
        self.run.require_own_url(trainer.checkpoint_callbacks)
        self._active = stage == "fit" and not trainer.fast_dev_run and not is_tuning(trainer)
        if self._active and self.run.path is not None:
            epochs = trainer.max_epochs or 0
            self.run.plan(self.settings.schedule.saves(steps=trainer.max_steps, epochs=epochs))
        RunCheckpointIO.install(trainer.strategy).add_run(self.settings.run.url, self._read)
        if self._active:
            self.run.open()
            self.run.continued = None
            if trainer.global_step == 0:  # a second fit continues from the trainer's present step
                continue_run(trainer, self.run)
            self._training = False
            self._interruption.watch()  # before any worker of a loader is forked, which a Ctrl-C would end
            self._requeue = requeueing(trainer, answered=lambda: self._training)

    def _read(self, address: Address) -> dict[str, Any]:
        """Read a checkpoint for Lightning; of shards the model and the optimizers are filled, and the other entries returned."""
        trainer, shards = self.adapter.trainer, self.run.shards
        self.run.refer_to(trainer.lightning_module)
        ours = address.url == self.settings.run.url
        saver = self.run.saver
        if not ours:
            placement = partial(ShardedPlacement, targets=self.adapter.targets, own=dict)
            saver = Saver(address.url, placement=placement)
        checkpoint = load_checkpoint(address, saver, adopt=ours and self._active, shards=shards)
        if shards:
            self._load_shards(trainer, checkpoint, address.url)
        else:
            self._require_model(trainer, checkpoint)
        return checkpoint

    def _load_shards(self, trainer: Trainer, checkpoint: dict[str, Any], url: str) -> None:
        weights, optimizers = checkpoint.pop("state_dict"), checkpoint.pop("optimizer_states", [])
        if trainer.state.fn == TrainerFn.FITTING:
            optimizers = self.adapter.reordered(optimizers)
            self._note_identities(checkpoint)
            self._require_optimizers(trainer, optimizers, url)
            for optimizer, stored in zip(trainer.optimizers, optimizers, strict=True):
                load_optimizer(optimizer, stored, same_dtypes=True)
        # its tensors are filled already; this is for what else modules store
        with plain_names(trainer.lightning_module) as module:
            module.load_state_dict(weights, strict=trainer.lightning_module.strict_loading)

    def on_load_checkpoint(
        self, trainer: Trainer, module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Take the position from a loaded checkpoint of any kind."""
        if trainer.state.fn == TrainerFn.FITTING:
            self._stopped = checkpoint.get(POSITION_KEY, {}).get(_STOPPED, False)
            self._stored_optimizers = checkpoint.get("optimizer_states", [])
            self._note_identities(checkpoint)
            self.run.note_restored(checkpoint)
            Position.of(trainer).load(trainer, checkpoint)
            if self._loads_own(trainer):
                self.run.remember()

    def _loads_own(self, trainer: Trainer) -> bool:
        address = Address.parse(str(trainer.ckpt_path))
        return self._active and address is not None and address.url == self.settings.run.url

    def _note_identities(self, checkpoint: Mapping[str, Any]) -> None:
        self._stored_session = checkpoint.get(SESSION, {})
        self._stored_schedulers = checkpoint.get(POSITION_KEY, {}).get(_SCHEDULERS, {})

    def on_fit_start(self, trainer: Trainer, module: LightningModule) -> None:
        """Note that the model is built; no batch has been fetched.

        Raises:
            StateMismatchError: the checkpoint that is being restored has other optimizers.
            ConfigError: there can be no step log of this training.
        """
        if self._stored_optimizers:
            self._require_optimizers(trainer, self._stored_optimizers, str(trainer.ckpt_path))
            self._stored_optimizers, self._stored_schedulers = [], {}
        if self._active:
            self.run.refer_to(module)
        self.run.load_trained()
        if self._active and self.settings.run.step_log is not None:
            self._start_log(trainer, module)
        loaded = trainer._checkpoint_connector._loaded_checkpoint
        own = POSITION_KEY in loaded and rounded_weights(loaded["state_dict"], module.state_dict()) is None
        self._loaded_optimizers = loaded.get("optimizer_states", []) if own else []
        self._continues, self._began = self._loads_own(trainer), False
        Position.of(trainer).fit_starts(trainer)

    def _require_optimizers(self, trainer: Trainer, stored: list[dict[str, Any]], url: str) -> None:
        there, ordered = self._stored_session.get("identities", []), not self.run.shards  # which have names
        more = {"ordered": ordered, "warns": trainer.is_global_zero}
        require_same_training(self.adapter, there, stored, url, self._stored_schedulers, **more)

    def _start_log(self, trainer: Trainer, module: LightningModule) -> None:
        step = trainer.global_step
        self.run.begin_log(module, trainer.optimizers)
        assert self.run.log is not None
        loaded = Address.parse(str(trainer.ckpt_path))
        continues = loaded is not None and loaded.url == self.settings.run.url
        if continues and world().broadcast(self.run.continued is not None):
            step = replay(self.run.log, self.adapter)
        elif trainer._checkpoint_connector._loaded_checkpoint:
            step = int(trainer._checkpoint_connector._loaded_checkpoint["global_step"])
        self.run.log.restart(step)

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        """The iterators exist; no batch has been fetched, and Lightning has loaded the optimizers' states.

        Raises:
            StateMismatchError: what was continued has been undone.
        """
        begins, continued = trainer.global_step, self.run.continued
        if self._active and continued is not None and begins < continued:
            raise StateMismatchError(
                f"the training was continued from step {continued}, and is at step {begins} before its first batch: most likely a callback's"
                " on_fit_start, such as LearningRateFinder's or BatchSizeFinder's, has put back what was before. Leave it out where a run is continued"
            )
        if module.automatic_optimization:
            require_fresh_gradients(trainer.optimizers)
        for optimizer, state in zip(trainer.optimizers, self._loaded_optimizers, strict=False):
            put_back_dtypes(optimizer, state)
            put_back_objects(optimizer, state)
        self._loaded_optimizers = []
        self._load_trained(trainer)
        self.run.trained.begin()
        Position.of(trainer).apply(trainer, module)
        self.run.trigger.start(step=trainer.global_step, epochs=trainer.current_epoch)
        self._seen_step = trainer.global_step
        self._training, self._began = self._active, True
        self.adapter.note_metrics(at=-1)  # what was measured before
        if self._continues:
            self.run.saved_step = trainer.global_step
        if self._active:
            self.run.begin()
            self._preemption.watch()
            self._stay_stopped(trainer)

    def _stay_stopped(self, trainer: Trainer) -> None:
        """End a run again that early stopping had ended, if it was continued by itself."""
        stopped = self._stopped and trainer.early_stopping_callbacks
        if stopped and world().broadcast(self.run.continued is not None):
            trainer.should_stop = True
            way_on = f"EarlyStopping has ended it: fit(ckpt_path={str(trainer.ckpt_path)!r}) goes on"
            self.run.warn_complete(trainer.global_step, way_on)

    def _load_trained(self, trainer: Trainer) -> None:
        """Freeze as the checkpoint does, and once more when the module's own ``on_train_start`` has frozen parts as at the first start."""
        self.run.load_trained()
        stored, self._stored_session = self._stored_session.get("trained"), {}
        if stored is None:
            return
        hook = trainer.strategy.on_train_start

        def on_train_start() -> None:
            vars(trainer.strategy).pop("on_train_start", None)
            load_trained(stored, self.adapter, self.settings.run.url)
            self.run.trained.begin()
            hook()

        vars(trainer.strategy)["on_train_start"] = on_train_start

    def _require_model(self, trainer: Trainer, checkpoint: dict[str, Any]) -> None:
        stored = checkpoint.get("state_dict", {})
        if isinstance(trainer.precision_plugin, DoublePrecision):  # which converts it when it is loaded
            trainer.lightning_module.double()
        if trainer.state.fn == TrainerFn.FITTING:
            url, first = self.settings.run.url, trainer.is_global_zero
            require_module(checkpoint, trainer.lightning_module, url, warns=first)
        if "state_dict" in checkpoint:
            given = quantized_as(stored, checkpoint["state_dict"], trainer.lightning_module)
            checkpoint["state_dict"] = given

    # ---- during training

    def on_train_epoch_start(self, trainer: Trainer, module: LightningModule) -> None:
        """Right before an epoch's iterator is built."""
        Position.of(trainer).epoch_starts(trainer)

    def on_train_batch_start(self, trainer: Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        """Note that a batch is about to be trained on."""
        self.run.probe.kept.see_training(batch)
        if self._active:
            self.run.steps.recent.see(batch, first=batch_idx % trainer.accumulate_grad_batches == 0)

    def on_validation_batch_start(
        self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Note that the module is about to get a batch of validation."""
        if dataloader_idx == 0:
            self.run.probe.kept.see_validation(batch, batch_idx)

    def on_before_optimizer_step(self, trainer: Trainer, module: LightningModule, optimizer: Any) -> None:
        """Note that the gradients of an optimizer step are complete."""
        if self._active:
            remaining = self.run.trigger.steps_until_due(trainer.global_step)
            self.run.gradients_complete(None if remaining is None else remaining - 1)

    def on_train_batch_end(
        self, trainer: Trainer, module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save if a checkpoint is due and this moment allows it."""
        if not self._active:
            return
        self.run.serve()
        step = trainer.global_step
        self._stepped, self._seen_step = step != self._seen_step, step
        self.adapter.note_metrics()
        self._last_batch = ends_epoch(trainer, batch_idx)
        self._validation_pending = validation_follows(trainer, batch_idx)
        position = Position.of(trainer)
        position.batch_ends(trainer, validation_follows=self._validation_pending)
        if self._validation_pending:
            self.run.trained.note_modes()
        if self._stepped:
            self.run.rehearse()
            self.run.trigger.after_step(step, agree=world().broadcast)
        if self._last_batch:
            self.run.trigger.after_epoch(trainer.current_epoch + 1)
        self._request_last(trainer)
        terminated, interrupted = self._is_asked_to_end()
        if terminated:
            self.run.trigger.request()
        # A validation interrupted by the signal would leave the ranks at different positions.
        wait = (self._validation_pending and not terminated) or (
            self._last_batch and not self._validation_pending
        )
        known = not wait and (terminated or position.is_known(trainer))
        if self._stepped:
            self.run.log_step(allowed=known)
        if known:
            self._save_if_due(terminated=terminated)
            if interrupted:
                self._end(trainer)

    def _is_asked_to_end(self) -> tuple[bool, bool]:
        """Return whether by any signal, and whether by one that Lightning does not handle, as a Ctrl-C, on any rank.

        One rank may learn of a signal earlier than the others: all must save at the same batch, or none.
        """
        own = self._interruption.received or self._requeue.received or (self.run.shards and self._preempted)
        asked, interrupted = world().any_of(own or self._preempted, own)
        return asked, interrupted

    @property
    def _preempted(self) -> bool:
        return self._preemption.received or self.adapter.trainer.received_sigterm

    def on_validation_end(self, trainer: Trainer, module: LightningModule) -> None:
        """Save what was due at the batch before this validation."""
        if trainer.sanity_checking or trainer.state.fn != TrainerFn.FITTING or not self._active:
            return
        self.run.serve()
        self._validation_pending = False
        self._request_last(trainer)
        self.adapter.note_metrics()
        if self._last_batch:
            return  # after the hooks at the epoch's end, which may log and change more
        if self.run.path is None:
            self.run.trigger.after_validation(trainer.current_epoch + 1)
        self._request_owed(trainer)
        # Gradients may be half accumulated: waiting for the step, no save would ever have the metric.
        self._save_or_end(trainer, anyway=self._is_ranked(trainer))

    def on_train_epoch_end(self, trainer: Trainer, module: LightningModule) -> None:
        """Save what was due at the epoch's last batch."""
        if self._active:
            self.adapter.note_metrics()
            if self._last_batch:  # else training has ended within the epoch, and cannot be continued here
                self._request_last(trainer)
                self._request_owed(trainer)
            self._save_or_end(trainer)

    def _is_ranked(self, trainer: Trainer) -> bool:
        monitor, plain = self.settings.run.saver.monitor, self.run.path is None and self.run.log is None
        known = monitor in self.adapter.metrics()
        return plain and monitor is not None and world().broadcast(known)

    def _save_or_end(self, trainer: Trainer, *, anyway: bool = False) -> None:
        terminated, interrupted = self._is_asked_to_end()
        if terminated and trainer.global_step != self.run.saved_step:
            self.run.trigger.request()
        self._save_if_due(terminated=terminated, anyway=anyway)
        if interrupted:
            self._end(trainer)

    def _end(self, trainer: Trainer) -> None:
        """Do as was asked on every rank when all is stored: end training, or let SLURM requeue the job,
        which then ends it."""
        preempted, requeued, interrupted = world().any_of(
            self.run.shards and self._preempted, self._requeue.received, self._interruption.received
        )
        try:
            if self.run.shards:
                self.run.serve()
                self.run.warn_unsaved(trainer.global_step)
            else:
                self.run.decide(self.run.saver.flush)
        finally:
            if preempted:
                raise SIGTERMException
            if requeued:
                self._requeue.end()
            if interrupted:
                self._interruption.end()

    def on_save_checkpoint(
        self, trainer: Trainer, module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Add to a checkpoint that is being made, if it is shrinkpoint's, the position in the data, from
        every rank."""
        if RunCheckpointIO.install(trainer.strategy).is_capturing:
            position = Position.of(trainer)
            checkpoint[POSITION_KEY] = position.state(
                trainer,
                checkpoint,
                mid_accumulation=not self._stepped,
                validation_pending=self._validation_pending,
                sharded=self.run.shards,
            )
            if position.lacks_gradients(checkpoint[POSITION_KEY]):
                self.run.warn_once(
                    "a save is within an accumulation of gradients by manual optimization, which checkpoints of several processes do not hold: after a resume the next"
                    " step lacks them. Save after steps of all optimizers"
                )
            checkpoint[POSITION_KEY][_SCHEDULERS] = scheduler_classes(self.adapter.schedulers())
            stopping = trainer.early_stopping_callbacks
            if trainer.should_stop and any(c.stopped_epoch == trainer.current_epoch for c in stopping):
                checkpoint[POSITION_KEY][_STOPPED] = True

    def _request_last(self, trainer: Trainer) -> None:
        """Save at the next moment that allows it if training ends here."""
        self._ending = ends_training(trainer, last_batch=self._last_batch)
        if self._ending and trainer.global_step != self.run.saved_step:
            self.run.trigger.request()

    def _request_owed(self, trainer: Trainer) -> None:
        owed = self.run.owes(self.adapter.metrics())
        if self.settings.run.saver.monitor is not None and world().broadcast(owed):
            self.run.trigger.request()

    def _save_if_due(self, *, terminated: bool = False, anyway: bool = False) -> None:
        trigger, adopts = self.run.trigger, self.run.path is not None
        if trigger.due and (self._stepped or self._ending or terminated or anyway):
            planned = adopts and trigger.planned and self._stepped
            last = terminated or self._ending
            self.run.save(last=last, exact=terminated and not planned, again=True, planned=planned)

    # ---- after training

    def on_train_end(self, trainer: Trainer, module: LightningModule) -> None:
        """Save the last steps, and wait until everything is committed."""
        if not self._active:
            return
        self._stepped |= trainer.global_step != self.run.saved_step
        self.run.save(last=True)
        self.run.finish()
        self.run.serve()
        if self._is_asked_to_end()[1]:
            self._end(trainer)
        self._unwatch()

    def on_fit_end(self, trainer: Trainer, module: LightningModule) -> None:
        """Say so where the run that was to be continued had ended before."""
        if self._continues and not self._began:
            self.run.best = world().broadcast(self.run.best)
            self.run.warn_complete(trainer.global_step, "Raise max_epochs or max_steps to continue")

    def on_exception(self, trainer: Trainer, module: LightningModule, exception: BaseException) -> None:
        """Finish a running save; if the process is asked to end between two batches, save there first."""
        terminated = isinstance(exception, SIGTERMException)

        def save() -> None:
            # With several processes the checkpoint was taken at the end of the batch, where all of them agree.
            alone = self._active and trainer.world_size == 1
            if terminated and alone:
                self.run.save(last=True, exact=True)

        self._unwatch()
        if terminated:
            self.run.fail(None, save=save)
        else:
            self.run.fail()

    def _unwatch(self) -> None:
        self._training = False
        for request in (self._interruption, self._requeue, self._preemption):
            request.unwatch()

    def teardown(self, trainer: Trainer, module: LightningModule, stage: str) -> None:
        """Release the store."""
        self._unwatch()
        self.run.close()


# ---- the moments at which a checkpoint allows an exact resume
#
# A checkpoint taken right after a batch makes Lightning skip the validation or the epoch's end that would have followed
# (with a stateful dataloader the whole next epoch is lost). So a due save is delayed until those are over.
#
# When training ends in the middle of an epoch, Lightning ends the epoch too: its hooks run, and its counters advance. A
# longer training cannot be continued from there, so the last checkpoint is taken before that.


def ends_epoch(trainer: Trainer, batch_idx: int) -> bool:
    """Return whether the present batch is its epoch's last one."""
    batches = trainer.fit_loop.epoch_loop.batch_progress
    return batch_idx + 1 >= trainer.num_training_batches or bool(batches.is_last_batch)


def ends_training(trainer: Trainer, *, last_batch: bool) -> bool:
    """Return whether Lightning makes no step after the present batch, as far as is known at its end, or that of a
    validation or an epoch."""
    steps, epochs = trainer.max_steps, trainer.max_epochs
    if steps is not None and 0 <= steps <= trainer.global_step:
        return True
    # Lightning counts an epoch as done only after the hooks at its end.
    if last_batch and epochs is not None and 0 <= epochs <= trainer.current_epoch + 1:
        return True
    return _stops_early(trainer)


def _stops_early(trainer: Trainer) -> bool:
    return trainer.should_stop and getattr(trainer.fit_loop, "_can_stop_early", True)


def validation_follows(trainer: Trainer, batch_idx: int) -> bool:
    """Return whether Lightning may validate right after the present batch.

    A validation by wall-clock time cannot be foreseen.
    """
    if not trainer.enable_validation:
        return False
    if _stops_early(trainer):  # it validates once more before it stops
        return True
    every, epochs = trainer.val_check_batch, trainer.check_val_every_n_epoch
    if every is None or math.isinf(every):
        return False
    if epochs is None:  # counted across epochs
        return bool((trainer.fit_loop.total_batch_idx + 1) % every == 0)
    return bool((trainer.current_epoch + 1) % epochs == 0 and (batch_idx + 1) % every == 0)
