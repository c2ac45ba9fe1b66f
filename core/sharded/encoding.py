"""The background half of one rank: codes the tensors that it owns, and stores them as its part of the checkpoint."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from shrinkpoint.coding.encode import EncodedState, encode_state
from shrinkpoint.coding.staging import StagedState
from shrinkpoint.config import SaverConfig
from shrinkpoint.container.layout import PartOf
from shrinkpoint.container.writer import write_container
from shrinkpoint.quality.strategy import Plan
from shrinkpoint.reports import SaveReport
from shrinkpoint.saving.finite import not_finite
from shrinkpoint.saving.reporting import provenance, report_of
from shrinkpoint.schemes.base import ReferenceState
from shrinkpoint.sharded.own import OwnState
from shrinkpoint.state.snapshot import DeviceCopy
from shrinkpoint.state.training import TrainingState
from shrinkpoint.state.tree import JSON
from shrinkpoint.store.keys import data_key
from shrinkpoint.store.parts import Part
from shrinkpoint.store.run import RunStore

__all__ = ["Link", "PartJob", "StoredPart", "store_part"]


@dataclass(frozen=True)
class Link:
    """What a rank's next delta builds on."""

    number: int
    """Of the save, by which the ranks make sure that they all have the same; 0 is a restore."""
    digest: str
    """State digest of the whole checkpoint."""
    reference: dict[str, ReferenceState]
    restored: bool = False


@dataclass(frozen=True, kw_only=True)
class PartJob:
    """One save of one rank, as the training thread hands it over."""

    number: int
    step: int
    rank: int
    world: int
    session: str
    state: TrainingState
    """The tensors that this rank owns, on the host, and the plain data, which only the first rank stores."""
    copy: DeviceCopy | None = None
    """Of tensors of a GPU: to be waited for before `state` is read, which the next save overwrites."""
    own: OwnState
    link: Link | None
    exact: bool


@dataclass(frozen=True)
class StoredPart:
    """A part that is stored, and not committed yet."""

    part: Part
    reference: dict[str, ReferenceState]
    report: SaveReport
    """Of this part alone."""
    untried: str | None = None
    """Why it is not known what a restore does to the next updates of this rank's parameters."""
    stand_ins: Sequence[str] = ()
    """Tensors that no container has as they were quantized, where the training adopts."""

    def message(self) -> dict[str, Any]:
        """Give the message to the first rank, in JSON primitives."""
        return {
            "ref": self.part.ref.to_json(),
            "state_digest": self.part.state_digest,
            "report": asdict(self.report),
            "untried": self.untried,
            "stand_ins": list(self.stand_ins),
        }


def store_part(
    store: RunStore,
    config: SaverConfig,
    job: PartJob,
    plan: Plan,
    known: Mapping[str, Any],
    *,
    staged: StagedState | None = None,
    table: JSON = None,
    tree: JSON = None,
) -> StoredPart:
    """Code a rank's tensors and put them into the run.

    Args:
        store: the run.
        config: how to save.
        job: the save.
        plan: the scheme.
        known: `OwnState.digests` of the first rank, empty there and where they did not arrive.
        staged: the tensors that are quantized already; the job's state then has their restored values.
        table: plain data that takes the place of the rank's own (`shrinkpoint.dcp`).
        tree: the plain data by which the rank's tensors are coded, such as its optimizers' settings; None takes the job's.

    Raises:
        ShrinkpointError: the state cannot be coded, or not be stored.
    """
    started = time.perf_counter()
    own = job.own.without(known) if job.rank else OwnState()
    state = TrainingState(
        job.state.tree if tree is None else tree,
        {**job.state.tensors, **own.tensors},
        {**job.state.specs, **own.specs},
    )
    encoded = _encode(config, job, state, plan, staged)
    checkpoint = replace(
        encoded.checkpoint,
        tree=job.state.tree if job.rank == 0 else None,
        part=PartOf(job.rank, job.world, own.tree or table),
    )
    container = write_container(checkpoint)
    encoded_at = time.perf_counter()
    ref = store.put_part(data_key(job.step, job.session), container)
    part = Part(ref=ref, state_digest=checkpoint.state_digest)
    report = replace(
        report_of(plan, encoded, step=job.step, size=ref.size),
        not_finite=not_finite(state, baseline=plan.baseline),
        redundancy=store.redundancy,
        encode_s=encoded_at - started,
        write_s=time.perf_counter() - encoded_at,
    )
    return StoredPart(part, dict(encoded.reference), report)


def _encode(
    config: SaverConfig, job: PartJob, state: TrainingState, plan: Plan, staged: StagedState | None
) -> EncodedState:
    link = job.link
    return encode_state(
        state,
        plan.scheme,
        step=job.step,
        reference=link.reference if link else None,
        parent=link.digest if link else None,
        release=link.reference.pop if link else None,
        provenance=provenance(),
        threads=config.encoder_threads,
        exactly=plan.reason if plan.is_exact and config.scheme != "lossless" else None,
        lasting=job.copy is None,
        staged=staged,
    )
