"""``shrinkpoint compile``: compile the coders now instead of at the start of a training."""

import time
from typing import Annotated

import typer

from shrinkpoint.cli.output import console
from shrinkpoint.errors import ShrinkpointError
from shrinkpoint.runtime.progress import waiting_for

__all__ = ["compile_now"]


def compile_now(
    scheme: Annotated[str, typer.Option("--scheme", help="Whose coders.")] = "auto",
) -> None:
    """Compile the coders now, up to a minute of one core; otherwise the first training on a machine does it."""
    from shrinkpoint.engine.warmup import compile_coders, is_compiled
    from shrinkpoint.runtime.kernel_cache import kernels_are_interpreted

    if kernels_are_interpreted():
        raise ShrinkpointError("NUMBA_DISABLE_JIT is set, so numba compiles nothing: unset it")
    out = console()
    if is_compiled(scheme):
        out.print(f"the coders of scheme {scheme} are compiled already")
        return
    started = time.perf_counter()
    with waiting_for(f"compiling the coders of scheme {scheme}, which takes a minute or two"):
        lasts = compile_coders(scheme)
    if not lasts:
        raise ShrinkpointError(
            "the compiled coders cannot be kept: numba finds no folder that it may write to;"
            " let NUMBA_CACHE_DIR name one, here and where training runs"
        )
    out.print(f"compiled the coders of scheme {scheme} in {time.perf_counter() - started:.0f} s")
