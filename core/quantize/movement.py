"""The root-mean-square movement of weights since the previous checkpoint, to which the noise of a restore is compared.

A measured loss depends on its batches. Independently of them, training recovers from noise that is smaller than its own
movement between two checkpoints about as fast as it moves, and such noise changes no weight that training does not
change.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

from shrinkpoint.arrays import Float64s, widened
from shrinkpoint.state.dtypes import TRAINED
from shrinkpoint.state.training import Role, TensorSpec, TrainingState

__all__ = ["Movement", "MovementTracker", "is_followed", "sampled_elements", "sampled_parameters"]


_MOVED = (Role.WEIGHT, Role.MASTER, Role.AVERAGE)
_WEIGHTS = (Role.WEIGHT, Role.MASTER)
_MOST_ELEMENTS = 1 << 20  # of the sampled parameters
_GOLDEN = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True, kw_only=True)
class Movement:
    """The movement of the weights between two snapshots."""

    rows: Mapping[str, Float64s]
    """By the tensor's name: root mean square of each row's change (the first axis against all others; tensors with a
    single axis are one row). A tensor that is new, or has another shape than before, is missing."""
    steps: int
    """Training steps from one to the other; at least 1."""
    before: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Elements of some weights at the last snapshot, by the tensor's name: `sampled_elements` of those of `sampled_parameters`."""


class MovementTracker:
    """Keeps the weights of the last snapshot, in their dtype, and compares the next one's with them."""

    def __init__(self) -> None:
        self._before: dict[str, torch.Tensor] = {}
        self._step: int | None = None
        self._own_memory = False

    def since(self, state: TrainingState, step: int) -> Movement | None:
        """Return the movement from the last noted snapshot to this one; None where there is none before it.

        Args:
            state: a snapshot; tensors on the host.
            step: the training step that it belongs to.
        """
        if not self._before or self._step is None:
            return None
        rows = {
            name: _row_changes(state.tensors[name], before)
            for name, before in self._before.items()
            if name in state.tensors and _comparable(state.tensors[name], before)
        }
        sampled = sampled_parameters(state)
        kept = [name for name in rows if state.specs[name].tag.role in _WEIGHTS]
        before = {  # copies, since what was noted may be overwritten before the save is planned
            name: sampled_elements(self._before[name]).clone()
            for name in kept
            if state.specs[name].tag.parameter in sampled
        }
        return Movement(rows=rows, steps=max(1, step - self._step), before=before)

    @property
    def knows(self) -> bool:
        """Whether a snapshot was noted."""
        return self._step is not None

    @property
    def step(self) -> int | None:
        """The training step of that snapshot; None where none was noted."""
        return self._step

    @property
    def noted(self) -> Mapping[str, torch.Tensor]:
        """The weights of the last snapshot, by name; not to be changed."""
        return self._before

    def note(self, state: TrainingState, step: int, *, lasting: bool = False) -> None:
        """Copy the weights: the next movement is measured from here.

        Args:
            state: a snapshot, or a restored state that training continues from.
            step: the training step that it belongs to.
            lasting: whether its tensors will not be written to any more, so that they need not be copied.
        """
        wanted = [name for name, spec in state.specs.items() if is_followed(spec)]
        kept: dict[str, torch.Tensor] = {}
        if lasting:
            self._before, self._step = {name: state.tensors[name] for name in wanted}, step
            self._own_memory = False
            return
        reusable = self._before if self._own_memory else {}
        with torch.no_grad():
            for name in wanted:
                tensor, old = state.tensors[name].detach(), reusable.get(name)
                fits = old is not None and old.shape == tensor.shape and old.dtype == tensor.dtype
                # memory is reused, so that nothing is allocated in steady state
                kept[name] = old.copy_(tensor) if old is not None and fits else tensor.to("cpu", copy=True)
        self._before, self._step, self._own_memory = kept, step, True

    def forget(self) -> None:
        """Drop the copy: the next movement is unknown."""
        self._before, self._step = {}, None


def is_followed(spec: TensorSpec) -> bool:
    """Whether a tensor's movement is measured: weights, master copies and averages of dtypes that are trained."""
    return spec.tag.role in _MOVED and spec.dtype in TRAINED and spec.numel > 0


def sampled_parameters(state: TrainingState) -> frozenset[str]:
    """Parameters spread over the model, `_MOST_ELEMENTS` at most in all; at least one matrix if there is one."""
    sizes: dict[str, int] = {}
    matrices: dict[str, int] = {}
    for spec in state.specs.values():
        name = spec.tag.parameter
        if spec.tag.role in _WEIGHTS and name is not None and spec.numel:
            sizes[name] = spec.numel
            if len(spec.shape) >= 2:
                matrices[name] = spec.numel
    if not sizes:
        return frozenset()
    first = min(matrices or sizes, key=lambda name: sizes[name])
    chosen, elements = {first}, sizes[first]
    places = {name: index * _GOLDEN % 1 for index, name in enumerate(sizes)}  # far apart, one after another
    for name in sorted(sizes, key=lambda name: places[name]):
        if name not in chosen and elements + sizes[name] <= _MOST_ELEMENTS:
            chosen.add(name)
            elements += sizes[name]
    return frozenset(chosen)


def sampled_elements(tensor: torch.Tensor) -> torch.Tensor:
    """`_MOST_ELEMENTS` of a large tensor, evenly spread over it, or all, flat."""
    # odd: it takes all columns of a matrix that has a power of two of them
    stride = 1 if tensor.numel() <= _MOST_ELEMENTS else tensor.numel() // _MOST_ELEMENTS | 1
    return tensor.reshape(-1)[::stride]


def _comparable(tensor: torch.Tensor, before: torch.Tensor) -> bool:
    return tensor.shape == before.shape and tensor.dtype == before.dtype


def _row_changes(tensor: torch.Tensor, before: torch.Tensor) -> Float64s:
    rows = tensor.shape[0] if tensor.dim() >= 2 else 1
    if tensor.dtype is torch.float64:
        exact: Float64s = (tensor - before).square().reshape(rows, -1).mean(dim=1).sqrt().numpy()
        return exact
    from shrinkpoint.quantize import matrix_kernels  # numba

    sums = np.empty(rows)
    one, other = (widened(each).reshape(rows, -1) for each in (tensor, before))
    matrix_kernels.row_squares(one, other, sums)
    moved: Float64s = np.sqrt(sums / one.shape[1])
    return moved
