"""``shrinkpoint export``: a checkpoint as an ordinary file."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shrinkpoint.cli.output import bytes_text, console, print_json
from shrinkpoint.cli.runs import (
    AsJson,
    Pairs,
    Seq,
    Step,
    StorageOptions,
    Target,
    addressed,
    load,
    parse_storage_options,
)
from shrinkpoint.engine.address import Address
from shrinkpoint.errors import ConfigError, NoCheckpointError
from shrinkpoint.runtime.progress import waiting_for
from shrinkpoint.store.connect import looks_like_file

if TYPE_CHECKING:
    from shrinkpoint.io.export import Exported

__all__ = ["export"]

_WEIGHTS_ALONE = "the step log has the weights alone: no optimizer state"


def export(
    url: Target,
    out: Annotated[
        str,
        typer.Argument(
            metavar="OUT",
            help="OUT.ckpt or OUT.pt: everything; OUT.safetensors: the weights; a folder OUT: PEFT's adapters.",
        ),
    ],
    step: Step = None,
    seq: Seq = None,
    force: Annotated[bool, typer.Option("--force", help="Replace OUT if it exists.")] = False,
    max_shard_size: Annotated[
        str | None,
        typer.Option(
            "--max-shard-size",
            metavar="SIZE",
            help="Of OUT.safetensors: several files of up to this size, as 5GB, and an index, as from_pretrained reads them.",
        ),
    ] = None,
    step_log_url: Annotated[
        str | None,
        typer.Option(
            "--step-log-url",
            help="The folder of the run's small step log, if it is not in the run: --step may name a logged step.",
        ),
    ] = None,
    storage_options: StorageOptions = None,
    option: Pairs = None,
    as_json: AsJson = False,
) -> None:
    """Write a checkpoint as a file that torch.load(weights_only=True), Lightning or safetensors reads."""
    from shrinkpoint.io.export import check_target

    folder = not Path(out).suffix
    target = Path(out) if folder else check_target(out, force=force)
    options = parse_storage_options(url, storage_options, option)
    limit = None if max_shard_size is None else _shard_size(target, max_shard_size)
    address, logged = addressed(url, step, seq), False
    try:
        exported, found = (
            _weights(address, options, target, limit=limit, force=force)
            if folder or target.suffix == ".safetensors"
            else _whole(url, options, step, seq, target, force=force)
        )
    except NoCheckpointError:
        if address.step is None or folder:
            raise
        from shrinkpoint.io.export import export as write
        from shrinkpoint.io.loading import load_weights
        from shrinkpoint.state.training import TrainingState

        weights = load_weights(str(address), storage_options=options, step_log_url=step_log_url)
        exported = write(TrainingState.capture({"model": weights}), target, force=force)
        found, logged = {"step": address.step, "seq": None}, True
    report = {
        "path": str(exported.path),
        "bytes": exported.bytes,
        "tensors": exported.tensors,
        **found,
        "logged": logged,
        "notes": [*([_WEIGHTS_ALONE] if logged else []), *exported.notes],
    }
    if as_json:
        print_json(report)
        return
    for note in report["notes"]:
        console(stderr=True).print(f"note: {note}")
    console().print(
        f"wrote {exported.path}: step {report['step']}, {exported.tensors} tensors, {bytes_text(exported.bytes)}"
    )


def _shard_size(target: Path, text: str) -> int:
    from shrinkpoint.io.exporting import bytes_of

    if target.suffix != ".safetensors":
        raise ConfigError("--max-shard-size is for OUT.safetensors")
    return bytes_of(text)


def _weights(
    address: Address, options: Any, target: Path, *, limit: int | None, force: bool
) -> "tuple[Exported, dict[str, Any]]":
    """Write the weights of a checkpoint some tensors at a time, or its adapters into a folder; returns also what it is."""
    from shrinkpoint.io.exporting import export_adapters, export_weights

    url, options = address.url if looks_like_file(address.url) else str(address), options or None
    exported = (
        export_weights(url, target, max_shard_size=limit, force=force, storage_options=options)
        if target.suffix
        else export_adapters(url, target, force=force, storage_options=options)
    )
    found: dict[str, Any] = {"step": exported.step, "seq": exported.seq}
    if len(exported.files) > 1:
        found["files"] = [str(file) for file in exported.files]
    return exported, found


def _whole(
    url: str, options: Any, step: int | None, seq: int | None, target: Path, *, force: bool
) -> "tuple[Exported, dict[str, Any]]":
    """Write the whole state of a checkpoint; returns also what it is."""
    from shrinkpoint.io.export import export as write

    loaded = load(url, options, step, seq)
    with waiting_for(f"writing {target}"):
        exported = write(loaded.decoded.state, target, force=force)
    number = loaded.manifest.seq if loaded.manifest is not None else None
    return exported, {"step": loaded.decoded.header.step, "seq": number}
