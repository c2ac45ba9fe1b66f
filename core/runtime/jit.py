"""Decorators for numba kernels: compiled on first use, without the GIL, cached on disk.

Importing this module imports numba, so it and the modules of kernels are only ever imported from inside a function of
their callers. numba checks no bounds: every kernel states what its caller must have checked.

Every machine compiles the kernels once, so compile time matters. A function is compiled with all that it calls, again
for each of its callers; array allocations, slice assignments and further argument types add to the time. So callers
allocate the arrays, and functions that Python never calls are a `jit_part` or `jit_inlined`.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numba
from numba.core import config
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler
from numba.core.compiler_lock import global_compiler_lock

from shrinkpoint.runtime.kernel_cache import keep


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
    options = {"pipeline_class": KernelCompiler, **options}
    dispatcher = numba.njit(**options, **_ALWAYS)(function)
    compiled: Callable[..., Any] = keep(dispatcher, function)
    return compiled


class KernelCompiler(Compiler):  # type: ignore[misc]
    """numba's compiler (a ``pipeline_class``) for kernels."""

    def compile_extra(self, function: Callable[..., Any]) -> Any:
        """Compile a function. The many small objects that this makes are in use until it is done: searching them for
        garbage took a tenth of the time."""
        if self.state.library is None:
            self.state.library = _Kernel(self.state.targetctx.codegen(), function.__qualname__)
            self.state.library.enable_object_caching()
        with rarely_collected():
            return super().compile_extra(function)


class _Kernel(JITCodeLibrary):  # type: ignore[misc]
    """Code that is optimised once. numba does it twice, for the sake of counted references, of which kernels have none or few:
    that took a fifth of the time."""

    def _optimize_final_module(self) -> None:
        try:
            manager, *builder = self._codegen._module_pass_manager()
        except (AttributeError, TypeError):  # another numba, whose own way is as good
            super()._optimize_final_module()
        else:
            manager.run(self._final_module, *builder)


_RARELY = 10_000
"""Further objects after which Python searches the youngest ones: 700 of them by default, 2000 in newer versions."""


@contextmanager
def rarely_collected() -> Iterator[None]:
    """Within it, Python searches for cyclic garbage less often, in all threads.

    Where it is searched for by hand only, nothing changes. What others set meanwhile remains.
    """
    found = gc.get_threshold()
    if not 0 < found[0] < _RARELY:  # 0 turns it off
        yield
        return
    ours = (_RARELY, *found[1:])
    gc.set_threshold(*ours)
    try:
        yield
    finally:
        if gc.get_threshold() == ours:
            gc.set_threshold(*found)


# numba optimises every function and generates its machine code. For what only kernels call that is work for nothing, since a kernel is
# linked with all that it calls, optimised and translated as a whole: it took a fifth of the time.
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

    def _optimize_functions(self, module: object) -> None:
        pass

    def _optimize_final_module(self) -> None:
        pass

    def _finalize_final_module(self) -> None:
        self._finalized = True


def jit_tiles(function: Callable[..., Any]) -> Callable[..., Any]:
    """As `jit`, with sequences of equal scalar operations turned into vectors, which numba leaves off."""
    return _compiled(function, pipeline_class=TileCompiler, **_ONLY_GIVEN_ARRAYS)


class TileCompiler(KernelCompiler):
    """The kernels' compiler with LLVM's SLP vectorizer, for functions of `jit_tiles`."""

    def compile_extra(self, function: Callable[..., Any]) -> Any:
        """See `KernelCompiler.compile_extra`."""
        with global_compiler_lock:
            before, config.SLP_VECTORIZE = config.SLP_VECTORIZE, 1
            try:
                return super().compile_extra(function)
            finally:
                config.SLP_VECTORIZE = before
