"""One Lightning run that is being saved: what the callback's hooks do."""

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn

from shrinkpoint.address import Address
from shrinkpoint.errors import ConfigError, ShrinkpointError, ShrinkpointWarning
from shrinkpoint.integrations.lightning_gradients import GradientCollector
from shrinkpoint.integrations.lightning_io import RunCheckpointIO, require_supported, storable
from shrinkpoint.integrations.lightning_moments import ends_epoch, validation_follows
from shrinkpoint.integrations.lightning_position import POSITION_KEY, Position
from shrinkpoint.integrations.lightning_probe import LossProbe
from shrinkpoint.integrations.lightning_ranks import on_rank_zero
from shrinkpoint.integrations.lightning_reports import (
    BestCheckpoints,
    finite_metrics,
    log_reports,
    metrics_of,
)
from shrinkpoint.integrations.lightning_resume import continue_run, is_tuning, require_module
from shrinkpoint.integrations.lightning_settings import Settings
from shrinkpoint.integrations.triggers import Trigger
from shrinkpoint.resume import require_optimizers
from shrinkpoint.roles import describe_training
from shrinkpoint.saver import Saver

__all__ = ["Session"]

_FAILED_S = 60.0  # after an error, what a save that is under way may still take


class Session:
    """Drives a `Saver` from a trainer's hooks; every method is called on every rank.

    Args:
        settings: the callback's options.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        metric = settings.monitor if settings.mode == "min" else None
        self.probe = LossProbe(metric=metric, batches=settings.probe_batches)
        self.best = BestCheckpoints(
            url=settings.url, monitor=settings.monitor, mode=settings.mode, top_k=settings.save_top_k
        )
        self.saved_step = 0
        """Optimizer steps at the last checkpoint of this run."""
        self._trigger = Trigger(settings.schedule)
        self._gradients = GradientCollector()
        self._saver: Saver | None = None
        self._active = False
        self._seen_step = 0
        self._stepped = False
        self._last_batch = False
        self._stored_optimizers: list[dict[str, Any]] = []
        self._position_wanted = False
        self._validation_pending = False
        self._told = 0
        self._warned: set[str] = set()

    # ---- before training

    def setup(self, trainer: Trainer, stage: str) -> None:
        """Check the store before training starts, and arrange that the run continues.

        Raises:
            ConfigError: the strategy is not supported, or two callbacks save to one run.
            StoreError: the store cannot be read or written.
        """
        require_supported(trainer.strategy)
        self._require_own_run(trainer)
        self._active = stage == "fit" and not trainer.fast_dev_run and not is_tuning(trainer)
        saver = self._saver = self._saver or self._new_saver()
        io = RunCheckpointIO.install(trainer.strategy)
        io.add_run(self.settings.url, saver, lambda checkpoint: self._require_model(trainer, checkpoint))
        if self._active:
            on_rank_zero(trainer.strategy, saver.check)
            if trainer.global_step == 0:  # a second fit goes on from where the trainer stands
                continue_run(trainer, saver, self.settings.resume)

    def take_position(self, trainer: Trainer, checkpoint: dict[str, Any]) -> None:
        """A checkpoint of any kind is being loaded."""
        if trainer.state.fn == TrainerFn.FITTING:
            self._stored_optimizers = checkpoint.get("optimizer_states", [])
            Position.of(trainer).load(trainer, checkpoint)

    def fit_starts(self, trainer: Trainer) -> None:
        """The model stands, and nothing has been drawn yet.

        Raises:
            StateMismatchError: the checkpoint that is being restored has other optimizers.
        """
        if self._stored_optimizers:
            require_optimizers(self._stored_optimizers, trainer.optimizers, str(trainer.ckpt_path))
            self._stored_optimizers = []
        Position.of(trainer).fit_starts()

    def train_starts(self, trainer: Trainer, module: LightningModule) -> None:
        """The iterators exist, and no batch has been drawn yet."""
        Position.of(trainer).apply(trainer, module)
        self._trigger.start(step=trainer.global_step, epochs=trainer.current_epoch)
        self._seen_step = trainer.global_step
        loaded = Address.parse(str(trainer.ckpt_path))
        if self._active and loaded is not None and loaded.url == self.settings.url:
            self.saved_step = trainer.global_step
            on_rank_zero(trainer.strategy, self._remember_checkpoints)
            if not trainer.is_global_zero:  # only the first process goes on from what it has read
                assert self._saver is not None
                self._saver.forget()

    def _remember_checkpoints(self) -> None:
        assert self._saver is not None
        for manifest in reversed(self._saver.store.manifests()):
            self.best.add(manifest.step, metrics_of(manifest))

    def _new_saver(self) -> Saver:
        return Saver(self.settings.url, self.settings.saver, storage_options=self.settings.storage_options)

    def _require_model(self, trainer: Trainer, checkpoint: dict[str, Any]) -> None:
        if trainer.state.fn == TrainerFn.FITTING:
            require_module(checkpoint, trainer.lightning_module, self.settings.url)

    def _require_own_run(self, trainer: Trainer) -> None:
        sessions = [getattr(callback, "_session", None) for callback in trainer.checkpoint_callbacks]
        urls = [session.settings.url for session in sessions if isinstance(session, Session)]
        if urls.count(self.settings.url) > 1:
            raise ConfigError(
                f"two CompressedCheckpoint callbacks save to {self.settings.url}: give each a URL of its own, or use one"
            )

    # ---- during training

    def epoch_starts(self, trainer: Trainer) -> None:
        """Right before an epoch's iterator is built."""
        Position.of(trainer).epoch_starts(trainer)

    def before_step(self, trainer: Trainer, module: LightningModule) -> None:
        """The gradients of an optimizer step are complete."""
        if self._active and trainer.is_global_zero and self.settings.saver.scheme != "lossless":
            self._gradients.before_step(trainer, module, self._trigger)

    def batch_ends(self, trainer: Trainer, module: LightningModule, batch_idx: int) -> None:
        """Save if a checkpoint is due and this moment allows it."""
        if not self._active:
            return
        self._attend(trainer)
        step = trainer.global_step
        self._stepped, self._seen_step = step != self._seen_step, step
        self._last_batch = ends_epoch(trainer, batch_idx)
        self._validation_pending = validation_follows(trainer, batch_idx)
        position = Position.of(trainer)
        position.batch_ends(trainer, validation_follows=self._validation_pending)
        if self._stepped:
            self._trigger.after_step(step, agree=trainer.strategy.broadcast)
        if self._last_batch:
            self._trigger.after_epoch(trainer.current_epoch + 1)
        # One rank may learn of a signal earlier than the others: all must save at the same batch, or none.
        terminated = trainer.strategy.reduce_boolean_decision(trainer.received_sigterm, all=False)
        if terminated:
            self._trigger.request()
        # A validation that is broken off by the signal would leave the ranks at different places.
        wait = (self._validation_pending and not terminated) or (
            self._last_batch and not self._validation_pending
        )
        if not wait and (terminated or position.is_known(trainer)):
            self._save_if_due(trainer, module, terminated=terminated)

    def validation_ends(self, trainer: Trainer, module: LightningModule) -> None:
        """Save what was due at the batch before this validation."""
        if trainer.sanity_checking or trainer.state.fn != TrainerFn.FITTING or not self._active:
            return
        self._attend(trainer)
        self._validation_pending = False
        if not (self._last_batch and self.settings.on_epoch_end):
            self._save_if_due(trainer, module)

    def epoch_ends(self, trainer: Trainer, module: LightningModule) -> None:
        """Save what was due at the epoch's last batch."""
        if self._active:
            self._save_if_due(trainer, module)

    def add_position(self, trainer: Trainer, checkpoint: dict[str, Any]) -> None:
        """A checkpoint of any kind is being made."""
        if self._position_wanted:
            position = Position.of(trainer)
            checkpoint[POSITION_KEY] = position.state(
                trainer,
                checkpoint,
                mid_accumulation=not self._stepped,
                validation_pending=self._validation_pending,
            )

    def _save_if_due(self, trainer: Trainer, module: LightningModule, *, terminated: bool = False) -> None:
        if self._trigger.due and (self._stepped or terminated):
            self._save(trainer, module, last=terminated, exact=terminated)

    def _attend(self, trainer: Trainer) -> None:
        """Serve the background's evaluation, and pass finished saves on."""
        if not trainer.is_global_zero or self._saver is None:
            return
        self._saver.poll()
        reports = self._saver.reports()[self._told :]
        self._told += len(reports)
        for report in reports:
            self.best.add(report.step, report.metrics)
        log_reports(trainer, reports)

    def _save(
        self, trainer: Trainer, module: LightningModule, *, last: bool = False, exact: bool = False
    ) -> None:
        """Take a checkpoint by Lightning's own way, which ends in our plugin on the first rank.

        Args:
            trainer: between two batches.
            module: the model.
            last: there will be no other: wait for the one that is under way rather than skip this one.
            exact: spend no time on a search.
        """
        self._trigger.saved()
        outcome: list[bool | Exception] = []

        def write(checkpoint: dict[str, Any]) -> None:
            try:
                outcome.append(self._hand_over(trainer, module, checkpoint, last=last, exact=exact))
            except Exception as error:  # noqa: BLE001 - raised below, on every rank: the others wait at a barrier
                outcome.append(error)

        def result() -> bool:
            (first,) = outcome
            if isinstance(first, Exception):
                raise first
            return first

        token = f"shrinkpoint-step-{trainer.global_step}"
        self._position_wanted = True
        try:
            with RunCheckpointIO.install(trainer.strategy).writing(token, write):
                trainer.save_checkpoint(token, weights_only=False)
        finally:
            self._position_wanted = False
        if on_rank_zero(trainer.strategy, result):
            self.saved_step = trainer.global_step

    def _hand_over(
        self,
        trainer: Trainer,
        module: LightningModule,
        checkpoint: dict[str, Any],
        *,
        last: bool,
        exact: bool,
    ) -> bool:
        assert self._saver is not None
        metrics = finite_metrics(trainer)
        if self.settings.monitor is not None and self.settings.monitor not in metrics:
            self._warn_once(
                f"monitor={self.settings.monitor!r} had not been logged when step {trainer.global_step} was saved; until it"
                f" is, checkpoints take no part in the ranking. Logged so far: {', '.join(sorted(metrics)) or 'nothing'}",
                topic="monitor",
            )

        def evaluate(weights: Mapping[str, torch.Tensor]) -> float:
            try:
                return self.probe.evaluate(trainer, module, weights)
            except Exception as error:
                self._warn_once(
                    f"the quality of checkpoints cannot be measured, so they are stored exactly: {error}"
                )
                raise

        accepted = self._saver.save(
            storable(checkpoint),
            step=trainer.global_step,
            describe=describe_training(
                module, trainer.optimizers, model_path=("state_dict",), optimizers_path=("optimizer_states",)
            ),
            metrics=metrics,
            evaluate=evaluate,
            gradients=self._gradients.take(trainer),
            exact=exact,
            wait=last and self._saver.busy,
        )
        return accepted is not None

    def _warn_once(self, message: str, *, topic: str | None = None) -> None:
        if (topic or message) not in self._warned:
            self._warned.add(topic or message)
            warnings.warn(message, ShrinkpointWarning, stacklevel=2)

    # ---- after training

    def train_ends(self, trainer: Trainer, module: LightningModule) -> None:
        """Save the last steps, and wait until everything is committed."""
        saver = self._saver
        if not self._active or saver is None:
            return
        unsaved = trainer.global_step != self.saved_step
        if unsaved and (self._trigger.due or self.settings.save_last):
            self._stepped = True
            self._save(trainer, module, last=True)
        on_rank_zero(trainer.strategy, saver.flush)
        if on_rank_zero(
            trainer.strategy, lambda: saver.failed
        ):  # there will be no next save to make up for it
            self._save(trainer, module, last=True)
            on_rank_zero(trainer.strategy, saver.flush)
        self._attend(trainer)
        self.best = trainer.strategy.broadcast(self.best)

    def fails(self, trainer: Trainer, module: LightningModule, *, terminated: bool) -> None:
        """Finish what is under way; when the process is asked to end between two batches, save there first."""
        if self._saver is None:
            return
        try:
            # With several processes the checkpoint was taken at the end of the batch, where all of them agree.
            if (
                terminated
                and self._active
                and trainer.world_size == 1
                and trainer.global_step != self.saved_step
            ):
                self._save(trainer, module, last=True, exact=True)
            if not self._saver.close(None if terminated else _FAILED_S):
                warnings.warn(
                    f"the save to {self.settings.url} is still under way after {_FAILED_S:.0f} s; the process ends when"
                    " it is finished",
                    ShrinkpointWarning,
                    stacklevel=2,
                )
        except ShrinkpointError as error:  # the exception that brought us here is the one to show
            warnings.warn(f"the last checkpoint was not saved: {error}", ShrinkpointWarning, stacklevel=2)

    def close(self) -> None:
        """Let go of the store."""
        if self._saver is not None:
            self._saver.close()
