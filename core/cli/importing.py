"""``shrinkpoint import``: existing checkpoints become a run."""

import glob
import importlib
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from shrinkpoint.cli.output import bytes_text, console, counted, print_json
from shrinkpoint.cli.runs import AsJson, Pairs, StorageOptions, parse_storage_options
from shrinkpoint.errors import ConfigError, NoCheckpointError
from shrinkpoint.runtime.progress import waiting_for


def import_run(
    checkpoints: Annotated[
        list[str],
        typer.Argument(
            metavar="CHECKPOINTS...",
            help="Files or folders of one training, or patterns in quotes: 'old/*.ckpt'.",
        ),
    ],
    url: Annotated[str, typer.Argument(metavar="RUN", help="The run to make: a new folder, or URL.")],
    scheme: Annotated[
        str, typer.Option("--scheme", help="auto rounds weights and moments, within the bound.")
    ] = "lossless",
    evaluate: Annotated[
        str | None,
        typer.Option(
            "--evaluate",
            metavar="MODULE:FUNCTION",
            help="Of --scheme auto: takes weights and buffers by name, gives the held-out loss, always of the same batches.",
        ),
    ] = None,
    storage_options: StorageOptions = None,
    option: Pairs = None,
    as_json: AsJson = False,
) -> None:
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
    function = None if evaluate is None else _function(evaluate)
    options = parse_storage_options(url, storage_options, option)
    try:
        with waiting_for("reading the checkpoints") as waiting:
            done = import_checkpoints(
                paths, url, scheme=scheme, evaluate=function, storage_options=options, say=waiting.say
            )
    except KeyboardInterrupt:
        console(stderr=True).print(
            "interrupted: the same command goes on from here, and stores nothing twice"
        )
        raise typer.Exit(130) from None
    report = {
        "url": url,
        "imported": list(done.steps),
        "present": list(done.present),
        "original_bytes": done.original_bytes,
        "bytes": done.stored_bytes,
        "notes": list(done.notes),
    }
    if as_json:
        print_json(report)
        return
    for note in done.notes:
        console(stderr=True).print(f"note: comes back as a plainer type: {note}")
    out = console()
    out.print(
        f"imported {counted(len(done.steps), 'checkpoint')} into {url}"
        + (f"; {len(done.present)} were there already" if done.present else "")
    )
    ratio = done.original_bytes / max(done.stored_bytes, 1)
    out.print(f"{bytes_text(done.stored_bytes)} instead of {bytes_text(done.original_bytes)}, {ratio:.1f}x")
    if scheme == "lossless":
        out.print(
            "Each was read back and is its original, bit by bit: the originals may be deleted. None was."
        )
    else:
        out.print(
            "Each was read back. Weights and moments are rounded, all else is the original's, bit by bit."
        )
        out.print(f"What a restore costs: shrinkpoint ls {url}. No original was deleted.")


def _matching(pattern: str) -> list[str]:
    pattern = os.path.expanduser(pattern)
    return [pattern] if Path(pattern).exists() else glob.glob(pattern, recursive=True)


def _function(name: str) -> Any:
    """Return a function of the user's, from a module of this folder or an installed one."""
    module, _, attribute = name.partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"--evaluate {name} is no module:function that can be imported: {error}") from error
    finally:
        sys.path.remove(os.getcwd())
    return found
