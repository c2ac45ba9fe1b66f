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
from shrinkpoint.errors import ConfigError, NoCheckpointError
from shrinkpoint.runtime.progress import waiting_for

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
    exported, found = None, None
    if folder or target.suffix == ".safetensors":
        exported, found = _weights(url, options, step, seq, out, limit=limit, force=force)
    if exported is None:
        state, found = _state(url, options, step, seq, step_log_url)
        with waiting_for(f"writing {out}"):
            from shrinkpoint.io.export import export as write

            exported = write(state, out, force=force)
    assert found is not None
    report = {
        "path": str(exported.path),
        "bytes": exported.bytes,
        "tensors": exported.tensors,
        **found,
        "notes": [*([_WEIGHTS_ALONE] if found["logged"] else []), *exported.notes],
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
    url: str, options: Any, step: int | None, seq: int | None, out: str, *, limit: int | None, force: bool
) -> "tuple[Exported | None, dict[str, Any] | None]":
    """The weights of a checkpoint, written some tensors at a time, or its adapters; None where a step was not saved: it may have been
    logged."""
    from shrinkpoint.io.exporting import export_adapters, export_weights
    from shrinkpoint.store.connect import looks_like_file

    named = addressed(url, step, seq)
    address = named.url if looks_like_file(named.url) else str(named)
    folder, options = not Path(out).suffix, options or None
    try:
        exported = (
            export_adapters(address, out, force=force, storage_options=options)
            if folder
            else export_weights(address, out, max_shard_size=limit, force=force, storage_options=options)
        )
    except NoCheckpointError:
        if named.step is None or folder:
            raise
        return None, None
    found: dict[str, Any] = {"step": exported.step, "seq": exported.seq, "logged": False}
    if len(exported.files) > 1:
        found["files"] = [str(file) for file in exported.files]
    return exported, found


def _state(
    url: str, options: Any, step: int | None, seq: int | None, step_log_url: str | None
) -> tuple[Any, dict[str, Any]]:
    """The state of a checkpoint, or the weights of a step that was logged and not saved; and what it is."""
    from shrinkpoint.io.loading import load_weights
    from shrinkpoint.state.training import TrainingState

    try:
        loaded = load(url, options, step, seq)
    except NoCheckpointError:
        address = addressed(url, step, seq)
        if address.step is None:
            raise
        weights = load_weights(str(address), storage_options=options, step_log_url=step_log_url)
        return TrainingState.capture({"model": weights}), {"step": address.step, "seq": None, "logged": True}
    number = loaded.manifest.seq if loaded.manifest is not None else None
    return loaded.decoded.state, {"step": loaded.decoded.header.step, "seq": number, "logged": False}
