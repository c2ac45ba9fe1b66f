"""Bounded retries: exponential backoff with jitter under one total deadline, for transient errors alone."""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from shrinkpoint.errors import ConfigError, StoreError
from shrinkpoint.store.objects import ObjectsBelow, ObjectStore, TransientStoreError
from shrinkpoint.warn import warn

T = TypeVar("T")

# The operating system's randomness: jitter must not advance a generator that the training seeded.
_RANDOM = random.SystemRandom()
_WARN_AFTER = 3  # one lost request is no news; a start that waits for a server that is not there is


@dataclass(frozen=True, kw_only=True)
class RetryPolicy:
    """How long to insist.

    Attributes:
        attempts: Most attempts of one operation, the first included.
        first_delay_s: Longest pause after the first failure; it doubles with each further one.
        max_delay_s: Ceiling of that pause.
        deadline_s: No attempt begins later than this after the first one began.
    """

    attempts: int = 7
    first_delay_s: float = 0.25
    max_delay_s: float = 20.0
    deadline_s: float = 300.0

    def __post_init__(self) -> None:
        if self.attempts < 1:
            raise ConfigError(f"RetryPolicy.attempts={self.attempts}: use 1 (no retries) or more")
        for name in ("first_delay_s", "max_delay_s", "deadline_s"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"RetryPolicy.{name}={getattr(self, name)}: use 0 or more seconds")

    def run(
        self,
        operation: Callable[[], T],
        *,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> T:
        """Call ``operation`` until it succeeds, fails for good, or the attempts or the deadline run out.

        Raises:
            StoreError: Its own permanent error at once, or the last transient one with the number of attempts.
        """
        began = clock()
        for attempt in range(1, self.attempts + 1):
            try:
                return operation()
            except TransientStoreError as error:
                # Pauses between half and all of the ceiling: writers that failed together do not return together.
                ceiling = min(self.max_delay_s, self.first_delay_s * 2.0 ** (attempt - 1))
                pause = ceiling * _RANDOM.uniform(0.5, 1.0)
                elapsed = clock() - began
                if attempt == self.attempts or elapsed + pause > self.deadline_s:
                    raise StoreError(
                        f"{error} (gave up after {attempt} attempts in {elapsed:.0f} s)"
                    ) from error
                if attempt == _WARN_AFTER:
                    warn(f"{error}. Failed {attempt} times by now; trying again")
            sleep(pause)
        raise AssertionError("attempts >= 1")


class RetryingObjects(ObjectsBelow):
    """An :class:`ObjectStore` that repeats what failed for a passing reason.

    After a lost response the second attempt of a put-if-absent reports False although the object is ours.
    """

    def __init__(self, inner: ObjectStore, policy: RetryPolicy) -> None:
        super().__init__(inner)
        self._policy = policy

    def _do(self, work: Callable[[ObjectStore], T]) -> T:
        return self._policy.run(lambda: work(self.inner))


def without_retries(objects: ObjectStore) -> ObjectStore:
    """Return the store below all `RetryingObjects`, to see of which kind it is."""
    while isinstance(objects, RetryingObjects):
        objects = objects.inner
    return objects
