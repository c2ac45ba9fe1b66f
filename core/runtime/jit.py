"""Decorators for numba kernels: compiled on first use, without the GIL, cached on disk.

Importing this module imports numba, so it and the modules of kernels are only ever imported from inside a function of
their callers. numba checks no bounds: every kernel states what its caller must have checked.

Every machine compiles the kernels once, so compile time matters. A function is compiled with all that it calls, again
for each of its callers; array allocations, slice assignments and further argument types add to the time. So callers
allocate the arrays, and functions that Python never calls are a `jit_part` or `jit_inlined`.
"""

from collections.abc import Callable
from typing import Any

import numba

from shrinkpoint.runtime.kernel_cache import keep
from shrinkpoint.runtime.kernel_compiler import KernelCompiler
from shrinkpoint.runtime.kernel_parts import PartCompiler

__all__ = ["jit", "jit_allocating", "jit_in_any_order", "jit_inlined", "jit_part"]


def jit(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile lazily, cached on disk (`shrinkpoint.runtime.kernel_cache`), in memory where no folder may be written to.

    Neither the function nor what it calls may make arrays, or return one. Compiling it is then an error, unless numba has
    compiled the same allocation for another function of this process.
    """
    return _compiled(function, **_ONLY_GIVEN_ARRAYS)


def jit_allocating(function: Callable[..., Any]) -> Callable[..., Any]:
    """As `jit`, for functions that make arrays: references to all arrays are counted, which takes longer to compile."""
    return _compiled(function)


def jit_part(function: Callable[..., Any]) -> Callable[..., Any]:
    """For functions that only kernels call: no Python wrapper (a call from Python would crash) and no cache entry.

    It is optimised and cached as a part of the kernels that call it, and may make arrays where they do.
    """
    return _part(function)


def jit_inlined(function: Callable[..., Any]) -> Callable[..., Any]:
    """As `jit_part`, for bodies that LLVM is to inline into their callers, whatever it thinks of it."""
    return _part(function, forceinline=True)


def jit_in_any_order(function: Callable[..., Any]) -> Callable[..., Any]:
    """As `jit` with reassociated (vectorised) sums, whose last bits may depend on the machine."""
    return _compiled(function, fastmath={"reassoc", "nsz"}, **_ONLY_GIVEN_ARRAYS)


# no kernel is called from C, for which numba would compile a further wrapper
_ALWAYS: dict[str, Any] = {"nogil": True, "error_model": "numpy", "no_cfunc_wrapper": True}
# the caller holds the arrays while a kernel runs, so it need not count references; parts do as the kernel that they are in
_ONLY_GIVEN_ARRAYS: dict[str, Any] = {"_nrt": False}


def _part(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    options |= {"no_cpython_wrapper": True, "pipeline_class": PartCompiler, **_ALWAYS}
    part: Callable[..., Any] = numba.njit(**options)(function)
    return part


def _compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    dispatcher = numba.njit(pipeline_class=KernelCompiler, **options, **_ALWAYS)(function)
    compiled: Callable[..., Any] = keep(dispatcher, function)
    return compiled
