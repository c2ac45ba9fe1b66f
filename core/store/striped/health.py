"""What a process has seen of the stores of a set: which ones fail, how long each is left alone (backoff), how long answers take.

This decides which stores are asked first and what is reported, never what is safe: a store in its backoff is asked all the
same where the others are not enough.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shrinkpoint.warn import warn

__all__ = ["Health"]

_SHORTEST_BACKOFF_S = 5.0
_LONGEST_BACKOFF_S = 300.0


@dataclass
class _State:
    reason: str | None = None
    until: float = 0.0
    backoff_s: float = 0.0
    transient: bool = False
    warned: bool = False
    warned_at: float = float("-inf")
    seconds: float | None = None
    """Of the last answer."""


class Health:
    """The state of each store, as far as this process knows.

    Args:
        shown: Their names in messages.
        clock: Seconds that never go back.
    """

    def __init__(self, shown: list[str], clock: Callable[[], float] = time.monotonic) -> None:
        self._shown = shown
        self._states = [_State() for _ in shown]
        self._clock = clock

    def backs_off(self, store: int) -> bool:
        """Whether it failed a short while ago, and is left alone for now."""
        return self._states[store].until > self._clock()

    def is_failing(self, store: int) -> bool:
        """Whether its last answer was a failure."""
        return self._states[store].reason is not None

    @property
    def failing(self) -> list[int]:
        """The stores whose last answer was a failure."""
        return [store for store in range(len(self._states)) if self.is_failing(store)]

    def is_known(self, store: int) -> bool:
        """Whether anything was heard of it yet: an answer, or a failure."""
        return self._states[store].seconds is not None or self.is_failing(store)

    def why(self, store: int) -> str | None:
        """What was wrong with it the last time."""
        return self._states[store].reason

    def seconds(self, store: int) -> float | None:
        """How long its last answer took."""
        return self._states[store].seconds

    def answered(self, store: int, seconds: float) -> None:
        """It works."""
        state = self._states[store]
        state.seconds = seconds
        state.reason, state.until, state.backoff_s = None, 0.0, 0.0

    def may_recover(self, stores: Sequence[int]) -> bool:
        """Whether one of these failed for a passing reason, so that another attempt makes sense."""
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
        """These stores and what is wrong with them, for a message."""
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
