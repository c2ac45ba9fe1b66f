"""Where the tensors of a sharded training are: in the shards of all ranks, each of which codes the whole tensors that it owns."""

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Any

import torch

from shrinkpoint.coding.selective import header_of
from shrinkpoint.config import SaverConfig
from shrinkpoint.engine.background import Background
from shrinkpoint.engine.chain import Chain
from shrinkpoint.engine.handover import Adoption, Handover, unsuitable
from shrinkpoint.engine.placement import Found, Placed, Placement
from shrinkpoint.engine.ranks import Ranks
from shrinkpoint.errors import (
    ConfigError,
    LostRankError,
    NoCheckpointError,
    ShrinkpointError,
    StateMismatchError,
    StoreError,
)
from shrinkpoint.group.ending import Ending
from shrinkpoint.group.group import Distributed, attempt, is_first_of_node
from shrinkpoint.group.mailbox import Mailbox
from shrinkpoint.quality.evaluation import Evaluate, ResumedSteps
from shrinkpoint.sharded.boxes import Pieces
from shrinkpoint.sharded.gathering import Gathering, Shards, moved_to, spread
from shrinkpoint.sharded.layout import (
    Layout,
    Owners,
    RankTensors,
    block_box,
    layout_of,
    owned_gradients,
    owners_of,
    tensors_of_rank,
)
from shrinkpoint.sharded.probing import SharedDesk
from shrinkpoint.sharded.restoring import Decoded, ReadPlan, decoded, fill, plan_of
from shrinkpoint.sharded.trees import coded_view, own_of
from shrinkpoint.state.frozen import references
from shrinkpoint.state.snapshot import Snapshot
from shrinkpoint.state.specs import BLOCK_ELEMENTS
from shrinkpoint.state.training import Describe, OwnState, TensorSpec, TrainingState
from shrinkpoint.store.manifest import Manifest
from shrinkpoint.store.run import RunStore

_APPEARS_S = 10.0  # a network's file system may remember for a while that a file was not there

Targets = Callable[[Mapping[str, TensorSpec]], Mapping[str, torch.Tensor]]


class ShardedPlacement(Placement):
    """The ranks that hold shards of a state, or copies of it.

    All ranks call `check`, `begin`, `accept`, `poll`, `flush`, `newest`, `restore` and `forget` of their savers at the same
    moments. An error on one rank is raised on all.

    Args:
        store: the run, the same for all ranks: a folder that all of them see, or a URL.
        config: how to save.
        targets: gives the tensors that a restore fills, by name, for the specs of the stored ones.
        own: what each rank stores for itself, values by group and name.
        copied: of copies of a model, which plain tensors are the same on every rank, so that each stores some of them; of others the
            first rank's are stored. None: the model is sharded.
        group: all ranks; None takes the default process group.
    """

    together = True
    group: Distributed
    desk: SharedDesk
    ranks: Ranks
    gathering: Gathering

    def __init__(
        self,
        store: RunStore,
        config: SaverConfig,
        *,
        targets: Targets,
        own: Callable[[], Mapping[str, Mapping[str, Any]]],
        copied: Callable[[TensorSpec], bool] | None = None,
        group: Distributed | None = None,
    ) -> None:
        self.store, self.config = store, config
        self.group = group = group or Distributed()
        self.desk = desk = SharedDesk(group, patience_s=config.commit_timeout_s)
        self.ranks = Ranks(group, config, desk.leave, desk.messages, coded_view)
        self.leads_node = is_first_of_node(group.rank)
        self.limit = BLOCK_ELEMENTS
        """Elements from which on a tensor is stored as several blocks of rows."""
        self.rank_tensors: RankTensors | None = None
        self.layout: Layout | None = None
        """What all ranks hold, at the last save."""
        self.owners: Owners = {}
        self._targets, self._own, self._is_of_copies = targets, own, copied is not None
        self.copied = copied or (lambda spec: False)
        self._mailbox: Mailbox | None = None

    # ---- beginning

    def check(self, url: str, chain: Chain | None) -> None:
        """Make sure that all ranks were given the same, and that each can write.

        Raises:
            ConfigError: they were not, or an option is not for sharded trainings.
            StoreError: the store cannot be reached or written.
        """
        group, store = self.group, self.store
        group.on_every(lambda: refuse_options(self.config, copied=self._is_of_copies))
        self._require_same_arguments(url)
        group.on_every(store.try_to_write if chain is None else chain.open)
        session = group.on_first(lambda: chain.open().session if chain is not None else "")
        run = group.on_first(store.run_id)
        group.on_every(lambda: self._require_same_run(run))
        # a node's folder is opened by its first process first; the first rank's writer has opened its own
        for leads in (True, False):
            opens = chain is None and leads == self.leads_node
            group.on_every(store.open_near if opens else lambda: None)
        if self._mailbox is None:
            mailbox = Mailbox(group)
            self.desk.mailbox = group.on_every(mailbox.another)
            self._mailbox = self.desk.background = mailbox
        self.ranks.connect(self._mailbox, session)
        self.desk.reopen()

    def _require_same_arguments(self, url: str) -> None:
        given = self.group.gather({"url": url} | asdict(self.config))
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
                    f"{self.store.display} is another place on rank {self.group.rank} than on rank 0: give a folder that all ranks"
                    " see, or a URL"
                )
            time.sleep(0.2)

    def ending(self) -> Ending:
        """See `Placement.ending`.

        Raises:
            StoreError: a rank cannot reach the first one; on every rank.
        """
        mailbox = self._mailbox
        assert mailbox is not None
        return self.group.on_every(lambda: Ending(mailbox))

    # ---- saving

    def place(self, state: TrainingState, frozen: Mapping[str, str]) -> "PlacedShards":
        """See `Placement.place`."""
        own, pieces = tensors_of_rank(state.tensors, state.specs, self.copied)
        return PlacedShards(state, self, replace(own, frozen=frozen), pieces)

    def own(self) -> OwnState:
        """See `Placement.own`."""
        return own_of(self._own(), self.group.rank)

    # ---- restoring

    def newest(self) -> Decoded | None:
        """See `Placement.newest`; it is sound on every rank, and so is an error one of every rank."""
        newest: Decoded | None = None
        failure: Exception | None = None

        def lead(manifest: Manifest) -> Decoded:
            self.group.broadcast(True)
            return self.read(lambda: manifest)

        if self.group.is_first:
            found, failure = attempt(lambda: self.store.newest_readable(lead))
            newest = None if found is None else found[1]
            self.group.broadcast(False)
        else:
            while self.group.broadcast(False):
                try:
                    newest = self.read(None)
                except LostRankError:
                    raise
                except ShrinkpointError:
                    newest = None  # damaged on one rank is damaged for all: the first one tries an older one
        self.group.raise_together(failure)
        return newest

    def read(self, choose: Callable[[], Manifest] | None) -> Decoded:
        """See `Placement.read`; what fails on one rank fails on all. Only the first rank's `choose` is called."""
        store, threads = self.store, self.config.encoder_threads

        def planned() -> ReadPlan:
            assert choose is not None
            manifest = choose()
            return plan_of(manifest, [header_of(store, ref) for ref in manifest.chain])

        plan = self.group.on_first(planned)
        return self.group.on_every(lambda: decoded(store, self.group, plan, threads, self.limit))

    def loaded(
        self,
        found: Found,
        filled: Callable[[TrainingState], TrainingState],
        keep: Callable[[TensorSpec], bool],
    ) -> TrainingState:
        """See `Placement.loaded`; the state is in the tensors of `targets`."""
        assert isinstance(found, Decoded)

        def referred() -> TrainingState:
            frozen = filled(TrainingState(found.plan.tree, {}, {}))
            if missing := references(frozen.tree):
                raise StateMismatchError(
                    f"checkpoints of {self.store.display} refer to frozen tensors, such as {min(missing)}, and do not hold them, which is not"
                    " supported for sharded models yet: continue it without shards, in one process or under DDP; there one save with"
                    " Advanced(frozen='store') makes a checkpoint that shards can continue"
                )
            return frozen

        frozen = self.group.on_every(referred)

        def targets(specs: Mapping[str, TensorSpec]) -> Mapping[str, torch.Tensor]:
            targets = self._targets({**specs, **frozen.specs})
            return {name: targets[name] for name in specs}

        state = fill(self.group, found, frozen.tree, targets, keep)
        return replace(state, tensors={**state.tensors, **frozen.tensors})


class PlacedShards(Placed):
    """A rank's part of a captured state.

    Args:
        state: with DTensors.
        placement: where its tensors are.
        own: what this rank holds of it.
        pieces: its memory.
    """

    _placement: ShardedPlacement
    shards: Shards
    """Where the tensors are, once there is a snapshot."""

    def __init__(
        self, state: TrainingState, placement: ShardedPlacement, own: RankTensors, pieces: Pieces
    ) -> None:
        super().__init__(state, placement)
        self._own, self._pieces = own, pieces
        self.is_new = own != placement.rank_tensors

    def snapshot(self, background: Background, *, new: bool) -> Snapshot:
        """See `Placed.snapshot`; the tensors move to their owners, on the training thread."""
        place, group, started = self._placement, self._placement.group, time.perf_counter()
        if new or place.layout is None:
            layout = layout_of(group.gather(self._own))
            owners = owners_of(layout.specs, group.size, place.limit)
            place.gathering = group.on_every(lambda: Gathering(group, layout, owners))
            place.rank_tensors, place.layout, place.owners = self._own, layout, owners
            began = background.movement
            if began.owners is not None and began.step is not None:
                # its weights go to those that own them in the whole state
                weights = moved_to(group, layout, began.owners, owners, began.noted)
                background.note(weights, began.step, lasting=True)
        background.movement.owners = None
        state, copy = place.gathering.gathered(self.state.tree, self._pieces)
        self.shards = Shards(group, place.layout, self._pieces, place.owners)
        return Snapshot(state, time.perf_counter() - started, copy, lasting=copy is None)

    def begin(self, background: Background, step: int) -> None:
        """See `Placed.begin`; each rank gets the weights that it would own if the state were weights alone."""
        super().begin(background, step)
        background.movement.owners = self.shards.owners

    def gradients(self, given: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """See `Placed.gradients`; they are whole, and the same on every rank."""
        return owned_gradients(self.shards.owners, self._placement.group.rank, given)

    def note_evaluations(self, number: int, evaluate: Evaluate, resumed: ResumedSteps | None) -> None:
        """See `Placed.note_evaluations`."""
        super().note_evaluations(number, evaluate, resumed)
        self._placement.desk.probe(number, self.shards, self.state)

    def handover(self, adoption: Adoption, describe: Describe, waited_s: float) -> Handover:
        """See `Placed.handover`; the number of ranks is one of the settings."""
        group, shards = self._placement.group, self.shards

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
        return Handover(blocks, {**adoption.settings, "ranks": group.size}, waited_s)

    def write(self, names: list[str], values: Mapping[str, torch.Tensor]) -> None:
        """See `Placed.write`; all ranks make sure that they have the same."""
        written = {*names}
        spread(self.shards, [name for name in self.shards.owners if name in written], values, proved=True)


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
