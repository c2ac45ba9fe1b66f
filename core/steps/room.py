"""Checks, before a segment is written, that the log still fits in its file system."""

import os
import shutil

from shrinkpoint.store.urls import Location

__all__ = ["Room"]

_RESERVE_SHARE, _RESERVE_MOST = 1 / 16, 2**30


class Room:
    """The free space of a log's folder, of which a part is left to other programs: one that finds no room in ``/dev/shm`` is killed.

    Args:
        location: the log's folder; of a remote one nothing is known, and everything fits.
        intervals: between checkpoints whose steps are kept.
        every: steps between two checkpoints, if known; otherwise it is learned from those that are committed.
    """

    def __init__(self, location: Location, intervals: int, every: int | None) -> None:
        self._location = location
        self._intervals = intervals
        self._every = every
        self._committed: int | None = None

    def committed(self, step: int) -> None:
        """A checkpoint of this step is stored; the interval is the longest one between two, if it was not given."""
        before, self._committed = self._committed, step
        if before is not None and step > before:
            self._every = max(self._every or 0, step - before)

    def lack(self, *, size: int, kept: int, step_bytes: float) -> str | None:
        """Why the next segment is not to be written; None where the log fits.

        Args:
            size: bytes of that segment.
            kept: bytes of the segments that are there.
            step_bytes: of one step, on average.
        """
        if self._location.kind != "local":
            return None
        usage = shutil.disk_usage(_existing(self._location.path))
        reserve = min(_RESERVE_SHARE * usage.total, _RESERVE_MOST)
        free = max(0.0, usage.free - reserve)
        where = f"{self._location.display} has {free / 1e9:.3g} GB, besides {reserve / 1e9:.3g} GB that are left to other programs"
        if self._every is not None:
            whole = self._intervals * self._every * step_bytes
            if max(float(size), whole - kept) > free:
                return (
                    f"the steps of {self._intervals} intervals between checkpoints, which are kept, take {whole / 1e9:.3g} GB, and"
                    f" {where}: save more often than every {self._every} steps, or choose another step_log_url"
                )
        if size > free:
            return f"the next steps take {size / 1e9:.3g} GB, and {where}: save more often, or choose another step_log_url"
        return None


def _existing(path: str) -> str:
    while not os.path.exists(path):
        path = os.path.dirname(path)
    return path
