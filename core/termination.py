"""A request to end the process, kept until training has come to a place at which it can be saved."""

import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import FrameType
from typing import Any

__all__ = ["TerminationRequest"]

_ONE_WISH_S = 1.0
"""Within it, further signals mean the same: a launcher that gets a Ctrl-C sends a SIGTERM after it."""


class TerminationRequest:
    """Notes a SIGTERM or Ctrl-C instead of dying of it, between `watch` and `unwatch`; a second one ends the process at once.

    Args:
        signals: which ones.
        clock: seconds; never goes back.
    """

    def __init__(
        self,
        signals: Sequence[signal.Signals] = (signal.SIGTERM, signal.SIGINT),
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._signals = signals
        self._clock = clock
        self._received: tuple[int, float] | None = None
        self._previous: dict[int, Any] = {}

    @property
    def received(self) -> bool:
        """Whether the process has been asked to end."""
        return self._received is not None

    def watch(self) -> None:
        """Take the signals over, but those that are ignored; does nothing outside the main thread, where Python forbids it."""
        if self._previous or threading.current_thread() is not threading.main_thread():
            return
        self._received = None
        for number in self._signals:
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._previous[number] = signal.signal(number, self._note)

    def unwatch(self) -> None:
        """Give the signals back to whoever had them before."""
        if not self._previous or threading.current_thread() is not threading.main_thread():
            return
        for number, previous in self._previous.items():
            if signal.getsignal(number) == self._note:  # somebody may have taken it over meanwhile
                signal.signal(number, previous if previous is not None else signal.SIG_DFL)
        self._previous = {}

    def end(self) -> None:
        """End the process in the way in which it would have ended without this.

        Raises:
            KeyboardInterrupt: after a Ctrl-C, as Python's own handler does; where no signal was received here, too.
            SystemExit: unless the handler that was there before does something else.
        """
        number = self._received[0] if self._received is not None else signal.SIGINT
        previous = self._previous.get(number)
        self.unwatch()
        if callable(previous):
            previous(number, None)
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        sys.exit(128 + number)

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = self._clock()
        if self._received is None:
            self._received = (number, now)
            _say(
                f"{signal.Signals(number).name}: the run is saved after this step, then ends; once more ends it now"
            )
        elif now - self._received[1] >= _ONE_WISH_S:
            self.end()


def _say(line: str) -> None:
    """Not as a warning, which a filter may turn into an error in the midst of whatever was going on."""
    with suppress(Exception):  # a signal that comes while this very stream is written to
        print(f"\nshrinkpoint: {line}", file=sys.stderr, flush=True)
