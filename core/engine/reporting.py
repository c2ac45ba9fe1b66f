"""What a save's report says, also of several ranks and of what is not finite, and the provenance in its container."""

import math
import platform
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

import torch

from shrinkpoint.coding.encode import EncodedState
from shrinkpoint.quality.plan import Plan
from shrinkpoint.reports import SaveReport, finite_or_none
from shrinkpoint.schemes.exactness import added_parts, exact_parts
from shrinkpoint.state.dtypes import PACKED
from shrinkpoint.state.training import Role, TensorSpec, TrainingState
from shrinkpoint.state.tree import JSON
from shrinkpoint.version import __version__

LOSS_ALONE = "the held-out loss"
"""What begins the words where all tensors are finite and their loss is not."""
_NAMED = 3
_LONGEST = 100
_OPTIMIZED = (Role.MASTER, Role.EXP_AVG, Role.EXP_AVG_SQ, Role.SQUARES)
_TRAINED = (Role.WEIGHT, *_OPTIMIZED)


def not_finite(state: TrainingState, *, baseline: float | None = None) -> str | None:
    """Say what of a checkpoint is not finite.

    Weights and moments may hold neither NaN nor infinity. Buffers, parameters that no optimizer trains and the rest of an optimizer's state may hold infinity, as
    the masks of attention do; what belongs to no parameter (a callback's best score) counts only where no role is known.

    Args:
        state: on the host.
        baseline: the held-out loss of its weights, if it was measured.

    Returns:
        A few words that name it; None where all is finite.
    """
    no_roles = all(spec.tag.role is Role.OTHER for spec in state.specs.values())
    optimized = {spec.tag.parameter for spec in state.specs.values() if spec.tag.role in _OPTIMIZED}
    names = [
        name
        for name, spec in state.specs.items()
        if _is_bad(state.tensors[name], _effective(spec, optimized), no_roles)
    ]
    parts = [_named(names)] if names else []
    if baseline is not None and not math.isfinite(baseline):
        parts.append(f"{LOSS_ALONE} is {baseline:g}")
    return "; ".join(parts) or None


def _effective(spec: TensorSpec, optimized: Collection[str | None]) -> TensorSpec:
    """A parameter that no optimizer trains, while others are trained, may hold what a buffer may: a mask, say."""
    if spec.tag.role is Role.WEIGHT and optimized and spec.tag.parameter not in optimized:
        return replace(spec, tag=replace(spec.tag, role=Role.BUFFER))
    return spec


def _is_bad(tensor: torch.Tensor, spec: TensorSpec, no_roles: bool) -> bool:
    numbers = spec.dtype.is_floating_point or spec.dtype.is_complex
    if not numbers or spec.dtype in PACKED or not tensor.numel():
        return False
    if spec.tag.role in _TRAINED:
        return not all(math.isfinite(value) for value in _extremes(tensor))
    belongs = spec.tag.role is Role.BUFFER or spec.tag.parameter is not None
    return (belongs or no_roles) and any(math.isnan(value) for value in _extremes(tensor))


def _extremes(tensor: torch.Tensor) -> tuple[float, float]:
    """Least and greatest element, both NaN where one of all is; in one pass, and without memory for it."""
    tensor = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    if tensor.dtype.itemsize == 1:  # torch compares no 8-bit floats
        tensor = tensor.float()
    least, greatest = torch.aminmax(tensor)
    return float(least), float(greatest)


def _named(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more tensors" if len(names) > _NAMED else ""
    shown = (name if len(name) <= _LONGEST else f"{name[:_LONGEST]}..." for name in names[:_NAMED])
    return f"NaN or infinity in {', '.join(shown)}{more}"


def with_untried(report: SaveReport, why: str, where: str = "") -> SaveReport:
    """With why it is not known what a restore does to the next updates.

    Args:
        report: of the save.
        why: the reason.
        where: on which ranks, as in " on rank 1"; empty for a process alone.
    """
    reason = f"{report.reason}; what a restore does to the next updates was not tried{where}: {why}"
    return replace(report, reason=reason)


def report_of(plan: Plan, encoded: EncodedState, state: TrainingState) -> SaveReport:
    """Return the report of a save, or of a rank's part of one, before it is committed; times and bytes are not known yet.

    Args:
        plan: by which it was encoded.
        encoded: the checkpoint.
        state: as it was before it was quantized.
    """
    entries, rise, whole, verdict = encoded.checkpoint.entries, plan.rise, plan.whole, plan.verdict
    updates = None if verdict is None else verdict.updates
    return SaveReport(
        step=encoded.checkpoint.step,
        seq=-1,
        kind=encoded.checkpoint.kind,
        scheme=plan.scheme.name,
        configuration=plan.configuration,
        reason=plan.reason,
        bytes=0,
        raw_bytes=sum(entry.spec.nbytes for entry in entries),
        sections=by_role([(entry.spec, entry.encoded.nbytes) for entry in entries]),
        raw_sections=by_role([(entry.spec, entry.spec.nbytes) for entry in entries]),
        degradation=None if rise is None else rise.mean,
        degradation_low=None if rise is None else rise.low,
        degradation_high=None if rise is None else rise.high,
        degradation_noise=None if rise is None else rise.first_order,
        cost=None if whole is None else finite_or_none(whole.mean),
        cost_high=None if whole is None else finite_or_none(whole.high),
        cost_delay=None if whole is None else finite_or_none(whole.delay),
        update_error=None if updates is None else updates.error,
        update_length=None if updates is None else updates.length,
        lost_steps=None if updates is None or verdict is None else verdict.lost_steps,
        measured=plan.measured,
        allowed=plan.allowed,
        resumed={str(steps): rise.mean for steps, rise in plan.resumed.items()},
        resumed_high={str(steps): rise.high for steps, rise in plan.resumed.items()},
        baseline=plan.baseline,
        not_finite=not_finite(state, baseline=plan.baseline),
        overhead=plan.overhead,
        evaluations=plan.evaluations,
        blocked_s=0.0,
        search_s=0.0,
        encode_s=0.0,
        write_s=0.0,
        metrics={},
        kept_exactly={
            **{e.spec.name: e.spec.tag.why for e in entries if e.spec.tag.why is not None},
            **encoded.kept_exactly,
        },
        exact=exact_parts(((entry.spec, entry.encoded.nbytes) for entry in entries), encoded.exact),
    )


def by_role(sizes: Iterable[tuple[TensorSpec, int]]) -> dict[str, int]:
    """Add up bytes of tensors by their roles."""
    totals: dict[str, int] = {}
    for spec, size in sizes:
        totals[spec.tag.role.value] = totals.get(spec.tag.role.value, 0) + size
    return totals


def merged(parts: Sequence[SaveReport], untried: Sequence[str | None]) -> SaveReport:
    """Return the report of a save of several ranks: settings of the first one that is not exact, sums of bytes, the most of times and errors, and the times that the first rank waited.

    Args:
        parts: of each rank.
        untried: of each rank, why it is not known what a restore does to its next updates; None where it is.
    """
    chosen = next((part for part in parts if part.measured != "exact"), parts[0])
    bad = [f"rank {rank}: {part.not_finite}" for rank, part in enumerate(parts) if part.not_finite]
    report = replace(
        chosen,
        kind=parts[0].kind,
        metrics=parts[0].metrics,
        blocked_s=parts[0].blocked_s,
        search_s=parts[0].search_s,
        adopt_s=parts[0].adopt_s,
        waited_s=parts[0].waited_s,
        bytes=sum(part.bytes for part in parts),
        raw_bytes=sum(part.raw_bytes for part in parts),
        sections=_added([part.sections for part in parts]),
        raw_sections=_added([part.raw_sections for part in parts]),
        encode_s=max(part.encode_s for part in parts),
        write_s=max(part.write_s for part in parts),
        not_finite="; ".join(bad) or None,
        kept_exactly={name: why for part in parts for name, why in part.kept_exactly.items()},
        exact=added_parts(row for part in parts for row in part.exact),
    )
    tried = [part for part in parts if part.update_error is not None]
    if tried:
        most = max(tried, key=lambda part: part.update_error or 0.0)
        lost_steps = max(part.lost_steps or 0.0 for part in tried)
        report = replace(
            report, update_error=most.update_error, update_length=most.update_length, lost_steps=lost_steps
        )
    ranks = [rank for rank, why in enumerate(untried) if why is not None]
    if not ranks:
        return report
    where = " on all ranks" if len(ranks) == len(parts) else f" on rank {', '.join(map(str, ranks))}"
    return with_untried(report, untried[ranks[0]] or "", where)


def _added(sizes: Sequence[Mapping[str, int]]) -> dict[str, int]:
    totals: Counter[str] = Counter()
    for own in sizes:
        totals.update(own)
    return dict(totals)


def provenance() -> JSON:
    """Return what a container's header says of the software that wrote it."""
    return {
        "shrinkpoint": __version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }
