"""What ranks say to each other: collectives on the training thread, and a store of our own for background threads.

A process group that two threads use at once aborts the process. Background threads therefore use a TCPStore alone, which
no other part of the training knows.
"""

import json
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

import shrinkpoint.errors as errors
from shrinkpoint.errors import StoreError

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, and not in __all__

__all__ = ["Mailbox", "Ranks", "rebuilt"]

T = TypeVar("T")

_JOIN_S = 120.0


class Ranks:
    """All ranks of a training. Every method is a collective, for the training thread: each rank calls it.

    Args:
        group: a process group with all ranks; None is the default one.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.world = dist.get_world_size(group)
        backend = str(dist.get_backend(group))
        self.device = torch.device("cpu")
        """On which tensors are exchanged."""
        if "gloo" not in backend and torch.cuda.is_available():
            self.device = torch.device("cuda", torch.cuda.current_device())

    def gather(self, value: T) -> list[T]:
        """Each rank's value, on every rank."""
        values: list[T | None] = [None] * self.world
        dist.all_gather_object(values, value, group=self.group)
        return values  # type: ignore[return-value]  # all are filled

    def broadcast(self, value: T | None) -> T:
        """The first rank's value, on every rank."""
        values = [value]
        dist.broadcast_object_list(values, src=0, group=self.group)
        return values[0]  # type: ignore[return-value]  # the first rank's own

    def most(self, numbers: Sequence[int]) -> list[int]:
        """The greatest of each number over all ranks; a few bytes."""
        tensor = torch.tensor(numbers, dtype=torch.int64, device=self.device)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self.group)
        return [int(number) for number in tensor.tolist()]

    def on_every(self, action: Callable[[], T]) -> T:
        """Run something on every rank; if it fails on one of them, every rank raises.

        Where it succeeds on all, eight bytes of each are all that is exchanged.

        Args:
            action: must not communicate with other ranks.

        Raises:
            Exception: where `action` failed, its error; elsewhere one of the same class with its message.
        """
        own, result = None, None
        try:
            result = action()
        except Exception as error:  # noqa: BLE001 - raised below, when the others know
            own = error
        if not self.most([own is not None])[0]:
            return result  # type: ignore[return-value]  # there was no error
        failures = self.gather(None if own is None else (type(own).__name__, str(own)))
        if own is not None:
            raise own
        for rank, named in enumerate(failures):
            if named is not None:
                raise rebuilt(*named, rank=rank)
        raise AssertionError("a rank has failed, and none says why")


def rebuilt(kind: str, message: str, *, rank: int) -> Exception:
    """An error of another rank, of the project's own class if it was one of these."""
    found = getattr(errors, kind, None)
    own = isinstance(found, type) and issubclass(found, errors.ShrinkpointError)
    text = f"on rank {rank}: {message}" if own else f"on rank {rank}: {kind}: {message}"
    return found(text) if own and found is not None else errors.ShrinkpointError(text)


class Mailbox:
    """Small JSON messages between the ranks' background threads, over a TCPStore that the first rank serves.

    For the background thread alone: a connection that waits is of no use to another thread.

    Args:
        ranks: all of them; the constructor is a collective.

    Raises:
        StoreError: the ranks cannot reach the first one; on every rank.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.rank, self.world = ranks.rank, ranks.world
        hosts = ranks.gather(socket.gethostname())
        host = "127.0.0.1" if len(set(hosts)) == 1 else os.environ.get("MASTER_ADDR", hosts[0])
        self._server: TCPStore | None = None

        def serve() -> int:
            if ranks.rank == 0:
                self._server = _store(host, 0, serves=True)
                return int(self._server.port)
            return 0

        port = ranks.broadcast(ranks.on_every(serve))
        self._place = (host, port)
        self._store = ranks.on_every(lambda: _store(host, port))

    def another(self) -> "Mailbox":
        """A further connection, for another thread; it lasts as long as this one.

        Raises:
            StoreError: the first rank cannot be reached.
        """
        other = Mailbox.__new__(Mailbox)
        other.rank, other.world, other._place, other._server = self.rank, self.world, self._place, None
        other._store = _store(*self._place)
        return other

    def post(self, key: str, value: Mapping[str, Any]) -> None:
        """Leave a message for the others.

        Raises:
            StoreError: the first rank is gone.
        """
        self._call(lambda: self._store.set(key, json.dumps(value)), key)

    def wait(self, key: str, timeout_s: float) -> dict[str, Any]:
        """A message, as soon as it is there.

        Raises:
            StoreError: it was not there in time, or the first rank is gone.
        """

        def get() -> dict[str, Any]:
            self._store.wait([key], timedelta(seconds=max(timeout_s, 0.001)))
            return dict(json.loads(self._store.get(key)))

        return self._call(get, key)

    def has(self, key: str) -> bool:
        """Whether there is a message.

        Raises:
            StoreError: the first rank is gone.
        """
        return self._call(lambda: bool(self._store.check([key])), key)  # type: ignore[attr-defined]  # not in torch 2.7's stubs

    def drop(self, keys: Sequence[str]) -> None:
        """Remove messages that all have read, in the background."""
        for key in keys:
            self._call(lambda key=key: self._store.delete_key(key), key)  # type: ignore[misc]

    def collect(self, prefix: str, timeout_s: float) -> list[dict[str, Any]]:
        """Each rank's message under ``<prefix>/<rank>``; those that are not there in time say so as an ``error``."""
        deadline = time.monotonic() + timeout_s
        found = []
        for rank in range(self.world):
            try:
                found.append(self.wait(f"{prefix}/{rank}", deadline - time.monotonic()))
            except StoreError:
                found.append({"error": f"it has not stored its part within {timeout_s:.0f} s", "late": True})
        return found

    def _call(self, action: Callable[[], T], key: str) -> T:
        try:
            return action()
        except (RuntimeError, ValueError) as error:  # torch's DistError is a RuntimeError
            raise StoreError(f"the ranks' messages ({key}): {str(error).splitlines()[0][:200]}") from error


def _store(host: str, port: int, *, serves: bool = False) -> "TCPStore":
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, and not in __all__

    try:
        return TCPStore(
            host, port, is_master=serves, wait_for_workers=False, timeout=timedelta(seconds=_JOIN_S)
        )
    except RuntimeError as error:
        raise StoreError(
            f"the ranks' messages: {host}:{port} cannot be reached ({str(error).splitlines()[0][:200]}). Set MASTER_ADDR to the"
            " first rank's address, as torchrun does"
        ) from error
