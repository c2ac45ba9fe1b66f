"""Python's search for cyclic garbage, while much is made that is no garbage."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["rarely_collected"]

_RARELY = 10_000
"""Further objects after which Python searches the youngest ones: 700 of them by default, 2000 in newer versions."""


@contextmanager
def rarely_collected() -> Iterator[None]:
    """Within it, Python searches for cyclic garbage less often, in all threads.

    Where it is searched for by hand only, nothing changes. What others set meanwhile remains.
    """
    found = gc.get_threshold()
    if not 0 < found[0] < _RARELY:  # 0 turns it off
        yield
        return
    ours = (_RARELY, *found[1:])
    gc.set_threshold(*ours)
    try:
        yield
    finally:
        if gc.get_threshold() == ours:
            gc.set_threshold(*found)
