"""Copies the weights after a step while the training computes the next one's gradients."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from shrinkpoint.steps.buffers import Buffers, CopiedState
from shrinkpoint.steps.hyperparameters import parameters_of
from shrinkpoint.steps.unchanged import Unchanged

__all__ = ["WeightCopies", "WeightCopy"]


class WeightCopy:
    """The weights of one step, which are being copied or are copied.

    Args:
        parts: the copies.
        unchanged: set by the copying thread when it is done: whether they are all of one moment.
    """

    def __init__(self, parts: Sequence[CopiedState], unchanged: list[bool]) -> None:
        self._parts = parts
        self._unchanged = unchanged

    def wait(self) -> Mapping[str, torch.Tensor] | None:
        """The copied tensors, by name, once all are there; None where the training changed some meanwhile.

        Raises:
            MemoryError: there was none for the copies.
        """
        found: dict[str, torch.Tensor] = {}
        for part in self._parts:
            part.wait()
            found |= part.state.tensors
        return found if all(self._unchanged) else None

    def release(self) -> None:
        """Return the memory; called once."""
        for part in self._parts:
            part.release()


class WeightCopies:
    """Copies weights in another thread from the end of a step to the beginning of the next one.

    What an optimizer owns changes in its ``step`` only, before which `settle` waits for what is left of the copy. Everything else,
    such as the buffers that a forward pass writes to, and everything on a GPU, whose copies the host does not wait for anyway, is
    copied at once. A training that changes weights by other means just then is noticed by `Unchanged`.

    Args:
        optimizers: that own the weights; what belongs to one without torch's hooks is copied at once.
        counted: a context for the time that the training waits in.
    """

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        counted: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._optimizers = [one for one in optimizers if isinstance(one, torch.optim.Optimizer)]
        self._counted = counted
        self._buffers = Buffers()
        self._of: Mapping[str, torch.Tensor] | None = None
        self._owned: Mapping[str, torch.Tensor] = {}
        self._others: Mapping[str, torch.Tensor] = {}
        self._copying: CopiedState | None = None
        hook = torch.compiler.disable(self._on_before)
        self._handles = [one.register_step_pre_hook(hook) for one in self._optimizers]

    @property
    def cpu_s(self) -> float:
        """CPU seconds of the other thread."""
        return self._buffers.cpu_s

    def take(self, tensors: Mapping[str, torch.Tensor]) -> WeightCopy:
        """Copy tensors, or begin to.

        Args:
            tensors: of the model, by name; the same object as the last time where they are the same.
        """
        self.settle()
        if tensors is not self._of:
            self._divide(tensors)
        parts, done = [], [True]
        if self._others:
            parts.append(self._buffers.take("others", self._others))
        if self._owned:
            done[0] = False
            owned = self._owned.values()
            unchanged = Unchanged(owned, owned)

            def check() -> None:
                done[0] = unchanged.at_all()

            self._copying = self._buffers.take("weights", self._owned, during=True, then=check)
            parts.append(self._copying)
        return WeightCopy(parts, done)

    def _divide(self, tensors: Mapping[str, torch.Tensor]) -> None:
        owned = {id(parameter) for one in self._optimizers for parameter in parameters_of(one)}
        during = {name: tensor.is_cpu and id(tensor) in owned for name, tensor in tensors.items()}
        self._of = tensors
        self._owned = {name: tensor for name, tensor in tensors.items() if during[name]}
        self._others = {name: tensor for name, tensor in tensors.items() if not during[name]}

    def settle(self) -> None:
        """Wait until nothing is being copied: the weights may change afterwards. For the training's thread."""
        copying, self._copying = self._copying, None
        if copying is not None:
            copying.settle()

    def forget(self) -> None:
        """Keep no tensor of the model."""
        self.settle()
        self._of, self._owned, self._others = None, {}, {}

    def close(self) -> None:
        """Leave the optimizers as they were, and end the thread."""
        self.forget()
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._buffers.close()

    def _on_before(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if self._copying is not None:
            with self._counted():
                self.settle()
