"""The background half of one rank: codes the tensors that it owns, and stores them as its part of the checkpoint."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from shrinkpoint.coding.encode import EncodedState, encode_state
from shrinkpoint.coding.staging import StagedState
from shrinkpoint.config import SaverConfig
from shrinkpoint.container.layout import PartOf
from shrinkpoint.container.writer import write_container
from shrinkpoint.quality.strategy import Plan
from shrinkpoint.saving.finite import not_finite
from shrinkpoint.saving.reporting import measured_of, provenance
from shrinkpoint.schemes.base import ReferenceState
from shrinkpoint.schemes.exactness import exact_parts
from shrinkpoint.sharded.own import OwnState
from shrinkpoint.state.snapshot import DeviceCopy
from shrinkpoint.state.training import TrainingState
from shrinkpoint.state.tree import JSON
from shrinkpoint.store.keys import data_key
from shrinkpoint.store.manifest import BlobRef
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
    report: dict[str, Any]
    """What the first rank's report is made of, as JSON."""


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
    seconds = {"encode_s": encoded_at - started, "write_s": time.perf_counter() - encoded_at}
    part = Part(ref=ref, state_digest=checkpoint.state_digest)
    report = _report(encoded, state, ref, plan) | seconds | {"redundancy": store.redundancy}
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


def _report(encoded: EncodedState, state: TrainingState, ref: BlobRef, plan: Plan) -> dict[str, Any]:
    entries = encoded.checkpoint.entries
    coded: dict[str, int] = {}
    raw: dict[str, int] = {}
    for entry in entries:
        role = entry.spec.tag.role.value
        coded[role] = coded.get(role, 0) + entry.encoded.nbytes
        raw[role] = raw.get(role, 0) + entry.spec.nbytes
    exact: list[JSON] = [
        [part.role, part.code, part.tensors, part.bytes, part.raw_bytes]
        for part in exact_parts(((entry.spec, entry.encoded.nbytes) for entry in entries), encoded.exact)
    ]
    return {
        "kind": encoded.checkpoint.kind,
        "bytes": ref.size,
        "raw_bytes": sum(entry.spec.nbytes for entry in entries),
        "sections": coded,
        "raw_sections": raw,
        "kept_exactly": dict(encoded.kept_exactly),
        "exact": exact,
        "not_finite": not_finite(state, baseline=plan.baseline),
        "scheme": plan.scheme.name,
        "configuration": plan.configuration,
        "reason": plan.reason,
        "is_exact": plan.is_exact,
        "is_explained": plan.is_explained,
        "measured": measured_of(plan) if plan.baseline is not None else None,
    }
