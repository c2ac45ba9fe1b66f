"""Records the inputs of every `optimizer.step()` at the moment when its gradients are final.

That moment is within ``step`` itself: after the closure, if there is one, and after the hooks that were registered before, which
may clip. Frameworks' own events come earlier (Lightning's ``on_before_optimizer_step`` before clipping).
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from shrinkpoint.optimizers.updates import frozen
from shrinkpoint.state.dtypes import memory_order, tensor_to_bytes
from shrinkpoint.steps.buffers import Buffers, CopiedState
from shrinkpoint.steps.hyperparameters import frozen_groups, parameters_of
from shrinkpoint.steps.record import Dense, Event, Gradient, Sparse
from shrinkpoint.steps.supervision import CannotLogError

__all__ = ["KEPT", "ZERO", "Capture", "Recorder"]

KEPT, ZERO = "kept", "zero"
"""The state of a gradient after its step: unchanged, or set to zeros."""

_ATTRIBUTES = ("grad_scale", "found_inf")


class Recorder:
    """Hooks optimizers and keeps the inputs of each ``step`` until `take`.

    Args:
        optimizers: all that the training has.
        failed: called with a message when a step cannot be logged; the training continues.
        before: called before each recorded step, while the state is still the old one; with True for the first after `start`.
        counted: a context in which all time is spent that the training would not spend without the recorder.
    """

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        *,
        failed: Callable[[str], None],
        before: Callable[[bool], None],
        counted: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._optimizers = list(optimizers)
        self._failed = failed
        self._before = before
        self._counted = counted
        self._capture = Capture()
        self._first = True
        self._active = False
        self._evaluations = 0
        self._pending: tuple[Event, Captured] | None = None
        self._events: list[Event] = []
        self._copied: list[CopiedState] = []
        self._consumed: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}
        # A compiled step calls its hooks too: they are no part of what torch.compile may trace.
        before_step, after_step = (torch.compiler.disable(hook) for hook in (self._on_before, self._on_after))
        self._handles = [
            (one.register_step_pre_hook(before_step), one.register_step_post_hook(after_step))
            for one in self._optimizers
        ]

        self.torn = False
        """Whether an optimizer has written to its gradients while they were copied, for the first time: that step is not known, and
        none after it until `start`."""

    @property
    def pending(self) -> bool:
        """Whether a step was made since the last `take`."""
        return bool(self._events)

    def start(self) -> None:
        """Record from now on."""
        self._drop()
        self._active = self._first = True
        self.torn = False

    def stop(self) -> None:
        """Record no more until `start`."""
        self._active = False
        self._drop()

    def close(self) -> None:
        """Remove the hooks."""
        self.stop()
        self._capture.close()
        for handles in self._handles:
            for handle in handles:
                handle.remove()

    def take(self) -> tuple[list[Event], list[CopiedState]]:
        """The events recorded since the last call, and the memory that they use."""
        taken = self._events, self._copied
        self._events, self._copied = [], []
        return taken

    def forget_gradients(self) -> None:
        """Forget which gradients the recorded steps have used."""
        self._consumed = {}

    def fate(self, parameter: torch.Tensor) -> str | torch.Tensor | None:
        """A parameter's present gradient: None, unchanged since its last recorded step, zeros, or another tensor."""
        gradient = parameter.grad
        if gradient is None:
            return None
        noted = self._consumed.get(id(parameter))
        if noted is not None and noted[0]() is gradient and noted[1] == gradient._version:
            return KEPT
        if gradient.layout != torch.strided:
            raise CannotLogError("a sparse gradient is kept from one step to the next, and added to")
        return gradient.detach() if bool(torch.any(gradient)) else ZERO

    def _drop(self) -> None:
        for copied in self._copied:
            copied.release()
        if self._pending is not None:
            self._pending[1].copied.release()
        self._pending, self._events, self._copied = None, [], []
        self._consumed = {}

    def _fail(self, reason: str) -> None:
        self.stop()
        self._failed(reason)

    def _on_before(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if not self._active:
            return None
        with self._counted():
            return self._prepared(optimizer, args, kwargs)

    def _prepared(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Record the step, or wrap its closure, which is then to be called."""
        if self._pending is not None:  # a step that raised and was not completed
            self._pending[1].copied.release()
            self._pending = None
        which = next(i for i, one in enumerate(self._optimizers) if one is optimizer)
        hooks = getattr(optimizer, "_optimizer_step_pre_hooks", {})
        if hooks and next(reversed(hooks)) != self._handles[which][0].id:
            self._fail(
                f"a hook was registered on {type(optimizer).__name__} after the log's own, and may change what is logged:"
                " register it before the Checkpointer is made"
            )
            return None
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        first, self._first = self._first, False
        if callable(closure):
            if first:
                self._before(True)
            return self._with(closure, which, args, kwargs) if self._active else None
        self._before(first)
        if self._active:  # what was to be done before the step has not failed
            self._record(which, closure=False, loss=None)
        return None

    def _with(
        self, closure: Callable[[], Any], which: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        self._evaluations = 0
        # A compiled step traces its closure: the user's part of it as ever, the recorder's not.
        evaluated = torch.compiler.disable(self._on_evaluated)

        def recorded() -> Any:
            loss = closure()
            evaluated(which, loss)
            return loss

        if "closure" in kwargs:
            return args, {**kwargs, "closure": recorded}
        return (args[0], recorded, *args[2:]), kwargs

    def _on_evaluated(self, which: int, loss: object) -> None:
        self._evaluations += 1
        if self._evaluations > 1 and self._active:
            name = type(self._optimizers[which]).__name__
            self._fail(
                f"{name} evaluates its closure several times in one step, so that its gradients are not those of one moment"
            )
        elif self._active:
            with self._counted():
                # Not before the closure, which is most of a step: until it is over, nothing waits for the segment before.
                self._before(False)
                if self._active:
                    self._record(which, closure=True, loss=loss)

    def _on_after(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if self._pending is None or not self._active:
            return
        with self._counted():
            (event, captured), self._pending = self._pending, None
            try:
                gradients = self._capture.end(captured)
            except Exception as error:  # noqa: BLE001 - training continues after any error
                captured.copied.release()
                self._fail(f"{type(error).__name__}: {error}")
                return
            self.torn = self.torn or gradients is None
            self._events.append(replace(event, gradients=gradients or []))
            self._copied.append(captured.copied)
            for parameter in parameters_of(optimizer):
                gradient = parameter.grad
                if gradient is not None:
                    self._consumed[id(parameter)] = weakref.ref(gradient), gradient._version

    def _record(self, which: int, *, closure: bool, loss: object) -> None:
        try:
            self._pending = self._captured(which, closure, loss)
        except Exception as error:  # noqa: BLE001 - training continues after any error
            self._fail(
                str(error) if isinstance(error, CannotLogError) else f"{type(error).__name__}: {error}"
            )

    def _captured(self, which: int, closure: bool, loss: object) -> "tuple[Event, Captured]":
        optimizer = self._optimizers[which]
        captured = self._capture.begin(
            which,
            [parameter.grad for parameter in parameters_of(optimizer)],
            scaled=any(getattr(optimizer, name, None) is not None for name in _ATTRIBUTES),
        )
        event = Event(
            optimizer=which,
            groups=frozen_groups(optimizer),
            attributes={
                name: frozen(getattr(optimizer, name)) for name in _ATTRIBUTES if hasattr(optimizer, name)
            },
            closure=closure,
            loss=_number(loss),
            gradients=[],  # known when the step is over
        )
        return event, captured


def _number(loss: object) -> Any:
    """The loss as a number, since some optimizers' steps depend on it."""
    if isinstance(loss, torch.Tensor):
        return loss.detach().clone() if loss.numel() == 1 and loss.layout == torch.strided else None
    return loss if isinstance(loss, bool | int | float) else None


_PROVEN = 2
"""Steps that an optimizer must have left its gradients as they were before they are copied during its steps."""
_CHECKED_EVERY = 64
"""Steps from one that is copied before it, and whose gradients are compared after it, to the next."""


# ---- Copies the gradients that an optimizer's step uses, where possible while the optimizer makes that step.
#
# An optimizer reads its gradients, and most leave them as they are. Once an optimizer was seen to do so, its gradients are
# copied by another thread during its step, and training waits for no more than what is left of the copy when the step is
# over. That is checked again now and then, since torch does not count all changes of a tensor. Until then, and for an optimizer that writes to its gradients (SGD with Nesterov momentum and ``foreach``, fused ones that
# unscale), the copy is made before the step.


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
