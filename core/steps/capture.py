"""Copies the gradients that an optimizer's step uses, where possible while the optimizer makes that step.

An optimizer reads its gradients, and most leave them as they are. Once an optimizer was seen to do so, its gradients are
copied by another thread during its step, and training waits for no more than what is left of the copy when the step is
over. That is checked again now and then, since torch does not count all changes of a tensor. Until then, and for an optimizer that writes to its gradients (SGD with Nesterov momentum and ``foreach``, fused ones that
unscale), the copy is made before the step.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from shrinkpoint.state.dtypes import tensor_to_bytes
from shrinkpoint.state.memory_order import memory_order
from shrinkpoint.steps.buffers import Buffers, CopiedState
from shrinkpoint.steps.record import Dense, Gradient, Sparse
from shrinkpoint.steps.supervision import CannotLogError

__all__ = ["Capture", "Captured"]

_PROVEN = 2
"""Steps that an optimizer must have left its gradients as they were before they are copied during its steps."""
_CHECKED_EVERY = 64
"""Steps from one that is copied before it, and whose gradients are compared after it, to the next."""


@dataclass(frozen=True)
class Captured:
    """The gradients of one step, which are being copied or are copied."""

    optimizer: int
    live: Sequence[torch.Tensor | None]
    """Of each parameter, in the groups' order."""
    versions: Sequence[int]
    """Torch's count of each one's changes before the step; 0 for those that are None."""
    copied: CopiedState
    during: bool
    """Whether the copy is made during the step."""
    scaled: bool
    """Whether the optimizer unscales them itself, as fused ones do for a gradient scaler; it may also skip the step."""


class Capture:
    """Copies gradients, and learns which optimizers leave theirs as they are."""

    def __init__(self) -> None:
        self._buffers = Buffers()
        self._unchanged: dict[int, int] = {}
        self._writing: set[int] = set()
        self._overlapped: set[int] = set()

    def close(self) -> None:
        """End the thread."""
        self._buffers.close()

    def begin(
        self, which: int, gradients: Sequence[torch.Tensor | None], *, scaled: bool = False
    ) -> Captured:
        """Copy the gradients, or begin to: right before the step, when they are final.

        Args:
            which: place of the optimizer among the training's.
            gradients: of its parameters.
            scaled: as of `Captured`. It then writes to them, but in a step that it skips, which shows nothing of other ones.

        Raises:
            CannotLogError: one has a layout that cannot be stored.
        """
        live = {}
        for index, gradient in enumerate(gradients):
            if gradient is None:
                continue
            if gradient.layout == torch.sparse_coo:
                live[f"{index}/indices"], live[f"{index}/values"] = gradient._indices(), gradient._values()
            elif gradient.layout == torch.strided:
                live[str(index)] = gradient
            else:
                raise CannotLogError(f"a gradient has the layout {gradient.layout}")
        unchanged = self._unchanged.get(which, 0)
        during = unchanged >= _PROVEN and unchanged % _CHECKED_EVERY > 0 and which not in self._writing
        during = during and not scaled
        during = during and all(g is None or (g.is_cpu and not g.is_sparse) for g in gradients)
        if during:
            self._overlapped.add(which)
        return Captured(
            optimizer=which,
            live=gradients,
            versions=_versions(gradients),
            copied=self._buffers.take(str(which), live, during=during),
            during=during,
            scaled=scaled,
        )

    def end(self, captured: Captured) -> list[Gradient] | None:
        """The copies, right after the step; None where the optimizer wrote to the gradients while they were copied.

        Raises:
            MemoryError: there was none for the copies.
        """
        copies = captured.copied.state.tensors
        if not captured.scaled:
            which, unchanged = captured.optimizer, self._unchanged.get(captured.optimizer, 0)
            if which not in self._writing and self._has_written(captured, copies):
                self._writing.add(which)
                if (
                    which in self._overlapped
                ):  # this step or one before it may have been copied while it wrote
                    return None
            self._unchanged[which] = unchanged + 1
        return [_gradient(index, live, copies) for index, live in enumerate(captured.live)]

    def _has_written(self, captured: Captured, copies: Mapping[str, torch.Tensor]) -> bool:
        if _versions(captured.live) != captured.versions:
            return True
        # Torch does not count changes through `.data`, nor those of fused optimizers.
        return not captured.during and not all(
            gradient is None
            or not gradient.is_cpu
            or gradient.is_sparse
            or np.array_equal(tensor_to_bytes(gradient), tensor_to_bytes(copies[str(index)]))
            for index, gradient in enumerate(captured.live)
        )


def _versions(gradients: Sequence[torch.Tensor | None]) -> list[int]:
    return [0 if gradient is None else gradient._version for gradient in gradients]


def _gradient(index: int, live: torch.Tensor | None, copies: Mapping[str, torch.Tensor]) -> Gradient:
    if live is None:
        return None
    if live.layout == torch.strided:
        return Dense(copies[str(index)], memory_order(live))
    return Sparse(
        indices=copies[f"{index}/indices"],
        values=copies[f"{index}/values"],
        shape=tuple(live.shape),
        coalesced=live.is_coalesced(),
    )
