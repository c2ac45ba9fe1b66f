"""Collective helpers for actions on the first process that no other process can be blocked by.

Over ``torch.distributed`` alone: where it is not initialized, a process is alone. Of several processes every one must
call `any_of`, `broadcast`, `gather`, `gather_first`, `on_first`, `on_every`, `raise_together` and `Outcome.share`, in the same order.
"""

from collections.abc import Callable
from typing import Generic, TypeVar

import torch
import torch.distributed as dist

from shrinkpoint.errors import ShrinkpointError
from shrinkpoint.runtime.processes import is_first, rank, world_size
from shrinkpoint.sharded.ranks import Ranks, rebuilt

__all__ = [
    "Outcome",
    "any_of",
    "broadcast",
    "gather",
    "gather_first",
    "is_first",
    "on_every",
    "on_first",
    "raise_together",
    "rank",
    "world_size",
]

T = TypeVar("T")


def broadcast(value: T) -> T:
    """The first rank's `value`, on every rank."""
    return value if world_size() == 1 else Ranks().broadcast(value)


def gather(value: T) -> list[T]:
    """`value` of every rank, in their order, on every rank."""
    return [value] if world_size() == 1 else Ranks().gather(value)


def gather_first(value: T) -> list[T]:
    """`value` of every rank, in their order, on the first rank alone; on the others nothing. For what is large."""
    if world_size() == 1:
        return [value]
    values: list[T] | None = [value] * world_size() if is_first() else None
    dist.gather_object(value, values, dst=0)
    return values if values is not None else []


def any_of(flag: bool, device: torch.device) -> bool:
    """Whether any rank has the `flag`; cheaper than `gather`.

    Args:
        flag: this rank's.
        device: on which the ranks exchange tensors.
    """
    if world_size() == 1:
        return flag
    tensor = torch.tensor([flag], dtype=torch.uint8, device=device)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return bool(tensor.item())


def on_first(action: Callable[[], T]) -> T:
    """Run `action` on the first rank and give its result, or its error, to every rank.

    Raises:
        Exception: on the first rank what `action` raised, on the others as `raise_together`.
    """
    outcome: Outcome[T] = Outcome()
    if is_first():
        outcome.run(action)
    return outcome.share()


def on_every(action: Callable[[], T]) -> T:
    """As `Ranks.on_every`, over all processes."""
    return action() if world_size() == 1 else Ranks().on_every(action)


def raise_together(error: Exception | None) -> None:
    """Raise the first rank's `error`, if it has one, on every rank.

    Raises:
        Exception: on the first rank `error` itself; on the others an error of the same class where it is one of
            shrinkpoint's, or else a `ShrinkpointError`, with the same message.
    """
    named = broadcast((type(error).__name__, str(error)) if error is not None else None)
    if error is not None:
        raise error
    if named is not None:
        raise rebuilt(*named, rank=0)


class Outcome(Generic[T]):
    """The result or error of an action on the first rank, kept until it can be shared with all ranks.

    For actions that run where they must not raise, because the other ranks are waiting at a barrier.
    """

    def __init__(self) -> None:
        self.error: Exception | None = None
        """The exception that the action raised."""
        self._results: list[T] = []

    def __enter__(self) -> "Outcome[T]":
        """Inside the block act here, and `put` the result; an exception ends the block and is kept for `share`."""
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        if not isinstance(error, Exception):
            return False
        self.error = error
        return True

    def put(self, result: T) -> None:
        """Keep the result of the action."""
        self._results = [result]

    def run(self, action: Callable[[], T]) -> None:
        """Run `action` here; its result, or what it raises, is kept for `share`."""
        with self:
            self.put(action())

    def get(self) -> T:
        """The result.

        Raises:
            Exception: what the action raised.
        """
        if self.error is not None:
            raise self.error
        if not self._results:
            raise ShrinkpointError("the action whose result is asked for was never run")
        return self._results[0]

    def share(self) -> T:
        """The first rank's result, on every rank.

        Raises:
            Exception: as `raise_together`; also where the action was never run on the first rank.
        """
        if is_first() and self.error is None and not self._results:
            self.run(self.get)
        raise_together(self.error if is_first() else None)
        return broadcast(self._results[0] if is_first() else None)  # type: ignore[return-value]
