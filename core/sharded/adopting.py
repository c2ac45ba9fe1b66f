"""Saves from which a sharded training itself goes on: owners quantize, and all shards get the restored values.

What is decided, and on what it depends, is as in `shrinkpoint.saving.adoption`. Nothing is measured on shards, so that there is no
search whose state a replay would have to continue: each planned save is planned afresh, by this rank's tensors, the sums over all
ranks' weights, the values adopted last and the settings. The number of ranks is one of the settings.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from shrinkpoint.coding.selective import header_of
from shrinkpoint.coding.staging import StagedState
from shrinkpoint.group.group import Distributed
from shrinkpoint.optimizers.updates import moments_of_direction
from shrinkpoint.quality.guards import Guard
from shrinkpoint.quality.planner import Planner
from shrinkpoint.quality.strategy import Plan, exactly
from shrinkpoint.saving.meta import Adopted, adopted_of
from shrinkpoint.saving.planned import (
    UNPLANNED,
    PlannedChain,
    Staging,
    changed_tensors,
    noted_settings,
    warn_adopts_from,
    warn_unplanned,
)
from shrinkpoint.saving.takeover import Adoption, NotAdoptedError, Takeover, unsuitable
from shrinkpoint.schemes.base import ReferenceState, SaveContext
from shrinkpoint.sharded.background import Background, Save
from shrinkpoint.sharded.boxes import Piece
from shrinkpoint.sharded.encoding import Link, PartJob, StoredPart, store_part
from shrinkpoint.sharded.layout import block_box, tensors_of_rank
from shrinkpoint.sharded.publishing import AdoptedPart
from shrinkpoint.sharded.restoring import Decoded
from shrinkpoint.sharded.spreading import Shards, spread
from shrinkpoint.sharded.trees import captured
from shrinkpoint.state.training import Describe, TrainingState
from shrinkpoint.store.manifest import Manifest
from shrinkpoint.store.run import RunStore
from shrinkpoint.warn import warn

__all__ = ["AdoptingBackground", "continue_adopting", "take_over", "takeover_for"]

_FIRST_LOOK_S = 0.01
_LONGEST_PAUSE_S = 0.5


# ---- on the training thread


def takeover_for(shards: Shards, describe: Describe, adoption: Adoption, waited_s: float) -> Takeover:
    """What this rank's background hands the restored values over by; a collective.

    Args:
        shards: of the state that is saved.
        describe: as of the save.
        adoption: of the planned save.
        waited_s: seconds that training waited for the save before.

    Raises:
        ShrinkpointError: a rank's state cannot be captured once more; on every rank.
    """
    group = shards.group

    def own() -> dict[str, str]:
        again = captured(adoption.live(), describe)
        _, pieces = tensors_of_rank(again.tensors, again.specs)
        specs = {name: shards.layout.specs[name] for name in shards.pieces if name in shards.layout.specs}
        return unsuitable(TrainingState(None, _locals(shards.pieces, specs), specs), _locals(pieces, pieces))

    exactly: dict[str, str] = {}
    for found in group.gather(group.on_every(own)):
        exactly |= found
    blocks = {
        name: exactly[of]
        for name, (spec, _) in shards.owners.items()
        if (of := block_box(spec)[0]) in exactly
    }
    return Takeover({}, blocks, {**adoption.settings, "ranks": group.size}, waited_s)


def _locals(pieces: Mapping[str, Sequence[Piece]], names: Mapping[str, object]) -> dict[str, torch.Tensor]:
    return {name: own[0].local for name, own in pieces.items() if own and name in names}


def take_over(shards: Shards, takeover: Takeover, *, started: float) -> None:
    """Wait until all ranks have quantized what they own, and write the restored values into all shards; a collective.

    If one rank could not, none takes anything over, and the save fails on all of them.

    Args:
        shards: of the state that is saved.
        takeover: as `takeover_for` gave it to this rank's background.
        started: `time.perf_counter` of when the training began to wait.

    Raises:
        StateMismatchError: a rank holds other values than its owner has restored; on every rank, and the save fails.
    """
    try:
        _wait_together(shards.group, takeover)
        values = takeover.values()
        changed = shards.group.gather(None if values is None else sorted(values))
        if values is None or any(names is None for names in changed):
            return
        names = {name for own in changed if own is not None for name in own}
        spread(shards, [name for name in shards.owners if name in names], values, proved=True)
        takeover.accept(tuple(sorted(names)), started=started)
    finally:
        takeover.leave()


def _wait_together(group: Distributed, takeover: Takeover) -> None:
    """Wait until it is settled on every rank; a rank that is gone ends this as it ends any collective."""
    pause_s = _FIRST_LOOK_S
    while group.most([not takeover.is_settled(pause_s)])[0]:
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def continue_adopting(
    store: RunStore,
    group: Distributed,
    background: "AdoptingBackground",
    decoded: Decoded,
    read: Callable[[Manifest], Decoded],
) -> Manifest | None:
    """Bring a rank's background into the state of the undisturbed run's at the last planned save; a collective.

    Args:
        store: the run.
        group: all ranks.
        background: of this rank.
        decoded: the checkpoint that the training has been restored from.
        read: reads another one; a collective.

    Returns:
        What the next planned save builds on, on the first rank; None for a base.

    Raises:
        ShrinkpointError: the planned save before an exact one cannot be read; on every rank.
    """
    manifest = decoded.plan.manifest
    last, digest = adopted_of(manifest), manifest.state_digest
    if last is None or last.planned:
        if last is None and group.rank == 0:
            warn_adopts_from(manifest.step)
        background.continue_from(
            last, decoded.reference, decoded.own_state, step=manifest.step, digest=digest
        )
        return manifest
    before = group.on_first(lambda: _planned_before(store, manifest, last))
    known = last if last.count else None
    if before is None:
        values = (
            decoded.own_state if last.count else None
        )  # before the first one, nothing is known of the movement
        background.continue_from(known, {}, values, step=manifest.step, digest=None)
        if group.rank == 0 and last.count and last.step != manifest.step:
            warn(
                f"the last planned save before step {manifest.step} could not be stored, and with it where the weights were: the next"
                " save's bits differ from those of an undisturbed run. This run stays reproducible from there on"
            )
        return None
    whole = read(before)

    def is_before(other: Manifest) -> bool:
        return (other.state_digest, other.step) == (before.state_digest, before.step)

    parent = group.on_first(lambda: next(filter(is_before, store.manifests()), None))
    background.continue_from(
        known,
        whole.reference,
        whole.own_state,
        step=before.step,
        digest=None if parent is None else parent.state_digest,
    )
    return parent


def _planned_before(store: RunStore, manifest: Manifest, last: Adopted) -> Manifest | None:
    """The chain of an exact checkpoint without its own end; None where that is not the last planned save."""
    if manifest.kind == "base" or not last.count:
        return None
    chain = manifest.chain[:-1]
    header = header_of(store, chain[-1])
    if header.step != last.step:
        return None
    return replace(
        manifest,
        chain=chain,
        kind="base" if len(chain) == 1 else "delta",
        step=header.step,
        state_digest=header.state_digest,
    )


# ---- in the background


class AdoptingBackground(Background):
    """As `Background`, for a training that adopts its planned saves; others are stored exactly, as branches of the chain."""

    _chain = PlannedChain()
    _settings: Mapping[str, Any] | None = None
    _warned_unmeasured = False
    _warned_of_size = False
    _coming: PlannedChain | None = None
    """The chain as it is when the save under way is committed."""

    # ---- where a training continues

    def continue_from(
        self,
        last: Adopted | None,
        reference: Mapping[str, ReferenceState],
        values: TrainingState | None,
        *,
        step: int,
        digest: str | None,
    ) -> None:
        """Go on as after a restore of a planned save, whose values are what the next save's movement is counted from.

        Args:
            last: what the restored checkpoint says of the last planned save; None where there is none.
            reference: what a reader holds of that save.
            values: this rank's tensors at that save; None where no movement is known, in an undisturbed run either.
            step: of that save.
            digest: state digest of that save; None where its manifest is gone, so that nothing can build on it.
        """
        self.link = None if digest is None else Link(0, digest, dict(reference), restored=True)
        self._chain = PlannedChain(last, dict(reference))
        self._settings = last.settings if last is not None else None
        self.movement.forget()
        if values is not None:
            self.movement.note(values, step, lasting=True)

    def forget(self) -> None:
        """See `Background.forget`."""
        super().forget()
        self._chain, self._settings = PlannedChain(), None

    # ---- saves

    def base_is_due(self, *, planned: bool) -> bool:
        """See `Background.base_is_due`; every rank decides it alike, by the number of adoptions."""
        last = self._chain.last
        return planned and (last is None or last.count % self._config.period == 0)

    def run(self, handed_over: list[Save]) -> None:
        """See `Background.run`."""
        takeover = handed_over[-1].takeover
        try:
            super().run(handed_over)
        finally:
            if takeover is not None:
                takeover.withdraw()

    def _store_part(self, save: Save) -> StoredPart | None:
        try:
            return super()._store_part(save)
        finally:
            if save.takeover is not None:
                save.takeover.withdraw()

    def _code(self, save: Save, known: Mapping[str, Any]) -> StoredPart:
        if save.takeover is None:
            return self._code_branch(save, known)
        return self._code_planned(save, save.takeover, known)

    def _code_branch(self, save: Save, known: Mapping[str, Any]) -> StoredPart:
        job = save.job
        link = None if job.link is None else replace(job.link, reference=dict(self._chain.known))
        return store_part(
            self._store, self._config, replace(job, link=link), exactly(UNPLANNED, is_explained=True), known
        )

    def _code_planned(self, save: Save, takeover: Takeover, known: Mapping[str, Any]) -> StoredPart:
        job = save.job
        try:
            state = self._recognised(save)
            reference = self._chain.reference(self.movement.noted, self._config.period)
            staging = Staging(state, reference, takeover.exactly, threads=self._config.waiting_threads)
            plan = self._plan_here(save, state, reference, staging)
            staged = staging.by(plan.scheme)
            takeover.offer(changed_tensors(state, staged.state))
        except NotAdoptedError as error:
            raise NotAdoptedError(
                f"another rank has failed, or the training has left ({error}). Training goes on from its own state, so that a replay"
                " will differ from here on"
            ) from error
        before, self._chain = self._chain, self._adopted(job, takeover, staged)
        self.movement.note(staged.state, job.step)
        link = None if job.link is None else replace(job.link, reference=dict(before.known))
        values = TrainingState(job.state.tree, staged.state.tensors, staged.state.specs)
        staged.stood_in.clear()
        stored = store_part(
            self._store,
            self._config,
            replace(job, state=values, link=link),
            plan,
            known,
            staged=staged,
        )
        assert self._chain.last is not None
        last = replace(self._chain.last, stand_ins=frozenset(staged.stood_in))
        self._coming = PlannedChain(last, stored.reference)
        return replace(stored, stand_ins=sorted(staged.stood_in))

    def _plan_here(
        self,
        save: Save,
        state: TrainingState,
        reference: Mapping[str, ReferenceState] | None,
        staging: Staging,
    ) -> Plan:
        job = save.job
        context = SaveContext(
            restore_budget=self._config.restore_budget,
            state=state,
            step=job.step,
            reference=reference,
            restored=reference is not None,
            adopts=True,
            movement=self.movement.since(state, job.step),
            directions=moments_of_direction(state, save.optimizers),
        )
        guard = Guard(
            save.optimizers,
            self._config.waiting_threads,
            restored=lambda scheme: staging.by(scheme).state,
        )
        warns = self._publisher is not None and not self._warned_unmeasured
        self._warned_unmeasured = True
        planner = Planner(
            self._config,
            lambda: 0.0,
            guard=guard if self._config.guards else None,
            clock=lambda: 0.0,
            warns=warns,
        )
        return planner.plan(self._with_sums(job, context), None)

    def _adopted(self, job: PartJob, takeover: Takeover, staged: StagedState) -> PlannedChain:
        """Become what a process is that has just restored this save."""
        more = {"measured": False, "probed": False, **takeover.settings}
        warns = self._publisher is not None
        settings = noted_settings(self._config, more, self._settings, step=job.step, warns=warns)
        self._settings = None
        return PlannedChain(self._chain.next(job.step, staged, settings))

    def _adoption(self, save: Save) -> AdoptedPart | None:
        last = self._chain.last or Adopted()
        if save.takeover is None:
            return AdoptedPart(last=replace(last, planned=False))
        return AdoptedPart(last=last, adopt_s=save.takeover.seconds, waited_s=save.takeover.waited_s)

    def _learn(self, job: PartJob, stored: StoredPart | None, outcome: Mapping[str, Any]) -> None:
        super()._learn(job, stored, outcome)
        coming, self._coming = self._coming, None
        if job.exact:
            if not self.failed and self._publisher is not None and not self._warned_of_size:
                self._warned_of_size = True
                warn_unplanned(self.reports[-1])
            self.link = job.link  # the planned save, on which the next one builds
        elif self.link is not None and coming is not None:
            self._chain = coming
            self.link = replace(self.link, restored=True)
