"""Warnings that may occur during a save in the background, and what messages are made of."""

import os
import sys
import threading
import warnings
from collections.abc import Callable, Collection, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, fields
from difflib import get_close_matches
from functools import wraps
from sysconfig import get_path
from types import FrameType
from typing import Any, TypeVar

from shrinkpoint.errors import ConfigError, ShrinkpointWarning

T = TypeVar("T")

LIBRARIES = tuple(
    os.path.join(folder, "")
    for folder in (
        os.path.dirname(os.path.abspath(__file__)),
        *(get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    )
)
"""Where code lies that is not the user's: this package, Python's own modules and what is installed."""
_PLAIN = (str, int, float, bool, type(None))
_FEW = 8


def brief(value: object) -> str:
    """Return a value for a message: short, and without a tensor's elements, which may be gigabytes on a device."""
    few = isinstance(value, list | tuple) and len(value) <= _FEW and all(isinstance(v, _PLAIN) for v in value)
    if isinstance(value, _PLAIN) or few:
        text = repr(value)
        return text if len(text) <= 200 else f"{text[:200]}..."
    name = type(value).__name__
    return f"{'an' if name[:1].lower() in 'aeio' else 'a'} {name}"


def meant(name: str, options: Collection[str]) -> str:
    """Return the end of a message about an unknown option: the one that was probably meant, if there is such a one."""
    near = get_close_matches(name, sorted(options), 1, 0.65)
    return f" (did you mean {near[0]}?)" if near else ""


def refuses_unknown_options(kind: type[T]) -> type[T]:
    """Return a dataclass of options that answers a mistyped keyword with a `ConfigError`; its signature stays the same."""
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
    """Warn with a `ShrinkpointWarning` of the user's line that led here; outside the main thread, never raise it.

    Where warnings are turned into errors (``python -W error``, a test suite), they are raised only where they can be
    caught. In the background that is not possible: the error would end the save that it reports on, or hide that
    another one failed. There the warning is shown as if the filter had let it pass.
    """
    place = _place_of(sys._getframe(1))
    if place.is_library and (asked := _asked_for.get()) is not None:
        place = asked
    try:
        warnings.warn_explicit(
            message, ShrinkpointWarning, place.file, place.line, place.module, place.registry
        )
    except ShrinkpointWarning as warning:
        if threading.current_thread() is threading.main_thread():
            raise
        _show(warning)


@dataclass(frozen=True)
class _Place:
    """A line of source, as ``warnings.warn_explicit`` takes it."""

    file: str
    line: int
    module: str
    registry: dict[str | tuple[str, type[Warning], int], int]
    is_library: bool


_asked_for: ContextVar[_Place | None] = ContextVar("_asked_for", default=None)


def some(names: Sequence[str], most: int = 5, between: str = ", ") -> str:
    """Return the first of some names, for a message, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{between.join(names[:most])}{more}"


def naming_this_line(job: Callable[[], None]) -> Callable[[], None]:
    """Return the job, whose warnings in a thread of the package name the user's line that leads here."""
    place = _place_of(sys._getframe(1))

    def run() -> None:
        _asked_for.set(place)
        job()

    return run


def _place_of(frame: FrameType) -> _Place:
    """Return the innermost line that is the user's: neither the package's nor a library's; where there is none, the given one."""
    found: FrameType | None = frame
    while found is not None and found.f_code.co_filename.startswith((*LIBRARIES, "<frozen")):
        found = found.f_back
    line = found or frame
    module = line.f_globals.get("__name__", "<string>")
    registry = line.f_globals.setdefault("__warningregistry__", {})
    return _Place(line.f_code.co_filename, line.f_lineno, module, registry, found is None)


def _show(warning: ShrinkpointWarning) -> None:
    warnings.showwarning(warning, ShrinkpointWarning, __file__, 0)
