"""``shrinkpoint export``: a checkpoint as an ordinary file."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shrinkpoint.cli.files import ContainerFile
from shrinkpoint.cli.options import (
    AsJson,
    Pairs,
    Seq,
    Step,
    StorageOptions,
    Target,
    parse_storage_options,
    split_address,
)
from shrinkpoint.cli.output import bytes_text, console, print_json
from shrinkpoint.cli.runs import open_run, pick
from shrinkpoint.errors import NoCheckpointError
from shrinkpoint.store.single import looks_like_file, naming

if TYPE_CHECKING:
    from shrinkpoint.coding import Decoded

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

    url, step, seq = split_address(url, step, seq)
    check_target(out, force=force)
    decoded, seq_read = _decode(url, parse_storage_options(url, storage_options, option), step, seq)
    exported = write(decoded.state, out, force=force)
    report = {
        "path": str(exported.path),
        "bytes": exported.bytes,
        "tensors": exported.tensors,
        "step": decoded.checkpoint.step,
        "seq": seq_read,
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


def _decode(
    url: str, options: Mapping[str, Any], step: int | None, seq: int | None
) -> tuple["Decoded", int | None]:
    from shrinkpoint.coding import decode_chain
    from shrinkpoint.config import SaverConfig
    from shrinkpoint.container.reader import read_container
    from shrinkpoint.saver import decode_checkpoint

    threads = SaverConfig().encoder_threads
    if looks_like_file(url):
        file = ContainerFile(url, options)
        with naming(file.url):
            return decode_chain([read_container(file.read(0, file.size))], threads=threads), None
    run = open_run(url, options)
    if step is None and seq is None:
        found = run.store.newest_sound(lambda m, data: decode_checkpoint(m, data, threads=threads))
        if found is None:
            raise NoCheckpointError(
                f"{run.store.display} is a run without a checkpoint yet: nothing to export"
            )
        return found[1], found[0].seq
    manifest = pick(run, step=step, seq=seq)
    return decode_checkpoint(manifest, run.store.fetch(manifest), threads=threads), manifest.seq
