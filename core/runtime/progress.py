"""Shows what the caller waits for, once that takes longer than two seconds.

On a terminal it is a line on stderr that is gone afterwards, elsewhere one line in Python's log, of level INFO, or on stderr if
the program has set up no log of that level. There is no output if the environment has ``SHRINKPOINT_QUIET``, or the logger ``shrinkpoint`` a level above INFO.
"""

import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

_AFTER_S = 2.0
_QUIET = "SHRINKPOINT_QUIET"
_log = logging.getLogger("shrinkpoint.runtime.progress")
_hushed = threading.Event()


class Waiting:
    """One progress line; made by `waiting_for`."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._since = time.monotonic()
        self._lock = threading.Lock()
        self._over = False
        self._shown: tuple[Progress, TaskID] | None = None

    def say(self, text: str) -> None:
        """Change the text."""
        with self._lock:
            self._text = text
            if self._shown is not None:
                progress, task = self._shown
                progress.update(task, description=text)

    def begin(self) -> None:
        """Show the line; called after two seconds."""
        with self._lock:
            if self._over or is_quiet():
                return
            if not sys.stderr.isatty():
                say(f"{self._text} ...")  # else a batch job's output would stand still without a reason
                return
            self._shown = _line(self._text, self._since)

    def end(self) -> None:
        """Remove the line."""
        with self._lock:
            self._over = True
            if self._shown is not None:
                self._shown[0].stop()
                self._shown = None


def is_quiet() -> bool:
    """Return whether progress output is turned off."""
    return (
        _hushed.is_set()
        or bool(os.environ.get(_QUIET))
        or logging.getLogger("shrinkpoint").level > logging.INFO
    )


def say(text: str) -> None:
    """Write one line, unless progress output is turned off: to Python's log, or to stderr where that would drop it."""
    if is_quiet():
        return
    if _log.hasHandlers() and _log.isEnabledFor(logging.INFO):
        _log.info("%s", text)
    else:
        print(f"shrinkpoint: {text}", file=sys.stderr, flush=True)


@contextmanager
def quieted(wanted: bool) -> Iterator[None]:
    """Turn progress output off inside the block, if `wanted`."""
    before = _hushed.is_set()
    if wanted:
        _hushed.set()
    try:
        yield
    finally:
        if not before:
            _hushed.clear()


@contextmanager
def waiting_for(text: str) -> Iterator[Waiting]:
    """Show a progress line for the block, if it takes longer than two seconds.

    Args:
        text: what, as in "resuming from step 300".
    """
    waiting = Waiting(text)
    timer = threading.Timer(_AFTER_S, waiting.begin)
    timer.daemon = True
    with suppress(RuntimeError):  # no thread can be started while the interpreter exits
        timer.start()
    try:
        yield waiting
    finally:
        timer.cancel()
        waiting.end()


def _line(text: str, since: float) -> "tuple[Progress, TaskID]":
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    progress = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
        get_time=time.monotonic,
    )
    task = progress.add_task(text, total=None)
    progress.tasks[0].start_time = since
    progress.start()
    return progress, task
