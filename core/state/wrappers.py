"""Optimizers inside of wrappers that hold no state of their own, as accelerate's ``AcceleratedOptimizer``.

A wrapper decides when an optimizer makes a step (gradient accumulation, a gradient scaler); what the optimizer is, and what a
step does, only the wrapped one tells.
"""

from typing import Any

from torch.optim import Optimizer

__all__ = ["unwrapped"]

_DEEPEST = 8


def unwrapped(optimizer: Any) -> Any:
    """The innermost optimizer whose parameter groups and state are this one's.

    A wrapper has an attribute ``optimizer``, and its parameter groups, and its state where it has one, are that one's own
    objects. Lookahead and SAM, which keep tensors beside those of the optimizer that they wrap, are no wrappers in this sense.

    Args:
        optimizer: anything with parameter groups; returned as it is where it wraps nothing.
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
