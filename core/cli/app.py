"""The entry point: commands, global options, and errors as one line instead of a traceback."""

import logging
import os
import sys
import time
import warnings
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from shrinkpoint.cli.files import export, import_run, try_schemes
from shrinkpoint.cli.look import diff, ls, show, verify
from shrinkpoint.cli.prune import compact, prune, undelete
from shrinkpoint.cli.report import report
from shrinkpoint.cli.runs import Answer, answering
from shrinkpoint.cli.stores import stores
from shrinkpoint.errors import ConfigError, ShrinkpointError, ShrinkpointWarning
from shrinkpoint.runtime.progress import quieted, waiting_for
from shrinkpoint.store.connect import reading_anyway
from shrinkpoint.version import __version__


class _Commands(TyperGroup):
    """Turns shrinkpoint's exceptions and warnings into lines on stderr and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        quiet, anyway = (bool(ctx.params.get(name)) for name in ("quiet", "read_anyway"))
        with warnings.catch_warnings(), quieted(quiet), reading_anyway(anyway):
            warnings.simplefilter("always", ShrinkpointWarning)
            warnings.showwarning = _show_warning
            try:
                return super().invoke(ctx)
            except ShrinkpointError as error:
                if ctx.params.get("debug"):
                    raise
                print(f"error: {error}", file=sys.stderr)
                raise typer.Exit(2 if isinstance(error, ConfigError) else 1) from error


def _show_warning(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
    own = issubclass(category, ShrinkpointWarning)
    text = f"warning: {message}\n" if own else warnings.formatwarning(message, category, *place[:2])
    print(text, file=sys.stderr, end="")


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Inspect, verify, export and clean up the checkpoints of a run (a folder, s3://bucket/prefix, any fsspec URL); try and import others.",
)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"shrinkpoint {__version__}")
        raise typer.Exit


@app.callback()
def _globals(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print no progress.")] = False,
    read_anyway: Annotated[
        bool,
        typer.Option(
            "--read-anyway", help="Read from the stores that answer; others may have newer checkpoints."
        ),
    ] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Take the options before the command's name, which `_Commands.invoke` reads."""


def _compile(scheme: Annotated[str, typer.Option(help="Whose coders.")] = "auto") -> Answer:
    """Compile the coders now, up to a minute of one core; otherwise the first training on a machine does it."""
    from shrinkpoint.engine.warmup import compile_coders, is_compiled
    from shrinkpoint.runtime.kernel_cache import kernels_are_interpreted

    if kernels_are_interpreted():
        raise ShrinkpointError("NUMBA_DISABLE_JIT is set, so numba compiles nothing: unset it")
    if is_compiled(scheme):
        return Answer({"scheme": scheme}, [f"the coders of scheme {scheme} are compiled already"])
    started = time.perf_counter()
    with waiting_for(f"compiling the coders of scheme {scheme}, which takes a minute or two"):
        lasts = compile_coders(scheme)
    if not lasts:
        raise ShrinkpointError(
            "the compiled coders cannot be kept: numba finds no folder that it may write to;"
            " let NUMBA_CACHE_DIR name one, here and where training runs"
        )
    took = f"{time.perf_counter() - started:.0f} s"
    return Answer({"scheme": scheme}, [f"compiled the coders of scheme {scheme} in {took}"])


for _command in (ls, show, report, diff, verify, export, compact, prune, undelete, stores):
    app.command()(answering(_command))
app.command("import")(answering(import_run))
app.command("try")(answering(try_schemes, of_stores=False))
app.command("compile")(answering(_compile, of_stores=False))


def main() -> None:
    """Run the command line; exits with 0, with 1 where a problem was found, or with 2 for a wrong call."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the caller, as by a daemon
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - until the process ends
    logging.getLogger("shrinkpoint").addHandler(logging.NullHandler())  # no progress but on terminals
    app()
