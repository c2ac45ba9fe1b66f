"""A progress bar for a replay, on terminals only."""

import sys
import time
from types import TracebackType
from typing import Any

__all__ = ["ReplayBar"]

_AFTER_S = 2.0


class ReplayBar:
    """Drawn on stderr where that is a terminal, and only for replays that take more than two seconds."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._bar: Any = None
        self._task: Any = None

    def __call__(self, done: int, of: int) -> None:
        """Show how many of the segments are replayed."""
        if self._bar is None:
            if not sys.stderr.isatty() or time.monotonic() - self._began < _AFTER_S:
                return
            from rich.console import Console
            from rich.progress import Progress

            self._bar = Progress(console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task("replaying logged steps", total=of)
            self._bar.start()
        self._bar.update(self._task, completed=done, total=of)

    def __enter__(self) -> "ReplayBar":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
