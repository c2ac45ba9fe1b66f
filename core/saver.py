"""Saves training states in the background, and restores the newest sound one; every integration drives this.

One save is a snapshot on the training thread, then a job in the background: choose a configuration, encode, commit,
collect. The job asks the training thread for evaluations and trial steps alone, which `Saver.poll` makes. With ``adopt``
training also waits for the restored values. Several processes make the same calls; a `Placement` gives each its part.
"""

import time
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from torch import nn

from shrinkpoint.config import SaverConfig
from shrinkpoint.engine.address import Address
from shrinkpoint.engine.adopt import AdoptingBackground
from shrinkpoint.engine.background import Background
from shrinkpoint.engine.chain import Chain
from shrinkpoint.engine.compaction import without_optimizer
from shrinkpoint.engine.handover import Handover
from shrinkpoint.engine.movement import is_followed
from shrinkpoint.engine.placement import Found, NoMemoryError, Placed, Placement
from shrinkpoint.engine.request import Job, SaveRequest, Way, plain_step, plain_timeout
from shrinkpoint.engine.retention import adopted_of, is_finite, is_weights_only, not_finite_text
from shrinkpoint.engine.under_way import Deadline, SaveUnderWay
from shrinkpoint.engine.warmup import Warmup
from shrinkpoint.errors import ConfigError, SaveFailedError
from shrinkpoint.group.ending import Ending
from shrinkpoint.group.group import attempt
from shrinkpoint.optimizers.updates import OptimizerKind
from shrinkpoint.reports import Accepted, SaveReport
from shrinkpoint.runtime.progress import waiting_for
from shrinkpoint.runtime.threads import Turns, Worker, in_turn
from shrinkpoint.state.frozen import FrozenTensors, named_digests
from shrinkpoint.state.training import Describe, TrainingState, plain
from shrinkpoint.store.connect import StorageOptions
from shrinkpoint.store.manifest import Manifest
from shrinkpoint.store.run import RunStore
from shrinkpoint.store.urls import RunUrl, url_text
from shrinkpoint.warn import warn

__all__ = ["Restored", "Saver", "SaverConfig"]

_FIRST_LOOK_S = 0.002
_LONGEST_PAUSE_S = 0.5


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


class _Agreed(NamedTuple):
    """A decision that all ranks have taken together."""

    busy: bool
    base: bool
    clock_s: float
    """The first rank's time."""


class Saver:
    """Saves states of one run and restores them.

    Args:
        url: the run's prefix: a folder, ``s3://bucket/prefix``, or any URL that fsspec knows; or a list of several, which hold
            it together (docs/stores.md); or `Stores` with options.
        config: how to save.
        storage_options: passed to fsspec, or a function that returns them and is asked again when they are refused; of several URLs for all but folders, or a list of as many.
        placement: says where the tensors are: all in this process, or those of `shrinkpoint.sharded.placement`.

    The constructor does no I/O; `check` does, before training starts. Call all methods on the training's thread. Calls from
    several threads wait for each other, but nothing stops a thread from changing the state that `save` copies.

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
        placement: Callable[[RunStore, SaverConfig], Placement] = Placement,
    ) -> None:
        self.url = url_text(url)
        """The run's URL, without credentials; of several, with commas between."""
        self.config = config or SaverConfig()
        """How to save."""
        self.store = RunStore(url, storage_options=storage_options)
        """The run's checkpoints."""
        self.blocked_s = 0.0
        """Seconds that training has waited for snapshots and unfinished saves so far."""
        self.adopted: tuple[str, ...] = ()
        """With ``adopt=True``: the tensors that the last call of `save` has given other values, in the training."""
        self._placement = placement(self.store, self.config)
        self.together = self._placement.together
        """Whether several processes save to this run together, each its part, and make all calls at the same moments."""
        self._group, self._desk = self._placement.group, self._placement.desk
        self._chain = Chain(self.store, self.config) if self._group.is_first else None
        background = AdoptingBackground if self.config.adopt else Background
        self._background = background(self._placement, self._chain, ready=self._compiled, url=self.url)
        self._under_way = SaveUnderWay()
        self._deadline = Deadline(self.config.deadline_s)
        self._worker = Worker("shrinkpoint-save", before_exit=self._desk.close)
        self._warmup = Warmup(self.config.scheme)
        self._frozen: FrozenTensors | None = None
        self._turns = Turns()
        self._newest: Found | None = None
        self._number = 0
        self._failed = False
        self._is_ready = not self.together  # several processes `check` first
        self._began = time.perf_counter()
        _savers.add(self)

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

    def check(self) -> None:
        """Make sure, before training starts, that the store can be written and holds nothing foreign.

        The coders are compiled from then on, in the background. A save of this run that an earlier saver of this process has under way
        is waited for: committed later, it would end this training as one of a second process. After `close` it opens the run again.

        Raises:
            ConfigError: several processes were not given the same, or an option is not for them.
            StoreError: the store cannot be reached or written, with the way out.
            RunMismatchError: the prefix holds something that is not a shrinkpoint run.
        """
        for other in list(_savers):
            if other is not self and other.store.is_same_place(self.store):
                other.finish()
        self._placement.check(self.url, self._chain)
        self._is_ready = True
        if self._placement.leads_node:
            self._background.check_scratch()
            self._warmup.start()

    def ending(self) -> Ending | None:
        """By which several processes agree where to end when one of them is asked to; a collective, once, after `check`. None of one process.

        Raises:
            StoreError: a rank cannot reach the first one; on every rank.
        """
        self._require_checked()
        return self._placement.ending()

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

    @property
    def failed(self) -> bool:
        """Whether the last save that was accepted could not be stored; of several ranks, the last one that all have agreed about."""
        return self._failed if self.together else self._background.failed

    @property
    def search_s(self) -> float:
        """Seconds that training has spent in evaluations so far."""
        return self._desk.seconds

    @property
    def evaluation_wanted(self) -> bool:
        """Whether the next `poll` will evaluate: where all processes must take part in it, they ask this first."""
        return self._desk.waiting

    def reports(self) -> list[SaveReport]:
        """Return every save that this process, or its group, has committed since it began, oldest first."""
        return list(self._background.reports)

    @property
    def lineage(self) -> str | None:
        """The training that the next checkpoint belongs to; None before the first one of a new training, and on other ranks than the first."""
        return None if self._chain is None else self._chain.lineage

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
        if self._frozen is not None:
            self._frozen.note()
        self._require_checked()
        if self.busy and not self.together:
            return  # training continues what is being saved
        self._join("begin")
        noted = self._background.movement.step is not None
        if self.config.scheme == "lossless" or self._group.any_of(noted)[0]:
            return

        def weights() -> Placed:
            live = self._captured(state, describe)
            specs = {name: spec for name, spec in live.specs.items() if is_followed(spec)}
            tensors = {name: live.tensors[name] for name in specs}
            return self._placement.place(TrainingState(None, tensors, specs), {})

        self._group.on_every(weights).begin(self._background, step)

    def save(self, state: object, **fields: Any) -> Accepted | None:
        """Save a state; as `accept`.

        Args:
            state: what a framework would give to ``torch.save``.
            fields: further ones of `SaveRequest`, by name; `step` is needed.
        """
        return self.accept(SaveRequest(state=state, **fields))

    def accept(self, request: SaveRequest) -> Accepted | None:
        """Save a state; returns as soon as it is copied. Only `poll`, `save` and `flush` call `evaluate` and `resumed`.

        Of several ranks, metrics are the first one's. The losses of `evaluate` and `resumed` are each rank's own; ranks with
        the same ones count once. `gradients` are whole, and the same on every rank.

        Returns:
            What was accepted; None when a save was still being written and `busy` is ``skip``, when shards have too little memory,
            or when it was to be waited for and has failed.

        Raises:
            SaveFailedError: three saves in a row have failed.
            FencedError: another writer has taken over the run.
            CannotRepresentError: the state holds an object that cannot be stored without pickle.
            ConfigError: a field cannot work, or this was called within another call, by an evaluation, say.
        """
        return self._turns.take("save", partial(self._accept, request))

    def _accept(self, request: SaveRequest) -> Accepted | None:
        started = time.perf_counter()
        self.adopted = ()
        asked, error = attempt(lambda: request.checked(adopts=bool(self.config.adopt)))
        if request.wait or self.config.busy == "wait" or self.config.adopt:
            self._join("save")
        else:
            self.poll()
        adopts = request.adoption is not None
        agreed = self._agree(0 if asked is None else asked.step, error, adopts=adopts)
        assert asked is not None
        if agreed.busy:
            self.skip(warns=self._group.is_first)
            return None
        waited_s = time.perf_counter() - started
        self._newest = None  # a later `restore` finds this checkpoint, or a newer one
        live, error = attempt(lambda: self._captured(asked.state, asked.describe))
        way = self._way(live, exact=asked.exact)
        weights_only = way.weights_only or self.config.weights_only
        placed, second = attempt(lambda: self._placed(live, weights_only=weights_only))
        # after a restore of weights alone, a fresh optimizer makes the steps
        no_steps = asked.resumed is None or weights_only or not self._desk.takes_steps
        flags = self._group.any_of(
            placed is None,
            placed is not None and placed.is_new,
            way.exact,
            not adopts,
            not self._measures(asked, exact=way.exact),
            no_steps,
        )
        failed, new, exact, unplanned, unmeasured, no_steps = flags
        if failed:
            self._group.raise_together(error or second)
        assert placed is not None
        try:
            snapshot = placed.snapshot(self._background, new=new)
        except NoMemoryError as lacking:
            self._background.give_up(asked.step, lacking)
            return None
        unmeasured = unmeasured or (exact and self.together)
        adoption = None if unplanned else asked.adoption
        handover = None if adoption is None else placed.handover(adoption, asked.describe, waited_s)
        if agreed.base or way.weights_only:
            self._background.link = None
        self._number += 1
        job = Job(
            snapshot=snapshot,
            step=asked.step,
            metrics=asked.metrics or {},
            measure=None if unmeasured else self._desk.measure,
            resume=None if unmeasured or no_steps else self._desk.resume,
            gradients=placed.gradients(asked.gradients or {}),
            optimizers=() if weights_only else tuple(OptimizerKind.of(one) for one in asked.optimizers),
            way=Way(exact, way.raw, weights_only),
            blocked_s=time.perf_counter() - started - (waited_s if handover is not None else 0.0),
            handover=handover,
            number=self._number,
            own=self._placement.own(),
            began=self._chain.open().now() if self.together and self._chain is not None else 0.0,
            clock_s=agreed.clock_s,
        )
        jobs, blocked_s = [job], job.blocked_s
        del snapshot, job  # the background alone has it then
        if not unmeasured and asked.evaluate is not None:
            placed.note_evaluations(self._number, asked.evaluate, None if no_steps else asked.resumed)
        self.blocked_s += blocked_s
        self._under_way.begin(asked.step, compiling=self._warmup.running)
        self._worker.submit(partial(self._background.run, jobs))
        if handover is not None:
            self._take(handover, placed, started)
        if asked.wait:
            self.flush()
            if self.failed:
                return None
        return Accepted(step=asked.step, blocked_s=blocked_s)

    def _captured(self, state: object, describe: Describe) -> TrainingState:
        frozen, shards = self._frozen, self.together
        if frozen is None:
            return TrainingState.capture(state, describe, shards=shards)
        return frozen.referred(TrainingState.capture(frozen.with_adapters(state), describe, shards=shards))

    def _placed(self, live: TrainingState | None, *, weights_only: bool) -> Placed:
        assert live is not None  # else there is an error already
        live = without_optimizer(live) if weights_only else live
        return self._placement.place(live, {} if self._frozen is None else named_digests(live.tree))

    def _measures(self, request: SaveRequest, *, exact: bool) -> bool:
        """Return whether this process can evaluate candidates; several do so only where something is chosen."""
        if request.evaluate is None or not self.together:
            return request.evaluate is not None
        chooses = self.config.scheme != "lossless" and not exact
        return (
            chooses
            and not self._desk.leaves_trace
            and (request.adoption is not None or not self.config.adopt)
        )

    def _way(self, live: TrainingState | None, *, exact: bool) -> Way:
        """Return how to save; of several ranks as the first one decides."""
        own = Way(exact)
        if self.config.deadline_s is None:
            return own
        if live is not None and self._group.is_first:
            own = self._deadline.choose(live, self.reports(), exact=exact)
        return self._group.broadcast(own)

    def _agree(self, step: int, error: Exception | None = None, *, adopts: bool = False) -> _Agreed:
        """Let all ranks learn the same of each other's saves, by one collective of a few bytes.

        Raises:
            ShrinkpointError: one rank has a reason not to go on, or they are at different steps; on every rank.
        """
        self._require_checked()
        background = self._background
        # while a save is under way its thread changes these, and nothing is decided by them
        idle = not self._worker.busy
        link = background.link.number if idle and background.link is not None else -1
        base, failed = idle and background.base_is_due(adopts=adopts), idle and background.failed
        if error is None and idle:
            error, background.fatal = background.fatal, None
        clock_s = time.perf_counter() - self._began if self._group.is_first else 0.0
        flags = error is not None, not idle, base, failed
        most = self._group.most([*map(int, flags), step, -step, link, -link, round(1e6 * clock_s)])
        if most[0]:
            self._group.raise_together(error)
        highest, lowest, newest, oldest = most[4], -most[5], most[6], -most[7]
        if highest != lowest:
            raise ConfigError(
                f"the ranks are at different steps, {lowest} to {highest}: every rank must save in the same batch"
            )
        self._failed = bool(most[3])
        return _Agreed(bool(most[1]), bool(most[2]) or newest < 0 or newest != oldest, 1e-6 * most[8])

    def _require_checked(self) -> None:
        if not self._is_ready:
            raise ConfigError("call check() first, on every rank")

    def _compiled(self) -> None:
        """Wait until the coders are compiled; in the background."""
        self._warmup.wait()
        self._under_way.compiling = False

    def _take(self, handover: Handover, placed: Placed, started: float) -> None:
        """Serve evaluations until all ranks have quantized what they code, and let the training go on from the restored values.

        If one rank could not, none goes on from them, and the save fails on all.
        """
        began, pause_s = time.perf_counter(), _FIRST_LOOK_S
        try:
            with self._waiting() if self._under_way.compiling else nullcontext():
                while self._group.most([not handover.is_settled(pause_s)])[0]:
                    handover.served_s += self.poll()
                    pause_s = _FIRST_LOOK_S if self._desk.is_active else min(2 * pause_s, _LONGEST_PAUSE_S)
            values = handover.values
            changed = self._group.gather(None if values is None else [*values])
            if values is not None and all(names is not None for names in changed):
                names = list(dict.fromkeys(name for own in changed for name in own or ()))
                placed.write(names, values)
                handover.accept(tuple(names), started=began)
        finally:
            handover.leave()
        self.adopted = handover.taken
        self.blocked_s += handover.seconds
        self._under_way.waited(started, time.perf_counter())

    def poll(self) -> float:
        """Make the measurement that the background asks for, if any; to be called after every batch.

        Of several processes a collective, of a few bytes, while a save with `evaluate` is being planned; else nothing.

        Returns:
            The seconds that it took; 0.0 almost always.

        Raises:
            ConfigError: an evaluation has failed on some ranks, and others do not come out of theirs.
            StoreError: the first rank is gone.
        """
        return self._desk.poll()[0]

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until the save that is under way is committed or has failed, on every rank; evaluations are made meanwhile.

        Returns:
            False if it is still under way after `timeout_s` seconds.

        Raises:
            SaveFailedError, FencedError: as `save`.
            ConfigError: it was called by an evaluation, for which it would wait.
        """
        timeout_s = plain_timeout(timeout_s)
        if not self._is_ready:
            return True
        self._join("flush", timeout_s)
        return not self._agree(0).busy

    def _join(self, call: str, timeout_s: float | None = None) -> None:
        """Wait for the save that is under way, and make its evaluations; of several processes a collective."""
        self._refuse_in_evaluation(call)
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self._waiting():
            if not (self.busy or self.together) or self._desk.drain(timeout_s):
                self._worker.join(None if deadline is None else max(0.0, deadline - time.monotonic()))

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
        if self._chain is not None:
            self._chain.close()
        self._warmup.stop()
        if self._group.is_first:
            self._under_way.end()
        return True

    def require_stored(self) -> None:
        """Raise where the last save could not be stored, at a training's end; no collective.

        Raises:
            SaveFailedError: it could not.
        """
        self._background.failures.require_none()
        if self.failed:
            stored = self.reports()
            newest = (
                f"the newest checkpoint is {self.store.display}#step={stored[-1].step}"
                if stored
                else "there is none"
            )
            raise SaveFailedError(
                f"the last save to {self.store.display} failed, as a warning has said; of this training {newest}"
            )

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

    # ---- restoring

    @in_turn
    def newest(self) -> Manifest | None:
        """Return the newest checkpoint whose whole chain is sound, on every rank; None in an empty run.

        The unfinished save is waited for. Damaged checkpoints are skipped with a warning that says what and why.

        Raises:
            ChainError: there are checkpoints, and none of them is sound.
            StoreError: the store cannot be read.
        """
        self._settle("newest")
        self._newest = self._found(None)
        return None if self._newest is None else self._newest.manifest

    def restore(self, which: Manifest | int | None = None, *, adopt: bool = True) -> Restored | None:
        """Read a checkpoint, verify its whole chain, and let the next save continue it.

        The unfinished save is waited for, since it may be the one; not with ``adopt=False``.

        Args:
            which: a manifest, or a step; None is the newest sound checkpoint.
            adopt: False only reads, as for an evaluation: the next save continues what it would have continued.

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
            return self._turns.take("restore", partial(self._restored, which, adopt=True))
        return self._restored(which, adopt=False)

    def _restored(self, which: Manifest | int | None, *, adopt: bool) -> Restored | None:
        if adopt:
            self._settle("restore")
        found = self._newest if adopt else None
        if found is None or (which is not None and which not in (found.manifest, found.manifest.step)):
            found = self._found(which)
        if found is None:
            return None
        if adopt or self.together:
            self._newest = None
        manifest, follows = found.manifest, adopt and self.config.scheme != "lossless"
        state = self._placement.loaded(found, self._filled, lambda spec: follows and is_followed(spec))
        if adopt:  # the next save continues it
            self._require_checked()
            self._background.continue_from(found)
        self._group.on_first(lambda: self._warn_of(manifest, adopts=adopt))
        return Restored(manifest, state)

    def _settle(self, call: str) -> None:
        """Wait for the unfinished save before the run is read."""
        if self._is_ready:
            self._join(call)

    def _found(self, which: Manifest | int | None) -> Found | None:
        name = "newest checkpoint" if which is None else f"checkpoint of step {getattr(which, 'step', which)}"
        says = waiting_for(f"reading the {name} of {self.store.display}")
        with says if self._placement.leads_node else nullcontext(), self._warmup.paused():
            if which is None:
                return self._placement.newest()
            if isinstance(which, Manifest):
                return self._placement.read(lambda: which)
            address = Address(url=self.url, step=which)
            return self._placement.read(lambda: address.find(self.store.manifests()))

    def _filled(self, state: TrainingState) -> TrainingState:
        return state if self._frozen is None else self._frozen.filled(state, self.store.display)

    def _warn_of(self, manifest: Manifest, *, adopts: bool) -> None:
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
        if (adopts or self.together) and is_weights_only(manifest.meta):
            warn(
                f"resumed weights of step {manifest.step} from {self.store.display}; optimizer state was not stored: it"
                " starts anew"
            )
        if adopts and adopted_of(manifest) is not None and not self.config.adopt:
            warn(
                f"the training up to step {manifest.step} adopted its checkpoints (adopt=True), and goes on without that: from now"
                " on a resumed run differs from an undisturbed one"
            )

    @in_turn
    def forget(self, *, follows: Manifest | None = None) -> None:
        """Forget what was read: the next save makes a base.

        Args:
            follows: the checkpoint whose training goes on all the same, so that retention goes on with it; None: another
                training begins, and leaves all earlier checkpoints alone.
        """
        self._newest = None
        self._join("forget")
        self._background.start_over()
        if follows is not None and self._chain is not None:
            self._chain.follow(follows)


_savers: "weakref.WeakSet[Saver]" = weakref.WeakSet()
