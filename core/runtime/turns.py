"""Lets several threads call an object's methods one after another."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from shrinkpoint.errors import ConfigError

__all__ = ["Turns"]


class Turns:
    """Calls of different threads wait for each other; one from within another of the same thread, which would wait for itself, is refused."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner: int | None = None
        self._call = ""

    @contextmanager
    def turn(self, call: str, timeout_s: float | None = None) -> Iterator[bool]:
        """Inside the block no other thread is in a block.

        Args:
            call: the method's name, for the message.
            timeout_s: seconds to wait for other threads at most; None: as long as they take.

        Returns:
            Whether the turn has come; False after `timeout_s` seconds.

        Raises:
            ConfigError: this thread is in a block already.
        """
        me = threading.get_ident()
        if self._owner == me:
            raise ConfigError(
                f"{call} was called within {self._call}, by a function that this calls (evaluate=, say) or by a signal handler: call it"
                " between two training steps"
            )
        if timeout_s is None:
            with self._lock:  # not acquire(): between that and a `try`, Ctrl-C would leave the lock taken
                yield from self._owned(me, call)
        elif self._lock.acquire(timeout=max(timeout_s, 0.0)):
            try:
                yield from self._owned(me, call)
            finally:
                self._lock.release()
        else:
            yield False

    def _owned(self, me: int, call: str) -> Iterator[bool]:
        try:
            self._owner, self._call = me, call
            yield True
        finally:
            self._owner = None
