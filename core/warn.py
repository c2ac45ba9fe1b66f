"""Warnings that may occur during a save in the background, and what messages are made of."""

import os
import sys
import threading
import warnings
from collections.abc import Collection
from dataclasses import fields
from difflib import get_close_matches
from functools import wraps
from typing import Any, TypeVar

from shrinkpoint.errors import ConfigError, ShrinkpointWarning

__all__ = ["brief", "meant", "refuses_unknown_options", "warn"]

T = TypeVar("T")

_PACKAGE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "")
_PLAIN = (str, int, float, bool, type(None))
_FEW = 8


def brief(value: object) -> str:
    """A value for a message: short, and without a tensor's elements, which may be gigabytes on a device."""
    few = isinstance(value, list | tuple) and len(value) <= _FEW and all(isinstance(v, _PLAIN) for v in value)
    if isinstance(value, _PLAIN) or few:
        text = repr(value)
        return text if len(text) <= 200 else f"{text[:200]}..."
    name = type(value).__name__
    return f"{'an' if name[:1].lower() in 'aeio' else 'a'} {name}"


def meant(name: str, options: Collection[str]) -> str:
    """The end of a message about an unknown option: the one that was probably meant, if there is such a one."""
    near = get_close_matches(name, sorted(options), 1)
    return f" (did you mean {near[0]}?)" if near else ""


def refuses_unknown_options(kind: type[T]) -> type[T]:
    """A dataclass of options that answers a mistyped keyword with a `ConfigError`; its signature stays the same."""
    changed: Any = kind
    names = [item.name for item in fields(changed)]
    init = changed.__init__

    @wraps(init)
    def checked(self: T, *arguments: Any, **options: Any) -> None:
        for name in options:
            if name not in names:
                raise ConfigError(
                    f"{kind.__name__} has no option {name!r}{meant(name, names)}; the options are: {', '.join(sorted(names))}"
                )
        init(self, *arguments, **options)

    changed.__init__ = checked
    return kind


def warn(message: str) -> None:
    """Warn with a `ShrinkpointWarning`, of the line outside this package that led here; outside the main thread, never raise it.

    Where warnings are turned into errors (``python -W error``, a test suite), they are raised only where they can be
    caught. In the background that is not possible: the error would end the save that it reports on, or hide that
    another one failed. There the warning is shown as if the filter had let it pass.

    Args:
        message: what happened, and what to do.
    """
    try:
        warnings.warn(message, ShrinkpointWarning, stacklevel=_level_of_caller())
    except ShrinkpointWarning as warning:
        if threading.current_thread() is threading.main_thread():
            raise
        _show(warning)


def _level_of_caller() -> int:
    """As of `warnings.warn` in `warn`: of the innermost call from outside this package; in a thread of its own, of who calls `warn`."""
    frame, level = sys._getframe(2), 2
    while frame.f_code.co_filename.startswith(_PACKAGE):
        if frame.f_back is None:
            return 2
        frame, level = frame.f_back, level + 1
    return level if threading.current_thread() is threading.main_thread() else 2


def _show(warning: ShrinkpointWarning) -> None:
    warnings.showwarning(warning, ShrinkpointWarning, __file__, 0)
