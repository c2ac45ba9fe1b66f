"""Faults at single system calls of a process whose store writes from several threads, which strace counts one by one.

The module ``os`` of the folder store is stood in for: what changes files is counted over all threads, and at one of these calls
the process is killed, or from it on calls of one name fail.
"""

import errno
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shrinkpoint.store import local

__all__ = ["InjectedCalls", "inject"]

_COUNTED = ("open", "write", "fsync", "link", "replace", "unlink", "mkdir")


class InjectedCalls:
    """Stands in for ``os``.

    Args:
        kill_at: Kill this process as it enters the call of this number, counted from 1.
        fail: The name of the calls that fail; None for none.
        fail_from: The number of the first of them, counted as above.
        error: With what, such as ``"ENOSPC"``.
        below: Where; elsewhere they work.
    """

    def __init__(
        self,
        *,
        kill_at: int | None = None,
        fail: str | None = None,
        fail_from: int = 1,
        error: str = "EIO",
        below: str = "/",
    ) -> None:
        self.calls: list[tuple[str, str]] = []
        self._kill_at, self._fail, self._fail_from = kill_at, fail, fail_from
        self._error, self._below = getattr(errno, error), below
        self._paths: dict[int, str] = {}
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        if name not in _COUNTED:
            return real

        def call(first: Any, *rest: Any) -> Any:
            path = self._paths.get(first, "") if isinstance(first, int) else os.fspath(first)
            if name != "open" or rest[0] & os.O_CREAT:
                self._enter(name, path)
            result = real(first, *rest)
            if name == "open":
                self._paths[result] = path
            return result

        return call

    def _enter(self, name: str, path: str) -> None:
        with self._lock:
            self.calls.append((name, path))
            number = len(self.calls)
            if number == self._kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
        if name == self._fail and number >= self._fail_from and Path(path).is_relative_to(self._below):
            raise OSError(self._error, os.strerror(self._error))


def inject(**how: Any) -> tuple[InjectedCalls, Callable[[], None]]:
    """From now on; the second is to end it."""
    injected, real = InjectedCalls(**how), local.os
    local.os = injected  # type: ignore[assignment]
    return injected, lambda: setattr(local, "os", real)
