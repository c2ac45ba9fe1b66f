"""Returns freed memory to the operating system (glibc's ``malloc_trim``).

glibc keeps freed memory below blocks that are still in use, in one arena for each allocating thread: after the save of
a state of many tensors that is about the state's size.
"""

import ctypes
from collections.abc import Callable
from functools import cache

__all__ = ["LARGE", "give_back"]

LARGE = 1 << 27
"""Size of a state in bytes from which on memory is returned after a save; less is kept for the next save."""


def give_back() -> None:
    """Return freed memory, if the C library can; it takes milliseconds, and pages are allocated again when needed."""
    trim = _trim()
    if trim is not None:
        trim(0)


@cache
def _trim() -> Callable[[int], int] | None:
    try:
        found: Callable[[int], int] = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):  # another C library, or one that cannot be loaded
        return None
    return found
