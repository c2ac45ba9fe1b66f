"""How the compiled loops are compiled: numba, without the GIL, on first use.

Importing this module imports numba, so it and the modules of kernels are only ever imported from inside a function of
their callers. numba checks no bounds: every kernel states what its caller must have checked.
"""

from collections.abc import Callable
from typing import Any

import numba

__all__ = ["jit", "jit_in_any_order", "jit_inlined"]


def jit(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile lazily, cached on disk where numba finds a folder it may write to, in memory elsewhere."""
    return _compiled(function)


def jit_inlined(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same for what is called so often that handing over its arrays would take longer than what it does."""
    return _compiled(function, forceinline=True)


def jit_in_any_order(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same for sums whose last bits may depend on the machine: they are reassociated, so that they vectorise."""
    return _compiled(function, fastmath={"reassoc", "nsz"})


def _compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    options |= {"nogil": True, "error_model": "numpy"}
    try:
        compiled: Callable[..., Any] = numba.njit(cache=True, **options)(function)
    except RuntimeError:  # numba's "cannot cache function": read-only install and no home folder
        compiled = numba.njit(**options)(function)
    return compiled
