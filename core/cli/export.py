"""``shrinkpoint export``: a checkpoint as an ordinary file."""

from typing import Annotated, Any

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
    split_address,
)
from shrinkpoint.cli.output import bytes_text, console, print_json
from shrinkpoint.errors import NoCheckpointError
from shrinkpoint.runtime.progress import waiting_for

__all__ = ["export"]

_WEIGHTS_ALONE = "the step log has the weights alone: no optimizer state"


def export(
    url: Target,
    out: Annotated[
        str,
        typer.Argument(metavar="OUT", help="OUT.ckpt or OUT.pt: everything; OUT.safetensors: the weights."),
    ],
    step: Step = None,
    seq: Seq = None,
    force: Annotated[bool, typer.Option("--force", help="Replace OUT if it exists.")] = False,
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
    from shrinkpoint.export import check_target
    from shrinkpoint.export import export as write

    check_target(out, force=force)
    state, found = _state(url, parse_storage_options(url, storage_options, option), step, seq, step_log_url)
    with waiting_for(f"writing {out}"):
        exported = write(state, out, force=force)
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


def _state(
    url: str, options: Any, step: int | None, seq: int | None, step_log_url: str | None
) -> tuple[Any, dict[str, Any]]:
    """The state of a checkpoint, or the weights of a step that was logged and not saved; and what it is."""
    from shrinkpoint.loading import load_weights
    from shrinkpoint.saving.address import Address
    from shrinkpoint.state.training import TrainingState

    try:
        loaded = load(url, options, step, seq)
    except NoCheckpointError:
        run, step, seq = split_address(url, step, seq)
        if step is None:
            raise
        address = str(Address(url=run, step=step))
        weights = load_weights(address, storage_options=options, step_log_url=step_log_url)
        return TrainingState.capture({"model": weights}), {"step": step, "seq": None, "logged": True}
    number = loaded.manifest.seq if loaded.manifest is not None else None
    return loaded.decoded.state, {"step": loaded.decoded.checkpoint.step, "seq": number, "logged": False}
