"""Tries the schemes on a sample of a checkpoint's largest tensors; writes nothing.

The sample is systematic: points at equal distances in the state's bytes, and of every parameter that has some, as many rows of it and of its
moments as it has points. Each parameter then counts by its points, and the spread over parameters gives the interval.
"""

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from shrinkpoint.coding.encode import encode_state, stage_state
from shrinkpoint.coding.grouping import groups_of
from shrinkpoint.container.writer import write_container
from shrinkpoint.engine.movement import MovementTracker
from shrinkpoint.errors import StateMismatchError
from shrinkpoint.schemes.base import ReferenceState, SaveContext
from shrinkpoint.schemes.catalogue import SCHEMES, AutoOptions, build
from shrinkpoint.schemes.reasons import why_left
from shrinkpoint.state.training import Role, TensorSpec, TrainingState

ROWS: Mapping[str, tuple[str, Any]] = {
    "auto, mild": ("auto", AutoOptions(weight_scale=1 / 16)),
    "auto, usual": ("auto", AutoOptions(weight_scale=1 / 2)),
    **{name: (name, None) for name in SCHEMES if name != "auto"},
}
"""What is tried: a scheme, and its options. The first is what `auto` takes where no loss is measured, the second what it begins with where one is."""

_POINTS = 24
_MOMENTS = (Role.EXP_AVG, Role.EXP_AVG_SQ, Role.SQUARES)
_CODED = (Role.WEIGHT, Role.MASTER, Role.AVERAGE, *_MOMENTS)
_DRAWS = 1000


@dataclass(frozen=True)
class Part:
    """How a parameter is sampled."""

    names: tuple[str, ...]
    """Its tensors: the weight and its moments."""
    points: int
    """By which it counts; 0 where all is coded."""
    rows: slice
    """Of those tensors that have as many rows as the first."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """Describe what a row of `ROWS` made of the sample."""

    base: tuple[float, float, float]
    """Size relative to the state, with the ends of its interval."""
    delta: tuple[float, float, float] | None
    weights: float | None
    """Root mean square of the relative errors of tensors, by elements; None where there are none."""
    moments: float | None
    cpu_s_per_gb: float
    kept: float
    """Bytes that stay in host memory for the next delta, relative to the state."""


def sampled(state: TrainingState, limit: int, later: TrainingState | None = None) -> list[Part]:
    """Return the sample: all of the state where it has at most `limit` bytes.

    Args:
        state: a checkpoint's.
        limit: of bytes, about.
        later: what has the tensors, too.

    Raises:
        StateMismatchError: it is of another model, or there are no tensors.
    """
    there = (later or state).specs
    specs = [spec for name, spec in state.specs.items() if there.get(name) == spec]
    if later is not None and not any(spec.tag.role in _CODED for spec in specs):
        raise StateMismatchError(
            "the two have no weights of the same names and shapes: give two checkpoints of one training"
        )
    if not specs:
        raise StateMismatchError("there are no tensors in it, and nothing to try")
    groups = groups_of(specs)
    names = [tuple(spec.name for spec in group) for group in groups]
    if state.nbytes <= limit:
        return [Part(each, 0, slice(None)) for each in names]
    sizes = np.array([sum(spec.nbytes for spec in group) for group in groups])
    middles = (np.arange(_POINTS) + 0.5) * sizes.sum() / _POINTS
    points = Counter(np.searchsorted(sizes.cumsum(), middles).tolist())
    parts = []
    for at, count in points.items():
        rows = (groups[at][0].shape or (1,))[0]
        taken = max(1, min(rows, round(rows * count * limit / _POINTS / float(sizes[at]))))
        parts.append(Part(names[at], count, slice((rows - taken) // 2, (rows + taken) // 2)))
    return parts


def _taken(state: TrainingState, parts: Sequence[Part]) -> TrainingState:
    tensors: dict[str, torch.Tensor] = {}
    for part in parts:
        rows = state.specs[part.names[0]].shape[:1]
        for name in part.names:
            whole = state.tensors[name]
            tensors[name] = (whole[part.rows] if rows and whole.shape[:1] == rows else whole).contiguous()
    specs = {name: replace(state.specs[name], shape=tuple(tensor.shape)) for name, tensor in tensors.items()}
    return TrainingState(state.tree, tensors, specs)


def tried(
    row: str, parts: Sequence[Part], state: TrainingState, step: int, later: tuple[TrainingState, int] | None
) -> Result:
    """Code the sample: as a base; and with a later state as a delta, of which the errors are then.

    Args:
        row: of `ROWS`.
        parts: the sample.
        state: a checkpoint's.
        step: its.
        later: another one of the same training, and its step.
    """
    one = _taken(state, parts)
    known = MovementTracker()
    known.note(one, step, lasting=True)
    last = base = _Coded.of(row, one, SaveContext(state=one, step=step))
    if later is not None:
        two = _taken(later[0], parts)
        alone = SaveContext(state=two, step=later[1], movement=known.since(two, later[1]))
        last = _Coded.of(row, two, replace(alone, reference=base.reference))
        base = _Coded.of(row, two, alone)
    return Result(
        base=base.size(parts),
        delta=None if later is None else last.size(parts),
        weights=last.error((Role.WEIGHT, Role.MASTER)),
        moments=last.error(_MOMENTS),
        cpu_s_per_gb=1e9 * last.cpu_s / one.nbytes,
        kept=sum(each.nbytes for each in last.reference.values()) / one.nbytes,
    )


@dataclass(frozen=True)
class _Coded:
    """A sample as a scheme stores it."""

    state: TrainingState
    restored: TrainingState
    sizes: Mapping[str, int]
    more: int
    """Bytes of the container that are not the tensors' own."""
    reference: Mapping[str, ReferenceState]
    cpu_s: float

    @classmethod
    def of(cls, row: str, state: TrainingState, context: SaveContext) -> "_Coded":
        scheme, reference = build(*ROWS[row], context), context.reference
        began = time.process_time()
        staged = stage_state(state, scheme, reference)
        encoded = encode_state(
            staged.state,
            scheme,
            step=context.step,
            reference=reference,
            parent=None if reference is None else "0" * 32,
            staged=staged,
        )
        seconds = time.process_time() - began
        sizes = {entry.spec.name: entry.encoded.nbytes for entry in encoded.checkpoint.entries}
        more = len(write_container(encoded.checkpoint)) - sum(sizes.values())
        return cls(state, staged.state, sizes, more, encoded.reference, seconds)

    def size(self, parts: Sequence[Part]) -> tuple[float, float, float]:
        """Return the size relative to the state, and its interval over parameters (bootstrap, 95 %)."""
        coded = np.array([sum(self.sizes[name] for name in part.names) for part in parts])
        raw = np.array([sum(self.state.specs[name].nbytes for name in part.names) for part in parts])
        if not parts[0].points:
            return ((coded.sum() + self.more) / raw.sum(),) * 3
        weights, ratios = np.array([part.points for part in parts]), coded / np.maximum(raw, 1)
        drawn = np.random.default_rng(0).integers(len(parts), size=(_DRAWS, len(parts)))
        means = (weights * ratios)[drawn].sum(axis=1) / weights[drawn].sum(axis=1)
        low, high = np.quantile(means, (0.025, 0.975))
        return float((weights * ratios).sum() / weights.sum()), float(low), float(high)

    def error(self, roles: Sequence[Role]) -> float | None:
        total, elements = 0.0, 0
        for name, spec in self.state.specs.items():
            if spec.tag.role not in roles:
                continue
            true, found = (each.tensors[name].double() for each in (self.state, self.restored))
            size = float(true.square().sum())
            if size > 0 and math.isfinite(size):
                total += spec.numel * float((found - true).square().sum()) / size
                elements += spec.numel
        return math.sqrt(total / elements) if elements else None


def left_exact(state: TrainingState) -> dict[str, list[TensorSpec]]:
    """Return the tensors that `auto` stores exactly whatever their values, by the reason's code."""
    options, found = AutoOptions(), dict[str, list[TensorSpec]]()
    for spec in state.specs.values():
        coded = spec.tag.role in _CODED and spec.dtype.is_floating_point
        if not coded or spec.numel < options.min_elements:
            found.setdefault(why_left(spec, options), []).append(spec)
    return found
