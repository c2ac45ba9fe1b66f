"""Compiles kernels with fewer searches for garbage.

Importing this module imports numba (see `shrinkpoint.runtime.jit`).
"""

from collections.abc import Callable
from typing import Any

from numba.core.compiler import Compiler

from shrinkpoint.runtime.garbage import rarely_collected

__all__ = ["KernelCompiler"]


class KernelCompiler(Compiler):  # type: ignore[misc]
    """numba's compiler (a ``pipeline_class``) for kernels."""

    def compile_extra(self, function: Callable[..., Any]) -> Any:
        """Compile a function. The many small objects that this makes are in use until it is done: searching them for
        garbage took a tenth of the time."""
        with rarely_collected():
            return super().compile_extra(function)
