"""The processes that train together. A process that trains by itself is a group of one.

Methods that communicate are collectives of the training thread: every rank calls them, in the same order. A process group
that two threads use at once aborts the process, so background threads have a `shrinkpoint.group.mailbox.Mailbox`.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cached_property
from itertools import count
from typing import TypeVar

import torch
import torch.distributed as dist

import shrinkpoint.errors as errors

T = TypeVar("T")

_AWAITS_S = 600.0
_meetings = count()


def attempt(action: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """Return an action's result, or its error for the caller to raise once the other ranks know."""
    try:
        return action(), None
    except errors.LostRankError:  # a further collective might wait for a rank that waits for this one
        raise
    except Exception as error:  # noqa: BLE001 - see above
        return None, error


class Group(ABC):
    """Processes that train together, numbered from 0."""

    rank: int
    """Of this process."""
    size: int
    """How many they are."""

    @property
    def is_first(self) -> bool:
        """Whether this is the process that decides for all."""
        return self.rank == 0

    @abstractmethod
    def gather(self, value: T) -> list[T]:
        """Give every rank the values of all, in their order."""

    @abstractmethod
    def gather_first(self, value: T) -> list[T]:
        """Give the first rank the values of all, and the others nothing; for what is large."""

    @abstractmethod
    def broadcast(self, value: T) -> T:
        """Give every rank the first one's value."""

    @abstractmethod
    def most(self, numbers: Sequence[int]) -> list[int]:
        """Give the greatest of each number over all ranks; a few bytes."""

    def any_of(self, *flags: bool) -> list[bool]:
        """Say for each flag whether any rank has it."""
        return [bool(number) for number in self.most(flags)]

    def on_first(self, action: Callable[[], T]) -> T:
        """Run something on the first rank, and give every rank its result.

        Args:
            action: must not communicate with other ranks.

        Raises:
            Exception: what `action` raised; as `raise_together` on the other ranks.
        """
        result, error = attempt(action) if self.is_first else (None, None)
        named, result = self.broadcast((_named(error), result))
        if error is not None:
            raise error
        if named is not None:
            raise rebuilt(*named, rank=0)
        return result  # type: ignore[return-value]  # there was no error

    def on_every(self, action: Callable[[], T]) -> T:
        """Run something on every rank; if it fails on one of them, every rank raises.

        Where it succeeds on all, eight bytes of each are all that is exchanged.

        Args:
            action: must not communicate with other ranks.

        Raises:
            Exception: as `raise_together`.
        """
        result, error = attempt(action)
        if self.most([error is not None])[0]:
            self.raise_together(error)
        return result  # type: ignore[return-value]  # there was no error

    def raise_together(self, error: Exception | None) -> None:
        """Raise on every rank if one of them has an error.

        Raises:
            Exception: `error`, where there is one; elsewhere the lowest rank's, as one of the same class where that is the
                project's own, and as a `ShrinkpointError` where it is not.
        """
        if isinstance(error, errors.LostRankError):
            raise error
        failures = self.gather(_named(error))
        if error is not None:
            raise error
        for rank, named in enumerate(failures):
            if named is not None:
                raise rebuilt(*named, rank=rank)


class Alone(Group):
    """A process that trains by itself."""

    rank, size = 0, 1

    def gather(self, value: T) -> list[T]:
        """See `Group.gather`."""
        return [value]

    gather_first = gather

    def broadcast(self, value: T) -> T:
        """See `Group.broadcast`."""
        return value

    def most(self, numbers: Sequence[int]) -> list[int]:
        """See `Group.most`."""
        return list(numbers)


@contextmanager
def connected() -> Iterator[None]:
    """Raise the failure of a collective as a `LostRankError`: that of the process group, and no rank's own."""
    try:
        yield
    except RuntimeError as error:
        raise errors.LostRankError(
            f"the processes of this training do not reach each other any more, as where one has ended: {str(error).splitlines()[0][:200]}"
        ) from error


class Distributed(Group):
    """The processes of a process group of ``torch.distributed``.

    Args:
        process_group: None is the default one.
    """

    def __init__(self, process_group: "dist.ProcessGroup | None" = None) -> None:
        self.process_group = process_group
        self.rank = dist.get_rank(process_group)
        self.size = dist.get_world_size(process_group)

    @cached_property
    def device(self) -> torch.device:
        """On which tensors are exchanged."""
        if "gloo" not in str(dist.get_backend(self.process_group)) and torch.cuda.is_available():
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")

    def gather(self, value: T) -> list[T]:
        """See `Group.gather`."""
        values: list[T | None] = [None] * self.size
        with connected():
            dist.all_gather_object(values, value, group=self.process_group)
        return values  # type: ignore[return-value]  # all are filled

    def gather_first(self, value: T) -> list[T]:
        """See `Group.gather_first`."""
        values: list[T] | None = [value] * self.size if self.is_first else None
        with connected():
            dist.gather_object(value, values, dst=0, group=self.process_group)
        return values or []

    def broadcast(self, value: T) -> T:
        """See `Group.broadcast`."""
        values = [value]
        with connected():
            dist.broadcast_object_list(values, src=0, group=self.process_group)
        return values[0]

    def most(self, numbers: Sequence[int]) -> list[int]:
        """See `Group.most`."""
        tensor = torch.tensor(numbers, dtype=torch.int64, device=self.device)
        with connected():
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self.process_group)
        return [int(number) for number in tensor.tolist()]


def world(process_group: "dist.ProcessGroup | None" = None) -> Group:
    """Give all processes that train together; this one alone where ``torch.distributed`` is not initialized.

    Args:
        process_group: as of `Distributed`.
    """
    together = dist.is_available() and dist.is_initialized() and dist.get_world_size(process_group) > 1
    return Distributed(process_group) if together else Alone()


def is_first_of_node(rank: int) -> bool:
    """Say whether this process is the first of its node, as torchrun and trainers number them; else the first one of all.

    Args:
        rank: of this process.
    """
    return os.environ.get("LOCAL_RANK", str(rank)) == "0"


def _named(error: Exception | None) -> tuple[str, str] | None:
    return None if error is None else (type(error).__name__, str(error))


def rebuilt(kind: str, message: str, *, rank: int) -> Exception:
    """Give an error of another rank, of the project's own class if it was one of these."""
    found = getattr(errors, kind, None)
    own = isinstance(found, type) and issubclass(found, errors.ShrinkpointError)
    text = f"on rank {rank}: {message}" if own else f"on rank {rank}: {kind}: {message}"
    return found(text) if own and found is not None else errors.ShrinkpointError(text)


def await_all(rule: str) -> None:
    """Wait until every process has come here as often as this one, without a collective, which training's own might meet.

    Args:
        rule: who comes here, for messages.

    Raises:
        ConfigError: not all have come in ten minutes.
    """
    group, number = world(), next(_meetings)
    if group.size == 1:
        return
    store = dist.distributed_c10d._get_default_store()
    store.set(f"shrinkpoint/{number}/{group.rank}", "here")
    keys = [f"shrinkpoint/{number}/{rank}" for rank in range(group.size)]
    try:
        store.wait(keys, timedelta(seconds=_AWAITS_S))
    except RuntimeError as error:
        raise errors.ConfigError(f"{rule}: in {_AWAITS_S:.0f} s not all of the {group.size} did") from error
