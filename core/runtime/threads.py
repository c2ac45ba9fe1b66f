"""How many threads may be started."""

import threading

__all__ = ["usable_threads"]


def usable_threads(wanted: int) -> int:
    """As many as are wanted; one, the caller's own, once the main thread has ended: the interpreter then allows no further ones.

    That is so in what a program has registered with `atexit`, such as a last save.

    Args:
        wanted: how many.
    """
    return wanted if threading.main_thread().is_alive() else 1
