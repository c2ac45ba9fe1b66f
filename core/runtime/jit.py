"""Decorators for numba kernels: compiled on first use, without the GIL, cached on disk.

Importing this module imports numba, so it and the modules of kernels are only ever imported from inside a function of
their callers. numba checks no bounds: every kernel states what its caller must have checked.

Every machine compiles the kernels once, so compile time matters. A function is compiled with all that it calls, again
for each of its callers; array allocations, slice assignments and further argument types add to the time. So callers
allocate the arrays; functions that Python never calls are a `jit_part`; and short bodies are `jit_inlined`.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import numba

from shrinkpoint.warn import warn

__all__ = ["jit", "jit_in_any_order", "jit_inlined", "jit_part"]


def jit(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile lazily, cached on disk where numba finds a folder it may write to, in memory elsewhere."""
    return _compiled(function)


def jit_part(function: Callable[..., Any]) -> Callable[..., Any]:
    """For functions that only kernels call: no Python wrapper (a call from Python would crash) and no cache entry.

    It is cached as a part of the kernels that call it.
    """
    options = {"no_cpython_wrapper": True, **_ALWAYS}
    part: Callable[..., Any] = numba.njit(**options)(function)
    return part


def jit_inlined(function: Callable[..., Any]) -> Callable[..., Any]:
    """For short bodies in kernels: inlined before type inference, and not compiled by themselves."""
    inlined: Callable[..., Any] = numba.njit(inline="always", **_ALWAYS)(function)
    return inlined


def jit_in_any_order(function: Callable[..., Any]) -> Callable[..., Any]:
    """As `jit` with reassociated (vectorised) sums, whose last bits may depend on the machine."""
    return _compiled(function, fastmath={"reassoc", "nsz"})


# no kernel is called from C, for which numba would compile a further wrapper
_ALWAYS: dict[str, Any] = {"nogil": True, "error_model": "numpy", "no_cfunc_wrapper": True}


@cache
def _warn_once() -> None:
    warn(
        "the compiled coders cannot be kept, since numba finds no folder that it may write to: every process will compile"
        " what it calls, for some 10 CPU seconds before a restore and half a minute before a save; let"
        " NUMBA_CACHE_DIR name a folder that lasts"
    )


def _compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    options |= _ALWAYS
    try:
        compiled: Callable[..., Any] = numba.njit(cache=True, **options)(function)
    except RuntimeError:  # numba's "cannot cache function": read-only install and no home folder
        _warn_once()
        compiled = numba.njit(**options)(function)
    return compiled
