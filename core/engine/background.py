"""The saves of one process, or of one of several ranks, in its background thread: plan, encode, commit, retain, report."""

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, TypeVar

from shrinkpoint.coding.encode import EncodedState, StagedState, encode_state
from shrinkpoint.container.layout import PartOf
from shrinkpoint.container.writer import write_container
from shrinkpoint.engine.chain import Chain, Link, StoredPart, commit_parts, store_part
from shrinkpoint.engine.movement import MovementTracker, is_followed
from shrinkpoint.engine.placement import Found, Placement
from shrinkpoint.engine.ranks import Ranks
from shrinkpoint.engine.reporting import provenance, report_of, with_untried
from shrinkpoint.engine.request import Job
from shrinkpoint.engine.retention import ADOPTION, WEIGHTS_ONLY, Adopted
from shrinkpoint.engine.under_way import Failures
from shrinkpoint.errors import (
    ChainError,
    ConfigError,
    FencedError,
    ScratchError,
    ShrinkpointError,
    StoreError,
)
from shrinkpoint.group.group import is_first_of_node
from shrinkpoint.optimizers.recognition import recognised
from shrinkpoint.optimizers.updates import moments_of_direction
from shrinkpoint.quality.guards import Guard
from shrinkpoint.quality.plan import Plan
from shrinkpoint.quality.planner import Planner
from shrinkpoint.reports import SaveReport
from shrinkpoint.runtime.memory import LARGE, give_back
from shrinkpoint.schemes.base import Movement, ReferenceState, SaveContext
from shrinkpoint.schemes.exact import Lossless
from shrinkpoint.state.averages import confirmed
from shrinkpoint.state.scratch import PlanesLostError, Scratch, put_arrays
from shrinkpoint.state.training import OwnState, TrainingState
from shrinkpoint.state.tree import JSON
from shrinkpoint.store.manifest import Manifest
from shrinkpoint.store.near import Share
from shrinkpoint.warn import warn

T = TypeVar("T")


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

    @property
    def advances(self) -> bool:
        """Return whether the next delta builds on it: not on an exact save of a training that adopts."""
        return self.last is None or self.staged is not None


class _FailedElsewhereError(StoreError):
    """The first rank has said that the save has failed, and reports it."""


@dataclass(frozen=True)
class _Coded:
    """Hold a whole state, or this rank's part of one, that is ready to be stored."""

    choice: Choice
    encoded: EncodedState
    own: OwnState
    """What this rank has for itself."""
    report: SaveReport
    """Without what is known once it is written."""
    untried: str | None
    """Why it is not known what a restore does to the next updates; None where it is, or nobody wants to know."""
    started: float


class Background:
    """Make saves in the background thread, and remember what the next one needs.

    Args:
        placement: how processes share a save: each codes what it owns, and the first one commits.
        chain: what is committed; None on all ranks but the first.
        ready: waits until the coders are compiled.
        url: of the run, for messages.
    """

    def __init__(
        self,
        placement: Placement,
        chain: Chain | None,
        *,
        ready: Callable[[], object] = lambda: None,
        url: str = "",
    ) -> None:
        config = placement.config
        if config.adoptions is not None:
            config = replace(config, restore_budget=config.adoptions)
        self._placement, self._ranks, self._chain = placement, placement.ranks, chain
        self._store, self._config, self._ready, self._url = placement.store, config, ready, url
        self._clock_s = 0.0  # of the first rank, by which the search of all decides
        self._began = time.perf_counter()
        self._warned_of_loss = False
        self._scratch = None if config.scratch_folder is None else Scratch(config.scratch_folder)
        self.failures = Failures(config, url)
        self.planner = self._new_planner()
        self.movement = MovementTracker()
        self.link: Link | None = None
        self.failed = False
        """Whether the last save was not committed, as far as this process knows."""
        self.fatal: ShrinkpointError | None = None
        """What the next `Saver._agree` raises; of several ranks the first one has it."""
        self.reports: list[SaveReport] = []

    def _new_planner(self) -> Planner:
        """Return a search of which nothing is known yet."""
        clock = time.perf_counter if self._ranks is None else lambda: self._clock_s
        return Planner(self._config, self._spent_s, clock=clock, warns=self._chain is not None)

    def _spent_s(self) -> float:
        """Return the seconds that evaluations have taken from training so far."""
        return self._placement.desk.seconds

    def check_scratch(self) -> None:
        """Warn where the folder of what is put away is in memory itself; before training starts."""
        if self._scratch is not None:
            self._scratch.check()

    def base_is_due(self, *, adopts: bool) -> bool:
        """Return whether the next checkpoint of several ranks is to be a base, as far as this one decides it.

        Args:
            adopts: whether training continues from the restored values.
        """
        return self._ranks is not None and self._chain is not None and self._chain.base_is_due

    def give_up(self, step: int, error: Exception) -> None:
        """Count a save that has failed on all ranks before this thread had anything to do."""
        self.link, self.failed = None, True
        if self._chain is not None:
            self.fatal = self.failures.note(step, error)

    # ---- where a training begins, or continues

    def note(self, state: TrainingState, step: int, *, lasting: bool = False) -> None:
        """Count the weights' movement from here, as where a training starts that restored nothing.

        Args:
            state: its weights, or those that this rank owns.
            step: training steps done so far.
            lasting: as of `MovementTracker.note`.
        """
        if self._config.scheme == "lossless":  # which makes no noise to be compared with the movement
            return
        if self._scratch is not None:
            state, lasting = self._scratch.weights(state, is_followed, lasting=lasting), True
        self.movement.note(state, step, lasting=lasting)

    def continue_from(self, found: Found) -> None:
        """Continue the chain of a restored checkpoint, from the state that a reader has got of it; of several ranks a collective.

        Raises:
            ShrinkpointError: with `adopt`, the planned save before an exact one cannot be read.
        """
        self.failed = False
        self.failures.passed()  # what was not stored is left behind
        self._continue(found)

    def _continue(self, found: Found) -> None:
        manifest, move = found.manifest, self._keeper()
        if self._chain is not None:
            self._chain.continue_from(manifest)
        moved = {name: known if move is None else move(known) for name, known in found.reference.items()}
        self.link = Link(manifest.state_digest, moved, restored=True)
        self.note(found.own_state, manifest.step, lasting=self._placement.together)
        self._resume_search(manifest.meta.get("search"))

    def _resume_search(self, stored: object) -> None:
        """Go on with the search for settings of a restored checkpoint, whose cost counts as a restore's."""
        try:
            self.planner.load_state_dict(stored if isinstance(stored, dict) else {})
        except ConfigError as error:
            if self._chain is not None:
                warn(f"the search starts over: {error}")

    def start_over(self) -> None:
        """Another training follows: build on nothing, count no movement from what was before, and collect none of it."""
        self.link = None
        self.movement.forget()
        if self._chain is not None:
            self._chain.lineage = self._chain.parent = None

    def _keeper(self) -> Callable[[ReferenceState], ReferenceState] | None:
        if self._scratch is None:
            return None
        file = self._scratch.file()
        return lambda reference: reference.moved(lambda arrays: put_arrays(file, arrays))

    # ---- saves

    def run(self, jobs: list[Job]) -> None:
        """Make a save; raises nothing.

        Args:
            jobs: the save, which is taken out: whoever calls this keeps no snapshot in memory.
        """
        job = jobs.pop()
        large = job.snapshot.state.nbytes >= LARGE
        try:
            report = self.commit(job)
        except Exception as error:  # noqa: BLE001 - whatever it was, training goes on and the next save starts afresh
            self.link, self.failed = None, True
            if self._chain is not None:
                self.fatal = error if isinstance(error, FencedError) else self.failures.note(job.step, error)
            elif self._ranks is not None and not isinstance(error, _FailedElsewhereError):
                warn(f"saving step {job.step} to {self._url} failed on rank {self._ranks.rank}: {error}")
        else:
            self.failed = False
            self.failures.over()
            self.reports.append(report)
        finally:
            self._placement.desk.leave()
        del job
        if large:
            give_back()

    def commit(self, job: Job) -> SaveReport:
        """Store one snapshot; on return it is committed.

        Whatever is raised, nothing that was stored before is harmed, and the caller must forget the `link`: the
        commit may have happened without our learning of it.
        """
        ranks = self._ranks
        if ranks is None:
            return self._made(job, self._store_whole)
        ranks.begin(job)
        self._clock_s, choice, stored = job.clock_s, None, None
        try:
            choice, stored, post = self._made(job, partial(self._store_part, ranks))
        except Exception as error:  # noqa: BLE001 - the first rank gets it, and reports it
            post = ranks.fail(error)
        finally:
            ranks.leave()
        ranks.post_part(job, post)
        commit = None if self._chain is None else partial(self._commit_parts, self._chain, job, choice)
        outcome = ranks.outcome(job, commit)
        if choice is None or stored is None or "error" in outcome:
            raise _FailedElsewhereError(str(outcome.get("error")))
        if "manifest" in outcome:
            share = Share(ranks.rank, ranks.size, is_first_of_node(ranks.rank))
            manifest = Manifest.from_bytes(outcome["manifest"].encode())
            self._store.copy_near(manifest, stored.copied, share)
        report = SaveReport.of_message(outcome["report"])
        link = Link(outcome["digest"], dict(stored.reference), job.number, exact=choice.plan.is_exact)
        self._learn(job, choice, link, report)
        return report

    def _made(self, job: Job, store: Callable[[Job, _Coded], T]) -> T:
        """Choose, encode and store; of one process a base where what a delta needs is lost."""
        try:
            self._ready()
            started, spent = time.perf_counter(), self._spent_s()
            state, movement = self._state(job)
            choice: Choice | None = None
            stored: T | None = None
            try:
                choice = self._choose(job, state, movement, self._next_link())
                stored = store(job, self._encode(job, state, choice, started, spent))
            except (ChainError, PlanesLostError) as error:  # a base needs neither a parent nor planes
                if self._ranks is not None:
                    raise
                self._warn_lost(error, job.step)
            if stored is None:  # not above, where the error keeps what the first attempt has coded
                if choice is not None and choice.staged is not None:  # training has adopted it
                    choice = replace(choice, link=None)
                else:
                    choice = self._choose(job, state, movement, None)
                stored = store(job, self._encode(job, state, choice, started, spent))
        finally:
            if job.handover is not None:
                job.handover.leave()
        return stored

    def _state(self, job: Job) -> tuple[TrainingState, Movement | None]:
        """Return the snapshot with all roles, and how far training has moved since the one before."""
        state = job.snapshot.wait()
        if self._ranks is not None:
            state = self._ranks.coded(state)
        state = recognised(confirmed(state), job.optimizers)
        lasting = job.snapshot.lasting and not self._config.adopt
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
            self.note(state, job.step, lasting=True)
            give_back()
        return state, movement

    def _next_link(self) -> Link | None:
        """Return the chain to extend, if any. It is forgotten here: coding uses up the reference, so that only one is in memory."""
        link, self.link = self.link, None
        if link is None or self._ranks is not None or self._chain is None:
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
        return self.planner.plan(context, job.measure, job.resume, exact=job.way.exact, guard=asked)

    # ---- coding and storing

    def _encode(self, job: Job, state: TrainingState, choice: Choice, started: float, spent: float) -> _Coded:
        """Code what was chosen, of several ranks with what this one has for itself.

        Args:
            job: the save.
            state: as it was before it was quantized.
            choice: how it is stored.
            started: when this began.
            spent: seconds that evaluations had taken by then.
        """
        plan, link, staged, values = choice.plan, choice.link, choice.staged, choice.values
        own = OwnState() if self._ranks is None else self._ranks.own(job)
        if self._ranks is not None or staged is not None:
            started = time.perf_counter()
        encoded = encode_state(
            TrainingState(values.tree, {**values.tensors, **own.tensors}, {**values.specs, **own.specs}),
            Lossless(raw=True) if job.way.raw else plan.scheme,
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
        report = replace(
            report_of(plan, encoded, state),
            blocked_s=max(job.blocked_s, job.snapshot.stalled_s),
            metrics=dict(job.metrics),
            search_s=self._spent_s() - spent,
        )
        if job.handover is not None:
            overhead = self._spent_s() / max(time.perf_counter() - self._began, 1e-9)
            adopt_s, waited_s = job.handover.seconds, job.handover.waited_s
            report = replace(report, adopt_s=adopt_s, waited_s=waited_s, overhead=overhead)
        if choice.last is not None and staged is not None:
            # those that no container has as they were quantized
            exact = staged.rows.keys() & encoded.kept_exactly.keys()
            choice = replace(choice, last=replace(choice.last, stand_ins=frozenset(exact)))
        untried = plan.verdict.untried if plan.verdict is not None and job.optimizers else None
        return _Coded(choice, encoded, own, report, untried, started)

    def _meta(self, job: Job, choice: Choice) -> dict[str, JSON]:
        last = choice.last
        search = self.planner.state_dict() if last is None else dict(last.search)
        meta: dict[str, Any] = {"search": search}
        if last is not None:
            meta[ADOPTION] = last.to_json()
        if job.way.weights_only:
            meta[WEIGHTS_ONLY] = True
        return meta

    def _store_whole(self, job: Job, coded: _Coded) -> SaveReport:
        assert self._chain is not None
        choice, checkpoint = coded.choice, coded.encoded.checkpoint
        report = coded.report if coded.untried is None else with_untried(coded.report, coded.untried)
        container = write_container(checkpoint, uses_up=choice.staged is None)
        report = self._chain.commit(
            container,
            replace(report, bytes=len(container), encode_s=time.perf_counter() - coded.started),
            choice.link,
            self._meta(job, choice),
            state_digest=checkpoint.state_digest,
            advances=choice.advances,
            explained=choice.plan.is_explained,
        )
        reference, exact = dict(coded.encoded.reference), choice.plan.is_exact
        self._learn(job, choice, Link(checkpoint.state_digest, reference, job.number, exact=exact), report)
        return report

    def _store_part(self, ranks: Ranks, job: Job, coded: _Coded) -> tuple[Choice, StoredPart, dict[str, Any]]:
        last = coded.choice.last
        stored = store_part(
            self._store,
            coded.encoded,
            replace(coded.report, encode_s=time.perf_counter() - coded.started),
            PartOf(ranks.rank, ranks.size, coded.own.tree or None),
            session=ranks.session,
            tree=job.snapshot.state.tree if ranks.rank == 0 else None,
        )
        more = {"untried": coded.untried, "stand_ins": [] if last is None else sorted(last.stand_ins)}
        return coded.choice, stored, stored.message() | more

    def _commit_parts(
        self, chain: Chain, job: Job, choice: Choice | None, posts: list[dict[str, Any]]
    ) -> dict[str, Any]:
        """Commit the parts of all ranks, and return what the others are to know."""
        link, meta, advances = None, {}, True
        if choice is not None:
            link, meta, advances = choice.link, self._meta(job, choice), choice.advances
            if choice.last is not None:
                names = {name for post in posts for name in post.get("stand_ins", ())}
                meta[ADOPTION] = replace(choice.last, stand_ins=frozenset(names)).to_json()
        report = commit_parts(chain, posts, link, began=job.began, meta=meta, advances=advances)
        digest = "" if chain.parent is None else chain.parent.state_digest
        outcome: dict[str, Any] = {"digest": digest, "report": asdict(report)}
        if self._store.copies_near and chain.committed is not None:
            outcome["manifest"] = chain.committed.to_bytes().decode()
        return outcome

    def _learn(self, job: Job, choice: Choice, link: Link, report: SaveReport) -> None:
        """Note that the save is committed, and with it what a delta to it builds on."""
        if not job.snapshot.lasting:
            self.note(choice.values, job.step)
        self.link = link
