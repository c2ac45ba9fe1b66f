"""Looks through wrappers that have no state of their own: of optimizers, as accelerate's ``AcceleratedOptimizer``, and of modules, as
``torch.compile``'s.

A wrapper decides when an optimizer makes a step (gradient accumulation, a gradient scaler), or how a module is called; only what is inside
determines the state.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

__all__ = [
    "named_buffers",
    "named_parameters",
    "optimizers_in",
    "own_names",
    "parameters_of",
    "plain_names",
    "scheduler_in",
    "unwrapped",
]

_DEEPEST = 8
_MANY = 64  # a longer list or dict of an optimizer's is one of tensors
_INSIDE = {  # the child that a wrapper's class puts into the names of parameters
    "OptimizedModule": "_orig_mod",
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "CheckpointWrapper": "_checkpoint_wrapped_module",
    "_FabricModule": "_original_module",
}


@contextmanager
def plain_names(module: nn.Module) -> Iterator[nn.Module]:
    """Inside the block, parts of a module have the names that they have without wrappers such as ``torch.compile``'s or DDP's.

    A training may be compiled at one start and not at the next: names in checkpoints are these. What is no such wrapper and has a child
    that is called ``module`` keeps its name.

    Args:
        module: that is not called inside the block; its wrappers are taken out of it, and put back afterwards.

    Returns:
        The module, or what is inside if it is a wrapper itself.
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
    """As the module's own method, with `plain_names`."""
    with plain_names(module) as inner:
        return list(inner.named_parameters(remove_duplicate=remove_duplicate))


def named_buffers(module: nn.Module, *, remove_duplicate: bool = True) -> list[tuple[str, torch.Tensor]]:
    """As the module's own method, with `plain_names`."""
    with plain_names(module) as inner:
        return list(inner.named_buffers(remove_duplicate=remove_duplicate))


def own_names(module: nn.Module) -> dict[str, str]:
    """The module's own names of entries of its ``state_dict()``, by those that they have with `plain_names`, where these are others."""
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
    """Return the innermost optimizer whose parameter groups and state are this one's.

    A wrapper has an attribute ``optimizer``, and its parameter groups, and its state where it has one, are that one's own
    objects. Lookahead and SAM, which keep tensors of their own, are no wrappers in
    this sense.

    Args:
        optimizer: anything with parameter groups; returned unchanged if it wraps nothing.
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
    """An object itself, or what accelerate's wrapper has inside, if that is one of torch's learning rate schedulers; else None."""
    inner = given if isinstance(given, LRScheduler) else getattr(given, "scheduler", None)
    return inner if isinstance(inner, LRScheduler) else None


def optimizers_in(optimizer: Any) -> list[Any]:
    """The optimizers inside a wrapper or a container of some, outermost first; those with no others inside: themselves.

    Args:
        optimizer: anything with ``state_dict``.
    """
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
