"""Checks that a log fits in the free space of its location."""

import os
import shutil

from shrinkpoint.store.urls import Location

__all__ = ["lack_of_room"]

_INTERVALS = 2  # between checkpoints, which are kept


def lack_of_room(location: Location, step_bytes: int, every: int) -> str | None:
    """A message if a log is too large for a local file system; None where it fits, or that is unknown.

    Args:
        location: the log's folder.
        step_bytes: of one step.
        every: steps between two checkpoints.
    """
    if location.kind != "local":
        return None
    needed, free = _INTERVALS * every * step_bytes, shutil.disk_usage(_existing(location.path)).free
    if needed <= free:
        return None
    return (
        f"the steps between two checkpoints, which are kept twice, take {needed / 1e9:.3g} GB, and {location.display} has"
        f" {free / 1e9:.3g} GB: save more often than every={every}, or choose another step_log_url"
    )


def _existing(path: str) -> str:
    while not os.path.exists(path):
        path = os.path.dirname(path)
    return path
