"""Asking several stores the same thing at once, without waiting for the last one longer than need be; which ones fail."""

import os
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

from shrinkpoint.errors import StoreError
from shrinkpoint.store.objects import TransientStoreError
from shrinkpoint.warn import warn

T = TypeVar("T")

_SHORTEST_BACKOFF_S = 5.0
_LONGEST_BACKOFF_S = 300.0
_MOST_ABANDONED = 4
_WIDTH = 8


@dataclass
class _State:
    reason: str | None = None
    until: float = 0.0
    backoff_s: float = 0.0
    transient: bool = False
    warned: bool = False
    warned_at: float = float("-inf")
    has_answered: bool = False


class Health:
    """The state of each store, as far as this process knows: which ones fail, and how long each is left alone (backoff).

    This decides which stores are asked first and what is reported, never what is safe: a store in its backoff is asked all
    the same where the others are not enough.

    Args:
        shown: Their names in messages.
        clock: Seconds that never go back.
    """

    def __init__(self, shown: list[str], clock: Callable[[], float] = time.monotonic) -> None:
        self._shown = shown
        self._states = [_State() for _ in shown]
        self._clock = clock

    def backs_off(self, store: int) -> bool:
        """Return whether it failed a short while ago, and is left alone for now."""
        return self._states[store].until > self._clock()

    def is_failing(self, store: int) -> bool:
        """Return whether its last answer was a failure."""
        return self._states[store].reason is not None

    @property
    def failing(self) -> list[int]:
        """The stores whose last answer was a failure."""
        return [store for store in range(len(self._states)) if self.is_failing(store)]

    def is_known(self, store: int) -> bool:
        """Return whether anything was heard of it yet: an answer, or a failure."""
        return self._states[store].has_answered or self.is_failing(store)

    def why(self, store: int) -> str | None:
        """Return what was wrong with it the last time."""
        return self._states[store].reason

    def answered(self, store: int) -> None:
        """Note that it works."""
        state = self._states[store]
        state.has_answered = True
        state.reason, state.until, state.backoff_s = None, 0.0, 0.0

    def may_recover(self, stores: Sequence[int]) -> bool:
        """Return whether one of these failed for a passing reason, so that another attempt makes sense."""
        return any(self._states[store].transient for store in stores)

    def failed(self, store: int, reason: str, *, transient: bool = False) -> None:
        """It does not work: leave it alone, twice as long as the last time."""
        state = self._states[store]
        state.reason, state.transient = reason, transient
        now = self._clock()
        if state.until <= now:  # several requests that fail together are one failure
            state.backoff_s = min(max(2 * state.backoff_s, _SHORTEST_BACKOFF_S), _LONGEST_BACKOFF_S)
            state.until = now + state.backoff_s

    def describe(self, stores: Sequence[int]) -> str:
        """Return these stores and what is wrong with them, for a message."""
        return "; ".join(f"{self._shown[store]}: {self.why(store) or 'not asked'}" for store in stores)

    def warn_of_changes(self, redundancy: int) -> None:
        """Warn once of every store that has begun to fail, and again only when it failed anew after it had worked."""
        now, new = self._clock(), []
        for store, state in enumerate(self._states):
            if state.reason is None:
                state.warned = False
            elif not state.warned:
                state.warned = True
                if (
                    now - state.warned_at > _LONGEST_BACKOFF_S
                ):  # an intermittent failure warns again now and then
                    state.warned_at = now
                    new.append(store)
        if new:
            more = (
                "no other store"
                if redundancy <= 0
                else f"{redundancy} more"
                if redundancy > 1
                else "one more store"
            )
            warn(
                f"{self.describe(new)}. The run goes on with the others; {more} may be lost now. See what is missing with"
                " `shrinkpoint stores`, and write it again with `shrinkpoint stores --heal`. This warning comes once, until it works again"
            )


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How long to wait for a store.

    Attributes:
        late_floor_s: The slowest may always take so long,
        late_factor: or so many times as long as the others took, whichever is more.
        alone_s: Where nothing else is there to compare with: so long for a small request that another store can serve. A store
            of which nothing was heard yet has as long, for it may have to load its library and to connect.
        bytes_per_s: What such a request may take longer for each byte.
        limit_s: No request is waited for longer than this.
    """

    late_floor_s: float = 2.0
    late_factor: float = 4.0
    alone_s: float = 10.0
    bytes_per_s: float = 1e6
    limit_s: float = 300.0


@dataclass
class Answers(Generic[T]):
    """What came back.

    Attributes:
        of: Answers by store.
        transient: Whether a store that gave none may give one at another attempt.
    """

    of: dict[int, T] = field(default_factory=dict)
    transient: bool = False


class Calls:
    """Makes requests to stores in daemon threads, which do not delay the end of the process.

    Args:
        health: Notes who answered and who did not.
        patience: How long to wait.
    """

    def __init__(self, health: Health, patience: Patience) -> None:
        self._health = health
        self.patience = patience
        self._abandoned: dict[int, list[Future[Any]]] = {}

    def ask(
        self, stores: Sequence[int], work: Callable[[int], T], *, enough: int, alone_s: float | None = None
    ) -> Answers[T]:
        """Call ``work(store)`` for each at once. A StoreError counts as the store's failure; any other exception is raised.

        Args:
            stores: Which ones to ask.
            work: The request.
            enough: Once there are so many answers, stores that take much longer are not waited for.
            alone_s: Where fewer have answered, wait no longer than this for any; None: as long as ``limit_s``.
        """
        answers: Answers[T] = Answers()
        began = time.monotonic()
        pending: dict[Future[T], int] = {}
        for store in stores:
            if self._is_stuck(store):
                self._health.failed(store, "does not answer earlier requests", transient=True)
                answers.transient = True
                continue
            pending[_in_background(partial(work, store))] = store
        deadline = began + (self.patience.limit_s if alone_s is None else alone_s)
        was_enough = len(answers.of) >= enough
        if was_enough:  # nothing is needed: do not wait for nothing either
            deadline = min(deadline, began + self._floor(pending.values()))
        unexpected: BaseException | None = None
        while pending:
            done, _ = wait(pending, max(0.0, deadline - time.monotonic()), FIRST_COMPLETED)
            if not done:
                for request, store in pending.items():
                    self._abandoned.setdefault(store, []).append(request)
                    seconds = time.monotonic() - began
                    self._health.failed(store, f"has not answered for {seconds:.1f} s", transient=True)
                answers.transient = True
                break
            for request in sorted(done, key=pending.__getitem__):
                store, error = pending.pop(request), request.exception()
                if error is None:
                    answers.of[store] = request.result()
                    self._health.answered(store)
                elif isinstance(error, StoreError | OSError):
                    transient = is_transient(error)
                    self._health.failed(store, str(error), transient=transient)
                    answers.transient |= transient
                else:
                    unexpected = error
            if not was_enough and len(answers.of) >= enough:
                was_enough, taken = True, time.monotonic() - began
                late = max(self._floor(pending.values()), self.patience.late_factor * taken)
                deadline = min(deadline, began + late)
        if unexpected is not None:
            raise unexpected
        return answers

    def _floor(self, stores: Iterable[int]) -> float:
        """Return how long these may always take."""
        if all(self._health.is_known(store) for store in stores):
            return self.patience.late_floor_s
        return max(self.patience.late_floor_s, self.patience.alone_s)

    def _is_stuck(self, store: int) -> bool:
        """Return whether so many requests hang there that another one would only hang with them."""
        hanging = [request for request in self._abandoned.get(store, ()) if not request.done()]
        self._abandoned[store] = hanging
        return len(hanging) >= _MOST_ABANDONED


class _Worker(threading.Thread):
    """Does one thing after another, and rests in `_idle` in between: to start a thread takes longer than to wake one.

    A daemon: a pool would be joined at the end of the process, and wait for a store that hangs.
    """

    def __init__(self) -> None:
        super().__init__(name="shrinkpoint-store", daemon=True)
        self.jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()

    def run(self) -> None:
        """Until the process ends."""
        while True:
            self.jobs.get()()
            _idle.append(self)


_idle: list[_Worker] = []
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_idle.clear)  # a child has none of its parent's threads


def _in_background(work: Callable[[], T]) -> "Future[T]":
    future: Future[T] = Future()

    def job() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 - raised again by whoever asked
            future.set_exception(error)

    try:
        worker = _idle.pop()
    except IndexError:
        worker = _Worker()
        worker.start()
    worker.jobs.put(job)
    return future


def is_transient(error: BaseException) -> bool:
    """Also where retries of a store's own have been used up."""
    return isinstance(error, TransientStoreError) or isinstance(error.__cause__, TransientStoreError)


def for_each(items: Sequence[T], work: Callable[[T], None]) -> None:
    """``work(item)`` of each, several at once, on threads that hold nothing up; an error comes through."""
    waiting: queue.SimpleQueue[T] = queue.SimpleQueue()
    for item in items:
        waiting.put(item)

    def run() -> None:
        with suppress(queue.Empty):
            while True:
                work(waiting.get_nowait())

    for request in [_in_background(run) for _ in range(min(_WIDTH, len(items)))]:
        request.result()
