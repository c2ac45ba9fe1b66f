"""How many threads and processors this process may use; in a container these are fewer than the machine has."""

import math
import os
import threading
from pathlib import Path

__all__ = ["processors", "usable_threads"]

_QUOTA = Path("/sys/fs/cgroup/cpu.max")
"""Of cgroup v2, as containers see their own: microseconds of CPU time in a period, and the period; ``max`` is no limit."""


def processors() -> int:
    """Processors that this process may use: those it is bound to, and no more than its container's CPU time allows.

    Examples:
        >>> from shrinkpoint.runtime.processors import processors
        >>> processors() >= 1
        True
    """
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _quota()
    return bound if quota is None else max(1, min(bound, math.ceil(quota)))


def _quota() -> float | None:
    try:
        used, period = _QUOTA.read_text(encoding="ascii").split()
        return int(used) / int(period)
    except (OSError, ValueError, ZeroDivisionError):  # no limit, no cgroup v2, or another system
        return None


def usable_threads(wanted: int) -> int:
    """As many as are wanted; one, the caller's own, once the main thread has ended: the interpreter then allows no further ones.

    That is so in what a program has registered with `atexit`, such as a last save.

    Args:
        wanted: how many.
    """
    return wanted if threading.main_thread().is_alive() else 1
