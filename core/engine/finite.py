"""What of a training state is no number any more: NaN or infinity, from which no training recovers by itself."""

import math
from collections.abc import Collection, Sequence
from dataclasses import replace

import torch

from shrinkpoint.state.dtypes import PACKED
from shrinkpoint.state.training import Role, TensorSpec, TrainingState

__all__ = ["LOSS_ALONE", "not_finite"]

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
