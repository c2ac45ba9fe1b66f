"""What a log measures of its own costs, for the reports of the saves meanwhile: `shrinkpoint advise` reads them."""

import time

from shrinkpoint.runtime.processors import processors
from shrinkpoint.state.tree import JSON
from shrinkpoint.steps.segment import Kind
from shrinkpoint.steps.writer import SegmentWriter

__all__ = ["Measured"]


class Measured:
    """The costs of one process's log since it began or was replayed.

    Args:
        kind: of the log.
    """

    def __init__(self, kind: Kind) -> None:
        self._kind = kind
        self._since: float | None = None
        self._blocked_before = 0.0
        self._replayed: tuple[int, float] = (0, 0.0)

    def begins(self, blocked_s: float) -> None:
        """The log begins.

        Args:
            blocked_s: seconds that the training has waited for it before.
        """
        self._since, self._blocked_before = time.perf_counter(), blocked_s

    def replayed(self, steps: int, seconds: float) -> None:
        """Steps were replayed, digests included, and reading but for what was read while the checkpoint was decoded."""
        if steps > 0:
            self._replayed = steps, seconds

    def report(self, writer: SegmentWriter | None, blocked_s: float, copies_cpu_s: float) -> dict[str, JSON]:
        """For a save's report.

        Args:
            writer: of the segments since `begins`.
            blocked_s: seconds that the training has waited so far.
            copies_cpu_s: CPU seconds of copies that were made in another thread.
        """
        steps, seconds = self._replayed
        return {
            "kind": self._kind,
            "seconds": 0.0 if self._since is None else time.perf_counter() - self._since,
            "blocked_s": blocked_s - self._blocked_before,
            "cpu_s": copies_cpu_s + (0.0 if writer is None else writer.cpu_s),
            "cores": processors(),
            "segments": 0 if writer is None else writer.segments,
            "steps": 0 if writer is None else writer.steps,
            "bytes": 0 if writer is None else writer.bytes,
            "replayed_steps": steps,
            "replay_s": seconds,
        }
