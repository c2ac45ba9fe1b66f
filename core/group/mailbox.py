"""Messages between the ranks' background threads, over a TCPStore that no other part of the training knows."""

import json
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from shrinkpoint.errors import FormatError, StoreError
from shrinkpoint.group.group import Group

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, and not in __all__

T = TypeVar("T")

_JOIN_S = 30.0  # the first rank listens already; torch may try for twice as long
_ANSWER_S = 60.0


class Mailbox:
    """Small JSON messages between the ranks' background threads, over a TCPStore that the first rank serves.

    For the background thread alone: a connection that waits is of no use to another thread.

    Args:
        group: all ranks; the constructor is a collective.

    Raises:
        StoreError: the ranks cannot reach the first one; on every rank.
    """

    def __init__(self, group: Group) -> None:
        self.rank, self.size = group.rank, group.size
        hosts = group.gather(socket.gethostname())
        host = "127.0.0.1" if len(set(hosts)) == 1 else os.environ.get("MASTER_ADDR", hosts[0])
        self._server: TCPStore | None = None

        def serve() -> int:
            if group.rank == 0:
                self._server = _store(host, 0, serves=True)
                return int(self._server.port)
            return 0

        port = group.broadcast(group.on_every(serve))
        self._place = (host, port)
        self._store = group.on_every(lambda: _store(host, port))

    def another(self) -> "Mailbox":
        """Return a further connection, for another thread; it lasts as long as this one.

        Raises:
            StoreError: the first rank cannot be reached.
        """
        other = Mailbox.__new__(Mailbox)
        other.rank, other.size, other._place, other._server = self.rank, self.size, self._place, None
        other._store = _store(*self._place)
        return other

    def post(self, key: str, value: Mapping[str, Any]) -> None:
        """Leave a message for the others.

        Raises:
            StoreError: the first rank is gone.
        """
        self._call(lambda: self._store.set(key, json.dumps(value)), key)

    def wait(self, key: str, timeout_s: float) -> dict[str, Any]:
        """Return a message, as soon as it is there.

        Raises:
            StoreError: it was not there in time, or the first rank is gone.
        """

        def get() -> dict[str, Any]:
            self._store.wait([key], timedelta(seconds=max(timeout_s, 0.001)))
            return dict(json.loads(self._store.get(key)))

        return self._call(get, key)

    def has(self, key: str) -> bool:
        """Return whether there is a message.

        Raises:
            StoreError: the first rank is gone.
        """
        return self._call(lambda: bool(self._store.check([key])), key)  # type: ignore[attr-defined]  # not in torch 2.7's stubs

    def drop(self, keys: Sequence[str]) -> None:
        """Remove messages that all have read, in the background."""
        for key in keys:
            self._call(lambda key=key: self._store.delete_key(key), key)  # type: ignore[misc]

    def collect(self, prefix: str, timeout_s: float) -> list[dict[str, Any]]:
        """Return each rank's message under ``<prefix>/<rank>``; those that are not there in time say so as an ``error``."""
        deadline = time.monotonic() + timeout_s
        found = []
        for rank in range(self.size):
            try:
                found.append(self.wait(f"{prefix}/{rank}", deadline - time.monotonic()))
            except StoreError:
                found.append({"error": f"it has sent nothing within {timeout_s:.0f} s", "late": True})
        return found

    def combine(
        self,
        key: str,
        own: Mapping[str, Any],
        reduce: Callable[[list[dict[str, Any]]], dict[str, Any]],
        *,
        timeout_s: float,
    ) -> dict[str, Any]:
        """Reduce the messages of all ranks to one, which every rank gets; every rank calls it.

        Args:
            key: of the result; each rank's message is at ``<key>/<rank>``. One with an ``error`` stands for a failure.
            own: this rank's message.
            reduce: makes one message of those of all ranks, on the first one.
            timeout_s: seconds that the ranks have for their messages.

        Raises:
            StoreError: a rank has failed, or its message was not there in time; on every rank that calls it.
            FormatError: as `reduce`.
        """
        self.post(f"{key}/{self.rank}", own)
        if self.rank:
            answer = self.wait(key, timeout_s + _ANSWER_S)
            if "error" in answer:
                raise StoreError(answer["error"])
            return answer
        try:
            messages = self.collect(key, timeout_s)
            for message in messages:
                if "error" in message:
                    raise StoreError(f"another rank has failed: {message['error']}")
            result = reduce(messages)
        except (StoreError, FormatError) as error:
            self.post(key, {"error": str(error)})
            raise
        self.post(key, result)
        return result

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
            f"the ranks' messages: {host}:{port} cannot be reached ({str(error).splitlines()[0][:200]}). The first rank has ended, or"
            " MASTER_ADDR is not its address, as torchrun sets it"
        ) from error
