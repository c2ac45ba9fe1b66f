"""Lets several threads call an object's methods one after another."""

import threading
import time
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

from shrinkpoint.errors import ConfigError

__all__ = ["Turns", "in_turn"]

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")

_LOOK_EVERY_S = 0.005


class Turns:
    """Calls of different threads wait for each other; one from within another of the same thread, which would wait for itself, is
    refused.

    Ctrl-C and other signals' handlers may come at any place, and call methods themselves. So the lock is taken and left by a ``with``
    of its own, which nothing can come in between, and never by `acquire` or a context manager in Python; and a thread that has it may take
    it again, as a handler does that comes before or after the call proper: it is then as if it had come before or after the call.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._inside: tuple[int, str] | None = None
        """Which thread is in which call."""

    def take(self, call: str, function: Callable[[], T]) -> T:
        """Call a function while no other thread is in one.

        Args:
            call: the method's name, for the message.
            function: what it does.

        Raises:
            ConfigError: this thread is in a call already.
        """
        me = threading.get_ident(), call
        with self._lock:
            self.refuse(call)
            try:
                self._inside = me
                return function()
            finally:
                self._inside = None

    def take_within(self, timeout_s: float, call: str, function: Callable[[], T]) -> T | None:
        """Return the same, if other threads' calls end in time.

        Args:
            timeout_s: seconds to wait for them at most.
            call: as of `take`.
            function: as of `take`.

        Returns:
            None where they did not.

        Raises:
            ConfigError: as `take`.
        """
        self.refuse(call)
        deadline = time.monotonic() + timeout_s
        while self._inside is not None:
            if time.monotonic() >= deadline:
                return None
            time.sleep(_LOOK_EVERY_S)
        return self.take(call, function)

    def refuse(self, call: str) -> None:
        """Raise where this thread is in a call already.

        Args:
            call: as of `take`.

        Raises:
            ConfigError: it is.
        """
        inside = self._inside
        if inside is not None and inside[0] == threading.get_ident():
            raise ConfigError(
                f"{call} was called within {inside[1]}, by a function that this calls (evaluate=, say) or by a signal handler: call it"
                " between two training steps"
            )


def in_turn(method: F) -> F:
    """Make a method one of those of an object's `Turns`, its attribute ``_turns``, that wait for each other."""

    @wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self._turns.take(method.__name__, lambda: method(self, *args, **kwargs))

    return cast("F", call)
