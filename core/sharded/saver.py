"""Saves a sharded training from all its ranks in the background, and restores it on any number of them."""

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import torch

from shrinkpoint.config import SaverConfig
from shrinkpoint.engine.address import Address
from shrinkpoint.engine.chain import Chain
from shrinkpoint.engine.compaction import without_optimizer
from shrinkpoint.engine.request import Job, SaveRequest, plain_step
from shrinkpoint.engine.retention import is_weights_only, lineage_of, not_finite_text
from shrinkpoint.engine.takeover import Takeover
from shrinkpoint.errors import ConfigError, NoCheckpointError, SaveFailedError, StateMismatchError, StoreError
from shrinkpoint.group.ending import Ending
from shrinkpoint.group.group import Distributed, is_first_of_node
from shrinkpoint.group.mailbox import Mailbox
from shrinkpoint.optimizers.updates import OptimizerKind
from shrinkpoint.quantize.movement import is_followed
from shrinkpoint.reports import Accepted, SaveReport
from shrinkpoint.runtime.progress import waiting_for
from shrinkpoint.saver import Restored, StateSaver
from shrinkpoint.schemes.base import ReferenceState
from shrinkpoint.sharded.adopting import take_over, takeover_for
from shrinkpoint.sharded.agreement import Agreed, Status, agree, refuse_options, require_same
from shrinkpoint.sharded.background import RankBackground
from shrinkpoint.sharded.boxes import Pieces
from shrinkpoint.sharded.gathering import Gathering, NoMemoryError
from shrinkpoint.sharded.layout import (
    Layout,
    RankTensors,
    layout_of,
    owned_gradients,
    owners_of,
    tensors_of_rank,
)
from shrinkpoint.sharded.probing import Probe, ProbedSave
from shrinkpoint.sharded.restoring import Decoded, fill, read_newest, read_one
from shrinkpoint.sharded.spreading import Shards, moved_to
from shrinkpoint.sharded.trees import own_of
from shrinkpoint.state.frozen import named_digests, references
from shrinkpoint.state.snapshot import Snapshot
from shrinkpoint.state.specs import BLOCK_ELEMENTS
from shrinkpoint.state.training import Describe, TensorSpec, TrainingState, plain
from shrinkpoint.store.connect import StorageOptions
from shrinkpoint.store.manifest import Manifest
from shrinkpoint.store.urls import RunUrl
from shrinkpoint.warn import warn

__all__ = ["ShardedSaver"]

_APPEARS_S = 10.0  # a network's file system may remember for a while that a file was not there

T = TypeVar("T")
Targets = Callable[[Mapping[str, TensorSpec]], Mapping[str, torch.Tensor]]


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
        super().__init__(url, config, storage_options, self._end_probe)
        self.moved = 0
        """Bytes that this rank has sent to others for the last save."""
        self.failed = False
        """Whether the last save that all ranks have agreed about could not be stored."""
        self._targets, self._own, self._is_of_copies = targets, own, copied is not None
        self._copied = copied or (lambda spec: False)
        self._group = group or Distributed()
        self._limit = block_elements
        self._number = 0
        self._rank_tensors: RankTensors | None = None
        self._layout: Layout | None = None
        self._owners: Mapping[str, tuple[TensorSpec, int]] = {}
        self._gathering: Gathering | None = None
        self._newest: Decoded | None = None
        self._begun: tuple[Mapping[str, tuple[TensorSpec, int]], int] | None = None
        self._chain: Chain | None = None
        self._background: RankBackground | None = None
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
        require_same(group, self.url, self.config)
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
            self._background = RankBackground(
                self.store, self.config, mailbox, probe, self._chain, self._warmup, self.url
            )
            if is_first_of_node(group.rank):
                self._background.look()
        if self._probe is not None:
            self._probe.reopen()
        if is_first_of_node(group.rank):
            self._warmup.start()

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
        takeover = None if planned is None else takeover_for(shards, request.describe, planned, waited_s)
        background, probe = self._background, self._probe
        assert background is not None
        assert probe is not None
        if agreed.base or alone:
            background.forget()
        self._number += 1
        job = Job(
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
        self.blocked_s += job.blocked_s
        accepted = Accepted(step=request.step, blocked_s=job.blocked_s)
        handed_over = [job]
        del job, snapshot
        if agreed.measures and evaluate is not None:
            probe.begin(ProbedSave(self._number, shards, found[0], evaluate, resumed))
        self._under_way.begin(request.step)
        self._worker.submit(lambda: background.run(handed_over))
        if takeover is not None:
            self._take_over(shards, takeover, probe, started)
        if request.wait:
            self.flush()
            return None if self.failed else accepted
        return accepted

    def _take_over(self, shards: Shards, takeover: Takeover, probe: Probe, started: float) -> None:
        take_over(shards, takeover, probe, started=time.perf_counter())
        self.blocked_s += takeover.seconds
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
    ) -> Agreed:
        if self._background is None:
            raise ConfigError("call check() first, on every rank")
        background = self._background
        # while a save is under way its thread changes these, and nothing is decided by them
        busy = self._worker.busy
        link = background.link if not busy else None
        fatal = background.fatal if not busy else None
        status = Status(
            step=step,
            busy=busy,
            link=-1 if link is None else link.number,
            base=not busy and background.base_is_due(planned=not exact),
            new_layout=new_layout,
            exact=exact,
            measures=measures,
            steps=steps,
            failed=not busy and background.failed,
            fatal=fatal,
            error=error,
            clock_s=time.perf_counter() - self._began if self._group.is_first else 0.0,
        )
        if fatal is not None:
            background.fatal = None
        agreed = agree(self._group, status)
        self.failed = agreed.failed
        return agreed

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
        """Wait for the save that is under way, on every rank.

        Returns:
            False if it is still under way on some rank after `timeout_s` seconds.

        Raises:
            SaveFailedError, FencedError: as `save`.
        """
        if self._background is None:
            return True
        if self._worker.busy or (self._probe is not None and self._probe.is_active):
            with waiting_for(f"waiting for the last save to {self.store.display}"):
                self._join(timeout_s)
        return not self._agree(0).busy

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

    def reports(self) -> list[SaveReport]:
        """Return every save of this process that was committed, oldest first, the same on every rank."""
        return [] if self._background is None else list(self._background.reports)

    # ---- restoring

    def newest(self) -> Manifest | None:
        """Return the newest checkpoint that is sound on every rank; None in an empty run.

        Raises:
            ChainError: there are checkpoints, and none of them is sound. StoreError: the store cannot be read.
        """
        with waiting_for(f"reading the newest checkpoint of {self.store.display}"):
            self._newest = read_newest(self.store, self._group, self.config.encoder_threads, self._limit)
        return None if self._newest is None else self._newest.plan.manifest

    def restore(self, which: Manifest | int | None = None, *, adopt: bool = True) -> Restored | None:
        """Read a checkpoint into the training's own tensors, and let the next save continue it.

        Args:
            which: a manifest, or a step; None is the newest sound checkpoint.
            adopt: False only reads: saves go on from what they went on from.

        Returns:
            The state, in the tensors of `targets`; None if the run is empty and `which` is None.

        Raises:
            NoCheckpointError, FormatError, ChainError, StoreError: as `Saver.restore`; on every rank.
            StateMismatchError: it is another model's, or refers to frozen tensors that are others on a rank, or not whole; nothing is
                changed then.
        """
        decoded = self._chosen(which)
        if decoded is None:
            return None
        manifest, tree = decoded.plan.manifest, decoded.plan.tree
        frozen = self._group.on_every(lambda: self._filled(TrainingState(tree, {}, {})))
        decoded = replace(decoded, plan=replace(decoded.plan, tree=frozen.tree))

        def targets(specs: Mapping[str, TensorSpec]) -> Mapping[str, torch.Tensor]:
            found = self._targets({**specs, **frozen.specs})
            return {name: found[name] for name in specs}

        follows = adopt and self.config.scheme != "lossless"  # the weights' movement from here
        state = fill(self._group, decoded, targets, lambda spec: follows and is_followed(spec))
        found = not_finite_text(manifest)
        if found is not None and self._group.rank == 0:
            warn(f"the checkpoint of step {manifest.step} in {self.store.display} is not finite: {found}")
        if is_weights_only(manifest.meta) and self._group.rank == 0:
            warn(
                f"the checkpoint of step {manifest.step} in {self.store.display} has weights alone: the optimizer starts anew"
            )
        if adopt:
            self._adopt(decoded)
        return Restored(manifest, replace(state, tensors={**state.tensors, **frozen.tensors}))

    def _filled(self, state: TrainingState) -> TrainingState:
        referred = references(state.tree)
        if referred and self._frozen is None:
            raise StateMismatchError(
                f"checkpoints of {self.store.display} refer to frozen tensors, such as {min(referred)}, and do not hold them, which is not"
                " supported for sharded models yet: continue it without shards, in one process or under DDP; there one save with"
                " Advanced(frozen='store') makes a checkpoint that shards can continue"
            )
        return super()._filled(state)

    def _chosen(self, which: Manifest | int | None) -> Decoded | None:
        known, self._newest = self._newest, None
        if which is None or (known is not None and which in (known.plan.manifest, known.plan.manifest.step)):
            if known is None:
                self.newest()
                known, self._newest = self._newest, None
            return known

        def choose() -> Manifest:
            if isinstance(which, Manifest):
                return which
            return Address(url=self.url, step=which).find(self.store.manifests())

        return read_one(self.store, self._group, choose, self.config.encoder_threads, self._limit)

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

    @property
    def lineage(self) -> str | None:
        """The training that the next checkpoint belongs to; None before the first one of a new training, and but on the first rank."""
        return None if self._chain is None else self._chain.lineage

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
