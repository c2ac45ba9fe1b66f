"""Saves training states in the background, and restores the newest sound one; every integration drives this.

One save is a snapshot on the training thread, then a job in the background: choose a configuration, encode, commit,
collect. The job asks the training thread for evaluations and trial steps alone, which `Saver.poll` makes. With ``adopt``
training also waits for the restored values.
"""

import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from shrinkpoint.coding.selective import Decoded, decode_checkpoint
from shrinkpoint.config import SaverConfig
from shrinkpoint.engine.address import Address
from shrinkpoint.engine.background import Background
from shrinkpoint.engine.chain import Chain
from shrinkpoint.engine.compaction import without_optimizer
from shrinkpoint.engine.continuation import Continuation
from shrinkpoint.engine.request import Job, SaveRequest, plain_step, plain_timeout
from shrinkpoint.engine.retention import adopted_of, is_finite, is_weights_only, not_finite_text
from shrinkpoint.engine.takeover import Adoption, Takeover, unsuitable
from shrinkpoint.engine.under_way import Deadline, SaveUnderWay, WaitingShare
from shrinkpoint.engine.warmup import Warmup
from shrinkpoint.errors import ConfigError
from shrinkpoint.group.group import Alone, Group
from shrinkpoint.optimizers.updates import OptimizerKind
from shrinkpoint.quality.evaluation import Evaluate, EvaluationDesk, ResumedSteps
from shrinkpoint.quantize.movement import is_followed
from shrinkpoint.reports import Accepted, SaveReport
from shrinkpoint.runtime.progress import waiting_for
from shrinkpoint.runtime.threads import Turns, Worker, in_turn
from shrinkpoint.state.frozen import FrozenTensors
from shrinkpoint.state.snapshot import Snapshotter
from shrinkpoint.state.training import Describe, TrainingState, plain
from shrinkpoint.store.connect import StorageOptions
from shrinkpoint.store.manifest import Manifest
from shrinkpoint.store.run import RunStore
from shrinkpoint.store.urls import RunUrl, url_text
from shrinkpoint.warn import warn

__all__ = ["Restored", "Saver", "SaverConfig", "StateSaver", "decode_checkpoint"]


@dataclass(frozen=True)
class Restored:
    """A checkpoint that was read and verified.

    Examples:
        >>> restored = shrinkpoint.Saver("runs/7").restore(2000)
        >>> restored.manifest.step
        2000
        >>> sorted(restored.state.to_object()["model"])
        ['0.bias', '0.weight', '2.bias', '2.weight']
    """

    manifest: Manifest
    """The record that committed it."""
    state: TrainingState
    """What was saved, on the host."""


class StateSaver(ABC):
    """Saves what it is asked to, in the background.

    Args:
        url: the run's prefix.
        config: how to save.
        storage_options: as of `Saver`.
        end_evaluations: called before the process ends while a save is under way.
        group: that train together.
    """

    _chain: Chain | None = None
    _background: Background | None = None

    def __init__(
        self,
        url: RunUrl,
        config: SaverConfig | None,
        storage_options: StorageOptions,
        end_evaluations: Callable[[], None],
        group: Group,
    ) -> None:
        self.url = url_text(url)
        """The run's URL, without credentials; of several, with commas between."""
        self.config = config or SaverConfig()
        """How to save."""
        self.store = RunStore(url, storage_options=storage_options)
        """The run's checkpoints."""
        self.blocked_s = 0.0
        """Seconds that training has waited for snapshots and unfinished saves so far."""
        self._under_way = SaveUnderWay()
        self._waits = WaitingShare()
        self._deadline = Deadline(self.config.deadline_s)
        self._worker = Worker("shrinkpoint-save", before_exit=end_evaluations)
        self._warmup = Warmup(self.config.scheme)
        self._frozen: FrozenTensors | None = None
        self._group, self._turns = group, Turns()
        self._newest: tuple[Manifest, Any] | None = None

    def refer_to(self, model: nn.Module, *, logged: bool = False) -> None:
        """Let checkpoints refer to the frozen tensors of a model, as the option `frozen` says; to be called before training starts.

        Args:
            model: the module whose state dict the states contain, none with shards; a restore checks its frozen tensors, and takes them.
            logged: whether there is a step log, which needs all weights in the checkpoints.

        Raises:
            ConfigError: ``frozen="reference"`` with a step log.
        """
        if logged and self.config.frozen == "reference":
            raise ConfigError(
                "frozen='reference' with step_log=: steps are replayed from whole weights; leave one of them out"
            )
        self._frozen = FrozenTensors(model, "store" if logged else self.config.frozen)

    def _captured(self, state: object, describe: Describe, *, shards: bool = False) -> TrainingState:
        if self._frozen is None:
            return TrainingState.capture(state, describe, shards=shards)
        whole = TrainingState.capture(self._frozen.with_adapters(state), describe, shards=shards)
        return self._frozen.referred(whole)

    def _filled(self, state: TrainingState) -> TrainingState:
        return state if self._frozen is None else self._frozen.filled(state, self.store.display)

    def _named(self, which: Manifest | int) -> Manifest:
        """Return the manifest of a step.

        Raises:
            NoCheckpointError: there is no checkpoint of it.
        """
        if isinstance(which, Manifest):
            return which
        return Address(url=self.url, step=which).find(self.store.manifests())

    def _warn_of(self, manifest: Manifest, *, resumes: bool) -> None:
        """Warn where a restored checkpoint is not finite, with the way to the last one that is, or has weights alone."""
        found = not_finite_text(manifest)
        if found is not None:
            sound = next(
                (m for m in self.store.manifests() if m.position < manifest.position and is_finite(m)), None
            )
            way_out = (
                "The run holds no finite checkpoint of before"
                if sound is None
                else f"The last finite one is of step {sound.step}. To go on from there: Checkpointer.resume(step={sound.step}),"
                f" Lightning's fit(ckpt_path='{Address(url=self.url, step=sound.step)}'), Transformers' train(resume_from_checkpoint=...)"
                " with the same address, or `shrinkpoint export` and whatever loads that"
            )
            warn(
                f"the checkpoint of step {manifest.step} in {self.store.display} is not finite: {found}. {way_out}"
            )
        if resumes and is_weights_only(manifest.meta):
            warn(
                f"resumed weights of step {manifest.step} from {self.store.display}; optimizer state was not stored: it"
                " starts anew"
            )

    @property
    def busy(self) -> bool:
        """Whether a save is being encoded or written; of several ranks on this one."""
        return self._worker.busy

    @property
    def skipped(self) -> int:
        """Saves that were skipped because one was still being written."""
        return self._under_way.skipped

    def skip(self, *, warns: bool = True) -> None:
        """Count a save that is not made because one is under way; the first, the tenth, the hundredth ... gives a warning with the reason.

        Args:
            warns: False where another rank says it.
        """
        self._under_way.skip(warns=warns)

    def save(self, state: object, **fields: Any) -> Accepted | None:
        """Save a state; as `accept`.

        Args:
            state: what a framework would give to ``torch.save``.
            fields: further ones of `SaveRequest`, by name; `step` is needed.
        """
        return self.accept(SaveRequest(state=state, **fields))

    @abstractmethod
    def accept(self, request: SaveRequest) -> Accepted | None:
        """Save a state; returns as soon as it is copied.

        Returns:
            What was accepted; None when a save was still being written and `busy` is ``skip``, when shards have too little memory,
            or when it was to be waited for and has failed.

        Raises:
            SaveFailedError: three saves in a row have failed.
            FencedError: another writer has taken over the run.
            CannotRepresentError: the state holds an object that cannot be stored without pickle.
            ConfigError: a field cannot work, or this was called within another call, by an evaluation, say.
        """

    def _hand_over(
        self, jobs: list[Job], background: Background, take_over: Callable[[Takeover], object], *, wait: bool
    ) -> Accepted | None:
        """Give the one job to the background, which alone has its snapshot then, and let the training go on."""
        step, blocked_s, takeover = jobs[0].step, jobs[0].blocked_s, jobs[0].takeover
        self.blocked_s += blocked_s
        self._under_way.begin(step, compiling=self._warmup.running)
        self._worker.submit(lambda: background.run(jobs))
        if takeover is not None:
            take_over(takeover)
            self.blocked_s += takeover.seconds
        if wait:
            self.flush()
            if self.failed:
                return None
        return Accepted(step=step, blocked_s=blocked_s)

    def _compiled(self) -> None:
        """Wait until the coders are compiled; in the background."""
        self._warmup.wait()
        self._under_way.compiling = False

    @abstractmethod
    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until the save that is under way is committed or has failed, on every rank; evaluations are made meanwhile.

        Returns:
            False if it is still under way after `timeout_s` seconds.

        Raises:
            SaveFailedError, FencedError: as `save`.
            ConfigError: it was called by an evaluation, for which it would wait.
        """

    @property
    @abstractmethod
    def failed(self) -> bool:
        """Whether the last save that was accepted could not be stored; of several ranks, the last one that all have agreed about."""

    def reports(self) -> list[SaveReport]:
        """Return every save that this process, or its group, has committed since it began, oldest first."""
        return [] if self._background is None else list(self._background.reports)

    @property
    def lineage(self) -> str | None:
        """The training that the next checkpoint belongs to; None before the first one of a new training, and on other ranks than the first."""
        return None if self._chain is None else self._chain.lineage

    # ---- restoring

    @in_turn
    def newest(self) -> Manifest | None:
        """Return the newest checkpoint whose whole chain is sound, on every rank; None in an empty run.

        Damaged checkpoints are skipped with a warning that says what and why.

        Raises:
            ChainError: there are checkpoints, and none of them is sound.
            StoreError: the store cannot be read.
        """
        self._newest = self._found()
        return None if self._newest is None else self._newest[0]

    def restore(self, which: Manifest | int | None = None, *, adopt: bool = True) -> Restored | None:
        """Read a checkpoint, verify its whole chain, and let the next save continue it.

        Args:
            which: a manifest, or a step; None is the newest sound checkpoint.
            adopt: False only reads, for an evaluation, say: saves go on from what they went on from.

        Returns:
            The state, of several ranks in the tensors of `targets`; None if the run is empty and `which` is None.

        Raises:
            ConfigError: `which` is neither.
            NoCheckpointError: there is no checkpoint of that step.
            StateMismatchError: it is another model's, or refers to frozen tensors that are others here; nothing is changed then.
            FormatError, ChainError: it is damaged.
            StoreError: the store cannot be read.
        """
        which = which if which is None or isinstance(which, Manifest) else plain_step(which)
        if adopt:
            return self._turns.take("restore", lambda: self._restored(which, adopt=True))
        return self._restored(which, adopt=False)

    def _restored(self, which: Manifest | int | None, *, adopt: bool) -> Restored | None:
        found = self._newest if adopt else None
        if which is None:
            found = found or self._found()
        elif found is None or which not in (found[0], found[0].step):
            found = self._read(which)
        if found is None:
            return None
        self._newest = None if adopt else self._newest
        manifest, decoded = found
        state = self._loaded(manifest, decoded, adopt=adopt)
        self._group.on_first(lambda: self._warn_of(manifest, resumes=adopt or self._group.size > 1))
        return Restored(manifest, state)

    def _found(self) -> tuple[Manifest, Any] | None:
        with waiting_for(f"reading the newest checkpoint of {self.store.display}"):
            return self._read_newest()

    @abstractmethod
    def _read_newest(self) -> tuple[Manifest, Any] | None:
        """Read and decode the newest sound checkpoint, or what this rank will own of it."""

    @abstractmethod
    def _read(self, which: Manifest | int) -> tuple[Manifest, Any]:
        """Read and decode one checkpoint, or what this rank will own of it."""

    @abstractmethod
    def _loaded(self, manifest: Manifest, decoded: Any, *, adopt: bool) -> TrainingState:
        """Give the state of what was decoded; with `adopt` the next save continues it."""


class Saver(StateSaver):
    """Saves states of one run and restores them.

    Args:
        url: the run's prefix: a folder, ``s3://bucket/prefix``, or any URL that fsspec knows; or a list of several, which hold
            it together (docs/stores.md); or `Stores` with options.
        config: how to save.
        storage_options: passed to fsspec, or a function that returns them and is asked again when they are refused; of several URLs for all but folders, or a list of as many.

    The constructor does no I/O; `check` does, before training starts. All methods are for the training's thread: calls of several
    threads are made one after another, but a state that changes while `save` copies it, or while it is evaluated, is stored so.

    Examples:
        >>> saver = shrinkpoint.Saver("runs/8", shrinkpoint.SaverConfig(scheme="lossless"))
        >>> saver.check()  # before training starts: can the store be written?
        >>> accepted = saver.save({"model": model.state_dict(), "epoch": 3}, step=500)
        >>> saver.close()  # waits for the save, which goes on in the background
        True
        >>> shrinkpoint.Saver("runs/8").restore().state.to_object()["epoch"]
        3
    """

    def __init__(
        self,
        url: RunUrl,
        config: SaverConfig | None = None,
        *,
        storage_options: StorageOptions = None,
    ) -> None:
        self._desk = EvaluationDesk()
        super().__init__(url, config, storage_options, self._desk.close, Alone())
        self.adopted: tuple[str, ...] = ()
        """With ``adopt=True``: the tensors that the last call of `save` has given other values, in the training."""
        self._chain: Chain = Chain(self.store, self.config)
        self._background: Background = Background(
            self.store,
            self.config,
            lambda: self._desk.seconds,
            self._chain,
            ready=self._compiled,
            url=self.url,
        )
        self._continuation = Continuation(self._background, self._chain)
        self._snapshotter = Snapshotter()
        self._evaluate: Evaluate | None = None
        self._resumed: ResumedSteps | None = None
        _savers.add(self)

    @property
    def failed(self) -> bool:
        """See `StateSaver.failed`."""
        return self._background.failed

    @property
    def search_s(self) -> float:
        """Seconds that training has spent in evaluations so far."""
        return self._desk.seconds

    @property
    def evaluation_wanted(self) -> bool:
        """Whether the next `poll` will evaluate: where all processes must take part in it, they ask this first."""
        return self._desk.waiting

    def check(self) -> None:
        """Make sure, before training starts, that the store can be written and holds nothing foreign.

        The coders are compiled from then on, in the background. A save of this run that an earlier saver of this process has under way
        is waited for: committed later, it would end this training as one of a second process.

        Raises:
            StoreError: the store cannot be reached or written, with the way out.
            RunMismatchError: the prefix holds something that is not a shrinkpoint run.
        """
        for other in list(_savers):
            if other is not self and other.store.is_same_place(self.store):
                other.finish()
        self._chain.open()
        self._background.look()
        self._warmup.start()

    # ---- saving

    @in_turn
    def begin(self, state: object, *, step: int = 0, describe: Describe = plain) -> None:
        """Note where a training starts: the noise of the first checkpoint is limited by how far the weights have moved since.

        Its weights are copied to the host. Without this call nothing is known of the movement until the second checkpoint, and
        the first one is stored finely. Nothing is noted where this saver has restored what training continues from, or has
        saved it.

        Args:
            state: what `save` will be given, or the part of it that holds the weights, in the same form.
            step: training steps done so far.
            describe: as of `save`.
        """
        step = plain_step(step)
        if self._continuation.is_known:
            return
        if self._frozen is not None:
            self._frozen.note()
        live = self._captured(state, describe)
        specs = {name: spec for name, spec in live.specs.items() if is_followed(spec)}
        tensors = {name: live.tensors[name].detach().to("cpu", copy=True) for name in specs}
        self._continuation.begin(TrainingState(None, tensors, specs), step)
        self._settle_if_idle()

    def accept(self, request: SaveRequest) -> Accepted | None:
        """See `StateSaver.accept`. `poll`, `save` and `flush` alone call `evaluate` and `resumed`."""
        return self._turns.take("save", lambda: self._accept(request.checked()))

    def _accept(self, request: SaveRequest) -> Accepted | None:
        adoption, evaluate, resumed = request.adoption, request.evaluate, request.resumed
        if adoption is not None and not self.config.adopt:
            raise ConfigError("adoption needs a saver with adopt=True")
        self._raise_if_fatal()
        started = time.perf_counter()
        self.adopted = ()
        if not self._is_free(request.wait):
            return None
        waited_s = time.perf_counter() - started
        self._newest = None  # a later `restore` finds this checkpoint, or a newer one
        self._settle_if_idle()
        captured = self._captured(request.state, request.describe)
        exact, alone = self._deadline.choose(captured, self.reports(), exact=request.exact)
        if alone:
            self._background.forget()
        optimizers = request.optimizers
        if self.config.weights_only or alone:  # after a restore, a fresh optimizer makes the steps
            captured, resumed, optimizers = without_optimizer(captured), None, ()
        self._evaluate, self._resumed = evaluate, resumed
        takeover = self._takeover(captured, request.describe, adoption, waited_s)
        jobs = [
            Job(
                snapshot=self._snapshotter.take(captured),
                step=request.step,
                metrics=request.metrics or {},
                measure=self._desk.measure if evaluate is not None else None,
                resume=self._desk.resume if resumed is not None else None,
                gradients={
                    name: value.detach().to("cpu", copy=True)
                    for name, value in (request.gradients or {}).items()
                },
                optimizers=tuple(OptimizerKind.of(optimizer) for optimizer in optimizers),
                exact=exact,
                weights_only=self.config.weights_only or alone,
                blocked_s=time.perf_counter() - started - (waited_s if takeover is not None else 0.0),
                takeover=takeover,
            )
        ]
        return self._hand_over(jobs, self._background, partial(self._take_over, started), wait=request.wait)

    def _is_free(self, wait: bool) -> bool:
        """Return whether the next save can begin: the one before has ended, or was waited for."""
        if self.busy:
            self.poll()
            if self.config.busy == "skip" and not wait and not self.config.adopt:
                self.skip()
                return False
            self.flush()
        return True

    def _takeover(
        self, captured: TrainingState, describe: Describe, adoption: Adoption | None, waited_s: float
    ) -> Takeover | None:
        if adoption is None:
            return None
        exactly = unsuitable(captured, TrainingState.capture(adoption.live(), describe).tensors)
        return Takeover(captured.tensors, exactly, adoption.settings, waited_s)

    def _take_over(self, started: float, takeover: Takeover) -> None:
        """Wait for the quantized values, and let the training go on from them."""
        with self._waiting() if self._under_way.compiling else nullcontext():
            takeover.wait(self.poll, started=time.perf_counter())
        self.adopted = takeover.taken
        self._waits.add(started, time.perf_counter())

    def poll(self) -> float:
        """Make the measurement that the background asks for, if any; to be called after every batch.

        Returns:
            The seconds that it took; 0.0 almost always.
        """
        return self._desk.serve(self._evaluate, self._resumed)

    def flush(self, timeout_s: float | None = None) -> bool:
        """See `StateSaver.flush`."""
        self._refuse_in_evaluation("flush")
        timeout_s = plain_timeout(timeout_s)
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self._waiting():
            while self.busy:
                if deadline is not None and time.monotonic() >= deadline:
                    return False
                if not self.poll():
                    self._desk.wait_for_request(0.01)
        self._raise_if_fatal()
        return True

    def _refuse_in_evaluation(self, call: str) -> None:
        if self._desk.serves:
            raise ConfigError(
                f"{call} was called by an evaluation, for which it would wait: call it between two training steps"
            )

    def _waiting(self, whose: str = "") -> AbstractContextManager[object]:
        """Says what is waited for, if anything is, once that takes more than two seconds."""
        return self._under_way.waiting(self.store.display, whose) if self.busy else nullcontext()

    def close(self, timeout_s: float | None = None) -> bool:
        """Finish the save that is under way, without further evaluations, and let go of the store.

        Returns:
            False if it is still under way after `timeout_s` seconds; it then goes on in the background.

        Raises:
            ConfigError: as `flush`.
        """
        self._refuse_in_evaluation("close")
        self._turns.refuse("close")
        timeout_s = plain_timeout(timeout_s)
        self._desk.close()  # before other threads' calls are waited for, which may wait for evaluations
        try:
            if timeout_s is None:
                return self._turns.take("close", lambda: self._close(None))
            deadline = time.monotonic() + timeout_s
            closed = self._turns.take_within(timeout_s, "close", lambda: self._close(deadline))
            if closed is None:  # another thread goes on
                self._desk.reopen()
        except BaseException:
            self._desk.reopen()
            raise
        return bool(closed)

    def _close(self, deadline: float | None) -> bool:
        with self._waiting():
            if not self._worker.join(None if deadline is None else max(deadline - time.monotonic(), 0.0)):
                return False
        self._desk.reopen()
        self._chain.close()
        self._warmup.stop()
        return True

    def require_stored(self) -> None:
        """Raise where the last save could not be stored, at a training's end.

        Raises:
            SaveFailedError: it could not.
        """
        self._background.require_stored()

    def finish(self) -> None:
        """Finish the save that is under way, without further evaluations; from any thread, for another saver of the same run."""
        if self.busy:
            self.end_evaluations("a later saver of this process goes on with the run")
            with self._waiting(" by an earlier saver of this process"):
                self._worker.join()
            self._desk.reopen()

    def end_evaluations(self, why: str = "training has ended") -> None:
        """Let the save that is under way go on without the training thread, which polls no more; `why` is for its report."""
        self._desk.close(why)

    def _raise_if_fatal(self) -> None:
        fatal, self._background.fatal = self._background.fatal, None
        if fatal is not None:
            raise fatal

    # ---- restoring

    def _read_newest(self) -> tuple[Manifest, Decoded] | None:
        return self.store.newest_readable(self._decode)

    def _read(self, which: Manifest | int) -> tuple[Manifest, Decoded]:
        manifest = self._named(which)
        with waiting_for(f"reading the checkpoint of step {manifest.step} of {self.store.display}"):
            return manifest, self._decode(manifest)

    def _loaded(self, manifest: Manifest, decoded: Decoded, *, adopt: bool) -> TrainingState:
        state = self._filled(decoded.state)
        if adopt:
            self._continuation.restore(manifest, decoded)
            if adopted_of(manifest) is not None and not self.config.adopt:
                warn(
                    f"the training up to step {manifest.step} adopted its checkpoints (adopt=True), and goes on without that: from now"
                    " on a resumed run differs from an undisturbed one"
                )
            self._settle_if_idle()
        return state

    @in_turn
    def forget(self, *, follows: Manifest | None = None) -> None:
        """Hold nothing of what was read: the next save makes a base.

        Args:
            follows: the checkpoint whose training goes on all the same, so that retention goes on with it; None: another
                training begins, and leaves all earlier checkpoints alone.
        """
        self._newest = None
        self._continuation.forget(follows)
        self._settle_if_idle()

    def _decode(self, manifest: Manifest) -> Decoded:
        with self._warmup.paused():
            return decode_checkpoint(self.store, manifest, threads=self.config.encoder_threads)

    def _settle_if_idle(self) -> None:
        if not self.busy:
            self._continuation.settle()


_savers: "weakref.WeakSet[Saver]" = weakref.WeakSet()
