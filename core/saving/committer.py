"""Turns snapshots into committed checkpoints, each a base or a delta against an earlier one: the background half."""

import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from shrinkpoint.coding.encode import EncodedState, encode_state
from shrinkpoint.coding.selective import decode_batches, header_of, sources_of_run
from shrinkpoint.config import SaverConfig
from shrinkpoint.container.writer import write_container
from shrinkpoint.errors import (
    ChainError,
    FencedError,
    FormatError,
    ScratchError,
    ShrinkpointError,
    StoreError,
)
from shrinkpoint.optimizers.recognition import recognised
from shrinkpoint.optimizers.updates import moments_of_direction
from shrinkpoint.quality.guards import Guard
from shrinkpoint.quality.planner import Planner
from shrinkpoint.quality.strategy import Plan
from shrinkpoint.quantize.movement import Movement, MovementTracker, is_followed
from shrinkpoint.reports import SaveReport
from shrinkpoint.runtime.memory import give_back
from shrinkpoint.runtime.scratch import Scratch
from shrinkpoint.saving.finite import LOSS_ALONE, not_finite
from shrinkpoint.saving.meta import ANCHORS, WEIGHTS_ONLY, anchors_of, lineage_of
from shrinkpoint.saving.reporting import Job, Link, provenance
from shrinkpoint.saving.retention import policy_of, record_of
from shrinkpoint.saving.slimming import Slimmer
from shrinkpoint.schemes.base import ReferenceState, SaveContext
from shrinkpoint.schemes.exact import ExactCodec
from shrinkpoint.schemes.exactness import large_share
from shrinkpoint.state.averages import confirmed
from shrinkpoint.state.scratch import PlanesLostError, put_arrays, put_tensor
from shrinkpoint.state.snapshot import Snapshot
from shrinkpoint.state.training import Role, TrainingState
from shrinkpoint.state.tree import JSON
from shrinkpoint.store.keys import new_nonce
from shrinkpoint.store.manifest import Anchor, Manifest
from shrinkpoint.store.run import RunStore, RunWriter
from shrinkpoint.warn import warn

__all__ = ["Committer", "RunCommits"]

_OF_VALUES = (ExactCodec.id,)  # which leave the values alone as the reference of the next delta
_UNCHANGED = 0.25  # least share of a base's bytes that has not changed, for a later base to do without it
_ANCHORS = 4  # of a chain, its base among them


class RunCommits:
    """What commits to one run: its writer, the training that its checkpoints belong to, and the removal of older ones.

    Args:
        store: where to.
        config: how.
    """

    def __init__(self, store: RunStore, config: SaverConfig) -> None:
        self._store = store
        self._config = config
        self._writer: RunWriter | None = None
        self.lineage: str | None = None
        """The training that the next checkpoint belongs to, also when it is killed and resumed; None until the first one."""

    def open(self) -> RunWriter:
        """The run's writer; taking it makes this process the run's only one.

        Raises:
            StoreError: the store cannot be written, or holds something foreign.
        """
        if self._writer is None:
            self._writer = self._store.writer()
        return self._writer

    def close(self) -> None:
        """Let go of the store."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def follow(self, manifest: Manifest) -> None:
        """Belong to the training of this checkpoint, whatever is built on."""
        self.lineage = lineage_of(manifest.meta) or new_nonce()

    def _lineage_of_this(self) -> str:
        if self.lineage is None:
            others = self._store.manifests()
            if others:
                warn(
                    f"{self._store.display} holds {len(others)} checkpoints, the newest of step {others[0].step}, that this"
                    " training does not continue. They stay: retention leaves them alone (`shrinkpoint prune` removes them), and"
                    " a resume goes on from the newest one, which is this training's from now on. To go on from them, stop and"
                    " start with resume='must' (a Checkpointer's resume() must be called, on every rank); to keep the two apart,"
                    " give another URL"
                )
            self.lineage = new_nonce()
        return self.lineage

    def _collect(self) -> None:
        policy = policy_of(self._config)
        if policy is None:
            return
        try:
            # A training that this one does not continue is not its to judge, whatever was forgotten.
            seen = [m for m in self._store.manifests() if lineage_of(m.meta) == self.lineage]
            records = [record_of(manifest, self._config.monitor) for manifest in seen]
            self.open().collect(policy.select(records), seen=seen, grace_s=self._config.grace_s)
        except FencedError:
            raise
        # as where nothing may be deleted; the checkpoint is committed all the same
        except ShrinkpointError as error:
            warn(
                f"the checkpoint is stored, but older ones could not be removed: {error}. The next save tries again"
            )


class Committer(RunCommits):
    """Encodes, commits and collects, in this order; remembers the chain that it extends.

    Args:
        store: where to.
        config: how.
        spent_s: seconds that evaluations have taken from training so far.
    """

    def __init__(self, store: RunStore, config: SaverConfig, spent_s: Callable[[], float]) -> None:
        super().__init__(store, config)
        self._spent_s = spent_s
        self._link: Link | None = None
        self._restored = False  # whether the training was, since the chain's last anchor
        self._movement = MovementTracker()
        self._warned_of_loss = False
        self._warned_exact: set[str] = set()
        self._diverged = False
        self._scratch = SaveScratch.of(config)
        self._slimmer = (
            Slimmer(
                store,
                keep=config.keep_optimizer,
                span=_ANCHORS * config.key_every,
                grace_s=config.grace_s,
                threads=config.encoder_threads,
            )
            if config.keep_optimizer is not None
            else None
        )
        self.planner = Planner(config, spent_s)

    def open(self) -> RunWriter:
        """See `RunCommits.open`."""
        known, writer = self._writer, super().open()
        if known is None and self._scratch is not None:
            self._scratch.look()
        return writer

    @property
    def follows(self) -> bool:
        """Whether it is known where the weights were at the last checkpoint, or at the start."""
        return self._movement.knows

    def begin(self, state: TrainingState, step: int) -> None:
        """Count the weights' movement from here: where a training starts that restored nothing."""
        self._note(state, step)

    def _note(self, state: TrainingState, step: int, *, lasting: bool = False) -> None:
        if self._config.scheme == "lossless":  # which makes no noise to be compared with the movement
            return
        if self._scratch is not None:
            state, lasting = self._scratch.weights(state, lasting=lasting), True
        self._movement.note(state, step, lasting=lasting)

    def _moved(self, state: TrainingState, step: int) -> Movement | None:
        try:
            return self._movement.since(state, step)
        except ScratchError as error:
            self._movement.forget()
            warn(
                f"{error}. How far training has moved since the last checkpoint is not known at step {step}, which is stored like a"
                " first one"
            )
            return None

    def adopt(self, parent: Manifest, reference: Mapping[str, ReferenceState], state: TrainingState) -> None:
        """Continue the chain of a restored checkpoint, from the state that a reader has got of it."""
        self.follow(parent)
        move = self._keeper()
        moved = {name: known if move is None else move(known) for name, known in reference.items()}
        self._link, self._restored = Link(parent, moved, restored=True), True
        self._note(state, parent.step)

    def _keeper(self) -> Callable[[ReferenceState], ReferenceState] | None:
        return None if self._scratch is None else self._scratch.keeper()

    def forget(self) -> None:
        """Build on nothing: the next checkpoint is a base."""
        self._link = None

    def start_over(self) -> None:
        """Another training follows: build on nothing, count no movement from what was before, and collect none of it."""
        self.forget()
        self.lineage = None
        self._movement.forget()

    def commit(self, job: Job) -> SaveReport:
        """Store one snapshot; on return it is committed.

        Whatever is raised, nothing that was stored before is harmed, and the caller must `forget` the chain: the
        commit may have happened without our learning of it.
        """
        started, spent = time.perf_counter(), self._spent_s()
        state = recognised(confirmed(job.snapshot.wait()), job.optimizers)
        if job.snapshot.lasting and self._scratch is not None:
            state = self._scratch.moments(job.snapshot, state)
            give_back()
        movement = self._moved(state, job.step)
        if job.snapshot.lasting:
            # The weights of before are let go of now, when most memory is needed. If this save fails, the next one counts the
            # movement from here: it has less noise than it might have, never more.
            self._note(state, job.step, lasting=True)
            give_back()
        stored: SaveReport | None
        try:
            stored = self._store_with(job, state, self._take_link(), movement, started, spent)
        except (ChainError, PlanesLostError) as error:  # a base needs neither a parent nor planes
            stored = None
            self._warn_lost(error, job.step)
        if stored is None:  # not above, where the error keeps what the first attempt has coded
            stored = self._store_with(job, state, None, movement, started, spent)
        if not job.snapshot.lasting:
            self._note(state, job.step)
        self._warn_diverged(stored)
        self._collect()
        self._slim()
        return stored

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

    def _warn_diverged(self, report: SaveReport) -> None:
        """Once, until a checkpoint is finite again."""
        found = report.not_finite
        # of a loss alone, the planner has warned
        warned, self._diverged = self._diverged, found is not None and not found.startswith(LOSS_ALONE)
        if self._diverged and not warned:
            warn(
                f"the checkpoint of step {report.step} is not finite: {report.not_finite}. Has the training diverged? The newest"
                " finite checkpoints are kept in addition to those that follow, and `shrinkpoint ls` marks these"
            )

    def _warn_exact(self, report: SaveReport) -> None:
        """Once for each way in which a substantial share of a lossy scheme's bytes is exact, and need not be."""
        share = large_share(report.exact, report.bytes, f"step {report.step}'s checkpoint")
        if share is not None and share[0] not in self._warned_exact:
            self._warned_exact.add(share[0])
            warn(f"{share[1]}. This warning comes once")

    def _store_with(
        self,
        job: Job,
        state: TrainingState,
        link: Link | None,
        movement: Movement | None,
        started: float,
        spent: float,
    ) -> SaveReport:
        plan, guard = self._plan(job, state, link, movement)
        if job.snapshot.lasting:
            give_back()  # what candidates took, before coding takes its own
        encoded = self._encode(job, state, link, plan)
        report = job.report(plan, encoded, guard=guard)
        container = write_container(encoded.checkpoint, uses_up=True)
        encoded_at = time.perf_counter()
        report = replace(
            report,
            bytes=len(container),
            not_finite=not_finite(state, baseline=plan.baseline),
            search_s=self._spent_s() - spent,
            encode_s=encoded_at - started,
        )
        noted: dict[str, JSON] = {"search": self.planner.state_dict()}
        if job.weights_only:
            noted[WEIGHTS_ONLY] = True
        if self._config.monitor is not None:
            noted["monitor"] = [self._config.monitor, self._config.mode]
        parent, anchor = (link.parent, link.anchor) if link else (None, None)
        manifest = self._commit(job, parent, encoded, container, report, noted, anchor)
        self._link = Link(manifest, dict(encoded.reference), exact=plan.is_exact)
        self._restored = self._restored and link is not None and anchor is None
        if not plan.is_explained:
            self._warn_exact(report)
        return self._stored(report, manifest, container, encoded_at)

    def _stored(
        self, report: SaveReport, manifest: Manifest, container: bytes, encoded_at: float
    ) -> SaveReport:
        """The report of a save that has just been committed; copies it to this node."""
        written_s = time.perf_counter() - encoded_at
        self._store.copy_near(manifest, container)
        return replace(
            report,
            seq=manifest.seq,
            write_s=written_s,
            redundancy=self._store.redundancy,
            parity=self._store.parity,
        )

    def _plan(
        self, job: Job, state: TrainingState, link: Link | None, movement: Movement | None
    ) -> tuple[Plan, Guard]:
        """What to store the snapshot with; and the guard, which has seen the next updates of what was chosen."""
        save_context = SaveContext(
            restore_budget=self._config.restore_budget,
            state=state,
            step=job.step,
            reference=link.reference if link else None,
            is_anchor=link is None or link.anchor is not None,
            restored=link is not None and (link.restored or link.exact),
            movement=movement,
            directions=moments_of_direction(state, job.optimizers),
            gradients=job.gradients,
        )
        guard = Guard(job.optimizers, self._config.encoder_threads)
        self.planner.guard = guard if self._config.guards else None
        return self.planner.plan(save_context, job.measure, job.resume, exact=job.exact), guard

    def _encode(self, job: Job, state: TrainingState, link: Link | None, plan: Plan) -> EncodedState:
        return encode_state(
            state,
            plan.scheme,
            step=job.step,
            reference=link.reference if link else None,
            parent=(link.state_digest or link.parent.state_digest) if link else None,
            release=link.reference.pop if link else None,
            keep=self._keeper(),
            provenance=provenance(),
            threads=self._config.encoder_threads,
            lasting=job.snapshot.lasting,
            exactly=plan.reason if plan.is_exact and self._config.scheme != "lossless" else None,
        )

    def _commit(
        self,
        job: Job,
        parent: Manifest | None,
        encoded: EncodedState,
        container: bytes,
        report: SaveReport,
        meta: Mapping[str, JSON],
        anchor: Anchor | None = None,
    ) -> Manifest:
        anchors: list[JSON] = []
        if parent is not None:
            anchors += anchors_of(parent)
        if anchor is not None:
            anchors[anchor.containers :] = [None]
        return self.open().commit(
            container,
            step=job.step,
            kind=encoded.checkpoint.kind,
            parent=parent,
            anchor=anchor,
            state_digest=encoded.checkpoint.state_digest,
            meta={"save": report.to_json(), "lineage": self._lineage_of_this(), ANCHORS: anchors, **meta},
        )

    def _take_link(self) -> Link | None:
        """The chain to extend, if any. It is forgotten here: coding uses up the reference, so that only one is in memory.

        Every so many checkpoints one builds on the last anchor instead, and is the next one, so that a restore reads few of those
        in between.
        """
        link, self._link = self._link, None
        if link is None or self._config.key_every == 1:
            return None
        anchors = anchors_of(link.parent)
        if len(link.parent.chain) - len(anchors) + 1 < self._config.key_every:
            return link
        if not anchors:
            return None
        last = Anchor(len(anchors), anchors[-1])
        try:
            return self._on_anchor(link, last) if len(anchors) < _ANCHORS else self._on_base(link, anchors[0])
        except FormatError as error:
            raise ChainError(str(error)) from error
        except StoreError as error:  # whether it can be written is seen next
            warn(f"{error}. The checkpoint is stored as a base, which takes more bytes")
            return None

    def _on_anchor(self, link: Link, anchor: Anchor) -> Link:
        """A link to an anchor, which is read from the run."""
        names = {name for name, known in link.reference.items() if known.sizes}
        link.reference.clear()
        move = self._keeper() or (lambda known: known)
        header, _, batches = decode_batches(
            sources_of_run(self._store, link.parent)[: anchor.containers],
            lambda header: names & header.tensors.keys(),
            threads=self._config.encoder_threads,
            lasting=True,
        )
        reference = {entry.spec.name: move(known) for rows in batches for entry, known, _ in rows}
        return Link(
            link.parent, reference, restored=self._restored, anchor=anchor, state_digest=header.state_digest
        )

    def _on_base(self, link: Link, digest: str) -> Link | None:
        """A link to the chain's base, where much of that has not changed since, as frozen weights: a later base does without it."""
        base, last = (header_of(self._store, link.parent.chain[at]) for at in (0, -1))
        same = {
            name
            for name, record in base.tensors.items()
            if record.codec in _OF_VALUES
            and name in link.reference
            and (other := last.tensors.get(name)) is not None
            and (other.digest, other.codec) == (record.digest, record.codec)
        }
        if sum(base.tensors[name].nbytes for name in same) < _UNCHANGED * link.parent.chain[0].size:
            return None
        self._store.fetch_blob(link.parent.chain[0], link.parent)  # of which nothing else would find damage
        reference = {name: link.reference[name] for name in same}
        return Link(link.parent, reference, anchor=Anchor(1, digest), state_digest=base.state_digest)

    def _slim(self) -> None:
        """Turn older checkpoints into weights, where `keep_optimizer` says so."""
        if self._slimmer is None:
            return
        try:
            self._slimmer.run(self.open(), self.lineage)
        except FencedError:
            raise
        except ShrinkpointError as error:  # the checkpoint is committed, and older ones are as they were
            warn(
                f"the checkpoint is stored, but older ones keep their optimizer state: {error}. The next save tries again"
            )


_MOMENTS = (Role.EXP_AVG, Role.EXP_AVG_SQ, Role.SQUARES, Role.STATE)


class SaveScratch:
    """Puts parts of one save after another into a folder, each into a file of its own, which is gone when the part is.

    What cannot be written stays in memory, after a warning.

    Args:
        scratch: makes the files.
    """

    def __init__(self, scratch: Scratch) -> None:
        self._scratch = scratch

    @staticmethod
    def of(config: SaverConfig) -> "SaveScratch | None":
        """As it is configured; None where all stays in memory."""
        return None if config.scratch_folder is None else SaveScratch(Scratch(config.scratch_folder))

    def look(self) -> None:
        """Warn where the folder is in memory itself; before training starts."""
        self._scratch.look()

    def weights(self, state: TrainingState, *, lasting: bool) -> TrainingState:
        """The weights of a snapshot whose movement is followed, to be compared with the next one's.

        Args:
            state: the snapshot, or its weights, on the host; it stays as it is.
            lasting: whether nobody will write to it any more, so that what stays in memory is not copied.
        """
        file = self._scratch.file()
        specs = {name: spec for name, spec in state.specs.items() if is_followed(spec)}
        tensors = {}
        for name in specs:
            tensor = state.tensors[name].detach()
            kept = put_tensor(file, tensor)
            tensors[name] = kept if kept is not tensor or lasting else tensor.to("cpu", copy=True)
        return TrainingState(None, tensors, specs)

    def moments(self, snapshot: Snapshot, state: TrainingState) -> TrainingState:
        """A snapshot without its moments in memory: whoever wants one reads it.

        Args:
            snapshot: lets go of them.
            state: of the snapshot, with the roles that are known by now.
        """
        file = self._scratch.file()
        tensors = dict(state.tensors)
        for name, spec in state.specs.items():
            if spec.tag.role in _MOMENTS:
                tensors[name] = put_tensor(file, tensors[name])
                snapshot.hold(name, tensors[name])
        return TrainingState(state.tree, tensors, state.specs)

    def keeper(self) -> Callable[[ReferenceState], ReferenceState]:
        """What puts the planes of one checkpoint away, tensor by tensor, from any thread."""
        file = self._scratch.file()
        return lambda reference: reference.moved(lambda arrays: put_arrays(file, arrays))
