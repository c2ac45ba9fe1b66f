"""Gives objects of a training, such as schedulers and loaders, their state back."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from shrinkpoint.state.wrappers import plain_names, unwrapped

__all__ = [
    "forget_position",
    "load_optimizer",
    "load_stateful",
    "put_back_dtypes",
    "state_of",
    "without_functions",
]

_FUNCTIONS = ("anneal_func", "_anneal_func")


def state_of(value: Any) -> Any:
    """An object's state; a scheduler's without the functions of `without_functions`, a module's with `plain_names`.

    Args:
        value: has ``state_dict``.
    """
    if isinstance(value, nn.Module):
        with plain_names(value) as inner:
            return inner.state_dict()
    state = value.state_dict()
    return without_functions(state) if isinstance(value, LRScheduler) else state


def without_functions(state: Any) -> Any:
    """The state of schedulers without the functions of torch's ``SWALR``, which its constructor sets and a load leaves as they are."""
    if type(state) is dict:
        kept = {key: item for key, item in state.items() if key not in _FUNCTIONS or not callable(item)}
        return {key: without_functions(item) for key, item in kept.items()}
    return [without_functions(item) for item in state] if type(state) is list else state


def load_stateful(value: Any, state: Any) -> None:
    """Load an object's state, before the random generators' own is restored.

    A stateful loader that has loaded a position makes its iterator when it is first asked for one, and draws a seed for it from
    torch's generator, which the undisturbed training did at the beginning of the epoch. Asked for its state, it makes the iterator here,
    before the generators are restored, and gives it to the loop.

    Args:
        value: has ``state_dict`` and ``load_state_dict``.
        state: what ``state_dict`` gave.
    """
    if isinstance(value, nn.Module):
        with plain_names(value) as inner:
            inner.load_state_dict(state)
        return
    value.load_state_dict(state)
    if hasattr(value, "__iter__"):
        try:
            value.state_dict()
        except StopIteration:  # of torchdata's sampler, where the data ends before the position
            forget_position(value)


def forget_position(loader: Any) -> None:
    """Let torchdata's loader begin at the next epoch's start, if it has not yet taken the position that it has been given."""
    if getattr(loader, "next_iter_state", None) is not None:
        loader.next_iter_state = None


def load_optimizer(optimizer: Any, state: Mapping[str, Any], *, same_dtypes: bool) -> None:
    """Load an optimizer's state as it was saved.

    Args:
        optimizer: or a wrapper of one.
        state: what ``state_dict`` gave.
        same_dtypes: whether the parameters have the dtypes that they had when it was saved; else torch converts it to theirs.
    """
    optimizer.load_state_dict(state)
    if same_dtypes:
        put_back_dtypes(optimizer, state)


def put_back_dtypes(optimizer: Any, state: Mapping[str, Any]) -> None:
    """Undo torch's rounding of a state that has just been loaded.

    ``torch.optim.Optimizer.load_state_dict`` converts everything but ``step`` to the dtype of its parameter: the fp32 copies and moments that
    mixed-precision optimizers keep of bfloat16 parameters would lose their low bits, and counts and codes would become floats. A class that loads
    its state itself is left alone.

    Args:
        optimizer: or a wrapper of one.
        state: what it has loaded; its tensors are taken over where they are on the parameter's device.
    """
    inner = unwrapped(optimizer)
    loads = getattr(type(inner), "load_state_dict", None)
    if loads is not torch.optim.Optimizer.load_state_dict or inner._optimizer_load_state_dict_pre_hooks:
        return
    names = [name for group in state["param_groups"] for name in group["params"]]
    parameters = [parameter for group in inner.param_groups for parameter in group["params"]]
    for name, parameter in zip(names, parameters, strict=True):
        entries = state["state"].get(name)
        if isinstance(entries, dict) and parameter in inner.state:
            inner.state[parameter] = _as_stored(entries, inner.state[parameter])


def _as_stored(stored: Any, live: Any) -> Any:
    if isinstance(stored, torch.Tensor) and isinstance(live, torch.Tensor):
        return live if live.dtype is stored.dtype else stored.to(device=live.device)
    if isinstance(stored, dict) and isinstance(live, dict) and stored.keys() == live.keys():
        return {key: _as_stored(value, live[key]) for key, value in stored.items()}
    if isinstance(stored, (list, tuple)) and isinstance(live, (list, tuple)) and len(stored) == len(live):
        return type(stored)(_as_stored(*pair) for pair in zip(stored, live, strict=True))
    return live
