"""Records the inputs of every `optimizer.step()` at the moment when its gradients are final.

That moment is within ``step`` itself: after the closure, if there is one, and after the hooks that were registered before, which
may clip. Frameworks' own events come earlier (Lightning's ``on_before_optimizer_step`` before clipping).
"""

import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from shrinkpoint.errors import ShrinkpointError
from shrinkpoint.optimizers.updates import frozen
from shrinkpoint.state.dtypes import memory_order
from shrinkpoint.state.snapshot import Snapshot, Snapshotter
from shrinkpoint.state.stateful import parameters_of
from shrinkpoint.state.training import TrainingState
from shrinkpoint.steps.record import Dense, Event, Gradient, Sparse

KEPT, ZERO = "kept", "zero"
"""The state of a gradient after its step: unchanged, or set to zeros."""

_ATTRIBUTES = ("grad_scale", "found_inf")


class CannotLogError(ShrinkpointError):
    """This training's steps cannot be logged; never raised into the training."""


def reason_of(error: Exception) -> str:
    """Give the message of an error of the log; with its class where it is not the project's own."""
    return str(error) if isinstance(error, ShrinkpointError) else f"{type(error).__name__}: {error}"


def frozen_groups(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Copy the present hyperparameters of every group."""
    return [
        {name: frozen(value) for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]


def set_groups(optimizer: torch.optim.Optimizer, groups: Sequence[Mapping[str, Any]]) -> None:
    """Give every group the hyperparameters that it had; tensors (a learning rate for CUDA graphs) keep their identity.

    Raises:
        ValueError: the optimizer has another number of groups.
    """
    for live, logged in zip(optimizer.param_groups, groups, strict=True):
        for name, value in logged.items():
            if name == "params":
                continue
            present = live.get(name)
            if isinstance(present, torch.Tensor) and isinstance(value, torch.Tensor | float | int):
                with torch.no_grad():
                    present.copy_(torch.as_tensor(value))
            else:
                live[name] = frozen(value)


@dataclass(frozen=True)
class Copied:
    """Tensors that were copied to the host."""

    snapshot: Snapshot
    release: Callable[[], None]
    """Returns their memory; called once, by any thread."""

    @property
    def state(self) -> TrainingState:
        """The copies; those from a GPU may be incomplete until ``snapshot.wait`` returns."""
        return self.snapshot.state

    @cached_property
    def nbytes(self) -> int:
        """Of the tensors."""
        return sum(tensor.nbytes for tensor in self.state.tensors.values())


class Copies:
    """Copies tensors into memory that is used again, so that logging takes none in steady state."""

    def __init__(self) -> None:
        self._free: dict[str, deque[Snapshotter]] = {}

    def take(self, what: str, tensors: Mapping[str, torch.Tensor], tree: object = None) -> Copied:
        """Copy tensors to the host.

        Args:
            what: their purpose, for which they keep their shapes.
            tensors: on any device.
            tree: plain data stored with them.
        """
        free = self._free.setdefault(what, deque())
        snapshotter = free.pop() if free else Snapshotter()
        snapshot = snapshotter.take(TrainingState(tree, dict(tensors), {}))
        return Copied(snapshot, lambda: free.append(snapshotter))


class Recorder:
    """Hooks optimizers and keeps the inputs of each ``step`` until `take`.

    Args:
        optimizers: all that the training has.
        first: called before the first recorded step after `start`, while the state is still the old one.
        guarded: a context for all that the training would not do without the recorder; takes any error.
    """

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        *,
        first: Callable[[], None],
        guarded: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._optimizers = list(optimizers)
        self._call_first, self._guarded = first, guarded
        self.copies = Copies()
        self._is_first = True
        self._active = False
        self._evaluations = 0
        self._pending: tuple[Event, Copied] | None = None
        self._events: list[Event] = []
        self._copied: list[Copied] = []
        self._consumed: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}
        # A compiled step calls its hooks too: they are no part of what torch.compile may trace.
        before_step, after_step = (torch.compiler.disable(hook) for hook in (self._on_before, self._on_after))
        self._handles = [
            (one.register_step_pre_hook(before_step), one.register_step_post_hook(after_step))
            for one in self._optimizers
        ]

    @property
    def pending(self) -> bool:
        """Whether a step was made since the last `take`."""
        return bool(self._events)

    def start(self) -> None:
        """Record from now on."""
        self._drop()
        self._active = self._is_first = True

    def stop(self) -> None:
        """Record no more until `start`."""
        self._active = False
        self._drop()

    def close(self) -> None:
        """Remove the hooks."""
        self.stop()
        for handles in self._handles:
            for handle in handles:
                handle.remove()

    def take(self) -> tuple[list[Event], list[Copied]]:
        """Return the events recorded since the last call, and the memory that they use."""
        taken = self._events, self._copied
        self._events, self._copied = [], []
        return taken

    def forget_gradients(self) -> None:
        """Forget which gradients the recorded steps have used."""
        self._consumed = {}

    def fate(self, parameter: torch.Tensor) -> str | torch.Tensor | None:
        """Return a parameter's present gradient: None, unchanged since its last recorded step, zeros, or another tensor."""
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
        self._forget_pending()
        for copied in self._copied:
            copied.release()
        self._events, self._copied, self._consumed = [], [], {}

    def _forget_pending(self) -> None:
        if self._pending is not None:
            self._pending[1].release()
        self._pending = None

    def _on_before(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Record the step, or wrap its closure, which is then to be called."""
        changed = None
        if self._active:
            with self._guarded():
                changed = self._before(optimizer, args, kwargs)
        return changed

    def _before(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        self._forget_pending()  # of a step that raised and was not completed
        which = next(i for i, one in enumerate(self._optimizers) if one is optimizer)
        hooks = getattr(optimizer, "_optimizer_step_pre_hooks", {})
        if hooks and next(reversed(hooks)) != self._handles[which][0].id:
            raise CannotLogError(
                f"a hook was registered on {type(optimizer).__name__} after the log's own, and may change what is logged:"
                " register it before the Checkpointer is made"
            )
        if self._is_first:
            self._is_first = False
            self._call_first()
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if not callable(closure):
            self._record(which, closure=False, loss=None)
            return None
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
        if not self._active:
            return
        with self._guarded():
            if self._evaluations > 1:
                raise CannotLogError(
                    f"{type(self._optimizers[which]).__name__} evaluates its closure several times in one step, so that its"
                    " gradients are not those of one moment"
                )
            self._record(which, closure=True, loss=loss)

    def _on_after(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._pending is None or not self._active:
            return
        with self._guarded():
            (event, copied), self._pending = self._pending, None
            self._events.append(event)
            self._copied.append(copied)
            for parameter in parameters_of(optimizer):
                gradient = parameter.grad
                if gradient is not None:
                    self._consumed[id(parameter)] = weakref.ref(gradient), gradient._version

    def _record(self, which: int, *, closure: bool, loss: object) -> None:
        """Copy the gradients, before an optimizer writes to them, as some do."""
        optimizer = self._optimizers[which]
        gradients = [parameter.grad for parameter in parameters_of(optimizer)]
        copied = self.copies.take(str(which), _tensors_of(gradients))
        event = Event(
            optimizer=which,
            groups=frozen_groups(optimizer),
            attributes={
                name: frozen(getattr(optimizer, name)) for name in _ATTRIBUTES if hasattr(optimizer, name)
            },
            closure=closure,
            loss=_number(loss),
            gradients=[_gradient(i, live, copied.state.tensors) for i, live in enumerate(gradients)],
        )
        self._pending = event, copied


def _number(loss: object) -> Any:
    """Return the loss as a number, since some optimizers' steps depend on it."""
    if isinstance(loss, torch.Tensor):
        return loss.detach().clone() if loss.numel() == 1 and loss.layout == torch.strided else None
    return loss if isinstance(loss, bool | int | float) else None


def _tensors_of(gradients: Sequence[torch.Tensor | None]) -> dict[str, torch.Tensor]:
    found = {}
    for index, gradient in enumerate(gradients):
        if gradient is None:
            continue
        if gradient.layout == torch.sparse_coo:
            found[f"{index}/indices"] = gradient._indices()
            found[f"{index}/values"] = gradient._values()
        elif gradient.layout == torch.strided:
            found[str(index)] = gradient
        else:
            raise CannotLogError(f"a gradient has the layout {gradient.layout}")
    return found


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
