"""Saves from which the training itself goes on: what is stored is decided so that a replay decides the same.

A planned save is quantized while the training waits, and the training takes the restored values over. From then on this
committer is in the state of one that has just restored that checkpoint: so is the search (`Planner.begin_again`), movement
is counted from the restored values, and the reference of the next save has these values. What is quantized next depends on
the training's state, on the values adopted last, on the number of adoptions and on the settings: neither on whether the save
before was committed, nor on time, nor on the container in which a reader finds the values.

Saves that were not planned are stored exactly, as side branches of the chain: the next planned save builds on the last
planned one, before and after a resume.
"""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from shrinkpoint.coding.encode import EncodedState, encode_state
from shrinkpoint.coding.selective import Decoded, decode_chain, sources_of_run
from shrinkpoint.coding.staging import StagedState
from shrinkpoint.config import SaverConfig
from shrinkpoint.container.writer import write_container
from shrinkpoint.errors import ChainError, ConfigError
from shrinkpoint.optimizers.recognition import recognised
from shrinkpoint.optimizers.updates import moments_of_direction
from shrinkpoint.quality.evaluation import Loss, ResumedSteps
from shrinkpoint.quality.guards import Guard
from shrinkpoint.quality.planner import Planner
from shrinkpoint.quality.strategy import Plan, exactly
from shrinkpoint.reports import SaveReport
from shrinkpoint.saving.committer import Committer
from shrinkpoint.saving.finite import not_finite
from shrinkpoint.saving.meta import KEY, Adopted, adopted_of
from shrinkpoint.saving.planned import (
    UNPLANNED,
    PlannedChain,
    Staging,
    changed_tensors,
    noted_settings,
    warn_adopts_from,
    warn_unplanned,
)
from shrinkpoint.saving.reporting import Job, Link, provenance
from shrinkpoint.saving.takeover import NotAdoptedError, Takeover
from shrinkpoint.schemes.base import ReferenceState, SaveContext
from shrinkpoint.state.averages import confirmed
from shrinkpoint.state.training import Role, Tag, TensorSpec, TrainingState
from shrinkpoint.store.manifest import Manifest
from shrinkpoint.store.run import RunStore
from shrinkpoint.warn import warn

__all__ = ["AdoptingCommitter"]

_STEPS_EACH = 1.2
"""Training steps that a probe's resumed step counts as: evaluations and copies of the state included."""


@dataclass
class _StepClock:
    """The search's time: training steps, which a replay counts alike."""

    step: int = 0
    spent: float = 0.0

    def now(self) -> float:
        return float(self.step)

    def paid(self) -> float:
        return self.spent

    def charged(self, resume: ResumedSteps | None) -> ResumedSteps | None:
        """The same, counting the steps."""
        if resume is None:
            return None

        def resumed(state: object, marks: Sequence[int]) -> Sequence[Loss]:
            self.spent += _STEPS_EACH * marks[-1]
            return resume(state, marks)

        return resumed


class AdoptingCommitter(Committer):
    """Encodes and commits the saves of a training that adopts them.

    Args:
        store, config, spent_s: see `Committer`.

    Raises:
        ConfigError: `config.adoptions` is not given.
    """

    def __init__(self, store: RunStore, config: SaverConfig, spent_s: Any) -> None:
        if config.adoptions is None:
            raise ConfigError(
                "adopt=True needs adoptions=, the number of planned saves of the whole run (total steps / every, say):"
                " max_degradation is divided among them"
            )
        super().__init__(store, replace(config, restore_budget=config.adoptions), spent_s)
        self._began = time.perf_counter()
        self._chain = PlannedChain()
        self._settings: Mapping[str, Any] | None = None
        self._warned_of_size = False
        self._anew()

    def _anew(self) -> None:
        """A search of which nothing is known yet."""
        self._clock = _StepClock()
        self.planner = Planner(self._config, self._clock.paid, clock=self._clock.now)

    # ---- where a training continues

    def adopt(self, parent: Manifest, reference: Mapping[str, ReferenceState], state: TrainingState) -> None:
        """See `Committer.adopt`: what is continued is the last planned save, and its search."""
        self._anew()
        last = adopted_of(parent)
        self._settings = last.settings if last is not None and last.count else None
        self._clock.step = parent.step if last is None else last.step
        if last is not None and not last.planned:
            self._continue_before(parent, last, state)
        else:
            super().adopt(parent, reference, state)
            self._chain = PlannedChain(last, reference)
        if last is None:
            warn_adopts_from(parent.step)
            self._resume_search(parent.meta.get("search"))
        elif last.count:
            self._resume_search(last.search)

    def _resume_search(self, search: Any) -> None:
        try:
            self.planner.begin_again(search if isinstance(search, dict) else {}, restored=True)
        except ConfigError as error:
            warn(f"the search starts over: {error}")

    def _continue_before(self, manifest: Manifest, last: Adopted, state: TrainingState) -> None:
        """Continue what the run had before an exact save: the weights of the last planned one, or of its beginning."""
        self.follow(manifest)
        self.forget()
        self._movement.forget()
        self._chain = PlannedChain(last if last.count else None)
        before = self._planned_before(manifest, last)
        carried = carried_in(state)
        if before is not None:
            decoded, parent = before
            self._note(decoded.state, last.step)
            self._chain = PlannedChain(last, decoded.reference)
            self._link = Link(parent, {}, restored=True) if parent is not None else None
        elif last.since == manifest.step:
            self._note(state, manifest.step)
        elif carried is not None and last.since is not None:
            self._note(carried, last.since)

    def _planned_before(self, manifest: Manifest, last: Adopted) -> tuple[Decoded, Manifest | None] | None:
        if manifest.kind == "base" or not last.count:
            return None
        chain = sources_of_run(self._store, manifest)[:-1]
        decoded = decode_chain(chain, threads=self._config.encoder_threads)
        if decoded.header.step != last.step:
            return None
        digest = decoded.header.state_digest
        parents = (m for m in self._store.manifests() if m.state_digest == digest and m.step == last.step)
        return decoded, next(parents, None)

    def start_over(self) -> None:
        """See `Committer.start_over`."""
        super().start_over()
        self._chain, self._settings = PlannedChain(), None
        self._anew()

    # ---- saves

    def commit(self, job: Job) -> SaveReport:
        """Store one snapshot; a planned one is handed to the waiting training in between."""
        started, spent = time.perf_counter(), self._spent_s()
        state = recognised(confirmed(job.snapshot.wait()), job.optimizers)
        if job.takeover is None:
            stored = self._store_exactly(job, state, started)
        else:
            try:
                stored = self._store_planned(job, job.takeover, state, spent)
            finally:
                job.takeover.withdraw()
        self._warn_diverged(stored)
        self._collect()
        self._slim()
        return stored

    def _store_planned(self, job: Job, takeover: Takeover, state: TrainingState, spent: float) -> SaveReport:
        try:
            reference = self._chain.reference(self._movement.noted, self._config.period)
            staging = Staging(state, reference, takeover.exactly, threads=self._config.waiting_threads)
            plan, guard = self._plan_here(job, state, reference, staging)
            staged = staging.by(plan.scheme)
            takeover.offer(changed_tensors(state, staged.state))
        except Exception as error:
            raise NotAdoptedError(
                f"{error}. Training goes on from its own state, so that a replay will differ from here on"
            ) from error
        before = self._chain
        parent = self._link.parent if self._link is not None and reference is not None else None
        last = self._have_adopted(job, takeover, staged)
        quantized_at = time.perf_counter()
        encoded = self._coded(job, staged, plan, before, parent)

        def report_for(encoded: EncodedState, size: int) -> SaveReport:
            return replace(
                job.report(plan, encoded, size, guard),
                not_finite=not_finite(state, baseline=plan.baseline),
                search_s=self._spent_s() - spent,
                adopt_s=takeover.seconds,
                waited_s=takeover.waited_s,
                overhead=self._spent_s() / max(time.perf_counter() - self._began, 1e-9),
                encode_s=time.perf_counter() - quantized_at,
            )

        last = replace(last, stand_ins=frozenset(staged.stood_in))
        try:
            stored = self._commit_with(job, encoded, parent, last, report_for)
        except ChainError as error:
            warn(f"{error}. Step {job.step} is stored as a base")
            encoded = self._coded(job, staged, plan, PlannedChain(), None)
            last = replace(last, stand_ins=frozenset(staged.stood_in))
            stored = self._commit_with(job, encoded, None, last, report_for)
        manifest, report = stored
        self._link = Link(manifest, {}, restored=True)
        self._chain = PlannedChain(last, encoded.reference)
        if not plan.is_explained:
            self._warn_exact(report)
        return report

    def _plan_here(
        self,
        job: Job,
        state: TrainingState,
        reference: Mapping[str, ReferenceState] | None,
        staging: Staging,
    ) -> tuple[Plan, Guard]:
        self._clock.step = job.step
        save_context = SaveContext(
            restore_budget=self._config.restore_budget,
            state=state,
            step=job.step,
            reference=reference,
            restored=reference is not None,
            adopts=True,
            movement=self._movement.since(state, job.step),
            directions=moments_of_direction(state, job.optimizers),
            gradients=job.gradients,
        )
        guard = Guard(
            job.optimizers,
            self._config.waiting_threads,
            restored=lambda scheme: staging.by(scheme).state,
        )
        self.planner.guard = guard if self._config.guards else None
        resume = self._clock.charged(job.resume)
        return self.planner.plan(save_context, job.measure, resume, exact=job.exact), guard

    def _have_adopted(self, job: Job, takeover: Takeover, staged: StagedState) -> Adopted:
        """Become what a process is that has just restored this save; until it is stored, values stand in for its container."""
        more = {"measured": job.measure is not None, "probed": job.resume is not None, **takeover.settings}
        settings = noted_settings(self._config, more, self._settings, step=job.step, warns=True)
        self._settings = None
        search = json.loads(json.dumps(self.planner.state_dict()))
        self.planner.begin_again(search, restored=True)
        self._note(staged.state, job.step)
        last = self._chain.next(job.step, staged, settings, search)
        self._chain, self._link = PlannedChain(last), None
        return last

    def _coded(
        self, job: Job, staged: StagedState, plan: Plan, before: PlannedChain, parent: Manifest | None
    ) -> EncodedState:
        staged.stood_in.clear()
        return encode_state(
            staged.state,
            plan.scheme,
            step=job.step,
            reference=before.known if parent is not None else None,
            parent=parent.state_digest if parent is not None else None,
            provenance=provenance(),
            threads=self._config.encoder_threads,
            exactly=plan.reason if plan.is_exact else None,
            staged=staged,
        )

    def _store_exactly(self, job: Job, state: TrainingState, started: float) -> SaveReport:
        """A side branch of the chain, which stays as it is.

        Where the chain does not hold the last planned save (there was none, or it could not be stored), the branch carries the
        weights that the next one is quantized by.
        """
        plan = exactly(UNPLANNED, is_explained=True)
        parent = self._link.parent if self._link is not None else None
        carries = parent is None and self._movement.step not in (None, job.step)
        encoded = encode_state(
            carrying(state, self._movement.noted) if carries else state,
            plan.scheme,
            step=job.step,
            reference=self._chain.known if parent is not None else None,
            parent=parent.state_digest if parent is not None else None,
            provenance=provenance(),
            threads=self._config.encoder_threads,
            lasting=job.snapshot.lasting,
        )
        last = replace(self._chain.last or Adopted(), planned=False, since=self._movement.step)
        if parent is None:
            last = replace(last, stand_ins=last.stand_ins | self._chain.quantized)

        def report_for(encoded: EncodedState, size: int) -> SaveReport:
            return replace(
                job.report(plan, encoded, size),
                not_finite=not_finite(state),
                encode_s=time.perf_counter() - started,
            )

        _, report = self._commit_with(job, encoded, parent, last, report_for)
        if not self._warned_of_size:
            self._warned_of_size = True
            warn_unplanned(report)
        return report

    def _commit_with(
        self, job: Job, encoded: EncodedState, parent: Manifest | None, last: Adopted, report_for: Any
    ) -> tuple[Manifest, SaveReport]:
        container = write_container(encoded.checkpoint)
        report = report_for(encoded, len(container))
        encoded_at = time.perf_counter()
        noted = {"search": dict(last.search), KEY: last.to_json()}
        manifest = self._commit(job, parent, encoded, container, report, noted)
        return manifest, self._stored(report, manifest, container, encoded_at)


_PREFIX = "adopted before/"


def carrying(state: TrainingState, noted: Mapping[str, torch.Tensor]) -> TrainingState:
    """A state with these weights in addition, which its tree does not refer to: only `carried_in` finds them.

    Args:
        state: that is stored.
        noted: weights by name, as they were at the last planned save, or where training began.
    """
    tag = Tag(role=Role.OTHER)
    specs = {
        _PREFIX + name: TensorSpec(
            name=_PREFIX + name, dtype=tensor.dtype, shape=tuple(tensor.shape), tag=tag
        )
        for name, tensor in noted.items()
    }
    tensors = {_PREFIX + name: tensor for name, tensor in noted.items()}
    return TrainingState(state.tree, {**state.tensors, **tensors}, {**state.specs, **specs})


def carried_in(state: TrainingState) -> TrainingState | None:
    """The weights that `carrying` has added, by their own names; None where there are none."""
    tensors = {
        name.removeprefix(_PREFIX): tensor
        for name, tensor in state.tensors.items()
        if name.startswith(_PREFIX) and name.removeprefix(_PREFIX) in state.specs
    }
    return TrainingState(None, tensors, {name: state.specs[name] for name in tensors}) if tensors else None
