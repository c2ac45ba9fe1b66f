"""Gives memory that was freed back to the system.

glibc keeps what was freed below memory that is still in use, once for each thread that allocates: after the save of a state in many
tensors that comes to about the state's size.
"""

import ctypes
from collections.abc import Callable
from functools import cache

__all__ = ["LARGE", "give_back"]

LARGE = 1 << 27
"""Bytes of state from which on memory is given back after a save; less is kept, so that the next save need not ask for it."""


def give_back() -> None:
    """Do so, where the C library can; it takes milliseconds, and the pages are asked for again when they are needed."""
    trim = _trim()
    if trim is not None:
        trim(0)


@cache
def _trim() -> Callable[[int], int] | None:
    try:
        found: Callable[[int], int] = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):  # of another C library, or none that can be looked into
        return None
    return found
