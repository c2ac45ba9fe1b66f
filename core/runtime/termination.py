"""Defers SIGTERM and Ctrl-C until training reaches a point at which it can be saved."""

import inspect
import math
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import CodeType, FrameType
from typing import Any

from shrinkpoint.errors import ConfigError
from shrinkpoint.warn import brief

_ONE_WISH_S = 1.0
"""Seconds in which further signals count as the same: a launcher that gets a Ctrl-C sends a SIGTERM after it."""

_PATIENCE_S = 60.0
_PATIENCE_STEPS = 10


class Pace:
    """Measures how often training reaches the point at which a request is answered, and whether it is due there again.

    Args:
        clock: seconds; never goes back.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._left_at = -math.inf
        self._longest_s = 0.0
        self._program: CodeType | None = None

    @contextmanager
    def visit(self, *, first: bool = False) -> Iterator[None]:
        """Inside this block training is at that point.

        Args:
            first: the time before does not count as an interval between two visits.
        """
        if not first and self._left_at > -math.inf:
            self._longest_s = max(self._longest_s, self._clock() - self._left_at)
        self._left_at = math.inf
        self._program = next((code for code in _running() if not code.co_flags & inspect.CO_OPTIMIZED), None)
        try:
            yield
        finally:
            self._left_at = self._clock()

    def expected(self) -> bool:
        """Return whether the last visit was less than a minute, or ten times the longest interval so far, ago, and by what still runs: the
        program, or the same cell of a notebook."""
        patience_s = max(_PATIENCE_S, _PATIENCE_STEPS * self._longest_s)
        runs = self._program is None or any(code is self._program for code in _running())
        return runs and self._clock() - self._left_at < patience_s


def _running() -> Iterator[CodeType]:
    """Yield the code of all that this thread is in, innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame.f_code
        frame = frame.f_back


def signals_of(names: Sequence[str]) -> list[signal.Signals]:
    """Return the signals of these names.

    Raises:
        ConfigError: there is no such signal, or it cannot be handled.
    """
    known = {one.name: one for one in signal.Signals if one not in (signal.SIGKILL, signal.SIGSTOP)}
    given = [] if isinstance(names, str) else [getattr(one, "name", one) for one in names]
    if isinstance(names, str) or any(name not in known for name in given):
        raise ConfigError(
            f"signals={brief(names)} must be a list of the names of signals that a process can handle, such as ['SIGUSR2']"
        )
    return [known[name] for name in given]


def _always() -> bool:  # a function of the module, since a callback is pickled with its request
    return True


class TerminationRequest:
    """Records a SIGTERM or Ctrl-C between `watch` and `unwatch`, so that training can be saved; a second ends the
    process.

    Processes forked meanwhile inherit the handler: a SIGTERM ends them as usual, and they ignore the first Ctrl-C (a
    terminal sends it to all), since this process may need them until it can be saved. Signals wait while a fork is made: Python
    forgets those that a new process gets before it runs Python code, and without the handler they would have ended it.

    Args:
        signals: which ones.
        more: further ones, by which a scheduler announces that it will end the processes: those that were forked ignore them, and a
            SIGTERM that follows is part of the same request.
        answered: whether `received` will be checked soon; where not, the first signal ends the process at once.
        replaces: do not call the handlers that were there before, since they would wait for other processes.
        then: called by `end` instead of ending the process.
        clock: seconds; never goes back.
    """

    def __init__(
        self,
        signals: Sequence[signal.Signals] = (signal.SIGTERM, signal.SIGINT),
        *,
        more: Sequence[signal.Signals] = (),
        answered: Callable[[], bool] = _always,
        replaces: bool = False,
        then: Callable[[], object] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._replaces = replaces
        self._more = set(more) - set(signals)
        self._signals = [*signals, *self._more]
        self._answered = answered
        self._then = then
        self._clock = clock
        self._received: tuple[int, float] | None = None
        self._confirmed = False
        self._previous: dict[int, Any] = {}
        self._covered: dict[int, Any] = {}
        self._pid = os.getpid()

    @property
    def received(self) -> bool:
        """Whether the process has been asked to end."""
        return self._received is not None

    @property
    def number(self) -> int | None:
        """The number of the signal by which it was asked; None if it was not."""
        return None if self._received is None else self._received[0]

    @property
    def watches(self) -> bool:
        """Whether the handlers are installed."""
        return bool(self._previous)

    def watch(self) -> None:
        """Install the handlers, except for ignored signals; does nothing outside the main thread, where Python forbids
        it."""
        if threading.current_thread() is not threading.main_thread():
            return
        if self._previous:
            own = (
                signal.getsignal(signal.SIGINT) is signal.default_int_handler
            )  # IPython's kernel puts it back after a cell
            if own and signal.SIGINT in self._previous:
                signal.signal(signal.SIGINT, self._note)
            return
        self._received, self._pid = None, os.getpid()
        for number in self._signals:
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._previous[number] = signal.signal(number, self._note)
        _FORKS.guard(self)

    def unwatch(self) -> None:
        """Put the previous handlers back."""
        if not self._previous or threading.current_thread() is not threading.main_thread():
            return
        for number, previous in self._previous.items():
            self._covered.setdefault(number, previous)  # another handler may put this one back
            if signal.getsignal(number) == self._note:
                signal.signal(number, previous if previous is not None else signal.SIG_DFL)
        self._previous = {}
        _FORKS.leave(self)

    def end(self, number: int = signal.SIGINT) -> None:
        """End the process as it would have ended without this handler.

        Args:
            number: of the signal that another process received, where this one received none.

        Raises:
            KeyboardInterrupt: after a Ctrl-C, as Python's own handler does.
            SystemExit: unless the previous handler does something else.
        """
        if self._then is not None:
            self._received = None
            self._then()
            return
        if self._received is not None:
            number = self._received[0]
        previous = self._previous.get(number)
        self.unwatch()
        if callable(previous) and not self._replaces:
            previous(number, None)
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        sys.exit(128 + number)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number not in self._previous:
            self._leave_to_previous(number, frame)
            return
        now = self._clock()
        first = self._received is None
        if self._received is None:
            self._received, self._confirmed = (number, now), False
        elif self._received[0] in self._more and number not in self._more and not self._confirmed:
            self._received, self._confirmed = (self._received[0], now), True
        again = now - self._received[1] >= _ONE_WISH_S
        if os.getpid() != self._pid:
            if number not in self._more and (number != signal.SIGINT or again):
                _pass_on(number, self._previous.get(number))
        elif (again and self._then is None) or (first and not self._answered()):
            self.end()
        elif first:
            ends = "ends; once more ends it now" if self._then is None else "is requeued"
            _say(
                f"{signal.Signals(number).name}: the run is saved after this step, if there is one, then {ends}"
            )

    def _leave_to_previous(self, number: int, frame: FrameType | None) -> None:
        """After `unwatch`, which could not remove this handler, since another one was installed over it."""
        previous = self._covered.get(number)
        if os.getpid() != self._pid and not callable(previous):
            _pass_on(number, previous)
        elif callable(previous):
            previous(number, frame)
        elif number == signal.SIGINT:
            raise KeyboardInterrupt
        else:
            sys.exit(128 + number)


def _pass_on(number: int, previous: Any) -> None:
    """Call the previous handler, in a forked process."""
    signal.signal(number, previous if previous is not None else signal.SIG_DFL)
    os.kill(os.getpid(), number)


class _Forks:
    """Blocks the signals of requests that watch while this process forks, in the thread that does."""

    def __init__(self) -> None:
        self._requests: weakref.WeakSet[TerminationRequest] = weakref.WeakSet()
        self._masks = threading.local()
        self._registered = False

    def guard(self, request: TerminationRequest) -> None:
        """From now on, for this request's signals."""
        self._requests.add(request)
        if not self._registered:
            self._registered = True
            os.register_at_fork(
                before=self._block, after_in_parent=self._restore, after_in_child=self._restore
            )

    def leave(self, request: TerminationRequest) -> None:
        """No more for this one."""
        self._requests.discard(request)

    def _block(self) -> None:
        numbers = {number for request in list(self._requests) for number in list(request._previous)}
        self._masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers) if numbers else None

    def _restore(self) -> None:
        before = getattr(self._masks, "before", None)
        if before is not None:
            self._masks.before = None
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


_FORKS = _Forks()


def _say(line: str) -> None:
    """Write to stderr, not as a warning: a filter may turn a warning into an error in the middle of any statement."""
    with suppress(Exception):  # a signal that comes while this very stream is written to
        print(f"\nshrinkpoint: {line}", file=sys.stderr, flush=True)
