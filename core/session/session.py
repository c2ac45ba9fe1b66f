"""One training that is being saved, on every process: what is the same in all frameworks.

Every rank saves and restores a share: of a sharded model what it owns, of copies an equal part. A state that the first
rank alone has is saved by that one, which decides for all then. What is not marked as the first rank's must be called
on every rank.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.nn import Module

from shrinkpoint.coding.selective import header_of
from shrinkpoint.engine.fitting import DryRestore
from shrinkpoint.engine.handover import Adoption
from shrinkpoint.engine.placement import Placement
from shrinkpoint.engine.request import SaveRequest
from shrinkpoint.engine.retention import is_finite, lineage_of, metrics_of
from shrinkpoint.errors import ConfigError, NoCheckpointError, ShrinkpointError
from shrinkpoint.group.group import Group, world
from shrinkpoint.io.loading import weights_of_step
from shrinkpoint.quality.resumed_steps import UntilFailure
from shrinkpoint.reports import Accepted, SaveReport
from shrinkpoint.runtime.progress import is_quiet, say
from shrinkpoint.runtime.termination import TerminationRequest, signals_of
from shrinkpoint.saver import Saver
from shrinkpoint.session.adapter import SESSION, TrainingAdapter
from shrinkpoint.session.batches import PROBE_BATCHES, KeptBatches, PathBatches
from shrinkpoint.session.ddp import HookStates, bucket_order, restore_buckets, restore_hook_states
from shrinkpoint.session.gradients import GradientCollector
from shrinkpoint.session.probe import LossProbe, StepProbe, reporting
from shrinkpoint.session.reports import BestCheckpoints, log_line
from shrinkpoint.session.settings import RunSettings
from shrinkpoint.session.trained import Trained, load_trained
from shrinkpoint.session.triggers import Schedule, Trigger
from shrinkpoint.sharded.placement import ShardedPlacement, refuse_options
from shrinkpoint.sharded.restoring import RANKS_KEY
from shrinkpoint.state.digest import tensor_digest
from shrinkpoint.state.dtypes import empty_tensor
from shrinkpoint.state.frozen import meta_filled
from shrinkpoint.state.specs import whole_specs
from shrinkpoint.state.training import TensorSpec, TrainingState
from shrinkpoint.store.manifest import Manifest
from shrinkpoint.warn import warn

if TYPE_CHECKING:
    from shrinkpoint.steps.training import TrainingLog

T = TypeVar("T")


_FAILED_S = 60.0


class TrainingSession:
    """Saves a training through a `Saver`, and continues it.

    Where the model is sharded, `restore` fills the adapter's targets; else new tensors, unless it fills copies as well.
    `group` gives the processes that save together.

    Raises:
        ConfigError: an option is not for sharded models.
    """

    def __init__(
        self,
        settings: RunSettings,
        adapter: TrainingAdapter,
        *,
        shards: bool = False,
        group: Callable[[], Group] = world,
    ) -> None:
        self.settings, self.adapter, self.group = settings, adapter, group
        self.shards, self._fills = shards, shards or adapter.fills_copies
        """Whether the model is sharded."""
        if self.shards and settings.step_log is not None:
            raise ConfigError(
                "step_log= is not supported for sharded models: leave it out, and save more often instead"
            )
        if self.shards:
            refuse_options(settings.saver)
        self.best = BestCheckpoints(
            url=settings.url,
            monitor=settings.saver.monitor,
            mode=settings.saver.mode,
            top_k=settings.saver.save_top_k,
        )
        """The last and the best checkpoint: on the first rank at any time, on the others after `finish`."""
        self.trained = Trained(adapter, self.warn_once)
        """What optimizers train and what is frozen."""
        self.saved_step = 0
        """The step of this run's last checkpoint, on every rank."""
        self._shown: int | None = None
        self.hooks = HookStates(wanted=settings.saver.scheme == "lossless")
        """The states of DDP's communication hooks, for checkpoints and the log."""
        self.log: TrainingLog | None = None
        """The step log, if one is wanted, once training begins."""
        self.continued: int | None = None
        """The step of the checkpoint that was chosen to continue from; on the first rank."""
        self._saver: Saver | None = None
        self._taken = 0
        self._unreported: list[SaveReport] = []
        self.is_monitor_asked_for = True
        """Whether the user has named it for the checkpoints; otherwise saves before its first value are no surprise."""
        self._monitored = self._lacked = False
        self._warned: set[str] = set()
        self._until_failure = UntilFailure(self.warn_once)
        self._dry = DryRestore()
        self.trigger = Trigger(Schedule())
        """When a save is due, where the framework has no schedule of its own."""
        self.termination = TerminationRequest(more=signals_of(settings.saver.signals))
        """A signal that asks for the end, where the framework does not handle it itself."""
        self.start_over()

    @property
    def together(self) -> bool:
        """Whether every rank saves and restores a part, and all measure together; known when ``torch.distributed`` is initialized."""
        return self.shards or self.group().size > 1

    def _measures_together(self) -> bool:  # which pickle takes, as where a callback goes to other processes
        return self.together

    def start_over(self) -> None:
        """Forget what was seen of a training."""
        self.probe = LossProbe(self.adapter, together=self._measures_together, shards=self.shards)
        """Evaluates restored weights on kept batches."""
        self.path = PathBatches() if self.settings.saver.adopt and not self.adapter.is_loop else None
        """With ``adopt``: the batches since the last planned save, which decide about the next one."""
        if self.path is not None:
            self.probe.kept = self.path
        elif not self.measures:
            self.probe.kept = KeptBatches(0)
        self.steps = StepProbe(self.probe, steps=self.probe_steps, give_up=self._until_failure.give_up)
        """Makes steps from a checkpoint."""
        self._gradients = GradientCollector()
        self._stored: Mapping[str, Any] | None = None

    def plan(self, saves: int | None) -> None:
        """With ``adopt=True``: take the number of planned saves of the whole run, before the saver is asked for.

        Raises:
            ConfigError: it does not follow from the trainer's limits (None), and the user has not given it.
        """
        saver = self.settings.saver
        if not saver.adopt or saver.adoptions is not None:
            return
        if saves is None:
            raise ConfigError(
                "adopt=True cannot be used here: the number of planned saves of the whole run, among which max_degradation is divided,"
                " does not follow from the trainer's limits. Give that number, as in adopt=200"
            )
        self.settings = replace(self.settings, saver=replace(saver, adopt=saves))

    @property
    def saver(self) -> Saver:
        """The run's saver; made when it is first asked for, so that a callback can be copied to other processes before."""
        if self._saver is None:
            stores, config = self.settings.stores, self.settings.saver
            options = self.settings.storage_options
            adapter = self.adapter
            placement = partial(
                ShardedPlacement,
                targets=adapter.targets if self._fills else _new_tensors,
                own=adapter.own,
                copied=None if self.shards else adapter.copied,
            )
            self._saver = Saver(
                stores,
                config,
                storage_options=options,
                placement=placement if self.together else Placement,
            )
        return self._saver

    @property
    def measures(self) -> bool:
        """Whether checkpoints are measured; of a sharded model the batches kept for that are others after a resume."""
        saver, adapter = self.settings.saver, self.adapter
        same = not self.shards or adapter.is_loop
        return adapter.measures and (same or (saver.scheme != "lossless" and not saver.adopt))

    @property
    def probe_steps(self) -> int:
        """Steps of a probe from a restored state; 0 for no probes."""
        saver = self.settings.saver
        return saver.probe_steps if saver.scheme != "lossless" and self.measures else 0

    # ---- before training

    def open(self) -> None:
        """Check that the store can be written and contains no foreign files; raises as `Saver.check`."""
        self.decide(self.saver.check)

    def refer_to(self, model: Module) -> None:
        """Let checkpoints refer to the frozen tensors of a model, as of `Saver.refer_to`, before training begins;
        shards are stored."""
        if not self.shards:
            self.saver.refer_to(model, logged=self.settings.step_log is not None)

    def require_own_url(self, callbacks: Iterable[object]) -> None:
        """Refuse two callbacks of one trainer that save to one run, by a ConfigError."""
        runs = [getattr(getattr(callback, "_session", None), "run", None) for callback in callbacks]
        url = self.settings.url
        if [run.settings.url for run in runs if isinstance(run, TrainingSession)].count(url) > 1:
            raise ConfigError(
                f"two CompressedCheckpoint callbacks save to {url}: give each a URL of its own, or use one"
            )

    def decide(self, action: Callable[[], T]) -> T:
        """Run `action` on every rank, since it communicates; or on the first rank for all, where that one alone saves."""
        return action() if self.together else self.group().on_first(action)

    def choose(self) -> Manifest | None:
        """Return the checkpoint to continue from, by the option ``resume``: the newest sound one, the same on all ranks.

        Raises:
            NoCheckpointError: there is none, and ``resume="must"``.
            ChainError, StoreError: as `Saver.newest`.
        """
        return self.decide(self.newest_wanted)

    def newest_wanted(self) -> Manifest | None:
        """As `choose`, for `decide`."""
        policy = self.settings.resume
        if policy == "never":
            self.saver.forget()  # the saves of this process so far belong to another training
        chosen = None if policy == "never" else self.saver.newest()
        if chosen is None and policy == "must":
            raise NoCheckpointError(
                f"{self.settings.url} holds no checkpoint, and resume='must' forbids starting afresh: correct the URL, or say resume='auto'"
            )
        self.continued = None if chosen is None else chosen.step
        return chosen

    def resume(self) -> Any:
        """Continue the training that the run holds, its logged steps included, or refuse to save among another one's
        checkpoints.

        Returns:
            The state that was loaded; None where the training starts afresh.

        Raises:
            NoCheckpointError, ChainError, StoreError: as `choose`.
            StateMismatchError: the run is another model's or framework's.
        """
        adapter = self.adapter
        manifest = self.choose()
        self.begin_log(adapter.model, adapter.optimizers)
        if manifest is None:
            self.require_own_run()
            if self.log is not None:
                self.log.restart(adapter.step)
            return None
        state = self.restore(manifest)
        self.group().on_first(lambda: adapter.check(state))
        adapter.load(state)
        if self.log is not None:
            stored = state
            reached, rest = self.log.recover(manifest.step, lambda: lambda: adapter.load(stored))
            if reached > manifest.step:
                state = adapter.completed(rest)
                adapter.load(state)
            self.log.restart(adapter.step)
        self.note_restored(state)
        self.saved_step = manifest.step
        self.remember()
        self.announce(adapter.step)
        return state

    def require_own_run(self) -> None:
        """Refuse, on every rank, to save among another model's checkpoints, which retention would remove."""

        def look() -> None:
            found = self.outline(self.adapter.outline)
            if found is not None:
                self.adapter.check(found)

        self.group().on_first(look)

    def announce(self, step: int) -> None:
        """Say, on the first rank, from where the run is continued."""
        if self.group().is_first:
            say(f"continuing {self.settings.url} from step {step}")

    def warn_complete(self, step: int, way_on: str) -> None:
        """Warn, on the first rank, that a training that is continued has ended before, and of the `way_on`."""
        self.warn_once(
            f"the run in {self.settings.url} is complete: it ended at step {step}. {way_on}; there is nothing to do now"
        )

    def warn_newer(self, given: str, step: int = -1) -> None:
        """Warn if the run has a checkpoint after `step`, and is not continued, since the user has given another one."""
        newest = self.group().on_first(lambda: next(iter(self.saver.store.manifests()), None))
        if newest is not None and newest.step > step:
            self.warn_once(
                f"{given} takes precedence: {self.settings.url}, which has step {newest.step}, is not continued. Leave it out to"
                " continue from there"
            )

    def restore(self, manifest: Manifest | int, *, adopt: bool = True) -> Any:
        """Return the state of a checkpoint, by manifest or step, which saves go on from; `adopt` and errors are those
        of `Saver.restore`."""
        restored = self.group().on_every(lambda: self.saver.restore(manifest, adopt=adopt))
        assert restored is not None
        state = restored.state.to_object()
        if not self._fills and isinstance(state, dict):
            state.pop(RANKS_KEY, None)
        return state

    @property
    def lineage(self) -> str | None:
        """The training that checkpoints belong to; None before the first one, and but on the first rank."""
        return self._saver.lineage if self._saver is not None and self.group().is_first else None

    def go_on_with(self, lineage: str | None) -> None:
        """Let saves belong to a training that was continued from elsewhere, so that retention counts its checkpoints
        too.

        Else every restart from a framework's own checkpoints would be a training of its own, whose predecessors'
        checkpoints nothing removes. `lineage` is as it was when that checkpoint was made. Where the run has no
        checkpoint of it, another training begins.
        """

        def latest() -> Manifest | None:
            manifests = self.saver.store.manifests() if lineage is not None else []
            return next((each for each in manifests if lineage_of(each.meta) == lineage), None)

        latest_of_it = self.group().on_first(latest)
        if latest_of_it is not None:
            self.decide(lambda: self.saver.forget(follows=latest_of_it))
            self.remember()

    def outline(self, keys: Collection[str], manifest: Manifest | None = None) -> dict[str, Any] | None:
        """Return entries of a stored state with meta tensors (shapes without elements), or None in an empty run; for
        the first rank.

        Only the container's header is read, whether its chain is sound or not: of the newest checkpoint, where no
        other is given.
        """
        if manifest is None:
            manifest = next(iter(self.saver.store.manifests()), None)
        if manifest is None:
            return None
        header = header_of(self.saver.store, manifest.chain[-1])
        specs = whole_specs(record.spec for record in header.tensors.values())
        shapes = {
            name: torch.empty(spec.shape, dtype=spec.dtype, device="meta") for name, spec in specs.items()
        }
        tree = {key: header.tree[key] for key in keys if key in header.tree}
        outline: dict[str, Any] = meta_filled(TrainingState(tree, shapes, specs)).to_object(own_tensors=True)
        return outline

    def remember(self) -> None:
        """Read which checkpoints were the best and the last, when a run is continued."""

        self.group().on_first(lambda: self.add_best(self.saver.store.manifests()))

    def add_best(self, manifests: Sequence[Manifest]) -> None:
        """Track the best and the last of these checkpoints, newest first, as far as they belong to the training that
        is continued."""
        for manifest in reversed(manifests):
            if self.saver.lineage in (None, lineage_of(manifest.meta)):
                self.best.add(manifest.step, metrics_of(manifest), finite=is_finite(manifest))

    # ---- during training

    def attend(self, *, serve: bool = True) -> list[SaveReport]:
        """Serve the background worker, and return the saves finished since the last call; on some ranks later than on
        others.

        Raises:
            ShrinkpointError: as `Saver.poll`, which is not called without `serve`.
        """
        if self._saver is None or not (self.together or self.group().is_first):
            return []
        if serve:
            self._saver.poll()
        self._take_reports()
        reports, self._unreported = self._unreported, []
        return reports

    def rehearse(self) -> None:
        """Refuse a training whose state could not be continued; once, and again when its structure has changed.

        Of shards each rank's state is captured, once. What takes them is compared with the checkpoint's tensors at a
        resume.

        Raises:
            CannotRepresentError, StateMismatchError: as `DryRestore.check`; on every rank.
        """
        adapter = self.adapter

        def capture() -> tuple[TrainingState, Any]:
            self.trained.require_room()
            state = adapter.bare_state()
            return TrainingState.capture(
                state, adapter.describe(state), shards=self.shards
            ), adapter.rehearsed

        optimizers, shards = adapter.optimizers, self.shards
        if not self._dry.knows(optimizers, shards=shards):
            try:
                self.group().on_every(
                    lambda: self._dry.check(
                        capture, adapter.model, optimizers, adapter.objects(), shards=shards
                    )
                )
            except ShrinkpointError:
                self._dry = DryRestore()  # on every rank, so that all ask together again
                raise

    def begin_log(self, model: Module, optimizers: Sequence[Any]) -> None:
        """Make and open the step log, if one is wanted, when model and optimizers exist.

        Raises:
            ConfigError: there can be no such log of this training.
            StoreError: it cannot be written.
        """
        self.make_log(model, optimizers)
        self.open_log()

    def make_log(self, model: Module, optimizers: Sequence[Any]) -> None:
        """Make the step log as `begin_log` does, and write nothing."""
        settings = self.settings
        if settings.step_log is None:
            return
        if settings.step_log.after_step is not None and not self.adapter.is_loop:
            raise ConfigError(
                "after_step is for Checkpointer: the callbacks' step logs have no averages of the weights (docs/resuming.md)"
            )
        from shrinkpoint.steps.training import TrainingLog  # most trainings have no log

        self._close_log()
        self.log = TrainingLog(
            model,
            optimizers,
            settings.step_log,
            **self.adapter.log_options(),
            more_bytes=lambda: self.hooks.nbytes,
            run_url=settings.stores,
            storage_options=settings.storage_options,
            config=settings.saver,
            read_base=lambda step: weights_of_step(settings.stores, step, settings.storage_options),
        )

    def open_log(self) -> None:
        """Open the step log of a run that is open."""
        if self.log is not None:
            self.log.open(self.group().on_first(self.saver.store.run_id))

    def _close_log(self) -> None:
        log, self.log = self.log, None
        if log is not None:
            log.close(whole=False)

    def log_step(self, *, boundary: bool = False, allowed: bool = True) -> None:
        """Take note of a step in the log, if there is one; as `TrainingLog.end_step`."""
        adapter = self.adapter
        if self.log is not None:
            self.log.end_step(
                adapter.step,
                capture=lambda: adapter.logged(self.captured),
                boundary=boundary,
                allowed=allowed,
            )

    def gradients_complete(self, remaining: int | None) -> None:
        """Average the gradients of a step that is about to be made, where settings depend on them; as
        `GradientCollector.update`."""
        saver, adapter = self.settings.saver, self.adapter
        if not (self.shards or saver.scheme == "lossless" or saver.adopt):
            self._gradients.update(adapter.model, adapter.optimizers, remaining, names=adapter.names())

    def serve(self) -> None:
        """Serve the background worker, and log finished saves."""
        reports = self.attend()
        for report in reports:
            self.probe.kept.adapt(report, self.settings.saver.search_overhead)
        if self.group().is_first:
            self.log_reports(reports)
        self._show_saving(self.saved_step if self.saver.busy and not is_quiet() else None)

    def log_reports(self, reports: Sequence[SaveReport]) -> None:
        """Give finished saves to Python's log and to the framework's loggers; on the first rank."""
        for report in reports:
            log_line(report)
        self.adapter.log(reports)

    def _show_saving(self, step: int | None) -> None:
        if step != self._shown:
            self._shown = step
            self.adapter.show_saving(step)

    def save(
        self, *, last: bool = False, exact: bool = False, again: bool = False, planned: bool = False
    ) -> Accepted | bool:
        """Take a checkpoint of the present step, unless one is running and ``busy="skip"``; it then counts as skipped.

        A missing monitor and a failing evaluation are warned about, once; resumed steps are not tried again after a
        failure.

        Args:
            last: it is the last save: wait for a running one instead of skipping this one, and until this one is
                committed.
            exact: store bit-exactly, without a search.
            again: even if this step has been saved.
            planned: with ``adopt``: training goes on from what is stored, on every rank when this returns.

        Returns:
            What was accepted, or whether the step was saved before.

        Raises:
            SaveFailedError, FencedError, CannotRepresentError: as `Saver.accept`.
            StateMismatchError: a rank has other values than were stored.
        """
        self.trigger.saved()
        adapter, step = self.adapter, self.adapter.step
        if step == self.saved_step and not again:
            return True
        # Ranks that save together agree about that later, before a tensor is moved.
        if not (self.together or self.group().broadcast(self.group().is_first and self._has_room(last))):
            return step == self.saved_step
        self.drain()
        state = self.captured()
        if self.log is not None:
            self.log.boundary(step, lambda: adapter.logged(lambda: state))
        if self.path is not None and not planned:
            self.path.add_to(state[SESSION])
        adoption = None
        if planned:
            own = (
                {"probe_batches": PROBE_BATCHES, "ranks": self.group().size} if self.path is not None else {}
            )
            adoption = Adoption(live=adapter.live, settings={**adapter.path_settings(), **own})

        def accept() -> Accepted | None:
            describe, metrics, measured = adapter.describe(state), adapter.metrics(), self.measures
            # the saver refuses others, on every rank
            if self.group().is_first and (metrics is None or isinstance(metrics, Mapping)):
                self._require_monitor(step, metrics or {})
            evaluate = reporting(self.probe.evaluation(), self.warn_once) if measured else None
            resumed = self.steps.resumed() if measured and (adapter.is_loop or not planned) else None
            # What a framework's first rank saves alone, all ranks may have to evaluate: they wait in `drain`.
            waits = self.together or adapter.is_loop or self.saver.busy
            request = SaveRequest(
                state=state,
                step=step,
                describe=describe,
                metrics=metrics,
                evaluate=evaluate,
                resumed=self._until_failure.guard(resumed),
                gradients=None if planned else self._gradients.take(adapter.optimizers),
                optimizers=adapter.optimizers,
                exact=exact,
                wait=last and waits,
                adoption=adoption,
            )
            return self.saver.accept(request)

        accepted = self.decide(accept)
        if accepted is not None:
            self.saved_step = step
        if planned and self.path is not None:
            self.path.start_over()
        if last:
            self.drain()
        return accepted or step == self.saved_step

    def starts(self, schedule: Schedule) -> None:
        """Begin, where each step's end is a moment from which the training can be continued; what is continued has been loaded."""
        self.trigger = Trigger(schedule)
        self.trigger.start(step=self.adapter.step, epochs=0)
        self.termination.watch()
        self.begin()

    def step_ends(self) -> None:
        """Save if that is due after a step, before anything of the next one; raises as `rehearse`, `attend`, `save`
        and `moment`."""
        self.rehearse()
        self.trigger.after_step(self.adapter.step, agree=self.group().broadcast)
        self.serve()
        self.log_step()
        owed = self.settings.saver.monitor is not None and self.group().broadcast(
            self.owes(self.adapter.metrics())
        )
        self.moment(due=self.trigger.due or owed, planned=self.trigger.planned, again=owed)

    def moment(self, *, due: bool, planned: bool = False, last: bool = False, again: bool = False) -> bool:
        """Save, if that is due or the process was asked to end, at a moment from which the training can be continued;
        as `save`.

        Raises:
            SystemExit, KeyboardInterrupt: a process was asked to end, and the training has been saved.
        """
        [asked] = self.group().any_of(self.termination.received)
        planned = planned and self.path is not None
        saved = False
        if due or last or asked:
            saved = bool(
                self.save(last=last or asked, exact=asked and not planned, again=again, planned=planned)
            )
        if asked:
            self.finish(exact=True)
            self._end()
        return saved

    def _end(self) -> None:
        """End training on every rank, as one of them was asked to."""
        if self.shards:
            self.attend()
            self.warn_unsaved(self.adapter.step)
        self.termination.end(max(number or 0 for number in self.group().gather(self.termination.number)))

    def ends(self, *, again: bool = False, saves: bool = True) -> None:
        """Save the last steps, wait until everything is committed, and end the process if it was asked to end; as
        `moment`.

        Without `saves`, the model's weights are no longer those of the last step.
        """
        [asked] = self.group().any_of(self.termination.received)
        if saves:
            self.save(last=True, exact=asked, again=again)
        self.finish(exact=asked, again=saves)
        self.serve()
        if asked:
            self._end()
        self.termination.unwatch()

    def drain(self) -> None:
        """Do nothing; overridden where other ranks take part in evaluations, and wait there for a running save."""

    def warn_once(self, message: str | None, *, topic: str | None = None) -> None:
        """Warn on the first rank, unless it is None, or the same message, or another one of the same `topic`, was given before."""
        if message is not None and self.group().is_first and (topic or message) not in self._warned:
            self._warned.add(topic or message)
            warn(message)

    def captured(self) -> dict[str, Any]:
        """Return the adapter's state, with what every framework's lacks.

        Raises:
            StateMismatchError: what would be saved is not what is trained.
        """
        adapter = self.adapter
        state, wrapped = adapter.state(), adapter.wrapped
        added = {
            "world": self.group().size,
            "buckets": bucket_order(wrapped),
            "hooks": self.hooks.capture(wrapped),
        }
        added |= self.group().on_every(lambda: self.trained.state(state))
        self._warn_apart()
        return adapter.joined(state, added)

    def _warn_apart(self) -> None:
        """Warn where parameters outside the model, which DDP leaves alone, are not the same on all ranks."""
        outside = self.trained.outside
        first, *others = self.group().gather({name: tensor_digest(value) for name, value in outside.items()})
        if any(first != {name: each.get(name) for name in first} for each in others):
            self.warn_once(
                f"{', '.join(first)}, which the optimizer trains outside the model, have other values on each process, since DDP does not"
                " average their gradients: checkpoints hold the first process's. Make them the model's"
            )

    def note_restored(self, state: Mapping[str, Any]) -> None:
        """Note what `captured` had added to the restored state, for `begin`."""
        self._stored = self.adapter.added(state)
        if self.path is not None:
            self.path.take_from(self._stored or {})

    def load_trained(self) -> None:
        """Restore parameters outside the model and every ``requires_grad``, as `note_restored` has noted them."""
        if self._stored is not None:
            self.warn_once(load_trained(self._stored["trained"], self.adapter, self.settings.url))

    def begin(self) -> None:
        """Begin to save a training that is built and loaded: as `Saver.begin`, with its checks and probes.

        Raises:
            ConfigError: as `HookStates.left_out`; on every rank.
            StateMismatchError: as `load_trained`.
        """
        adapter, stored = self.adapter, self._stored
        self.load_trained()
        self._stored = None
        if stored is not None and stored["world"] == self.group().size:
            restore_buckets(adapter.wrapped, stored["buckets"])
            restore_hook_states(adapter.wrapped, stored["hooks"])
        self.trained.begin()
        log = self.settings.step_log
        self.warn_once(
            self.hooks.left_out(adapter.wrapped, exact_log=log is not None and log.kind == "exact")
        )
        self.steps.starts()
        if self.shards and not adapter.is_loop:
            return
        followed = adapter.followed()  # a collective with FSDP1
        if self.together or self.group().is_first:
            self.saver.begin(followed, step=adapter.step, describe=adapter.describe(followed))
        else:  # only the first process saves deltas to the checkpoint that it has read
            self.saver.forget()

    def _has_room(self, last: bool) -> bool:
        saver = self.settings.saver
        room = last or bool(saver.adopt) or saver.busy == "wait" or not self.saver.busy
        if not room:
            self.saver.skip()
            monitor, metrics = saver.monitor, self.adapter.metrics()
            if isinstance(metrics, Mapping) and monitor in metrics:
                self.warn_once(
                    f"step {self.adapter.step} has {monitor}={metrics[monitor]} and is not saved, since another save is being written: the"
                    " best checkpoint may not be the best. Advanced(busy='wait') would wait. This warning comes once",
                    topic="not ranked",
                )
        return room

    def owes(self, metrics: Mapping[str, float]) -> bool:
        """Return whether to save because the monitor is known now, as it was not at the last save; for the first rank.

        Without this nothing would ever be ranked where saves and validations fall on different steps.
        """
        saver = self.settings.saver
        return self._lacked and saver.monitor in metrics and not saver.adopt

    def _require_monitor(self, step: int, metrics: Mapping[str, float]) -> None:
        monitor = self.settings.saver.monitor
        self._lacked = monitor not in (None, "step", *metrics)
        self._monitored = self._monitored or not self._lacked
        if monitor is None or not self.is_monitor_asked_for:
            return
        if not self._monitored and not self.best.scores:
            self.warn_once(self.adapter.lacks(monitor, step, metrics), topic="monitor")

    def _take_reports(self) -> None:
        new = self.saver.reports()[self._taken :]
        self._taken += len(new)
        self._unreported += new
        for report in new:
            if self.log is not None:
                self.log.committed(report.step)
            self.best.add(report.step, report.metrics, finite=report.not_finite is None)

    # ---- after training

    def finish(self, *, exact: bool = False, again: bool = True) -> None:
        """Wait until everything is committed, and broadcast the best checkpoint to all ranks.

        With `again` the present state is saved when the last save has failed, since no later one will replace it.

        Raises:
            SaveFailedError, FencedError: on every rank.
        """
        self.drain()
        self.decide(self.saver.flush)
        if self.group().broadcast(self.group().is_first and self.saver.failed):
            if again:
                self.save(last=True, exact=exact, again=True)
            self.decide(self.saver.flush)
            self.decide(self.saver.require_stored)
        if self.together or self.group().is_first:
            self._take_reports()
        self.best = self.group().broadcast(self.best)

    def warn_unsaved(self, step: int) -> None:
        """Say on the first rank, if training ends at a step that could not be saved, which checkpoint is the newest."""
        newest = self.best.last_path
        if step != self.saved_step:
            self.warn_once(
                f"training ends at step {step}, which could not be saved:"
                f" {f'the newest checkpoint is {newest}' if newest else 'there is no checkpoint'}"
            )

    def fail(self, timeout_s: float | None = _FAILED_S, *, save: Callable[[], object] = bool) -> None:
        """Finish a running save after training has ended with an error; does not communicate with other ranks.

        A failure of `save`, which is called first, is only a warning: the original error is the one to show.
        """
        self.termination.unwatch()
        self._close_log()
        self._show_saving(None)
        if self._saver is None:
            return
        try:
            save()
        except Exception as error:  # noqa: BLE001 - it would hide the one that ended training
            warn(f"the last checkpoint was not saved: {error}")
        if not self._saver.close(timeout_s):
            warn(
                f"the save to {self.settings.url} is still running after {timeout_s:.0f} s; the process ends when it is finished"
            )
        self._take_reports()

    def release(self) -> None:
        """After `fail` or `close`: drop all references to the training; the store is read again if needed."""
        self._saver, self._taken = None, 0

    def close(self) -> None:
        """Release the store when a running save is finished; does not communicate with other ranks."""
        self._close_log()
        if self._saver is not None:
            self._saver.close()


def _new_tensors(specs: Mapping[str, TensorSpec]) -> dict[str, torch.Tensor]:
    return {name: empty_tensor(spec.shape, spec.dtype) for name, spec in specs.items()}
