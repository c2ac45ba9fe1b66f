"""How much of what a restore costs is still there some steps later, and when to measure it again.

The loss at a restore is the wrong test in both directions: noise in the weights is trained away within some steps, and a
second moment that was restored too small shows only after some. What is left after the steps is what a restore costs a run.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shrinkpoint.errors import ConfigError

__all__ = ["Healing"]

_LEAST = 0.25  # of what a restore costs is taken to remain, whatever one noisy measurement says
_NOISE = 0.0002
_MARGIN = 1.5  # a resumed step beside one of training: evaluations and copies of the state come on top


class Healing:
    """Keeps the share that remains, and a purse of training time for measuring it.

    Args:
        steps: how far to go on from a restore; 0 measures nothing.
        overhead: share of the training time that may be taken.
        clock: seconds since any fixed moment.
    """

    def __init__(self, steps: int, overhead: float, clock: Callable[[], float] = time.perf_counter) -> None:
        self.marks: Sequence[int] = tuple(sorted({max(1, steps // 4), steps})) if steps > 0 else ()
        """After so many steps the loss is measured."""
        self.remains = 1.0
        """Share of a restore's cost that is left after the last mark."""
        self._overhead = overhead
        self._clock = clock
        self._since: tuple[float, int] | None = None
        self._purse = 0.0
        self._step_s = math.inf

    def saw(self, step: int) -> None:
        """A save begins: time has gone by, and steps."""
        now = self._clock()
        if self._since is not None and step > self._since[1]:
            passed = now - self._since[0]
            self._purse += self._overhead * passed
            self._step_s = passed / (step - self._since[1])
        self._since = now, step

    @property
    def due(self) -> bool:
        """Whether there is time to measure."""
        if not self.marks or self._since is None:
            return False
        return math.isinf(self._overhead) or self._purse >= self._price

    @property
    def _price(self) -> float:
        return 2 * self.marks[-1] * _MARGIN * self._step_s

    def measured(self, at_restore: float, resumed: Mapping[int, float], seconds: float) -> None:
        """Take over a measurement: a worse one at once, a better one half, for one alone may be luck.

        Args:
            at_restore: the rise of the loss at the restore.
            resumed: the rise after each of the marks.
            seconds: what it took from training.
        """
        self._purse -= seconds
        left = max(resumed[self.marks[-1]], 0.0)
        if not math.isfinite(left):
            self.remains = 1.0
        elif at_restore > _NOISE or left > _NOISE:
            share = min(1.0, max(_LEAST, left / max(at_restore, _NOISE)))
            self.remains = max(share, (self.remains + share) / 2)

    def state_dict(self) -> dict[str, object]:
        """What a resumed training needs, in JSON primitives."""
        return {"remains": self.remains}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned.

        Raises:
            ConfigError: it is no such state.
        """
        remains = state.get("remains")
        if not isinstance(remains, float) or not _LEAST <= remains <= 1:
            raise ConfigError(f"the share that remains after a restore, {remains!r}, is malformed")
        self.remains = remains
