"""One Composer run that is being saved: the handlers of the callback's events."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from composer.algorithms.sam import SAMOptimizer
from composer.callbacks import CheckpointSaver
from composer.core import Event, State
from composer.loggers import Logger

from shrinkpoint.engine.request import SaveRequest
from shrinkpoint.engine.takeover import Adoption
from shrinkpoint.errors import ConfigError
from shrinkpoint.group.group import world
from shrinkpoint.integrations.composer.data import DataPlace
from shrinkpoint.integrations.composer.probe import LossProbe, StepProbe
from shrinkpoint.integrations.composer.reports import current_metrics, log_reports
from shrinkpoint.integrations.composer.resume import continue_run, require_supported, rest_of
from shrinkpoint.integrations.composer.schedule import Settings, saves_until
from shrinkpoint.integrations.composer.state import (
    describe_state,
    followed_state,
    numbered_states,
    parameter_names,
    plain_optimizers,
    stored_state,
    trained_module,
)
from shrinkpoint.runtime.termination import TerminationRequest, signals_of
from shrinkpoint.saver import Saver
from shrinkpoint.session.adopting import PathBatches, with_adoptions
from shrinkpoint.session.gradient_buckets import (
    Buckets,
    bucket_order,
    restore_buckets,
)
from shrinkpoint.session.gradients import GradientCollector, require_fresh_gradients
from shrinkpoint.session.hook_states import restore_hook_states
from shrinkpoint.session.probe import KeptBatches
from shrinkpoint.session.run_session import RunSession
from shrinkpoint.session.trained import load_trained
from shrinkpoint.state.wrappers import named_parameters
from shrinkpoint.warn import warn

__all__ = ["Session"]

_LINEAGE = "lineage"

_LOOK_EVERY_S = 0.01


class Session:
    """Drives a `RunSession` from a trainer's events; every method is called on every rank.

    Args:
        settings: the callback's options.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.run = self._new_run()
        self._begin_measuring()
        self._data = DataPlace()
        self._buckets: Buckets = []
        self._hooks: Sequence[Any] = []
        self._stored_trained: Mapping[str, Any] | None = None
        self._gradients = GradientCollector()
        self._termination = TerminationRequest(more=signals_of(self.settings.run.saver.signals))
        self._loaded_lineage: str | None = None
        self._evaluated: dict[str, int] = {}
        self._postponed = False

    def _new_run(self) -> RunSession:
        return RunSession(self.settings.run)

    def _begin_measuring(self) -> None:
        self._probe = LossProbe(together=self.run.together)
        self._path: PathBatches | None = None
        if self.settings.run.saver.adopt:  # measure on batches that a resumed run sees again
            self._path = self._probe.kept = PathBatches()
        if not self.run.measures:
            self._probe.kept = KeptBatches(0)
        self._steps = StepProbe(self._probe, steps=self.run.probe_steps)

    # ---- the callback's own state in checkpoints

    def state(self) -> dict[str, Any]:
        """Which training the checkpoints of the run belong to; empty before the first one, and but on the first rank."""
        lineage = self.run.lineage
        return {} if lineage is None else {_LINEAGE: lineage}

    def load_state(self, stored: Mapping[str, Any]) -> None:
        """Note the training that Composer has loaded, for `after_load`."""
        self._loaded_lineage = stored.get(_LINEAGE)

    # ---- before training

    def init(self, state: State) -> None:
        """The trainer is being built: check the store before anything expensive.

        Raises:
            ConfigError: two callbacks save to one run, or no process will ever have the whole state.
            StoreError: the store cannot be read or written.
        """
        require_supported(state)
        self.run.require_own_url(state.callbacks)
        if world().is_first and any(isinstance(callback, CheckpointSaver) for callback in state.callbacks):
            warn(
                f"save_folder makes Composer write checkpoints of its own too, in full size, while training waits. They are"
                f" independent of those in {self.settings.run.url}; without save_folder the run is saved and continued as well"
            )
        if self._path is not None:
            self._require_adoptable(state)
            saves_until(self.settings.interval, None)  # refuses a clock
        if not self._counts_saves:
            self.run.open()

    @property
    def _counts_saves(self) -> bool:
        """Whether the number of planned saves follows from the trainer's limits."""
        return self._path is not None and self.settings.run.saver.adoptions is None

    def _require_adoptable(self, state: State) -> None:
        if state.fsdp_config is not None:
            raise ConfigError(
                "adopt=True with FSDP needs FSDP2 and parallelism_config['fsdp']['state_dict_type']='sharded': leave it out, or give"
                " scheme='lossless'"
            )

    def after_load(self, state: State, logger: Logger) -> None:
        """Continue the run, unless it was loaded from a load_path already.

        Raises:
            ShrinkpointError: as `continue_run`.
        """
        if self._counts_saves:  # the trainer sets its max_duration after `init`
            planned = saves_until(self.settings.interval, state.max_duration)
            self.run.use(with_adoptions(self.settings.run, planned))
            self.run.open()
        if state.fsdp_config is None:
            self.run.refer_to(trained_module(state))
        elif self.settings.run.saver.frozen == "reference":
            raise ConfigError(
                "frozen='reference' is not supported with FSDP yet: give Advanced(frozen='store')"
            )
        elif any(isinstance(each, (torch.optim.LBFGS, SAMOptimizer)) for each in state.optimizers):
            raise ConfigError("Composer cannot load the state of LBFGS and SAM with FSDP: train without FSDP")
        self._buckets, self._hooks = continue_run(
            self.run, self._data, state, logger, lineage=self._loaded_lineage, take=self._take
        )

    def _take(self, stored: Mapping[str, Any]) -> None:
        self._stored_trained = stored["trained"]
        if self._path is not None:
            self._path.take_from(stored)

    def fit_starts(self, state: State) -> None:
        """Training starts or continues.

        Raises:
            ConfigError: the optimizer trains what is not in the model.
        """
        self._begin_trained(state)
        if (
            int(state.timestamp.batch) < self.run.saved_step
        ):  # ``fit(reset_time=True)``: the count of batches restarts
            self.run.saved_step = 0
        self.run.check_hooks(state.model)
        self._termination.watch()
        restore_buckets(state.model, self._buckets)  # DDP exists only now
        restore_hook_states(state.model, self._hooks)
        self._buckets, self._hooks = [], []
        self._data.fit_starts(state)
        self._steps.starts(state)
        self._begin_saving(state)

    def _begin_trained(self, state: State) -> None:
        module, optimizers = trained_module(state), list(state.optimizers)
        require_fresh_gradients(optimizers)
        if self._stored_trained is not None:
            url = self.run.settings.url
            self.run.warn_once(load_trained(self._stored_trained, module, optimizers, url))
            self._stored_trained = None
        self.run.trained.begin(module, optimizers)
        if self._trained_part(state)["outside"]:
            raise ConfigError(
                f"the optimizer trains {len(self.run.trained.outside)} parameters that are not in the model, whose state Composer cannot name: make"
                " them parameters of the ComposerModel, such as a loss or a head that is an attribute of it"
            )

    def _trained_part(self, state: State) -> dict[str, Any]:
        """The entry of a checkpoint with what is frozen.

        Raises:
            StateMismatchError: what would be saved is not what is trained.
        """
        module, optimizers = trained_module(state), list(state.optimizers)
        names = dict(named_parameters(module, remove_duplicate=False))
        part: dict[str, Any] = self.run.trained.state(module, optimizers, names, tuple)["trained"]
        return part

    def _begin_saving(self, state: State) -> None:
        weights = followed_state(state)
        if world().is_first:
            self.run.saver.begin(weights, step=int(state.timestamp.batch), describe=describe_state(state))

    # ---- during training

    def epoch_starts(self, state: State) -> None:
        """An epoch's iterator is about to be built."""
        self._data.epoch_starts(state)

    def fetches(self, state: State) -> None:
        """A training batch is about to be fetched."""
        self._data.fetches(state)

    def batch_starts(self, state: State) -> None:
        """A batch is about to be trained on."""
        self._data.batch_starts(state)
        self._steps.batch_starts()

    def trains(self, state: State) -> None:
        """The model is about to get a batch of training, or the part of one that fits into memory."""
        if world().is_first or state.fsdp_enabled:
            self._probe.kept.see_training(state.batch)
        self._steps.see(state)

    def evaluates(self, state: State) -> None:
        """The model is about to get a batch of evaluation, or the part of one that fits into memory."""
        first = next((evaluator.label for evaluator in state.evaluators), None)
        if state.dataloader_label == first and (world().is_first or state.fsdp_enabled):
            self._probe.kept.see_validation(state.batch, int(state.eval_timestamp.batch))

    def evaluation_ends(self, state: State) -> None:
        """One evaluator has been run."""
        self._evaluated[str(state.dataloader_label)] = int(state.timestamp.batch)

    def _metrics(self, state: State) -> dict[str, float]:
        return current_metrics(state, self._evaluated)

    def _owes(self, state: State) -> bool:
        measured = int(state.timestamp.batch) in self._evaluated.values()
        return measured and world().is_first and self.run.owes(self._metrics(state))

    def batch_ends(self, state: State) -> None:
        """A step has been made; its gradients are still available; called once even if the optimizer needed several
        passes."""
        saver = self.settings.run.saver
        if self.run.together or not world().is_first:
            return
        if saver.scheme != "lossless" and not saver.adopt:
            every, batch = self.settings.every_batches, int(state.timestamp.batch)
            remaining = None if every is None else -batch % every
            module = trained_module(state)
            self._gradients.update(module, state.optimizers, remaining, names=parameter_names(module))

    def epoch_ends(self, state: State) -> None:
        """All of an epoch's batches have been fetched."""
        self._data.epoch_ends(state)

    def checkpoint(self, state: State, logger: Logger, event: Event) -> None:
        """A moment from which a run can be continued: serve the background worker, and save if a checkpoint is due.

        Raises:
            SystemExit: the process was asked to end, and has been saved.
        """
        due, error = False, None
        try:
            due = bool(self.settings.due(state, event))  # on every rank: the user's function may communicate
        except Exception as caught:  # noqa: BLE001 - raised below, when the others know
            error = caught
        failed, due, terminated, wanted, owed = world().any_of(
            error is not None,
            world().is_first and due,
            self._termination.received,
            self._evaluation_wanted,
            self._owes(state),
        )
        if failed:
            world().raise_together(error)
        if not state.fsdp_enabled:  # whose shards would have to be gathered
            self.run.rehearse(
                lambda: stored_state(state, [], []),
                lambda _: describe_state(state),
                lambda stored: (stored["state"]["model"], numbered_states(stored, state)),
                trained_module(state),
                [*plain_optimizers(state).values()],
            )
        self._attend(state, logger, wanted=wanted)
        if event is Event.BATCH_CHECKPOINT:
            self.run.log.end_step(int(state.timestamp.batch), lambda: rest_of(self._stored(state)))
        monitored = self.settings.run.saver.monitor is not None and self._path is None
        if monitored and event is Event.BATCH_CHECKPOINT and not terminated:
            ends_epoch = state.dataloader_len == state.timestamp.batch_in_epoch  # its evaluation may follow
            self._postponed, due = (due, False) if ends_epoch else (False, due)
        elif event is Event.EPOCH_CHECKPOINT:
            self._postponed, due = False, due or self._postponed
        if due or terminated or owed:
            ended = (state.get_elapsed_duration() or 0.0) >= 1.0
            planned = self._path is not None and due and bool(self.settings.planned(state, event))
            exact = terminated and not planned
            self._save(state, last=terminated or ended, exact=exact, again=owed, planned=planned)
        if terminated:
            self._finish(state, exact=True)
            self._end(state)

    def _end(self, state: State) -> None:
        """End training as one of the ranks was asked to, on every rank."""
        self._termination.end(max(number or 0 for number in world().gather(self._termination.number)))

    def _gathers(self, state: State) -> bool:
        """Whether the first rank saves what FSDP shards, and the others take part in its evaluations."""
        return state.fsdp_enabled and not self.run.together

    @property
    def _evaluation_wanted(self) -> bool:
        saver = self.run.saver
        return world().is_first and isinstance(saver, Saver) and saver.evaluation_wanted

    def _attend(self, state: State, logger: Logger, *, wanted: bool) -> None:
        gathers = self._gathers(state)
        if gathers and wanted:
            self._evaluate_together(state)
        reports = self.run.attend(serve=not gathers)
        if not gathers:  # else the other ranks would have to take part
            for report in reports:
                self._probe.kept.adapt(report, self.settings.run.saver.search_overhead)
        if world().is_first:
            log_reports(logger, reports)

    def _evaluate_together(self, state: State) -> None:
        if world().is_first:
            self.run.saver.poll()
        else:
            with suppress(ConfigError):  # the first rank gets it too, and reports it
                self._probe.evaluate_sharded(state, None)

    def _drain(self, state: State) -> None:
        """Wait for a running save, if all processes take part in its evaluations."""
        while self._gathers(state):
            busy, wanted = world().broadcast((self.run.saver.busy, self._evaluation_wanted))
            if wanted:
                self._evaluate_together(state)
            elif not busy:
                return
            elif world().is_first:
                time.sleep(_LOOK_EVERY_S)

    def _save(
        self,
        state: State,
        *,
        last: bool = False,
        exact: bool = False,
        again: bool = False,
        planned: bool = False,
    ) -> None:
        """Take a checkpoint; all ranks take part.

        Args:
            state: at a moment from which a run can be continued.
            last: it is the last save: wait for a running one instead of skipping this one.
            exact: store bit-exactly, without a search.
            again: even if this batch has been saved.
            planned: with ``adopt=True``: training goes on from what is stored.
        """
        batch = int(state.timestamp.batch)
        if (batch == self.run.saved_step and not again) or not self.run.wants(last=last):
            return
        self._drain(state)
        stored = self._stored(state)
        self.run.log.boundary(batch, rest_of(stored))
        if self._path is not None and not planned:
            self._path.add_to(stored)

        def request() -> SaveRequest:
            measures = self.run.measures
            return SaveRequest(
                state=stored,
                step=batch,
                describe=describe_state(state),
                metrics=self._metrics(state),
                evaluate=self._evaluation(state) if measures else None,
                resumed=self._steps.resumed(state) if measures and not planned else None,
                gradients=None if planned else self._gradients.take(state.optimizers),
                optimizers=state.optimizers,
                exact=exact,
                wait=last,
            )

        if self.run.save(request, self._adoption(state) if planned else None):
            self.run.saved_step = batch
        if planned and self._path is not None:
            self._path.start_over()
        if last:
            self._drain(state)

    def _adoption(self, state: State) -> Adoption:
        def live() -> dict[str, Any]:
            followed = followed_state(state)["state"]
            return {"state": {**followed, "optimizers": stored_state(state, [], [])["state"]["optimizers"]}}

        return Adoption(live=live, settings={"save_interval": str(self.settings.interval)})

    def _stored(self, state: State) -> dict[str, Any]:
        places, buckets = world().gather(self._data.state(state)), bucket_order(state.model)
        if state.fsdp_enabled:  # its parameters may be whole, after an evaluation, until its state is taken
            return {**stored_state(state, places, buckets), "trained": self._trained_part(state)}
        trained = self._trained_part(state)
        hooks = self.run.hooks.capture(state.model)
        stored = world().on_every(
            lambda: stored_state(state, places, buckets, hooks)
        )  # a callback's own state may fail on one rank alone
        return {**stored, "trained": trained}

    def _evaluation(self, state: State) -> Callable[[Mapping[str, torch.Tensor]], tuple[float, ...]]:
        if self._gathers(state):
            return partial(self._probe.evaluate_sharded, state)
        return self._probe.evaluation(state)

    # ---- after training

    def fit_ends(self, state: State, logger: Logger) -> None:
        """Save the last batches, and wait until everything is committed.

        Raises:
            SaveFailedError: the last checkpoint could not be stored.
        """
        self._data.epoch_ends(state)
        terminated, owed = world().any_of(self._termination.received, self._owes(state))
        self._save(state, last=True, exact=terminated, again=owed)
        self._finish(state, exact=terminated)
        self._attend(state, logger, wanted=False)
        if terminated:
            self._end(state)
        self._termination.unwatch()

    def _finish(self, state: State, *, exact: bool) -> None:
        self._drain(state)
        self.run.finish(lambda: self._save(state, last=True, exact=exact, again=True))

    def close(self) -> None:
        """Finish a running save, after an error too; the other processes may have ended."""
        self._data.close()
        self._termination.unwatch()
        self.run.fail()
        self.run.release()
        self._begin_measuring()
        self._gradients = GradientCollector()
