"""How processes share a save: one process alone here; `shrinkpoint.sharded.placement` has several."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from shrinkpoint.coding.selective import decode_checkpoint
from shrinkpoint.config import SaverConfig
from shrinkpoint.engine.chain import Chain
from shrinkpoint.engine.handover import Adoption, Handover, unsuitable, write
from shrinkpoint.engine.ranks import Ranks
from shrinkpoint.errors import StoreError
from shrinkpoint.group.ending import Ending
from shrinkpoint.group.group import Alone, Group
from shrinkpoint.quality.evaluation import Evaluate, EvaluationDesk, ResumedSteps
from shrinkpoint.schemes.base import ReferenceState
from shrinkpoint.state.snapshot import Snapshot, Snapshotter
from shrinkpoint.state.training import Describe, OwnState, TensorSpec, TrainingState
from shrinkpoint.store.manifest import Manifest
from shrinkpoint.store.run import RunStore

if TYPE_CHECKING:
    from shrinkpoint.engine.background import Background


class NoMemoryError(StoreError):
    """A process has too little memory for a save."""


@dataclass
class Found:
    """A checkpoint, as far as one process has decoded it."""

    manifest: Manifest
    reference: Mapping[str, ReferenceState]
    """The planes that a reader of it keeps for the next delta."""
    own_state: TrainingState
    """What this process has decoded, and will code next."""


class Placed:
    """A captured state, of which a save takes a snapshot.

    Args:
        state: with live tensors, not copied.
        placement: where they are.
    """

    is_new = False
    """Whether this process holds other tensors than at the save before."""

    def __init__(self, state: TrainingState, placement: "Placement") -> None:
        self.state, self._placement = state, placement

    def snapshot(self, background: "Background", *, new: bool) -> Snapshot:
        """Copy what this process codes; of several a collective.

        Args:
            background: that codes it.
            new: whether a process `is_new`.

        Raises:
            NoMemoryError: a rank has too little memory; on every rank.
        """
        return self._placement.snapshotter.take(self.state)

    def begin(self, background: "Background", step: int) -> None:
        """Let the background count the weights' movement from this state; of several processes a collective."""
        snapshot = self.snapshot(background, new=True)
        background.note(snapshot.wait(), step, lasting=snapshot.lasting)

    def gradients(self, given: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Copy the gradients of what this process codes to the host."""
        return {name: value.detach().to("cpu", copy=True) for name, value in given.items()}

    def note_evaluations(self, number: int, evaluate: Evaluate, resumed: ResumedSteps | None) -> None:
        """Give the desk the evaluations of the save of this number."""
        self._placement.desk.begin(evaluate, resumed)

    def handover(self, adoption: Adoption, describe: Describe, waited_s: float) -> Handover:
        """Return the object that carries restored values to the training; of several processes a collective."""
        again = TrainingState.capture(adoption.live(), describe)
        return Handover(unsuitable(self.state, again.tensors), adoption.settings, waited_s)

    def write(self, names: list[str], values: Mapping[str, torch.Tensor]) -> None:
        """Write restored values into the training's tensors; of several processes a collective.

        Args:
            names: of all that are written.
            values: those that this process has coded.
        """
        write(self.state.tensors, values)


class Placement:
    """One process, which trains alone and has every tensor in whole.

    Args:
        store: the run.
        config: how to save.
    """

    together = False
    """Whether several processes save together, each of which codes a part."""
    leads_node = True
    """Whether this process warns and compiles for its node."""
    group: Group
    desk: EvaluationDesk
    ranks: Ranks | None = None

    def __init__(self, store: RunStore, config: SaverConfig) -> None:
        self.store, self.config = store, config
        self.group, self.desk, self.snapshotter = Alone(), EvaluationDesk(), Snapshotter()

    def check(self, url: str, chain: Chain | None) -> None:
        """Make sure that the store can be written; of several processes a collective.

        Args:
            url: the run's, as given.
            chain: of the run; None on other ranks than the first.
        """
        if chain is not None:
            chain.open()

    def ending(self) -> Ending | None:
        """By which several processes agree where to end; a collective."""
        return None

    def place(self, state: TrainingState, frozen: Mapping[str, str]) -> Placed:
        """Return a captured state as this process has it.

        Args:
            state: with live tensors.
            frozen: digests of what it refers to, by name.
        """
        return Placed(state, self)

    def own(self) -> OwnState:
        """Copy what only this process has, as ranks do; a single process has nothing."""
        return OwnState()

    # ---- restoring

    def newest(self) -> Found | None:
        """Read and decode the newest sound checkpoint; of several processes a collective."""
        found = self.store.newest_readable(self._decode)
        return None if found is None else found[1]

    def read(self, choose: Callable[[], Manifest]) -> Found:
        """Read and decode one checkpoint; of several processes a collective.

        Args:
            choose: gives it, on the first rank.
        """
        return self._decode(choose())

    def _decode(self, manifest: Manifest) -> Found:
        decoded = decode_checkpoint(self.store, manifest, threads=self.config.encoder_threads)
        return Found(manifest, decoded.reference, decoded.state)

    def loaded(
        self,
        found: Found,
        filled: Callable[[TrainingState], TrainingState],
        keep: Callable[[TensorSpec], bool],
    ) -> TrainingState:
        """Return the state of what was decoded; of several processes a collective.

        Args:
            found: by this process.
            filled: puts frozen tensors in the place of references.
            keep: which tensors `found` still has afterwards.
        """
        return filled(found.own_state)
