"""Saves a sharded training from all its ranks in the background, and restores it on any number of them."""

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch

from shrinkpoint.config import SaverConfig
from shrinkpoint.engine.background import Background
from shrinkpoint.engine.chain import Chain
from shrinkpoint.engine.compaction import without_optimizer
from shrinkpoint.engine.ranks import Ranks
from shrinkpoint.engine.request import Job, SaveRequest, plain_step
from shrinkpoint.engine.retention import lineage_of
from shrinkpoint.engine.takeover import Adoption, Takeover, unsuitable
from shrinkpoint.errors import ConfigError, NoCheckpointError, SaveFailedError, StateMismatchError, StoreError
from shrinkpoint.group.ending import Ending
from shrinkpoint.group.group import Distributed, is_first_of_node
from shrinkpoint.group.mailbox import Mailbox
from shrinkpoint.optimizers.updates import OptimizerKind
from shrinkpoint.quantize.movement import is_followed
from shrinkpoint.reports import Accepted
from shrinkpoint.runtime.progress import waiting_for
from shrinkpoint.saver import StateSaver
from shrinkpoint.schemes.base import ReferenceState
from shrinkpoint.sharded.boxes import Pieces
from shrinkpoint.sharded.gathering import Gathering, NoMemoryError
from shrinkpoint.sharded.layout import (
    Layout,
    RankTensors,
    block_box,
    layout_of,
    owned_gradients,
    owners_of,
    tensors_of_rank,
)
from shrinkpoint.sharded.probing import Probe, ProbedSave
from shrinkpoint.sharded.restoring import Decoded, fill, read_newest, read_one
from shrinkpoint.sharded.spreading import Shards, moved_to, spread
from shrinkpoint.sharded.trees import coded_view, own_of
from shrinkpoint.state.frozen import named_digests, references
from shrinkpoint.state.snapshot import Snapshot
from shrinkpoint.state.specs import BLOCK_ELEMENTS
from shrinkpoint.state.training import Describe, TensorSpec, TrainingState, plain
from shrinkpoint.store.connect import StorageOptions
from shrinkpoint.store.manifest import Manifest
from shrinkpoint.store.urls import RunUrl

__all__ = ["ShardedSaver", "refuse_options"]

_APPEARS_S = 10.0  # a network's file system may remember for a while that a file was not there

_FIRST_LOOK_S = 0.01
_LONGEST_PAUSE_S = 0.5

T = TypeVar("T")
Targets = Callable[[Mapping[str, TensorSpec]], Mapping[str, torch.Tensor]]


@dataclass(frozen=True, kw_only=True)
class _Agreed:
    """What all ranks do."""

    busy: bool
    base: bool
    new_layout: bool
    exact: bool
    measures: bool
    steps: bool
    clock_s: float
    """The first rank's time."""


class ShardedSaver(StateSaver):
    """As `shrinkpoint.saver.Saver`, for a training whose ranks hold shards of its state.

    All ranks call `check`, `begin`, `accept`, `poll`, `flush`, `newest`, `restore` and `forget` at the same moments. An
    error on one rank is raised on all.

    Args:
        url: the run's prefix, the same for all ranks: a folder that all of them see, or a URL.
        config: how to save.
        targets: gives the tensors that a restore fills, by name, for the specs of the stored ones.
        own: what each rank stores for itself, values by group and name.
        copied: of copies of a model, which plain tensors are the same on every rank, so that each stores some of them; of others the
            first rank's are stored. None: the model is sharded.
        storage_options: passed to fsspec.
        group: all ranks; None takes the default process group.
        block_elements: elements from which on a tensor is stored as several blocks of rows.
    """

    def __init__(
        self,
        url: RunUrl,
        config: SaverConfig | None = None,
        *,
        targets: Targets,
        own: Callable[[], Mapping[str, Mapping[str, Any]]],
        copied: Callable[[TensorSpec], bool] | None = None,
        storage_options: StorageOptions = None,
        group: Distributed | None = None,
        block_elements: int = BLOCK_ELEMENTS,
    ) -> None:
        group = group or Distributed()
        super().__init__(url, config, storage_options, self._end_probe, group)
        self.moved = 0
        """Bytes that this rank has sent to others for the last save."""
        self._failed = False
        self._targets, self._own, self._is_of_copies = targets, own, copied is not None
        self._copied = copied or (lambda spec: False)
        self._group: Distributed = group
        self._limit = block_elements
        self._number = 0
        self._rank_tensors: RankTensors | None = None
        self._layout: Layout | None = None
        self._owners: Mapping[str, tuple[TensorSpec, int]] = {}
        self._gathering: Gathering | None = None
        self._begun: tuple[Mapping[str, tuple[TensorSpec, int]], int] | None = None
        self._mailbox: Mailbox | None = None
        self._probe: Probe | None = None
        self._session, self._began = "", time.perf_counter()

    # ---- beginning

    def check(self) -> None:
        """Make sure, before training starts, that all ranks were given the same, and that each can write.

        After `close` it opens the run again, and saves go on from what they went on from.

        Raises:
            ConfigError: they were not, or an option is not for sharded trainings.
            StoreError: the store cannot be reached or written.
        """
        group = self._group
        group.on_every(lambda: refuse_options(self.config, copied=self._is_of_copies))
        self._require_same_arguments()
        if group.rank == 0 and self._chain is None:
            self._chain = Chain(self.store, self.config)
        group.on_every(self._open)
        chain = self._chain
        self._session = group.on_first(lambda: chain.open().session if chain is not None else "")
        run = group.on_first(self.store.run_id)
        group.on_every(lambda: self._require_same_run(run))
        for leads in (True, False):  # a folder on this node, by its first process
            group.on_every(lambda leads=leads: self._open_near(leads=leads))  # type: ignore[misc]
        if self._background is None:
            self._mailbox = mailbox = Mailbox(group)
            probe = self._probe = Probe(
                group, group.on_every(mailbox.another), patience_s=self.config.commit_timeout_s
            )
            self._background = Background(
                self.store,
                self.config,
                lambda: probe.seconds,
                self._chain,
                ready=self._compiled,
                url=self.url,
                ranks=Ranks(mailbox, self.config, probe.leave, probe.messages, coded_view),
            )
            if is_first_of_node(group.rank):
                self._background.look()
        if self._probe is not None:
            self._probe.reopen()
        if is_first_of_node(group.rank):
            self._warmup.start()

    def _require_same_arguments(self) -> None:
        given = self._group.gather({"url": self.url} | asdict(self.config))
        for rank, other in enumerate(given):
            name = next((name for name, value in other.items() if value != given[0][name]), None)
            if name is not None:
                raise ConfigError(
                    f"rank 0 was given {name}={given[0][name]!r}, and rank {rank} {name}={other[name]!r}: every rank must give"
                    " the same"
                )

    def _require_same_run(self, run: str) -> None:
        """Refuse a folder that only the first rank sees: no process could read what the ranks store apart."""
        deadline = time.monotonic() + _APPEARS_S
        while True:
            try:
                own = self.store.run_id()
            except NoCheckpointError:
                own = ""
            if own == run:
                return
            if time.monotonic() >= deadline:
                raise StoreError(
                    f"{self.store.display} is another place on rank {self._group.rank} than on rank 0: give a folder that all ranks"
                    " see, or a URL"
                )
            time.sleep(0.2)

    def _open_near(self, *, leads: bool) -> None:
        if self._chain is None and leads == is_first_of_node(self._group.rank):  # a writer has opened it
            self.store.open_near()

    def _open(self) -> None:
        if self._chain is not None:
            self._chain.open()
        else:
            self.store.try_to_write()

    def begin(self, state: object, *, step: int = 0, describe: Describe = plain) -> None:
        """See `Saver.begin`; each rank gets the weights that it would own if there were nothing else."""
        step, background = plain_step(step), self._background
        if self._frozen is not None:
            self._frozen.note()
        if background is None:
            raise ConfigError("call check() first, on every rank")
        self._join()
        if self.config.scheme == "lossless" or self._group.any_of(background.movement.knows)[0]:
            return

        def own() -> tuple[TrainingState, RankTensors, Pieces]:
            live = self._captured(state, describe, shards=True)
            specs = {name: spec for name, spec in live.specs.items() if is_followed(spec)}
            weights = TrainingState(None, {name: live.tensors[name] for name in specs}, specs)
            return weights, *tensors_of_rank(weights.tensors, specs, self._copied)

        snapshot, shards = self._gathered(*self._group.on_every(own), new=True)
        background.begin(snapshot.wait(), step, lasting=snapshot.lasting)
        self._begun = shards.owners, step

    def _move_begun(self, layout: Layout) -> None:
        """Bring the weights of the beginning to those that own them now that the whole state is known; a collective."""
        if self._begun is not None and self._background is not None:
            (before, step), self._begun = self._begun, None
            noted = self._background.movement.noted
            state = moved_to(self._group, layout, before, self._owners, noted)
            self._background.begin(state, step, lasting=True)

    def ending(self) -> Ending:
        """By which the ranks agree where to end when one of them is asked to; a collective, once, after `check`.

        Raises:
            StoreError: a rank cannot reach the first one; on every rank.
        """
        mailbox = self._mailbox
        if mailbox is None:
            raise ConfigError("call check() first, on every rank")
        return self._group.on_every(lambda: Ending(mailbox))

    # ---- saving

    @property
    def search_s(self) -> float:
        """Seconds that training has spent in evaluations so far."""
        return 0.0 if self._probe is None else self._probe.seconds

    def poll(self) -> float:
        """Make the measurement that all ranks' background threads ask for, if they do; to be called after every batch.

        A collective, of a few bytes, while a save with `evaluate` is being planned; else nothing.

        Returns:
            The seconds that it took; 0.0 almost always.

        Raises:
            ConfigError: an evaluation has failed on some ranks, and others do not come out of theirs.
            StoreError: the first rank is gone.
        """
        return 0.0 if self._probe is None else self._probe.serve()

    def accept(self, request: SaveRequest) -> Accepted | None:
        """See `StateSaver.accept`; returns when each rank has a copy of the tensors that it codes.

        Metrics are the first rank's. The losses of `evaluate` and `resumed` are each rank's own; ranks with the same ones count
        once. `gradients` are whole, and the same on every rank.
        """
        evaluate, resumed, adoption = request.evaluate, request.resumed, request.adoption
        started = time.perf_counter()
        self._newest = None  # as in `Saver.save`
        if request.wait or self.config.busy == "wait" or self.config.adopt:
            self._join()
        waited_s = time.perf_counter() - started
        live, error = self._attempt(lambda: self._captured(request.state, request.describe, shards=True))
        exact, alone = self._way(live, exact=request.exact)
        weights_only = alone or self.config.weights_only
        found, second = self._attempt(lambda: self._own_tensors(live, weights_only=weights_only))
        asked, third = self._attempt(request.checked)
        error = error or second or third
        agreed = self._agree(
            request.step,
            error,
            new_layout=found is not None and found[1] != self._rank_tensors,
            exact=exact or bool(self.config.adopt and adoption is None),
            measures=evaluate is not None
            and self.config.scheme != "lossless"
            and not (self._probe is not None and self._probe.leaves_trace),
            steps=resumed is not None
            and not weights_only
            and self._probe is not None
            and self._probe.takes_steps,
        )
        assert found is not None
        assert asked is not None
        request = asked
        if agreed.busy:
            self.skip(warns=self._group.is_first)
            return None
        try:
            snapshot, shards = self._gathered(*found, new=agreed.new_layout)
        except NoMemoryError as error:
            assert self._background is not None
            self._background.give_up(request.step, error)
            return None
        planned = adoption if not agreed.exact else None
        takeover = None if planned is None else self._takeover(shards, request.describe, planned, waited_s)
        background, probe = self._background, self._probe
        assert background is not None
        assert probe is not None
        if agreed.base or alone:
            background.forget()
        self._number += 1
        jobs = [
            Job(
                snapshot=snapshot,
                step=request.step,
                metrics=request.metrics or {},
                measure=probe.measure if agreed.measures else None,
                resume=probe.resume if agreed.steps else None,
                gradients=owned_gradients(shards.owners, self._group.rank, request.gradients or {}),
                optimizers=()
                if weights_only
                else tuple(OptimizerKind.of(optimizer) for optimizer in request.optimizers),
                exact=agreed.exact,
                weights_only=weights_only,
                blocked_s=time.perf_counter() - started - (waited_s if takeover is not None else 0.0),
                takeover=takeover,
                number=self._number,
                own=own_of(self._own(), self._group.rank),
                session=self._session,
                began=self._chain.open().now() if self._chain else 0.0,
                clock_s=agreed.clock_s,
            )
        ]
        del snapshot
        if agreed.measures and evaluate is not None:
            probe.begin(ProbedSave(self._number, shards, found[0], evaluate, resumed))
        return self._hand_over(
            jobs, background, partial(self._take_over, shards, probe, started), wait=request.wait
        )

    def _takeover(self, shards: Shards, describe: Describe, adoption: Adoption, waited_s: float) -> Takeover:
        """Return what this rank's background hands the restored values over by; the number of ranks is one of the settings."""
        group = self._group

        def own() -> dict[str, str]:
            again = TrainingState.capture(adoption.live(), describe, shards=True)
            _, pieces = tensors_of_rank(again.tensors, again.specs)
            specs = {name: shards.layout.specs[name] for name in shards.pieces if name in shards.layout.specs}
            before = TrainingState(None, _locals(shards.pieces, specs), specs)
            return unsuitable(before, _locals(pieces, pieces))

        exactly: dict[str, str] = {}
        for found in group.gather(group.on_every(own)):
            exactly |= found
        blocks = {
            name: exactly[of]
            for name, (spec, _) in shards.owners.items()
            if (of := block_box(spec)[0]) in exactly
        }
        return Takeover({}, blocks, {**adoption.settings, "ranks": group.size}, waited_s)

    def _take_over(self, shards: Shards, probe: Probe, started: float, takeover: Takeover) -> None:
        """Serve evaluations until all ranks have quantized what they own, and write the restored values into all shards.

        If one rank could not, none takes anything over, and the save fails on all of them.
        """
        began, pause_s = time.perf_counter(), _FIRST_LOOK_S
        try:
            while self._group.most([not takeover.is_settled(pause_s)])[0]:
                takeover.note_served(probe.serve())
                pause_s = _FIRST_LOOK_S if probe.is_active else min(2 * pause_s, _LONGEST_PAUSE_S)
            values = takeover.values()
            changed = self._group.gather(None if values is None else sorted(values))
            if values is not None and all(names is not None for names in changed):
                names = {name for own in changed for name in own or ()}
                spread(shards, [name for name in shards.owners if name in names], values, proved=True)
                takeover.accept(tuple(sorted(names)), started=began)
        finally:
            takeover.leave()
        self._waits.add(started, time.perf_counter())

    def _own_tensors(
        self, live: TrainingState | None, *, weights_only: bool
    ) -> tuple[TrainingState, RankTensors, Pieces]:
        assert live is not None  # else there is an error already
        live = without_optimizer(live) if weights_only else live
        own, pieces = tensors_of_rank(live.tensors, live.specs, self._copied)
        frozen = {} if self._frozen is None else named_digests(live.tree)
        return live, replace(own, frozen=frozen), pieces

    @staticmethod
    def _attempt(action: Callable[[], T]) -> tuple[T | None, Exception | None]:
        try:
            return action(), None
        except Exception as error:  # noqa: BLE001 - all ranks raise it together
            return None, error

    def _way(self, live: TrainingState | None, *, exact: bool) -> tuple[bool, bool]:
        if self.config.deadline_s is None:
            return exact, False
        own = exact, False
        if live is not None and self._group.is_first:
            own = self._deadline.choose(live, self.reports(), exact=exact)
        return self._group.broadcast(own)

    def _agree(
        self,
        step: int,
        error: Exception | None = None,
        *,
        new_layout: bool = False,
        exact: bool = False,
        measures: bool = False,
        steps: bool = False,
    ) -> _Agreed:
        """Let all ranks learn the same of each other's saves, by one collective of a few bytes.

        Args:
            step: of the save.
            error: why this rank cannot save.
            new_layout: whether it holds other shards than at the save before.
            exact: whether it stores bit-exactly.
            measures: whether it can evaluate candidates.
            steps: whether it can take training steps from a restored state.

        Raises:
            ShrinkpointError: one rank has a reason not to go on, or they are at different steps; on every rank.
        """
        background = self._background
        if background is None:
            raise ConfigError("call check() first, on every rank")
        # while a save is under way its thread changes these, and nothing is decided by them
        idle = not self._worker.busy
        link = background.link.number if idle and background.link is not None else -1
        base, failed = idle and background.base_is_due(planned=not exact), idle and background.failed
        trouble = error
        if idle and background.fatal is not None:
            trouble, background.fatal = background.fatal, None
        flags = trouble is not None, not idle, base, new_layout, exact, not measures, not steps, failed
        clock_s = time.perf_counter() - self._began if self._group.is_first else 0.0
        most = self._group.most([*map(int, flags), step, -step, link, -link, round(1e6 * clock_s)])
        if most[0]:
            self._group.raise_together(trouble)
        highest, lowest, newest, oldest = most[8], -most[9], most[10], -most[11]
        if highest != lowest:
            raise ConfigError(
                f"the ranks are at different steps, {lowest} to {highest}: every rank must save in the same batch"
            )
        busy, base, new_layout, exact, blind, still, self._failed = map(bool, most[1:8])
        return _Agreed(
            busy=busy,
            base=base or newest < 0 or newest != oldest,
            new_layout=new_layout,
            exact=exact,
            measures=not blind and not exact,
            steps=not blind and not exact and not still,
            clock_s=1e-6 * most[12],
        )

    def _gathered(
        self, live: TrainingState, own: RankTensors, pieces: Pieces, *, new: bool
    ) -> tuple[Snapshot, Shards]:
        """Move the tensors to their owners, on the training thread."""
        group, started = self._group, time.perf_counter()
        if new or self._layout is None:
            layout = layout_of(group.gather(own))
            owners = owners_of(layout.specs, group.size, self._limit)
            self._gathering = group.on_every(lambda: Gathering(group.rank, group.size, layout, owners))
            self._rank_tensors, self._layout, self._owners = own, layout, owners
            self._move_begun(layout)
        assert self._gathering is not None
        state, copy, self.moved = self._gathering.gathered(group, live.tree, pieces)
        snapshot = Snapshot(state, time.perf_counter() - started, copy, lasting=copy is None)
        return snapshot, Shards(group, self._layout, pieces, self._owners)

    def flush(self, timeout_s: float | None = None) -> bool:
        """See `StateSaver.flush`."""
        if self._background is None:
            return True
        if self._worker.busy or (self._probe is not None and self._probe.is_active):
            with waiting_for(f"waiting for the last save to {self.store.display}"):
                self._join(timeout_s)
        return not self._agree(0).busy

    @property
    def failed(self) -> bool:
        """See `StateSaver.failed`."""
        return self._failed

    def require_stored(self) -> None:
        """See `Saver.require_stored`; no collective, since all ranks know whether it failed."""
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

    def _join(self, timeout_s: float | None = None) -> None:
        """Wait for the save that is under way, and make its evaluations; a collective."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        if self._probe is not None and not self._probe.drain(timeout_s):
            return
        self._worker.join(None if deadline is None else max(0.0, deadline - time.monotonic()))

    def _end_probe(self) -> None:
        if self._probe is not None:
            self._probe.close()

    def close(self, timeout_s: float | None = None) -> bool:
        """Finish this rank's save, without further evaluations, and let go of the store.

        No collective, so that it may be called after an error.
        """
        self._end_probe()
        if not self._worker.join(timeout_s):
            return False
        if self._chain is not None:
            self._chain.close()
        self._warmup.stop()
        return True

    # ---- restoring

    def _read_newest(self) -> tuple[Manifest, Decoded] | None:
        found = read_newest(self.store, self._group, self.config.encoder_threads, self._limit)
        return None if found is None else (found.plan.manifest, found)

    def _read(self, which: Manifest | int) -> tuple[Manifest, Decoded]:
        found = read_one(
            self.store, self._group, lambda: self._named(which), self.config.encoder_threads, self._limit
        )
        return found.plan.manifest, found

    def _loaded(self, manifest: Manifest, decoded: Decoded, *, adopt: bool) -> TrainingState:
        self._newest = None
        frozen = self._group.on_every(lambda: self._filled(TrainingState(decoded.plan.tree, {}, {})))
        decoded = replace(decoded, plan=replace(decoded.plan, tree=frozen.tree))

        def targets(specs: Mapping[str, TensorSpec]) -> Mapping[str, torch.Tensor]:
            found = self._targets({**specs, **frozen.specs})
            return {name: found[name] for name in specs}

        follows = adopt and self.config.scheme != "lossless"  # the weights' movement from here
        state = fill(self._group, decoded, targets, lambda spec: follows and is_followed(spec))
        if adopt:
            self._adopt(decoded)
        return replace(state, tensors={**state.tensors, **frozen.tensors})

    def _filled(self, state: TrainingState) -> TrainingState:
        referred = references(state.tree)
        if referred and self._frozen is None:
            raise StateMismatchError(
                f"checkpoints of {self.store.display} refer to frozen tensors, such as {min(referred)}, and do not hold them, which is not"
                " supported for sharded models yet: continue it without shards, in one process or under DDP; there one save with"
                " Advanced(frozen='store') makes a checkpoint that shards can continue"
            )
        return super()._filled(state)

    def forget(self, *, follows: Manifest | None = None) -> None:
        """Hold nothing of what was read: the next save makes a base.

        Args:
            follows: as of `Saver.forget`.
        """
        self._newest = self._begun = None
        self._join()
        if self._background is not None:
            self._background.start_over()
        if self._chain is not None:
            self._chain.parent = None
            self._chain.lineage = None if follows is None else lineage_of(follows.meta)

    def _adopt(self, decoded: Decoded) -> None:
        background, manifest = self._background, decoded.plan.manifest
        if background is None:
            raise StoreError("call check() first, on every rank")
        self._join()
        self._begun = None
        background.adopt(
            manifest,
            decoded.reference,
            decoded.own_state,
            lasting=True,
            group=self._group,
            read=self._read_before,
        )

    def _read_before(self, manifest: Manifest) -> tuple[Mapping[str, ReferenceState], TrainingState]:
        decoded = read_one(
            self.store, self._group, lambda: manifest, self.config.encoder_threads, self._limit
        )
        return decoded.reference, decoded.own_state


def _locals(pieces: Pieces, names: Mapping[str, object]) -> dict[str, torch.Tensor]:
    return {name: next(iter(own.values())) for name, own in pieces.items() if own and name in names}


def refuse_options(config: SaverConfig, *, copied: bool = False) -> None:
    """Refuse the options that are not for sharded models.

    Args:
        config: how to save.
        copied: whether every rank has the whole model, to whose frozen tensors checkpoints may refer.

    Raises:
        ConfigError: one of them is given.
    """
    if config.frozen == "reference" and not copied:
        raise ConfigError(
            "frozen='reference' is not supported for sharded models yet: give Advanced(frozen='store')"
        )
