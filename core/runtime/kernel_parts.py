"""Compiles functions that only kernels call, as far as their kernels do not do it again.

numba optimises every function and generates its machine code. For what only kernels call that is work for nothing, since
a kernel is linked with all that it calls, optimised and translated as a whole: it took a fifth of the time.

Importing this module imports numba (see `shrinkpoint.runtime.jit`).
"""

from typing import Any

from numba.core.codegen import JITCodeLibrary

from shrinkpoint.runtime.kernel_compiler import KernelCompiler

__all__ = ["PartCompiler"]


class PartCompiler(KernelCompiler):
    """The kernels' compiler (a ``pipeline_class``) for functions without a Python wrapper."""

    def __init__(self, typing: Any, target: Any, library: Any, *arguments: Any) -> None:
        part = _Part(target.codegen(), "part") if library is None else library
        super().__init__(typing, target, part, *arguments)


class _Part(JITCodeLibrary):  # type: ignore[misc]
    """Code to be linked into other code, and no more."""

    @property
    def codegen(self) -> "_Part":
        """Where numba makes the environment known to the machine code, of which there is none."""
        return self

    def set_env(self, name: str, environment: object) -> None:
        """Nothing: an environment is for wrappers and for exceptions."""

    def get_pointer_to_function(self, name: str) -> int:
        """0 is numba's answer for what is not defined."""
        self._ensure_finalized()
        return 0

    def _optimize_final_module(self) -> None:
        pass

    def _finalize_final_module(self) -> None:
        self._finalized = True
