"""``shrinkpoint export``: a checkpoint as an ordinary file."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from shrinkpoint.cli.output import bytes_text, console
from shrinkpoint.cli.runs import (
    Answer,
    OptionsOf,
    Seq,
    Step,
    Target,
    addressed,
    answering,
    load,
    name_of,
    of_stores,
)
from shrinkpoint.errors import ConfigError, NoCheckpointError
from shrinkpoint.runtime.progress import waiting_for

_WEIGHTS_ALONE = "the step log has the weights alone: no optimizer state"


@of_stores
@answering
def export(
    url: Target,
    options_of: OptionsOf,
    out: Annotated[
        str,
        typer.Argument(
            metavar="OUT",
            help="OUT.ckpt or OUT.pt: everything; OUT.safetensors: the weights; a folder OUT: PEFT's adapters, or the files of an imported folder.",
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
) -> Answer:
    """Write a checkpoint as a file that torch.load(weights_only=True), Lightning or safetensors reads."""
    from shrinkpoint.io.export import bytes_of, check_target, export_adapters, export_weights
    from shrinkpoint.io.export import export as write
    from shrinkpoint.io.loading import load_weights
    from shrinkpoint.state.training import TrainingState

    folder = not Path(out).suffix
    target = Path(out) if folder else check_target(out, force=force)
    options = options_of(url)
    if max_shard_size is not None and target.suffix != ".safetensors":
        raise ConfigError("--max-shard-size is for OUT.safetensors")
    limit = None if max_shard_size is None else bytes_of(max_shard_size)
    address, logged = addressed(url, step, seq), False
    name = name_of(address)
    try:
        if folder:
            exported = export_adapters(name, target, force=force, storage_options=options)
        elif target.suffix == ".safetensors":
            exported = export_weights(
                name, target, max_shard_size=limit, force=force, storage_options=options
            )
        else:
            decoded, _, manifest = load(address, options)
            with waiting_for(f"writing {target}"):
                exported = write(decoded.state, target, force=force)
            exported = replace(
                exported, step=decoded.header.step, seq=None if manifest is None else manifest.seq
            )
    except NoCheckpointError:
        if address.step is None or folder:
            raise
        weights = load_weights(name, storage_options=options, step_log_url=step_log_url)
        exported, logged = write(TrainingState.capture({"model": weights}), target, force=force), True
        exported = replace(exported, step=address.step)
    notes = [*([_WEIGHTS_ALONE] if logged else []), *exported.notes]
    report = {
        "path": str(exported.path), "bytes": exported.bytes, "tensors": exported.tensors, "step": exported.step, "seq": exported.seq,
        **({"files": [str(file) for file in exported.files]} if len(exported.files) > 1 else {}), "logged": logged, "notes": notes,
    }  # fmt: skip

    def show() -> None:
        for note in notes:
            console(stderr=True).print(f"note: {note}")
        size = f"{exported.tensors} tensors, {bytes_text(exported.bytes)}"
        console().print(f"wrote {exported.path}: step {exported.step}, {size}")

    return Answer(report, show)
