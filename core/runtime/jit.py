"""Decorators for numba kernels: compiled on first use, without the GIL, cached on disk.

Importing this module imports numba, so it and the modules of kernels are only ever imported from inside a function of
their callers. numba checks no bounds: every kernel states what its caller must have checked.

Every machine compiles the kernels once, so compile time matters. A function is compiled with all that it calls, again
for each of its callers; array allocations, slice assignments and further argument types add to the time. So callers
allocate the arrays; functions that Python never calls are a `jit_part`; and short bodies are `jit_inlined`.
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


def _compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    compiled: Callable[..., Any] = keep(numba.njit(**options, **_ALWAYS)(function), function)
    return compiled
