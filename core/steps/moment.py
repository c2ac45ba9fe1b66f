"""The state at the end of a segment, whose digest the writer's thread takes while the training leaves it alone."""

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from shrinkpoint.steps.fingerprint import combined, digests_of, parts_of
from shrinkpoint.steps.recorder import CannotLogError
from shrinkpoint.steps.segment import Place

__all__ = ["Moment"]


class Moment:
    """A step, and the digest of the state after it.

    Weights and optimizer states change in `optimizer.step()` only. From the end of one step to the beginning of the next one
    another thread can read them as they are, without a copy. The training calls `settle` before the next step: it then waits for
    a digest that has begun, and takes one itself that has not.

    Args:
        step: training steps done.
        optimizers: in the state after that step.
        more: other tensors that a replay must reproduce, by name.
    """

    def __init__(
        self,
        step: int,
        optimizers: Sequence[torch.optim.Optimizer],
        more: Mapping[str, torch.Tensor],
    ) -> None:
        self.step = step
        self._parts: dict[str, Any] = parts_of(optimizers, more)
        self._versions = _versions(self._parts)
        self._digest: str | None = None
        self._is_settled = False
        self._lock = threading.Lock()
        if any(torch.is_tensor(value) and not value.is_cpu for value in self._parts.values()):
            self.settle()  # the device's work is queued behind that of the training, by the training's own thread

    def settle(self) -> None:
        """Make sure that the digest is taken: the state may change afterwards."""
        with self._lock:
            if self._is_settled:
                return
            try:
                digest = combined(digests_of(self._parts))
                if _versions(self._parts) == self._versions:
                    self._digest = digest
            finally:
                self._parts, self._is_settled = {}, True

    def place(self) -> Place:
        """The step with its digest, which is taken now if it is not yet.

        Raises:
            CannotLogError: the state was changed meanwhile, or `abandon` was called before.
        """
        self.settle()
        if self._digest is None:
            raise CannotLogError(
                f"weights or optimizer states were changed outside of optimizer.step() right after step {self.step}, while their"
                " digest was taken"
            )
        return Place(self.step, self._digest)

    def abandon(self) -> None:
        """Take no digest any more, and forget the state."""
        with self._lock:
            self._parts, self._is_settled = {}, True


def _versions(parts: Mapping[str, Any]) -> list[int]:
    return [value._version for value in parts.values() if torch.is_tensor(value) and not value.is_inference()]
