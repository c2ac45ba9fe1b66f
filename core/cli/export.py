"""``shrinkpoint export``: a checkpoint as an ordinary file."""

from typing import Annotated

import typer

from shrinkpoint.cli.decode import load
from shrinkpoint.cli.options import (
    AsJson,
    Pairs,
    Seq,
    Step,
    StorageOptions,
    Target,
    parse_storage_options,
)
from shrinkpoint.cli.output import bytes_text, console, print_json
from shrinkpoint.runtime.progress import waiting_for

__all__ = ["export"]


def export(
    url: Target,
    out: Annotated[
        str,
        typer.Argument(metavar="OUT", help="OUT.ckpt or OUT.pt: everything; OUT.safetensors: the weights."),
    ],
    step: Step = None,
    seq: Seq = None,
    force: Annotated[bool, typer.Option("--force", help="Replace OUT if it exists.")] = False,
    storage_options: StorageOptions = None,
    option: Pairs = None,
    as_json: AsJson = False,
) -> None:
    """Write a checkpoint as a file that torch.load(weights_only=True), Lightning or safetensors reads."""
    from shrinkpoint.export import check_target
    from shrinkpoint.export import export as write

    check_target(out, force=force)
    loaded = load(url, parse_storage_options(url, storage_options, option), step, seq)
    with waiting_for(f"writing {out}"):
        exported = write(loaded.decoded.state, out, force=force)
    report = {
        "path": str(exported.path),
        "bytes": exported.bytes,
        "tensors": exported.tensors,
        "step": loaded.decoded.checkpoint.step,
        "seq": loaded.manifest.seq if loaded.manifest is not None else None,
        "notes": list(exported.notes),
    }
    if as_json:
        print_json(report)
        return
    for note in exported.notes:
        console(stderr=True).print(f"note: {note}")
    console().print(
        f"wrote {exported.path}: step {report['step']}, {exported.tensors} tensors, {bytes_text(exported.bytes)}"
    )
