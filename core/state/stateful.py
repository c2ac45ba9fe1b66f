"""The objects of a training: what is inside wrappers that have no state of their own, and how an object's state is taken and given back.

A wrapper decides when an optimizer makes a step (accelerate's ``AcceleratedOptimizer``, a gradient scaler), or how a module is called
(``torch.compile``'s); only what is inside determines the state.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._pytree import tree_map

from shrinkpoint.errors import CannotRepresentError, StateMismatchError

_DEEPEST = 8
_MANY = 64  # a longer list or dict of an optimizer's is one of tensors
_INSIDE = {  # the child that a wrapper's class puts into the names of parameters
    "OptimizedModule": "_orig_mod",
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "CheckpointWrapper": "_checkpoint_wrapped_module",
    "_FabricModule": "_original_module",
}
_FUNCTIONS = ("anneal_func", "_anneal_func")


@contextmanager
def plain_names(module: nn.Module) -> Iterator[nn.Module]:
    """Inside the block, parts of a module have the names that they have without wrappers such as ``torch.compile``'s
    or DDP's.

    A training may be compiled at one start and not at the next: names in checkpoints are these. What is no such
    wrapper and has a child that is called ``module`` keeps its name. The module is not called inside the block: its
    wrappers are taken out of it, and put back afterwards. It is what is inside, if it is a wrapper itself.
    """
    with ExitStack() as stack:
        for parent in module.modules():
            for name, child in parent._modules.items():
                inner = child if child is None else _inside(child)
                if inner is not child:
                    stack.callback(parent._modules.__setitem__, name, child)
                    parent._modules[name] = inner
        yield _inside(module)


def named_parameters(module: nn.Module, *, remove_duplicate: bool = True) -> list[tuple[str, nn.Parameter]]:
    """Return what the module's own method gives, with `plain_names`."""
    with plain_names(module) as inner:
        return list(inner.named_parameters(remove_duplicate=remove_duplicate))


def named_modules(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return what the module's own method gives, with `plain_names`."""
    with plain_names(module) as inner:
        return list(inner.named_modules())


def named_buffers(module: nn.Module, *, remove_duplicate: bool = True) -> list[tuple[str, torch.Tensor]]:
    """Return what the module's own method gives, with `plain_names`."""
    with plain_names(module) as inner:
        return list(inner.named_buffers(remove_duplicate=remove_duplicate))


def own_names(module: nn.Module) -> dict[str, str]:
    """Return a module's own names of its ``state_dict()``'s entries, by those with `plain_names`, where these differ."""
    if all(_inside(part) is part for part in module.modules()):
        return {}
    with plain_names(module) as inner:
        plain = list(inner.state_dict())
    names = zip(plain, module.state_dict(), strict=True)
    return {name: own for name, own in names if own != name}


def _inside(module: nn.Module) -> nn.Module:
    for kind in type(module).__mro__:
        if (
            (name := _INSIDE.get(kind.__name__)) is not None
            and not module._parameters
            and not module._buffers
        ):
            inner = name in module._modules and module._modules[name]  # a scripted module's have no get()
            return _inside(inner) if isinstance(inner, nn.Module) else module
    return module


def parameters_of(optimizer: Optimizer) -> list[Any]:
    """Return all parameters of an optimizer, in the groups' order."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def unwrapped(optimizer: Any) -> Any:
    """Return the innermost optimizer whose parameter groups and state are this one's; itself, if it wraps nothing.

    A wrapper has an attribute ``optimizer``, and its parameter groups, and its state where it has one, are that one's
    own objects. Lookahead and SAM, which keep tensors of their own, are no wrappers in this sense.
    """
    found = optimizer
    for _ in range(_DEEPEST):
        inner = getattr(found, "optimizer", None)
        if not isinstance(inner, Optimizer) or inner is found:
            break
        same_groups = getattr(found, "param_groups", None) is inner.param_groups
        if not (same_groups and getattr(found, "state", inner.state) is inner.state):
            break
        found = inner
    return found


def scheduler_in(given: Any) -> LRScheduler | None:
    """Return an object itself, or what accelerate's wrapper has inside, if that is one of torch's learning rate schedulers; else None."""
    inner = given if isinstance(given, LRScheduler) else getattr(given, "scheduler", None)
    return inner if isinstance(inner, LRScheduler) else None


def optimizers_in(optimizer: Any) -> list[Any]:
    """Return the optimizers inside a wrapper or a container of some, outermost first; those with no others inside: themselves."""
    found: dict[int, Any] = {}
    waiting = [optimizer]
    while waiting:
        value = waiting.pop(0)
        if isinstance(value, (list, tuple, dict)):
            items = value.values() if isinstance(value, dict) else value
            waiting += items if len(value) <= _MANY else ()
        elif value is optimizer or (isinstance(value, Optimizer) and id(value) not in found):
            if isinstance(getattr(value, "state", None), dict) and hasattr(value, "param_groups"):
                found[id(value)] = value
            own = vars(value).items() if hasattr(value, "__dict__") else ()
            waiting += [item for name, item in own if name not in ("state", "param_groups", "defaults")]
    return list(found.values())


def has_state(value: object) -> bool:
    """Return whether an object gives its state, and takes it."""
    return all(callable(getattr(value, name, None)) for name in ("state_dict", "load_state_dict"))


def state_of(value: Any) -> Any:
    """Return an object's ``state_dict``; a scheduler's without the functions of `without_functions`, a module's with
    `plain_names`."""
    if isinstance(value, nn.Module):
        with plain_names(value) as inner:
            return inner.state_dict()
    if getattr(value, "world_size", 0) == 1 and hasattr(value, "consolidate_state_dict"):
        value.consolidate_state_dict()  # torch's ZeroRedundancyOptimizer, in one process
    try:
        state = value.state_dict()
    except Exception as error:
        kind = type(value)
        raise CannotRepresentError(
            f"the state of the {kind.__module__}.{kind.__qualname__} cannot be saved, since its state_dict() fails with"
            f" {type(error).__name__}: {error}. Mend that, or use another one"
        ) from error
    return without_functions(state) if isinstance(value, LRScheduler) else state


def without_functions(state: Any) -> Any:
    """Return schedulers' state without the functions of torch's ``SWALR``: its constructor sets them, and no load does."""
    if type(state) is dict:
        kept = {key: item for key, item in state.items() if key not in _FUNCTIONS or not callable(item)}
        return {key: without_functions(item) for key, item in kept.items()}
    return [without_functions(item) for item in state] if type(state) is list else state


def load_stateful(value: Any, state: Any) -> None:
    """Load an object's state, before the random generators' own is restored.

    A stateful loader that has loaded a position makes its iterator when it is first asked for one, and draws a seed
    for it from torch's generator, which the undisturbed training did at the beginning of the epoch. Asked for its
    state, it makes the iterator here, before the generators are restored, and gives it to the loop.
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


def load_object(name: str, value: Any, state: Any) -> None:
    """Load the state of an object, as of `load_stateful`; a StateMismatchError names it where it does not take it."""
    try:
        load_stateful(value, state)
    except Exception as error:
        kind = type(value)
        raise StateMismatchError(
            f"{name}: {kind.__module__}.{kind.__qualname__}.load_state_dict() does not take its state in the checkpoint"
            f" ({type(error).__name__}: {error}). Build it as the run did, or let it take that form too, and begin again: the model has been"
            " restored. Under another name it is not restored"
        ) from error


def forget_position(loader: Any) -> None:
    """Let torchdata's loader begin at the next epoch's start, if it has not yet taken the position that it has been given."""
    if getattr(loader, "next_iter_state", None) is not None:
        loader.next_iter_state = None


def parts_of(state: Any, optimizer: Any) -> list[tuple[Mapping[str, Any], Any]]:
    """Return pairs of the states in the form of ``torch.optim.Optimizer`` in an optimizer's state, and the optimizers
    that have them.

    One may have others inside, as Lookahead and containers. There are no pairs where it is not clear which belong
    together.
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
    """Load an optimizer's state as it was saved, into it or a wrapper of it.

    Where the parameters have not the same dtypes as then, torch converts the state to theirs.
    """
    loads = getattr(type(unwrapped(optimizer)), "load_state_dict", None)
    if loads is torch.optim.Optimizer.load_state_dict:  # which takes no named tuples
        plain = tree_map(lambda v: tuple(v) if _is_named(v) else v, state, is_leaf=_is_named)
        optimizer.load_state_dict(plain)
    else:
        optimizer.load_state_dict(state)
    for part, inner in parts_of(state, optimizer) if same_dtypes else ():
        put_back_dtypes(inner, part)


def put_back_dtypes(optimizer: Any, state: Mapping[str, Any]) -> None:
    """Undo torch's rounding of a state that has just been loaded, by an optimizer or a wrapper of one.

    ``torch.optim.Optimizer.load_state_dict`` converts everything but ``step`` to the dtype of its parameter: the fp32
    copies and moments that mixed-precision optimizers keep of bfloat16 parameters would lose their low bits, and
    counts and codes would become floats. A class that loads its state itself is left alone. Stored tensors are taken
    over where they are on the parameter's device.
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
        made = [_as_stored(*pair) for pair in zip(stored, live, strict=True)]
        return type(stored)(*made) if _is_named(stored) else type(stored)(made)
    return live


def _is_named(value: Any) -> bool:
    return isinstance(value, tuple) and hasattr(value, "_fields")
