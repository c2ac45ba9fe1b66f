"""Gives objects of a training, such as schedulers and loaders, their state back."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from shrinkpoint.errors import CannotRepresentError
from shrinkpoint.state.wrappers import optimizers_in, parameters_of, plain_names, unwrapped

__all__ = [
    "forget_position",
    "load_optimizer",
    "load_stateful",
    "optimizer_states",
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
    if getattr(value, "world_size", 0) == 1 and hasattr(value, "consolidate_state_dict"):
        value.consolidate_state_dict()  # torch's ZeroRedundancyOptimizer, in one process
    try:
        state = value.state_dict()
    except (AttributeError, KeyError, NotImplementedError, RuntimeError, TypeError) as error:
        kind = type(value)
        raise CannotRepresentError(
            f"the state of the {kind.__module__}.{kind.__qualname__} cannot be saved, since its state_dict() fails with"
            f" {type(error).__name__}: {error}. Use another one, or an ordinary optimizer in each process"
        ) from error
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


def parts_of(state: Any, optimizer: Any) -> list[tuple[Mapping[str, Any], Any]]:
    """The states in the form of ``torch.optim.Optimizer`` in an optimizer's state, and the optimizers that have them.

    Args:
        state: an optimizer's, or of one that has others inside, as Lookahead and containers.
        optimizer: that it is of.

    Returns:
        Pairs; none where it is not clear which belong together.
    """
    states = list(optimizer_states(state))
    if len(states) == 1 and states[0] is state:
        return [(state, optimizer)]
    inner = [one for one in optimizers_in(optimizer) if one is not optimizer]
    fits = len(states) == len(inner) and all(map(_same_sizes, states, inner))
    return list(zip(states, inner, strict=True)) if fits else []


def optimizer_states(node: Any) -> Iterator[Mapping[str, Any]]:
    """Yield every ``state_dict`` of an optimizer below, in order."""
    if isinstance(node, Mapping):
        if isinstance(node.get("param_groups"), list) and isinstance(node.get("state"), Mapping):
            yield node
        else:
            for child in node.values():
                yield from optimizer_states(child)
    elif isinstance(node, (list, tuple)):
        for child in node:
            yield from optimizer_states(child)


def _same_sizes(state: Mapping[str, Any], optimizer: Any) -> bool:
    there, here = (
        [len(group["params"]) for group in groups]
        for groups in (state["param_groups"], optimizer.param_groups)
    )
    return there == here


def load_optimizer(optimizer: Any, state: Mapping[str, Any], *, same_dtypes: bool) -> None:
    """Load an optimizer's state as it was saved.

    Args:
        optimizer: or a wrapper of one.
        state: what ``state_dict`` gave.
        same_dtypes: whether the parameters have the dtypes that they had when it was saved; else torch converts it to theirs.
    """
    optimizer.load_state_dict(state)
    for part, inner in parts_of(state, optimizer) if same_dtypes else ():
        put_back_dtypes(inner, part)


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
    parameters = parameters_of(inner)
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
