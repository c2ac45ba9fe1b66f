"""Returns freed memory to the operating system (glibc's ``malloc_trim``).

glibc keeps freed memory below blocks that are still in use, in one arena for each allocating thread: after the save of
a state of many tensors that is about the state's size.
"""

import ctypes
from collections.abc import Callable
from functools import cache

__all__ = ["LARGE", "Returns", "give_back"]

LARGE = 1 << 27
"""Size of a state in bytes from which on memory is returned after a save; less is kept for the next save."""
_TIMES = 16
"""How often memory is given back while all tensors of a state are worked on."""


def give_back() -> None:
    """Return freed memory, if the C library can; it takes milliseconds, and pages are allocated again when needed."""
    trim = _trim()
    if trim is not None:
        trim(0)


class Returns:
    """Gives memory back now and then while a large state is worked on: what one tensor took, the next may not fit into.

    Args:
        nbytes: of the state.
    """

    def __init__(self, nbytes: int) -> None:
        self._every = nbytes // _TIMES if nbytes >= LARGE else None
        self._done = 0

    def after(self, nbytes: int) -> None:
        """Count what has been worked on, in bytes; threads may call it at the same time."""
        if self._every is None:
            return
        self._done += nbytes
        if self._done >= self._every:
            self._done = 0
            give_back()


@cache
def _trim() -> Callable[[int], int] | None:
    try:
        found: Callable[[int], int] = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):  # another C library, or one that cannot be loaded
        return None
    return found
