"""Doing something on the first process of a Lightning run so that no other process waits for ever."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist
from lightning.pytorch.strategies import Strategy

import shrinkpoint.errors as errors

__all__ = ["gather", "on_rank_zero", "raise_together"]

T = TypeVar("T")


def on_rank_zero(strategy: Strategy, action: Callable[[], T]) -> T:
    """Run `action` on global rank 0 and give its result, or its error, to every rank.

    Must be called on every rank.

    Raises:
        Exception: on rank 0 what `action` raised, on the others one with the same message.
    """
    result: T | None = None
    error: Exception | None = None
    if strategy.is_global_zero:
        try:
            result = action()
        except Exception as raised:  # noqa: BLE001 - raised below, on every rank
            error = raised
    raise_together(strategy, error)
    shared: T = strategy.broadcast(result)
    return shared


def raise_together(strategy: Strategy, error: Exception | None) -> None:
    """Raise rank 0's `error`, if it has one, on every rank; must be called on every rank."""
    named = strategy.broadcast((type(error).__name__, str(error)) if error is not None else None)
    if error is not None:
        raise error
    if named is not None:
        kind = getattr(errors, named[0], errors.ShrinkpointError)
        raise kind(f"on the first process: {named[1]}")


def gather(value: Any) -> list[Any]:
    """`value` of every rank, in their order; must be called on every rank."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
