"""How the compiled loops are compiled: numba, without the GIL, on first use.

Importing this module imports numba, so it and the modules of kernels are only ever imported from inside a function of
their callers. numba checks no bounds: every kernel states what its caller must have checked.

Every machine compiles the kernels once, so that what they cost to compile counts. A function is compiled with all that it
calls, again for each of its callers, and each array that is made in it, each assignment of an array to a part of another
and each type that an argument may have adds to that. So callers hand over the arrays that kernels work on; what Python does
not call is a `jit_part`; and short bodies are `jit_inlined`.
"""

from collections.abc import Callable
from typing import Any

import numba

from shrinkpoint.runtime.kernel_cache import keep

__all__ = ["jit", "jit_in_any_order", "jit_inlined", "jit_part"]


def jit(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile lazily, cached on disk (`shrinkpoint.runtime.kernel_cache`), in memory where no folder may be written to."""
    return _compiled(function)


def jit_part(function: Callable[..., Any]) -> Callable[..., Any]:
    """For what kernels call and Python never does, which would crash: neither wrapped for it nor cached by itself.

    It is in the cache as a part of the kernels that call it.
    """
    options = {"no_cpython_wrapper": True, **_ALWAYS}
    part: Callable[..., Any] = numba.njit(**options)(function)
    return part


def jit_inlined(function: Callable[..., Any]) -> Callable[..., Any]:
    """For short bodies in kernels: they are copied into these before types are inferred, and not compiled by themselves."""
    inlined: Callable[..., Any] = numba.njit(inline="always", **_ALWAYS)(function)
    return inlined


def jit_in_any_order(function: Callable[..., Any]) -> Callable[..., Any]:
    """As `jit`, for sums whose last bits may depend on the machine: they are reassociated, so that they vectorise."""
    return _compiled(function, fastmath={"reassoc", "nsz"})


# no kernel is handed to C, for which numba would wrap each once more
_ALWAYS: dict[str, Any] = {"nogil": True, "error_model": "numpy", "no_cfunc_wrapper": True}


def _compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    compiled: Callable[..., Any] = keep(numba.njit(**options, **_ALWAYS)(function), function)
    return compiled
