"""What is said of a save that is under way, while others wait for it or are skipped because of it."""

import time
from contextlib import AbstractContextManager

from shrinkpoint.runtime.progress import waiting_for
from shrinkpoint.warn import warn

__all__ = ["SaveUnderWay"]


class SaveUnderWay:
    """The save that was accepted last, and how many were skipped since the first."""

    def __init__(self) -> None:
        self.skipped = 0
        """Saves that were not made because one was under way."""
        self.compiling = False
        """Whether it waits for coders to be compiled."""
        self._step, self._since = 0, 0.0
        self._warn_at = 1

    def begin(self, step: int, *, compiling: bool = False) -> None:
        """A save of this step was accepted."""
        self._step, self._since, self.compiling = step, time.monotonic(), compiling

    def skip(self, *, warns: bool = True) -> None:
        """Count a save that is not made; the first, the tenth, the hundredth ... gives a warning with the reason.

        Args:
            warns: False where another rank says it.
        """
        self.skipped += 1
        if not warns or self.skipped < self._warn_at:
            return
        self._warn_at = 10 * self.skipped
        why = (
            " (its coders are being compiled, as `shrinkpoint compile` does beforehand)"
            if self.compiling
            else ""
        )
        count = "a save is" if self.skipped == 1 else f"{self.skipped} saves so far have been"
        seconds = round(time.monotonic() - self._since)
        how_long = f"has been under way for {seconds} s" if seconds else "is still under way"
        warn(
            f"{count} skipped: that of step {self._step} {how_long}{why}. Training does not wait for it; busy='wait' would"
        )

    def waiting(self, where: str, whose: str = "") -> AbstractContextManager[object]:
        """Says that it is waited for, once that takes more than two seconds.

        Args:
            where: the store, for readers.
            whose: the saver, if it is another one.
        """
        why = ", whose coders are being compiled" if self.compiling else ""
        return waiting_for(f"waiting for the last save{whose}, of step {self._step}, to {where}{why}")
