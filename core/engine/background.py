"""The saves of one process, or of one of several ranks, in its background thread: plan, encode, commit, retain, report."""

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, TypeAlias, TypeVar

from shrinkpoint.coding.encode import EncodedState, StagedState, encode_state
from shrinkpoint.config import SaverConfig
from shrinkpoint.container.layout import PartOf
from shrinkpoint.container.writer import write_container
from shrinkpoint.engine.adopt import (
    UNPLANNED,
    Adopting,
    PlannedChain,
    Staging,
    carried_in,
    carrying,
    changed_tensors,
    planned_before,
    still_there,
    warn_adopts_from,
    warn_unplanned,
)
from shrinkpoint.engine.chain import Chain, Link, StoredPart, commit_parts, store_part
from shrinkpoint.engine.handover import Handover, NotAdoptedError
from shrinkpoint.engine.movement import MovementTracker, is_followed
from shrinkpoint.engine.ranks import Ranks
from shrinkpoint.engine.reporting import not_finite, provenance, report_of, with_untried
from shrinkpoint.engine.request import Job
from shrinkpoint.engine.retention import ADOPTION, WEIGHTS_ONLY, Adopted, adopted_of
from shrinkpoint.engine.under_way import Failures
from shrinkpoint.errors import (
    ChainError,
    ConfigError,
    FencedError,
    ScratchError,
    ShrinkpointError,
    StoreError,
)
from shrinkpoint.group.group import Group, is_first_of_node
from shrinkpoint.optimizers.recognition import recognised
from shrinkpoint.optimizers.updates import moments_of_direction
from shrinkpoint.quality.guards import Guard
from shrinkpoint.quality.plan import Plan, exactly
from shrinkpoint.quality.planner import Planner
from shrinkpoint.reports import SaveReport
from shrinkpoint.runtime.memory import LARGE, give_back
from shrinkpoint.schemes.base import Movement, ReferenceState, SaveContext
from shrinkpoint.state.averages import confirmed
from shrinkpoint.state.scratch import PlanesLostError, Scratch, put_arrays
from shrinkpoint.state.training import TrainingState
from shrinkpoint.state.tree import JSON
from shrinkpoint.store.manifest import Manifest
from shrinkpoint.store.near import Share
from shrinkpoint.store.run import RunStore
from shrinkpoint.warn import warn

__all__ = ["Background", "Choice"]

T = TypeVar("T")
Read: TypeAlias = Callable[[Manifest], tuple[Mapping[str, ReferenceState], TrainingState]]


@dataclass(frozen=True)
class Choice:
    """How a snapshot is stored."""

    plan: Plan
    values: TrainingState
    """What is coded."""
    link: Link | None
    staged: StagedState | None = None
    """What is quantized already, of a planned save that training goes on from."""
    last: Adopted | None = None
    """The last planned save up to this one, where the training adopts."""
    exactly: str | None = None
    """Why what was to be lossy is exact."""

    def coded(self, encoded: EncodedState) -> "Choice":
        """Return the same, whose `last` names the tensors that no container has as they were quantized."""
        if self.last is None or self.staged is None:
            return self
        exact = self.staged.rows.keys() & encoded.kept_exactly.keys()
        return replace(self, last=replace(self.last, stand_ins=frozenset(exact)))


class _FailedElsewhereError(StoreError):
    """The first rank has said that the save has failed, and reports it."""


@dataclass(frozen=True)
class _Made:
    """This rank's part of a save."""

    choice: Choice
    encoded: EncodedState
    stored: StoredPart


class Background:
    """What a background thread does and remembers.

    Args:
        store: the run.
        config: how to save.
        spent_s: seconds that evaluations have taken from training so far.
        chain: what is committed; None on all ranks but the first.
        ready: waits until the coders are compiled.
        url: of the run, for messages.
        ranks: of a group, each of which codes what it owns, and whose first one commits; None of a process alone.
    """

    def __init__(
        self,
        store: RunStore,
        config: SaverConfig,
        spent_s: Callable[[], float],
        chain: Chain | None,
        *,
        ready: Callable[[], object] = lambda: None,
        url: str = "",
        ranks: Ranks | None = None,
    ) -> None:
        if config.adoptions is not None:
            config = replace(config, restore_budget=config.adoptions)
        self.adopting = Adopting(config, warns=chain is not None) if config.adopt else None
        self._store, self._config, self._chain = store, config, chain
        self._spent_s, self._ready, self._url, self._ranks = spent_s, ready, url, ranks
        self._clock_s = 0.0  # of the first rank, by which the search of all decides
        self._began = time.perf_counter()
        self._warned_of_loss = False
        self._scratch = None if config.scratch_folder is None else Scratch(config.scratch_folder)
        self._failures = Failures(config, url)
        self.planner = (
            Planner(
                config,
                spent_s,
                clock=time.perf_counter if ranks is None else lambda: self._clock_s,
                warns=chain is not None,
            )
            if self.adopting is None
            else self.adopting.planner()
        )
        self.movement = MovementTracker()
        self.link: Link | None = None
        self.failed = False
        """Whether the last save was not committed, as far as this process knows."""
        self.fatal: ShrinkpointError | None = None
        """Why training must not go on; of several ranks known to the first one."""
        self.reports: list[SaveReport] = []

    def look(self) -> None:
        """Warn where the folder of what is put away is in memory itself; before training starts."""
        if self._scratch is not None:
            self._scratch.look()

    def base_is_due(self, *, planned: bool) -> bool:
        """Return whether the next checkpoint of several ranks is to be a base, as far as this one decides it.

        Args:
            planned: whether it is a planned one of a training that adopts, where every rank decides alike.
        """
        if self._ranks is None:  # `Chain.next` decides
            return False
        if self.adopting is None:
            return self._chain is not None and self._chain.base_is_due
        last = self.adopting.chain.last
        return planned and (last is None or last.count % self._config.period == 0)

    def give_up(self, step: int, error: Exception) -> None:
        """Count a save that has failed on all ranks before this thread had anything to do."""
        self.link, self.failed = None, True
        if self._chain is not None:
            self.fatal = self._failures.note(step, error)

    # ---- where a training begins, or continues

    def begin(self, state: TrainingState, step: int, *, lasting: bool = False) -> None:
        """Count the weights' movement from here: where a training starts that restored nothing.

        Args:
            state: its weights, or those that this rank owns.
            step: training steps done so far.
            lasting: as of `MovementTracker.note`.
        """
        self._note(state, step, lasting=lasting)

    def adopt(
        self,
        parent: Manifest,
        reference: Mapping[str, ReferenceState],
        state: TrainingState,
        *,
        lasting: bool = False,
        group: Group,
        read: Read,
    ) -> None:
        """Continue the chain of a restored checkpoint, from the state that a reader has got of it; of several ranks a collective.

        Args:
            parent: the checkpoint.
            reference: what a reader holds of it.
            state: its tensors, or those of them that this rank owns.
            lasting: as of `MovementTracker.note`.
            group: the ranks, or this process alone.
            read: gives reference and state of another checkpoint of this chain.

        Raises:
            ShrinkpointError: the planned save before an exact one cannot be read.
        """
        self.failed = False
        self._failures.passed()  # what was not stored is left behind
        if self.adopting is not None:
            self._adopt_planned(parent, (reference, state), lasting, group, read)
            return
        if self._chain is not None:
            self._chain.adopt(parent)
        move = self._keeper()
        moved = {name: known if move is None else move(known) for name, known in reference.items()}
        self.link = Link(parent.state_digest, moved, restored=True)
        self._note(state, parent.step, lasting=lasting)
        self._resume_search(parent.meta.get("search"))

    def _adopt_planned(
        self,
        manifest: Manifest,
        restored: tuple[Mapping[str, ReferenceState], TrainingState],
        lasting: bool,
        group: Group,
        read: Read,
    ) -> None:
        """Continue the last planned save, and its search; after an exact one what the run had before that."""
        last, (reference, state) = adopted_of(manifest), restored
        go_on = partial(self.continue_from, manifest, last, lasting=lasting)
        if last is None or last.planned:
            if self._chain is not None:
                self._chain.adopt(manifest)
            go_on(reference, (state, manifest.step), digest=manifest.state_digest)
            return
        planned = group.on_first(lambda: planned_before(self._store, manifest, last))
        parent = None
        if planned is not None:
            reference, values = read(planned)
            parent = group.on_first(lambda: still_there(self._store, planned))
            go_on(reference, (values, last.step), digest=None if parent is None else parent.state_digest)
        elif last.since is None:
            go_on({}, None)
        elif last.since == manifest.step:
            go_on({}, (state, manifest.step))
        elif (carried := carried_in(state)) is not None:
            go_on({}, (carried, last.since))
        else:
            go_on({}, (state, manifest.step))
            if self._chain is not None and any(map(is_followed, state.specs.values())):
                warn(
                    f"the last planned save before step {manifest.step} could not be stored, and with it where the weights were: the next"
                    " save's bits differ from those of an undisturbed run. This run stays reproducible from there on"
                )
        if self._chain is not None:
            self._chain.follow(manifest)
            self._chain.parent = parent

    def continue_from(
        self,
        manifest: Manifest,
        last: Adopted | None,
        reference: Mapping[str, ReferenceState],
        values: tuple[TrainingState, int] | None,
        *,
        digest: str | None = None,
        lasting: bool = False,
    ) -> None:
        """Go on as after a restore of a planned save, whose values are what the next save's movement is counted from.

        Args:
            manifest: what the training has been restored from.
            last: what that says of the last planned save; None where there is none.
            reference: what a reader holds of that save.
            values: the tensors at that save, and its step; None where no movement is known, in an undisturbed run either.
            digest: state digest of that save; None where its manifest is gone, so that nothing can build on it.
            lasting: as of `MovementTracker.note`.
        """
        assert self.adopting is not None
        self.planner = self.adopting.planner()
        known = PlannedChain(last if last is not None and last.count else None, dict(reference))
        self.adopting.continue_from(last, known, step=manifest.step)
        self.link = None if digest is None else Link(digest, dict(reference), restored=True)
        self.movement.forget()
        if values is not None:
            self.movement.note(*values, lasting=lasting)
        if last is None:
            if self._chain is not None:
                warn_adopts_from(manifest.step)
            self._resume_search(manifest.meta.get("search"))
        elif last.count:
            self._resume_search(last.search)

    def _resume_search(self, stored: object) -> None:
        """Go on with the search for settings of a restored checkpoint, whose cost counts as a restore's."""
        try:
            self.planner.load_state_dict(stored if isinstance(stored, dict) else {})
        except ConfigError as error:
            if self._chain is not None:
                warn(f"the search starts over: {error}")

    def forget(self) -> None:
        """Build on nothing: the next checkpoint is a base."""
        self.link = None

    def start_over(self) -> None:
        """Another training follows: build on nothing, count no movement from what was before, and collect none of it."""
        self.forget()
        self.movement.forget()
        if self._chain is not None:
            self._chain.lineage = self._chain.parent = None
        if self.adopting is not None:
            self.planner = self.adopting.planner()
            self.adopting.continue_from(None, PlannedChain(), step=0)

    def _note(self, state: TrainingState, step: int, *, lasting: bool = False) -> None:
        if self._config.scheme == "lossless":  # which makes no noise to be compared with the movement
            return
        if self._scratch is not None:
            state, lasting = self._scratch.weights(state, is_followed, lasting=lasting), True
        self.movement.note(state, step, lasting=lasting)

    def _keeper(self) -> Callable[[ReferenceState], ReferenceState] | None:
        if self._scratch is None:
            return None
        file = self._scratch.file()
        return lambda reference: reference.moved(lambda arrays: put_arrays(file, arrays))

    # ---- saves

    def run(self, handed_over: list[Job]) -> None:
        """Make a save; raises nothing."""
        large = handed_over[0].snapshot.state.nbytes >= LARGE
        self._make(handed_over.pop())
        if large:
            give_back()

    def _make(self, job: Job) -> None:
        try:
            report = self.commit(job)
        except Exception as error:  # noqa: BLE001 - whatever it was, training goes on and the next save starts afresh
            self.link, self.failed = None, True
            self._note_failure(job, error)
        else:
            self.failed = False
            self._failures.over()
            self.reports.append(report)

    def require_stored(self) -> None:
        """Raise what no later save makes up for, at a training's end.

        Raises:
            SaveFailedError: the last save has failed.
        """
        self._failures.require_none()

    def _note_failure(self, job: Job, error: Exception) -> None:
        if self._chain is not None:
            self.fatal = error if isinstance(error, FencedError) else self._failures.note(job.step, error)
        elif self._ranks is not None and not isinstance(error, _FailedElsewhereError):
            warn(f"saving step {job.step} to {self._url} failed on rank {self._ranks.rank}: {error}")

    def commit(self, job: Job) -> SaveReport:
        """Store one snapshot; on return it is committed.

        Whatever is raised, nothing that was stored before is harmed, and the caller must `forget` the chain: the
        commit may have happened without our learning of it.
        """
        ranks = self._ranks
        if ranks is None:
            return self._made(job, self._store_whole)
        ranks.begin(job)
        self._clock_s, made = job.clock_s, None
        try:
            made = self._made(job, partial(self._store_part, ranks))
            post = made.stored.message()
        except Exception as error:  # noqa: BLE001 - the first rank gets it, and reports it
            post = ranks.fail(error)
        finally:
            ranks.leave()
        ranks.post_part(job, post)
        if self._chain is None:
            outcome = ranks.outcome(job)
        else:
            outcome = ranks.publish(job, partial(self._commit_parts, self._chain, job, made))
        if made is None or "error" in outcome:
            raise _FailedElsewhereError(str(outcome.get("error")))
        if "manifest" in outcome:
            share = Share(ranks.rank, ranks.size, is_first_of_node(ranks.rank))
            manifest = Manifest.from_bytes(outcome["manifest"].encode())
            self._store.copy_near(manifest, made.stored.copied, share)
        report = SaveReport.of_message(outcome["report"])
        self._learn(job, made.choice, made.encoded, outcome["digest"], report)
        return report

    def _made(self, job: Job, store: Callable[[Job, TrainingState, Choice, float, float], T]) -> T:
        """Choose, encode and store; of one process a base where what a delta needs is lost."""
        try:
            self._ready()
            started, spent = time.perf_counter(), self._spent_s()
            state, movement = self._state(job)
            choice: Choice | None = None
            stored: T | None = None
            try:
                choice = self._choose(job, state, movement, self._next_link())
                stored = store(job, state, choice, started, spent)
            except (ChainError, PlanesLostError) as error:  # a base needs neither a parent nor planes
                if self._ranks is not None:
                    raise
                self._warn_lost(error, job.step)
            if stored is None:  # not above, where the error keeps what the first attempt has coded
                if choice is not None and choice.staged is not None:  # training has adopted it
                    choice = replace(choice, link=None)
                else:
                    choice = self._choose(job, state, movement, None)
                stored = store(job, state, choice, started, spent)
        finally:
            if job.handover is not None:
                job.handover.withdraw()
        return stored

    def _state(self, job: Job) -> tuple[TrainingState, Movement | None]:
        """Return the snapshot with all roles, and how far training has moved since the one before."""
        state = recognised(confirmed(self._arrived(job)), job.optimizers)
        lasting = job.snapshot.lasting and self.adopting is None
        if lasting and self._scratch is not None:
            state = self._scratch.moments(job.snapshot, state)
            give_back()
        try:
            movement = self.movement.since(state, job.step)
        except ScratchError as error:
            self.movement.forget()
            movement = None
            warn(
                f"{error}. How far training has moved since the last checkpoint is not known at step {job.step}, which is stored like a"
                " first one"
            )
        if lasting:
            # The weights of before are let go of now, when most memory is needed. If this save fails, the next one counts the
            # movement from here: it has less noise than it might have, never more.
            self._note(state, job.step, lasting=True)
            give_back()
        return state, movement

    def _arrived(self, job: Job) -> TrainingState:
        """Return the snapshot, as if the model had only the tensors that this process codes."""
        state = job.snapshot.wait()
        return state if self._ranks is None else self._ranks.coded(state)

    def _next_link(self) -> Link | None:
        """The chain to extend, if any. It is forgotten here: coding uses up the reference, so that only one is in memory."""
        if self.adopting is not None or self.link is None:
            return self.link
        link, self.link = self.link, None
        if self._ranks is not None or self._chain is None:
            return link
        return self._chain.next(link, self._keeper())

    def _warn_lost(self, error: ChainError | PlanesLostError, step: int) -> None:
        """Say why a base is stored where a delta was to be; of a chain that is gone, once."""
        if isinstance(error, ChainError):
            if not self._warned_of_loss:
                self._warned_of_loss = True
                warn(
                    f"{error}. Step {step} is stored as a base; checkpoints that need what is gone cannot be restored. This warning comes"
                    " once"
                )
        else:
            warn(f"{error}. Step {step} is stored as a base; nothing that was stored before is harmed")

    # ---- choosing

    def _choose(self, job: Job, state: TrainingState, movement: Movement | None, link: Link | None) -> Choice:
        if self.adopting is not None:
            if job.handover is None:
                return self._branch(self.adopting, job, state, link)
            return self._adopt_now(self.adopting, job, job.handover, state, movement, link)
        guard = Guard(job.optimizers, self._config.encoder_threads)
        context = self._context(job, state, movement, None if link is None else link.reference)
        context = replace(
            context,
            is_anchor=link is None or link.anchor is not None,
            restored=link is not None and (link.restored or link.exact),
        )
        plan = self._plan(job, context, guard)
        if job.snapshot.lasting:
            give_back()  # what candidates took, before coding takes its own
        exactly = plan.reason if plan.is_exact and self._config.scheme != "lossless" else None
        return Choice(plan, state, link, exactly=exactly)

    def _context(
        self,
        job: Job,
        state: TrainingState,
        movement: Movement | None,
        reference: Mapping[str, ReferenceState] | None,
    ) -> SaveContext:
        return SaveContext(
            restore_budget=self._config.restore_budget,
            state=state,
            step=job.step,
            reference=reference,
            movement=movement,
            directions=moments_of_direction(state, job.optimizers),
            gradients=job.gradients,
        )

    def _plan(self, job: Job, context: SaveContext, guard: Guard) -> Plan:
        asked = guard if self._config.guards else None
        if self._ranks is not None:
            return self._ranks.plan(self.planner, context, job, asked)
        return self.planner.plan(context, job.measure, job.resume, exact=job.exact, guard=asked)

    def _branch(self, adopting: Adopting, job: Job, state: TrainingState, link: Link | None) -> Choice:
        """Return a side branch of the chain, which stays as it is.

        Where the chain does not hold the last planned save (there was none, or it could not be stored), the branch carries the
        weights that the next one is quantized by.
        """
        if link is not None:
            link = replace(link, reference=dict(adopting.chain.known))
        elif self.movement.step not in (None, job.step):
            state = carrying(state, self.movement.noted)
        last = adopting.branch(self.movement.step, is_delta=link is not None)
        return Choice(exactly(UNPLANNED, is_explained=True), state, link, last=last)

    def _adopt_now(
        self,
        adopting: Adopting,
        job: Job,
        handover: Handover,
        state: TrainingState,
        movement: Movement | None,
        link: Link | None,
    ) -> Choice:
        """Choose, and let the waiting training take the values over."""
        try:
            adopting.clock.step = job.step
            reference = adopting.chain.reference(self.movement.noted, self._config.period)
            staging = Staging(state, reference, handover.exactly, threads=self._config.waiting_threads)
            guard = Guard(
                job.optimizers,
                self._config.waiting_threads,
                restored=lambda scheme: staging.by(scheme).state,
            )
            context = self._context(job, state, movement, reference)
            context = replace(context, restored=reference is not None, adopts=True)
            resume = adopting.clock.charged(job.resume)
            plan = self._plan(replace(job, resume=resume), context, guard)
            staged = staging.by(plan.scheme)
            handover.offer(changed_tensors(state, staged.state))
        except Exception as error:
            raise NotAdoptedError(
                f"{error}. Training goes on from its own state, so that a replay will differ from here on"
            ) from error
        known = adopting.chain.known
        last = adopting.adopted(job, handover, staged, self.planner)
        self.movement.note(staged.state, job.step)
        self.link = None
        link = replace(link, reference=dict(known)) if link is not None and reference is not None else None
        return Choice(plan, staged.state, link, staged, last, exactly=plan.reason if plan.is_exact else None)

    # ---- coding and storing

    def _encode(self, job: Job, choice: Choice) -> EncodedState:
        link, staged = choice.link, choice.staged
        return encode_state(
            choice.values,
            choice.plan.scheme,
            step=job.step,
            reference=link.reference if link else None,
            parent=link.digest if link else None,
            release=link.reference.pop if link else None,
            keep=self._keeper(),
            provenance=provenance(),
            threads=self._config.encoder_threads,
            exactly=choice.exactly,
            lasting=job.snapshot.lasting and staged is None,
            staged=staged,
        )

    def _report(
        self, job: Job, state: TrainingState, choice: Choice, encoded: EncodedState, spent: float
    ) -> SaveReport:
        """Return the report before anything is written."""
        plan, handover = choice.plan, job.handover
        report = replace(
            report_of(plan, encoded, step=job.step),
            blocked_s=max(job.blocked_s, job.snapshot.stalled_s),
            metrics=dict(job.metrics),
            not_finite=not_finite(state, baseline=plan.baseline),
            search_s=self._spent_s() - spent,
        )
        if handover is not None:
            overhead = self._spent_s() / max(time.perf_counter() - self._began, 1e-9)
            report = replace(report, adopt_s=handover.seconds, waited_s=handover.waited_s, overhead=overhead)
        return report

    def _untried(self, job: Job, choice: Choice) -> str | None:
        """Why it is not known what a restore does to the next updates; None where it is, or nobody wants to know."""
        verdict = choice.plan.verdict
        return None if verdict is None or not job.optimizers else verdict.untried

    def _meta(self, job: Job, choice: Choice) -> dict[str, JSON]:
        last = choice.last
        search = self.planner.state_dict() if last is None else dict(last.search)
        meta: dict[str, Any] = {"search": search}
        if last is not None:
            meta[ADOPTION] = last.to_json()
        if job.weights_only:
            meta[WEIGHTS_ONLY] = True
        return meta

    def _store_whole(
        self, job: Job, state: TrainingState, choice: Choice, started: float, spent: float
    ) -> SaveReport:
        assert self._chain is not None
        if choice.staged is not None:
            started = time.perf_counter()
        encoded = self._encode(job, choice)
        choice = choice.coded(encoded)
        report = self._report(job, state, choice, encoded, spent)
        untried = self._untried(job, choice)
        report = report if untried is None else with_untried(report, untried)
        digest = encoded.checkpoint.state_digest
        container = write_container(encoded.checkpoint, uses_up=choice.staged is None)
        report = replace(report, bytes=len(container), encode_s=time.perf_counter() - started)
        report = self._chain.commit(
            container,
            report,
            choice.link,
            self._meta(job, choice),
            state_digest=digest,
            advances=self.adopting is None or choice.staged is not None,
            explained=choice.plan.is_explained,
        )
        self._learn(job, choice, encoded, digest, report)
        return report

    def _store_part(
        self, ranks: Ranks, job: Job, state: TrainingState, choice: Choice, started: float, spent: float
    ) -> _Made:
        """Code and put this rank's part."""
        started, own, values = time.perf_counter(), ranks.own(job), choice.values
        tensors, specs = {**values.tensors, **own.tensors}, {**values.specs, **own.specs}
        encoded = self._encode(job, replace(choice, values=TrainingState(values.tree, tensors, specs)))
        report = self._report(job, state, choice, encoded, spent)
        last = choice.coded(encoded).last
        stored = store_part(
            self._store,
            encoded,
            replace(report, encode_s=time.perf_counter() - started),
            PartOf(ranks.rank, ranks.size, own.tree or None),
            session=job.session,
            tree=job.snapshot.state.tree if ranks.rank == 0 else None,
            untried=self._untried(job, choice),
            stand_ins=() if last is None else sorted(last.stand_ins),
        )
        return _Made(choice, encoded, stored)

    def _commit_parts(
        self, chain: Chain, job: Job, made: _Made | None, posts: list[dict[str, Any]]
    ) -> dict[str, Any]:
        """Commit the parts of all ranks, and return what the others are to know."""
        link, meta, advances = None, {}, True
        if made is not None:
            link, meta = made.choice.link, self._meta(job, made.choice)
            advances = self.adopting is None or made.choice.staged is not None
            if made.choice.last is not None:
                names = {name for post in posts for name in post.get("stand_ins", ())}
                meta[ADOPTION] = replace(made.choice.last, stand_ins=frozenset(names)).to_json()
        report = commit_parts(chain, posts, link, began=job.began, meta=meta, advances=advances)
        digest = "" if chain.parent is None else chain.parent.state_digest
        outcome: dict[str, Any] = {"digest": digest, "report": asdict(report)}
        if self._store.copies_near and chain.committed is not None:
            outcome["manifest"] = chain.committed.to_bytes().decode()
        return outcome

    def _learn(
        self, job: Job, choice: Choice, encoded: EncodedState, digest: str, report: SaveReport
    ) -> None:
        """Note that the save is committed."""
        if self.adopting is None:
            if not job.snapshot.lasting:
                self._note(choice.values, job.step)
            self.link = Link(digest, dict(encoded.reference), number=job.number, exact=choice.plan.is_exact)
        elif choice.last is not None and choice.staged is not None:
            self.link = Link(digest, {}, number=job.number, restored=True)
            self.adopting.stored(choice.last, encoded)
        elif self._chain is not None and not self.adopting.warned_of_size:
            self.adopting.warned_of_size = True
            warn_unplanned(report)
