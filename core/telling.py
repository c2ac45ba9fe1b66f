"""Warnings that may come up while a save is under way in the background."""

import threading
import warnings

from shrinkpoint.errors import ShrinkpointWarning

__all__ = ["tell"]


def tell(message: str, *, stacklevel: int = 2) -> None:
    """Warn with a `ShrinkpointWarning`; outside the main thread, never raise it.

    Whoever turns warnings into errors (``python -W error``, a test suite) gets them as errors where they can be caught. In
    the background nobody could: the error would end the save that it tells of, or hide that another one failed. There
    the warning is shown as if the filter had let it pass.

    Args:
        message: what happened, and what to do.
        stacklevel: as of `warnings.warn`: 1 is the caller of this function.
    """
    try:
        warnings.warn(message, ShrinkpointWarning, stacklevel=stacklevel + 1)
    except ShrinkpointWarning as warning:
        if threading.current_thread() is threading.main_thread():
            raise
        _show(warning)


def _show(warning: ShrinkpointWarning) -> None:
    warnings.showwarning(warning, ShrinkpointWarning, __file__, 0)
