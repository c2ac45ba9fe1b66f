"""How long a training may wait for the writer of its log before it leaves a gap instead."""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["Patience"]

_AT_ONCE_S = 1.0


class Patience:
    """Bounds all waiting so far by a share of the training's time, and one second.

    Args:
        share: of the training's time; None: any.
    """

    def __init__(self, share: float | None) -> None:
        self._share = share
        self._began = time.monotonic()
        self._waited = 0.0

    @property
    def left_s(self) -> float:
        """Seconds that the training may wait now."""
        if self._share is None:
            return math.inf
        return max(0.0, _AT_ONCE_S + self._share * (time.monotonic() - self._began) - self._waited)

    @contextmanager
    def spent(self) -> Iterator[None]:
        """Count the time of the block."""
        started = time.monotonic()
        try:
            yield
        finally:
            self._waited += time.monotonic() - started
