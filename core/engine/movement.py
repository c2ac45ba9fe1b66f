"""Follows the weights from save to save: the noise of a restore is compared to how far training has moved them meanwhile.

A measured loss depends on its batches. Independently of them, training recovers from noise that is smaller than its own
movement between two checkpoints about as fast as it moves, and such noise changes no weight that training does not
change.
"""

from collections.abc import Mapping

import numpy as np
import torch

from shrinkpoint.arrays import Float64s, widened
from shrinkpoint.quality.guards import WEIGHTS, sampled_elements, sampled_parameters
from shrinkpoint.schemes.base import Movement
from shrinkpoint.state.dtypes import TRAINED
from shrinkpoint.state.training import Role, TensorSpec, TrainingState


class MovementTracker:
    """Keeps the weights of the last snapshot, in their dtype, and compares the next one's with them.

    Attributes:
        noted: these weights, by name; not to be changed.
        step: the training step of that snapshot; None where none was noted.
        owners: of several ranks, who has each of them, where that is not who codes it: as where training began. None: who codes it.
    """

    noted: Mapping[str, torch.Tensor]
    step: int | None
    owners: Mapping[str, tuple[TensorSpec, int]] | None

    def __init__(self) -> None:
        self.forget()

    def since(self, state: TrainingState, step: int) -> Movement | None:
        """Return the movement from the last noted snapshot to this one; None where there is none before it.

        Args:
            state: a snapshot; tensors on the host.
            step: the training step that it belongs to.
        """
        if not self.noted or self.step is None:
            return None
        sampled = sampled_parameters(state)
        rows: dict[str, Float64s] = {}
        before: dict[str, torch.Tensor] = {}
        for name, old in self.noted.items():
            new = state.tensors.get(name)
            if new is None or new.shape != old.shape or new.dtype != old.dtype:
                continue
            rows[name] = _row_changes(new, old)
            tag = state.specs[name].tag
            if tag.role in WEIGHTS and tag.parameter in sampled:
                before[name] = sampled_elements(old).clone()  # so that the others can be let go of
        return Movement(rows=rows, steps=max(1, step - self.step), before=before)

    def note(self, state: TrainingState, step: int, *, lasting: bool = False) -> None:
        """Copy the weights: the next movement is measured from here.

        Args:
            state: a snapshot, or a restored state that training continues from.
            step: the training step that it belongs to.
            lasting: whether its tensors will not be written to any more, so that they need not be copied.
        """
        followed = {name: state.tensors[name] for name, spec in state.specs.items() if is_followed(spec)}
        self.forget()  # first, so that old and new ones are not in memory together
        if not lasting:
            followed = {name: one.detach().to("cpu", copy=True) for name, one in followed.items()}
        self.noted, self.step = followed, step

    def forget(self) -> None:
        """Drop the copy: the next movement is unknown."""
        self.noted, self.step, self.owners = {}, None, None


def is_followed(spec: TensorSpec) -> bool:
    """Return whether a tensor's movement is measured: weights, master copies and averages of dtypes that are trained."""
    return spec.tag.role in (*WEIGHTS, Role.AVERAGE) and spec.dtype in TRAINED and spec.numel > 0


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
