"""A resume is rehearsed right after the first step, so that a state that cannot be saved or continued is refused then."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from shrinkpoint.engine.fitting import fitted, taken
from shrinkpoint.errors import StateMismatchError
from shrinkpoint.state.stateful import parts_of
from shrinkpoint.state.training import TrainingState
from shrinkpoint.state.wrappers import optimizers_in, unwrapped

__all__ = ["DryRestore"]


class DryRestore:
    """Does what a resume would do, without changing anything, once for each structure that the state has.

    The state is captured and encoded, so that every part of it is seen to be representable, and decoded again. Models and optimizers that load in a
    way of their own, or have not all that they load in their ``state_dict()``, are tried with it: on copies without elements, as of
    `shrinkpoint.engine.fitting.taken`. Of all else, as schedulers, samplers and callbacks, nothing is called but ``state_dict``; loaders are left alone.
    """

    def __init__(self) -> None:
        self._known: object = None

    def knows(self, optimizers: Sequence[Any]) -> bool:
        """Whether the state's structure, of which the optimizers' is looked at, is the one that was rehearsed."""
        return _structure(optimizers) == self._known

    def check(
        self,
        capture: Callable[[], tuple[TrainingState, Callable[[Any], tuple[Any, Sequence[Any]]]]],
        model: nn.Module,
        optimizers: Sequence[Any],
    ) -> None:
        """Refuse a training whose state could not be continued; free of cost where its structure is known.

        Args:
            capture: gives the state as a save would, and what takes the model's and the optimizers' states out of it.
            model: live.
            optimizers: live, in the order of their states.

        Raises:
            CannotRepresentError: a part cannot be stored; the message names it.
            StateMismatchError: an object would not take its state back, or the state lacks an inner optimizer's.
        """
        if self.knows(optimizers):
            return
        found, parts = capture()
        weights, states = parts(found.to_object(own_tensors=True))
        kept = {tensor.data_ptr() for tensor in found.tensors.values()}
        fitted(weights, model, "this run")
        for optimizer, state in zip(optimizers, states, strict=True):
            _require_inner(optimizer, kept)
            kind = type(unwrapped(optimizer))
            loads = getattr(kind, "load_state_dict", None)
            if not parts_of(state, optimizer) or loads is not torch.optim.Optimizer.load_state_dict:
                taken(optimizer, state)
        self._known = _structure(optimizers)


def _structure(optimizers: Sequence[Any]) -> list[list[int]]:
    inner = [one for given in optimizers for one in optimizers_in(given)]
    return [[len(one.state), *(len(group["params"]) for group in one.param_groups)] for one in inner]


def _require_inner(optimizer: Any, kept: set[int]) -> None:
    for inner in optimizers_in(optimizer):
        tensors = [value for entries in inner.state.values() for value in _tensors(entries)]
        if any(tensor.data_ptr() not in kept for tensor in tensors if tensor.numel()):
            kind, name = type(unwrapped(optimizer)).__qualname__, type(inner).__qualname__
            if inner is not unwrapped(optimizer) and inner is not optimizer:
                raise StateMismatchError(
                    f"{kind} has an optimizer inside, a {name}, whose state is not in {kind}.state_dict(), so that a resume would go on without it:"
                    " let state_dict() and load_state_dict() include the inner optimizer's"
                )


def _tensors(entries: Any) -> Iterator[torch.Tensor]:
    values = entries.values() if isinstance(entries, dict) else ()
    return (value for value in values if type(value) is torch.Tensor and value.layout is torch.strided)
