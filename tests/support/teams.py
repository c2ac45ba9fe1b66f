"""Runs something in a team of threads that share its parts."""

from collections.abc import Callable
from typing import TypeVar

from shrinkpoint.runtime.threads import map_in_order

__all__ = ["in_team"]

Result = TypeVar("Result")


def in_team(threads: int, work: Callable[[], Result]) -> Result:
    """What ``work()`` gives, in one of so many threads."""
    (result,) = map_in_order(lambda given: given(), [work], threads)
    return result
