"""A request to end the process, kept until training has come to a place at which it can be saved."""

import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

__all__ = ["Pace", "TerminationRequest"]

_ONE_WISH_S = 1.0
"""Within it, further signals mean the same: a launcher that gets a Ctrl-C sends a SIGTERM after it."""

_PATIENCE_S = 60.0
_PATIENCE_STEPS = 10


class Pace:
    """How often training comes to the place at which a request is answered, and whether it is to be expected there again.

    Args:
        clock: seconds; never goes back.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._left_at = -math.inf
        self._longest_s = 0.0

    @contextmanager
    def visit(self, *, first: bool = False) -> Iterator[None]:
        """While this is open training is at that place.

        Args:
            first: what was before is none of the training's way from one visit to the next.
        """
        if not first and self._left_at > -math.inf:
            self._longest_s = max(self._longest_s, self._clock() - self._left_at)
        self._left_at = math.inf
        try:
            yield
        finally:
            self._left_at = self._clock()

    def expected(self) -> bool:
        """Whether no more time has passed since the last visit than a minute, or ten times the longest between two so far."""
        patience_s = max(_PATIENCE_S, _PATIENCE_STEPS * self._longest_s)
        return self._clock() - self._left_at < patience_s


class TerminationRequest:
    """Notes a SIGTERM or Ctrl-C instead of dying of it, between `watch` and `unwatch`; a second one ends the process at once.

    Processes forked meanwhile inherit this: they end of a SIGTERM as ever, and leave the first Ctrl-C, which a terminal sends to all,
    to this one, which may need them to come to a place at which it can be saved.

    Args:
        signals: which ones.
        answered: whether somebody will look at `received` before long; where not, the first signal ends the process at once.
        clock: seconds; never goes back.
    """

    def __init__(
        self,
        signals: Sequence[signal.Signals] = (signal.SIGTERM, signal.SIGINT),
        *,
        answered: Callable[[], bool] = lambda: True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._signals = signals
        self._answered = answered
        self._clock = clock
        self._received: tuple[int, float] | None = None
        self._previous: dict[int, Any] = {}
        self._pid = os.getpid()

    @property
    def received(self) -> bool:
        """Whether the process has been asked to end."""
        return self._received is not None

    def watch(self) -> None:
        """Take the signals over, but those that are ignored; does nothing outside the main thread, where Python forbids it."""
        if self._previous or threading.current_thread() is not threading.main_thread():
            return
        self._received, self._pid = None, os.getpid()
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
        first = self._received is None
        if self._received is None:
            self._received = (number, now)
        again = now - self._received[1] >= _ONE_WISH_S
        if os.getpid() != self._pid:
            if number != signal.SIGINT or again:
                self._pass_on(number)
        elif again or (first and not self._answered()):
            self.end()
        elif first:
            _say(
                f"{signal.Signals(number).name}: the run is saved after this step, if there is one, then ends; once more ends it"
                " now"
            )

    def _pass_on(self, number: int) -> None:
        """Let a forked process do with a signal what it would have done without this."""
        previous = self._previous.get(number)
        signal.signal(number, previous if previous is not None else signal.SIG_DFL)
        os.kill(os.getpid(), number)


def _say(line: str) -> None:
    """Not as a warning, which a filter may turn into an error in the midst of whatever was going on."""
    with suppress(Exception):  # a signal that comes while this very stream is written to
        print(f"\nshrinkpoint: {line}", file=sys.stderr, flush=True)
