"""Finds the optimizer inside wrappers that have no state of their own, such as accelerate's ``AcceleratedOptimizer``.

A wrapper decides when an optimizer makes a step (gradient accumulation, a gradient scaler); only the wrapped optimizer
determines what a step does.
"""

from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

__all__ = ["scheduler_in", "unwrapped"]

_DEEPEST = 8


def unwrapped(optimizer: Any) -> Any:
    """The innermost optimizer whose parameter groups and state are this one's.

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
