"""``shrinkpoint import``: existing checkpoints become a run."""

import glob
import os
import pkgutil
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shrinkpoint.cli.output import bytes_text, console, counted
from shrinkpoint.cli.runs import Answer, OptionsOf, answering, of_stores
from shrinkpoint.errors import ConfigError, NoCheckpointError
from shrinkpoint.runtime.progress import waiting_for

if TYPE_CHECKING:
    from shrinkpoint.io.importing import Imported


@of_stores
@answering
def import_run(
    checkpoints: Annotated[
        list[str],
        typer.Argument(
            metavar="CHECKPOINTS...",
            help="Files or folders of one training, or patterns in quotes: 'old/*.ckpt'.",
        ),
    ],
    url: Annotated[str, typer.Argument(metavar="RUN", help="The run to make: a new folder, or URL.")],
    options_of: OptionsOf,
    scheme: Annotated[str, typer.Option(help="auto rounds weights and moments.")] = "lossless",
    evaluate: Annotated[
        str | None,
        typer.Option(
            "--evaluate",
            metavar="MODULE:FUNCTION",
            help="Of --scheme auto: takes weights and buffers by name, gives the held-out loss, always of the same batches.",
        ),
    ] = None,
) -> Answer:
    """Store existing checkpoints in a run, bit by bit, by step; removes nothing.

    Reads files of torch.save, Lightning, Composer and safetensors, folders of
    Hugging Face's Trainer and of torch.distributed.checkpoint, and executes
    nothing. Each is read back and compared with its original. Interrupted,
    give the same command again: nothing is stored twice.

    Lightning's CompressedCheckpoint continues a run of Lightning's own
    checkpoints, as Lightning would. Of others export a checkpoint, and give
    it to the framework.
    """
    paths = sorted({Path(found) for pattern in checkpoints for found in _matching(pattern)})
    if not paths:
        raise NoCheckpointError(f"nothing matches {' '.join(checkpoints)}")
    # frameworks are not imported, but torch is
    from shrinkpoint.io.importing import import_checkpoints

    if evaluate is not None and scheme == "lossless":
        raise ConfigError("--evaluate is for a scheme that rounds: add --scheme auto, or leave it out")
    function, options = None if evaluate is None else _function(evaluate), options_of(url)
    try:
        with waiting_for("reading the checkpoints") as waiting:
            done = import_checkpoints(
                paths, url, scheme=scheme, evaluate=function, storage_options=options, say=waiting.say
            )
    except KeyboardInterrupt:
        print("interrupted: the same command goes on from here, and stores nothing twice", file=sys.stderr)
        raise typer.Exit(130) from None
    return Answer({"url": url} | asdict(done), lambda: _print(done, url, scheme))


def _print(done: "Imported", url: str, scheme: str) -> None:
    for note in done.notes:
        console(stderr=True).print(f"note: {note}")
    out, ratio = console(), done.original_bytes / max(done.bytes, 1)
    there = f"; {counted(len(done.present), 'checkpoint')} already stored" if done.present else ""
    out.print(f"imported {counted(len(done.imported), 'checkpoint')} into {url}{there}")
    out.print(f"{bytes_text(done.bytes)} instead of {bytes_text(done.original_bytes)}, {ratio:.1f}x")
    if scheme == "lossless":
        out.print(
            "Each was read back and is its original, bit by bit: the originals may be deleted. None was."
        )
        return
    out.print("Each was read back. Weights and moments are rounded, all else is the original's, bit by bit.")
    out.print(f"What a restore costs: shrinkpoint ls {url}. No original was deleted.")


def _matching(pattern: str) -> list[str]:
    pattern = os.path.expanduser(pattern)
    return [pattern] if Path(pattern).exists() else glob.glob(pattern, recursive=True)


def _function(name: str) -> Any:
    """Return a function of the user's, from a module of this folder or an installed one."""
    sys.path.insert(0, os.getcwd())
    try:
        return pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"--evaluate {name} is no module:function that can be imported: {error}") from error
    finally:
        sys.path.remove(os.getcwd())
