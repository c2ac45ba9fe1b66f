"""What a save is handed over with, its report, and the provenance in its container."""

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from shrinkpoint.coding.encode import EncodedState
from shrinkpoint.optimizers.updates import OptimizerKind
from shrinkpoint.quality.evaluation import Measure, ResumedSteps
from shrinkpoint.quality.guards import Guard
from shrinkpoint.quality.strategy import Plan
from shrinkpoint.reports import SaveReport, finite_or_none
from shrinkpoint.saving.takeover import Takeover
from shrinkpoint.schemes.base import ReferenceState
from shrinkpoint.schemes.exactness import exact_parts
from shrinkpoint.state.snapshot import Snapshot
from shrinkpoint.state.training import TensorSpec
from shrinkpoint.state.tree import JSON
from shrinkpoint.store.manifest import Anchor, Manifest
from shrinkpoint.version import __version__

__all__ = ["Job", "Link", "measured_of", "provenance", "report_of", "with_updates"]


@dataclass(frozen=True, kw_only=True)
class Job:
    """One save, as the training thread hands it over."""

    snapshot: Snapshot
    step: int
    metrics: Mapping[str, float]
    measure: Measure | None
    resume: ResumedSteps | None = None
    gradients: Mapping[str, torch.Tensor] | None
    optimizers: Sequence[OptimizerKind] = ()
    exact: bool
    weights_only: bool = False
    blocked_s: float
    takeover: Takeover | None = None
    """Of a planned save that training goes on from."""


@dataclass(frozen=True)
class Link:
    """What the next delta builds on."""

    parent: Manifest
    reference: dict[str, ReferenceState]
    restored: bool = False
    """Whether the training went on from a restore of it."""
    exact: bool = False
    """Whether nothing of it was quantized, so that its weights stand for themselves, as after a restore."""
    anchor: Anchor | None = None
    """Of the parent's chain, where that is built on instead of `parent`."""
    state_digest: str | None = None
    """Of the anchor."""


def with_updates(report: SaveReport, job: Job, plan: Plan, guard: Guard) -> SaveReport:
    """With what a restore does to the optimizer's next updates, or why that is not known."""
    if plan.is_exact:
        return report
    if guard.untried is not None and job.optimizers:
        untried = f"what a restore does to the next updates was not tried: {guard.untried}"
        report = replace(report, reason=f"{report.reason}; {untried}")
    if guard.updates is None:
        return report
    updates = guard.updates
    return replace(
        report,
        update_error=updates.error,
        update_length=updates.length,
        lost_steps=guard.lost_steps,
    )


def report_of(job: Job, plan: Plan, encoded: EncodedState, size: int = 0) -> SaveReport:
    """The report of a save before it is committed, in a container of `size` bytes; times but `blocked_s` are not known yet."""
    entries = encoded.checkpoint.entries
    return SaveReport(
        step=job.step,
        seq=-1,
        kind=encoded.checkpoint.kind,
        scheme=plan.scheme.name,
        configuration=plan.configuration,
        reason=plan.reason,
        bytes=size,
        raw_bytes=sum(entry.spec.nbytes for entry in entries),
        sections=_by_role([(entry.spec, entry.encoded.nbytes) for entry in entries]),
        raw_sections=_by_role([(entry.spec, entry.spec.nbytes) for entry in entries]),
        **measured_of(plan),
        blocked_s=max(job.blocked_s, job.snapshot.stalled_s),
        search_s=0.0,
        encode_s=0.0,
        write_s=0.0,
        metrics=job.metrics,
        kept_exactly={
            **{e.spec.name: e.spec.tag.why for e in entries if e.spec.tag.why is not None},
            **encoded.kept_exactly,
        },
        exact=exact_parts(((entry.spec, entry.encoded.nbytes) for entry in entries), encoded.exact),
    )


def measured_of(plan: Plan) -> dict[str, Any]:
    """What a report says of the measurements behind a plan."""
    return {
        "degradation": plan.degradation,
        "degradation_low": plan.degradation_low,
        "degradation_high": plan.degradation_high,
        "degradation_luck": plan.degradation_luck,
        "cost": finite_or_none(plan.whole.mean) if plan.whole is not None else None,
        "cost_high": finite_or_none(plan.whole.high) if plan.whole is not None else None,
        "cost_delay": finite_or_none(plan.whole.delay) if plan.whole is not None else None,
        "measured": plan.measured,
        "allowed": plan.allowed,
        "resumed": {str(steps): rise.mean for steps, rise in plan.resumed.items()},
        "resumed_high": {str(steps): rise.high for steps, rise in plan.resumed.items()},
        "baseline": plan.baseline,
        "overhead": plan.overhead,
        "evaluations": plan.evaluations,
    }


def _by_role(sizes: Sequence[tuple[TensorSpec, int]]) -> dict[str, int]:
    totals: dict[str, int] = {}
    for spec, size in sizes:
        totals[spec.tag.role.value] = totals.get(spec.tag.role.value, 0) + size
    return totals


def provenance() -> JSON:
    """What a container's header says of the software that wrote it."""
    return {
        "shrinkpoint": __version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }
