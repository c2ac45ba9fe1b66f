"""Counts of what a hand-written loop does between two saves: changes of the weights, steps of the optimizers, and gradients that wait for one."""

import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import islice
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler

from shrinkpoint.state.roles import unnamed
from shrinkpoint.state.stateful import optimizers_in, parameters_of


class WeightChanges:
    """Counts the changes of a model's parameters."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._undone = self._replaced = 0
        self._begin()

    @property
    def count(self) -> int:
        """A number that grows whenever a parameter is changed in place, gets other memory (``p.data = ...``) or another dtype.

        Left out are `undone` changes, and moves to another device, which keep the values.
        """
        self._replaced += self._look()
        return self._counted() - self._undone + self._replaced

    @contextmanager
    def undone(self) -> Iterator[None]:
        """Inside this block changes of the weights are not counted, since they are undone at its end."""
        before = self._counted()
        self._replaced += self._look()
        try:
            yield
        finally:
            self._undone += self._counted() - before
            self._look()

    def follow(self) -> None:
        """Count the changes of parameters that have taken the places of others."""
        if list(map(id, self._parameters)) != list(map(id, self._model.parameters())):
            counted = self._counted()
            self._begin()
            self._replaced += counted - self._counted()

    def _begin(self) -> None:
        self._parameters = list(self._model.parameters())
        # Parameters made in inference mode have no count of changes; those that are made of others, as shards are, no place.
        self._versioned = [parameter for parameter in self._parameters if not parameter.is_inference()]
        self._placed = [p for p in self._parameters if type(p) in (torch.Tensor, nn.Parameter)]
        self._places, self._kinds = _places(self._placed), _kinds(self._placed)

    def _counted(self) -> int:
        return sum(parameter._version for parameter in self._versioned)

    def _look(self) -> int:
        """Return how many parameters have got other memory on their device, or another dtype, since the last look; training waits for it."""
        places = _places(self._placed)
        if places == self._places:
            return 0
        kinds = _kinds(self._placed)
        before = zip(self._places, self._kinds, strict=True)
        found = sum(
            place != old and (dtype is not old_dtype or device == old_device)
            for place, (dtype, device), (old, (old_dtype, old_device)) in zip(
                places, kinds, before, strict=True
            )
        )
        self._places, self._kinds = places, kinds
        return found


def _places(parameters: Sequence[torch.Tensor]) -> list[int]:
    return [parameter.data_ptr() for parameter in parameters]


def _kinds(parameters: Sequence[torch.Tensor]) -> list[tuple[torch.dtype, torch.device]]:
    return [(parameter.dtype, parameter.device) for parameter in parameters]


class _Used:
    """The gradient of an optimizer's first parameter that has one, right after a step."""

    def __init__(self, parameter: Any, before: "_Used | None") -> None:
        self._parameter, gradient = parameter, parameter.grad
        self._gradient, self._version = weakref.ref(gradient), gradient._version
        self._replaced = False
        """Whether the gradient before was set to None, as ``zero_grad`` does, and not to zeros."""
        if before is not None and before._parameter is parameter:
            self._replaced = before._gradient() is not gradient

    def is_left(self) -> bool:
        """Return whether the gradient has not been zeroed since; a generator's loss adds to the discriminator's used ones."""
        gradient = self._parameter.grad
        same = gradient is not None and gradient is self._gradient()
        return same and (self._replaced or gradient._version == self._version)


class StepCount:
    """Counts the steps of optimizers, without wrappers, and knows which gradients wait for one."""

    def __init__(self, optimizers: Sequence[Any]) -> None:
        self.count, self.known = 0, bool(optimizers)
        """Whether all can be counted."""
        self.by_scaler = False
        """Whether a gradient scaler has made the first one."""
        self._optimizers = optimizers
        self._used: dict[Any, _Used] = {}
        own = weakref.ref(self)

        def made(optimizer: Any, *_: Any) -> None:
            if (steps := own()) is not None:
                steps.by_scaler |= not steps.count and _by_scaler()
                steps.count += 1
                used = (p for p in parameters_of(optimizer) if p.grad is not None)
                for first in islice(used, 1):
                    steps._used[optimizer] = _Used(first, steps._used.get(optimizer))

        self._hooks = ExitStack()
        for optimizer in (inner for each in optimizers for inner in optimizers_in(each)):
            try:
                self._hooks.callback(optimizer.register_step_post_hook(made).remove)
            except AttributeError:
                self.known = False
        weakref.finalize(self, self._hooks.close)

    def accumulated(self, agree: Callable[[bool], bool] = bool) -> dict[str, torch.Tensor]:
        """Return the gradients that no step has used yet, by `unnamed`; none that are not finite, for which a scaler skips the step.

        `agree` decides for all processes from what each would do.
        """
        used = (optimizer for optimizer, one in self._used.items() if one.is_left())
        spent = {id(parameter) for optimizer in used for parameter in parameters_of(optimizer)}
        named = self._named() if self.known else ()
        found = {name: p.grad for name, p in named if p.grad is not None and id(p) not in spent}
        own = [getattr(one, "_local_tensor", one) for one in found.values()]  # of a shard
        values = [one.coalesce().values() if one.is_sparse else one for one in own]
        wanted = any(one.any() for one in values) and all(one.isfinite().all() for one in values)
        return found if agree(bool(wanted)) else {}

    def put_back(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """Give all parameters their gradients from `accumulated`, or none."""
        self._used.clear()
        for name, parameter in self._named():
            given = gradients.get(name)
            parameter.grad = None if given is None else given.to(parameter.device, parameter.dtype, copy=True)

    def _named(self) -> Iterator[tuple[str, Any]]:
        for index, optimizer in enumerate(self._optimizers):
            for number, parameter in enumerate(parameters_of(optimizer)):
                yield unnamed(index, number), parameter

    def stop(self) -> None:
        """Count no more."""
        self.known = False
        self._hooks.close()


def _by_scaler() -> bool:
    """Return whether one of the present calls is an enabled gradient scaler's."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and not isinstance(frame.f_locals.get("self"), GradScaler):
        frame = frame.f_back
    return frame is not None and bool(frame.f_locals["self"].is_enabled())
