"""One Composer run that is being saved: the handlers of the callback's events."""

from collections.abc import Mapping
from typing import Any

import torch
from composer.algorithms.sam import SAMOptimizer
from composer.callbacks import CheckpointSaver
from composer.core import Event, State
from composer.loggers import Logger

from shrinkpoint.errors import ConfigError
from shrinkpoint.group.group import world
from shrinkpoint.integrations.composer.adapter import ComposerAdapter
from shrinkpoint.integrations.composer.gathering import GatheringSession
from shrinkpoint.integrations.composer.resume import continue_run, require_supported
from shrinkpoint.integrations.composer.schedule import Settings, saves_until
from shrinkpoint.integrations.composer.state import trained_module
from shrinkpoint.session.gradients import require_fresh_gradients
from shrinkpoint.session.session import TrainingSession
from shrinkpoint.warn import warn

_LINEAGE = "lineage"


class Session:
    """Drives a `TrainingSession` from a trainer's events, by whose names its methods are; every one is called on
    every rank.

    Raises:
        ConfigError: an option is not for sharded models.
    """

    def __init__(self, settings: Settings, *, shards: bool = False) -> None:
        self.settings = settings
        self.adapter = adapter = ComposerAdapter(settings)
        self.run: TrainingSession = (
            TrainingSession(settings.run, adapter, shards=True)
            if shards
            else GatheringSession(settings.run, adapter)
        )
        self._loaded_lineage: str | None = None
        self._postponed = False
        self._first_part = True

    # ---- the callback's own state in checkpoints

    def state(self) -> dict[str, Any]:
        """Return which training the checkpoints of the run belong to; empty before the first one, and but on the first rank."""
        lineage = self.run.lineage
        return {} if lineage is None else {_LINEAGE: lineage}

    def load_state(self, stored: Mapping[str, Any]) -> None:
        """Note the training that Composer has loaded, for `after_load`."""
        self._loaded_lineage = stored.get(_LINEAGE)

    # ---- before training

    def init(self, state: State, logger: Logger) -> None:
        """Check the store before anything expensive; the trainer is being built.

        Raises:
            ConfigError: two callbacks save to one run, or no process will ever have the whole state.
            StoreError: the store cannot be read or written.
        """
        self.adapter.run, self.adapter.logger = state, logger
        require_supported(state)
        self.run.require_own_url(state.callbacks)
        if world().is_first and any(isinstance(callback, CheckpointSaver) for callback in state.callbacks):
            warn(
                f"save_folder makes Composer write checkpoints of its own too, in full size, while training waits. They are"
                f" independent of those in {self.settings.run.url}; without save_folder the run is saved and continued as well"
            )
        if self.run.path is not None:
            if state.fsdp_config is not None and not self.run.shards:
                raise ConfigError(
                    "adopt=True with FSDP needs FSDP2 and parallelism_config['fsdp']['state_dict_type']='sharded': leave it out, or give"
                    " scheme='lossless'"
                )
            saves_until(self.settings.interval, None)  # refuses a clock
        if not self._counts_saves:
            self.run.open()

    @property
    def _counts_saves(self) -> bool:
        """Whether the number of planned saves follows from the trainer's limits."""
        return self.run.path is not None and self.settings.run.saver.adoptions is None

    def after_load(self, state: State) -> None:
        """Continue the run, unless it was loaded from a load_path already; raises as `continue_run`."""
        if self._counts_saves:  # the trainer sets its max_duration after `init`
            self.run.plan(saves_until(self.settings.interval, state.max_duration))
            self.run.open()
        if state.fsdp_config is None:
            self.run.refer_to(trained_module(state))
        elif self.settings.run.saver.frozen == "reference":
            raise ConfigError(
                "frozen='reference' is not supported with FSDP yet: give Advanced(frozen='store')"
            )
        elif any(isinstance(each, (torch.optim.LBFGS, SAMOptimizer)) for each in state.optimizers):
            raise ConfigError("Composer cannot load the state of LBFGS and SAM with FSDP: train without FSDP")
        continue_run(self.run, self.adapter, lineage=self._loaded_lineage)

    def fit_start(self, state: State) -> None:
        """Training starts or continues; refuses an optimizer that trains what is not in the model, by a ConfigError."""
        require_fresh_gradients(state.optimizers)
        if self.adapter.step < self.run.saved_step:  # ``fit(reset_time=True)``: the count of batches restarts
            self.run.saved_step = 0
        self.run.termination.watch()
        self.adapter.data.fit_starts(state)
        self.run.begin()
        if self.run.continued is not None:
            _keep_modes(state.model)
        if outside := self.run.trained.state({})["trained"]["outside"]:
            raise ConfigError(
                f"the optimizer trains {len(outside)} parameters that are not in the model, whose state Composer cannot name: make"
                " them parameters of the ComposerModel, such as a loss or a head that is an attribute of it"
            )

    # ---- during training

    def epoch_start(self, state: State) -> None:
        """Note that an epoch's iterator is about to be built."""
        self.adapter.data.epoch_starts(state)

    def before_dataloader(self, state: State) -> None:
        """Note that a training batch is about to be fetched."""
        self.adapter.data.fetches(state)

    def batch_start(self, state: State) -> None:
        """Note that a batch is about to be trained on."""
        self.adapter.data.batch_starts(state)
        self._first_part = True

    def before_forward(self, state: State) -> None:
        """The model is about to get a batch of training, or the part of one that fits into memory."""
        self.run.probe.kept.see_training(state.batch)
        self.run.steps.recent.see(state.batch, first=self._first_part)
        self._first_part = False

    def eval_before_forward(self, state: State) -> None:
        """The model is about to get a batch of evaluation, or the part of one that fits into memory."""
        first = next((evaluator.label for evaluator in state.evaluators), None)
        if state.dataloader_label == first:
            self.run.probe.kept.see_validation(state.batch, int(state.eval_timestamp.batch))

    def eval_end(self, state: State) -> None:
        """Note that one evaluator has been run."""
        self.adapter.evaluated[str(state.dataloader_label)] = int(state.timestamp.batch)

    def _owes(self, state: State) -> bool:
        measured = int(state.timestamp.batch) in self.adapter.evaluated.values()
        return measured and world().is_first and self.run.owes(self.adapter.metrics())

    def batch_end(self, state: State) -> None:
        """A step has been made, of several passes perhaps; its gradients are still available."""
        every = self.settings.every_batches
        self.run.gradients_complete(None if every is None else -int(state.timestamp.batch) % every)

    def epoch_end(self, state: State) -> None:
        """Note that all of an epoch's batches have been fetched."""
        self.adapter.data.epoch_ends(state)

    def checkpoint(self, state: State, event: Event) -> None:
        """Serve the background worker, and save if a checkpoint is due, at a moment from which a run can be
        continued; as `moment`."""
        due, error = False, None
        try:
            due = bool(self.settings.due(state, event))  # on every rank: the user's function may communicate
        except Exception as caught:  # noqa: BLE001 - raised below, when the others know
            error = caught
        failed, due, wanted, owed = world().any_of(
            error is not None,
            world().is_first and due,
            isinstance(self.run, GatheringSession) and self.run.evaluation_wanted,
            self._owes(state),
        )
        if failed:
            world().raise_together(error)
        if not state.fsdp_enabled:  # whose shards would have to be gathered
            self.run.rehearse()
        if wanted and isinstance(self.run, GatheringSession):
            self.run.evaluate()
        self.run.serve()
        if event is Event.BATCH_CHECKPOINT:
            self.run.log_step()
        monitored = self.settings.run.saver.monitor is not None and self.run.path is None
        if monitored and event is Event.BATCH_CHECKPOINT:
            ends_epoch = state.dataloader_len == state.timestamp.batch_in_epoch  # its evaluation may follow
            self._postponed, due = (due, False) if ends_epoch else (False, due)
        elif event is Event.EPOCH_CHECKPOINT:
            self._postponed, due = False, due or self._postponed
        ended = (due or owed) and (state.get_elapsed_duration() or 0.0) >= 1.0
        planned = due and self.run.path is not None and bool(self.settings.planned(state, event))
        self.run.moment(due=due or owed, planned=planned, last=ended, again=owed)

    # ---- after training

    def fit_end(self, state: State) -> None:
        """Save the last batches, and wait until everything is committed, or raise a SaveFailedError."""
        self.adapter.data.epoch_ends(state)
        [owed] = world().any_of(self._owes(state))
        self.run.ends(again=owed)

    def close(self) -> None:
        """Finish a running save, after an error too; the other processes may have ended."""
        self.adapter.data.close()
        self.run.fail()
        self.run.release()
        self.run.start_over()


def _keep_modes(model: Any) -> None:
    """Let parts that were restored in evaluation mode stay so when Composer puts the whole model into training mode, once, after `fit_start`."""
    parts = [part for part in model.modules() if model.training and not getattr(part, "training", True)]

    def train(mode: bool = True) -> Any:
        del model.train
        model.train(mode)
        for part in parts:
            part.training = False
        return model

    model.train = train
