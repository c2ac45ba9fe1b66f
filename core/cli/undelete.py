"""``shrinkpoint undelete``: restores removed checkpoints whose data still exists."""

from shrinkpoint.cli.options import (
    AsJson,
    Pairs,
    Seq,
    Step,
    StorageOptions,
    Url,
    Yes,
    addressed,
    parse_storage_options,
)
from shrinkpoint.cli.output import console, print_json
from shrinkpoint.cli.runs import open_run
from shrinkpoint.errors import NoCheckpointError
from shrinkpoint.store.manifest import Manifest

__all__ = ["undelete"]


def undelete(
    url: Url,
    step: Step = None,
    seq: Seq = None,
    yes: Yes = False,
    storage_options: StorageOptions = None,
    option: Pairs = None,
    as_json: AsJson = False,
) -> None:
    """Bring back removed checkpoints, all or one, for as long as their data waits for the end of its grace."""
    address = addressed(url, step, seq)
    url, step, seq = address.url, address.step, address.seq
    run = open_run(url, parse_storage_options(url, storage_options, option))
    there = run.store.removed()
    wanted = [m for m in there if (step is None or m.step == step) and (seq is None or m.seq == seq)]
    if not wanted:
        known = ", ".join(str(m.step) for m in there) or "none"
        raise NoCheckpointError(
            f"{run.store.display} has no such removed checkpoint; the steps that can be brought back are: {known}"
        )
    if yes:
        with run.store.writer() as writer:
            for manifest in wanted:
                writer.undelete(manifest)
    if as_json:
        print_json({"done": yes, "undelete": [{"seq": m.seq, "step": m.step} for m in wanted]})
    else:
        _print(wanted, run.store.display, yes=yes)


def _print(wanted: list[Manifest], shown: str, *, yes: bool) -> None:
    steps = ", ".join(str(manifest.step) for manifest in wanted)
    if yes:
        console().print(
            f"brought back {len(wanted)} checkpoints to {shown}; steps: {steps}. Pin those that a training with retention must not remove"
        )
    else:
        console().print(
            f"would bring back {len(wanted)} checkpoints to {shown}; steps: {steps}. Nothing was changed: give --yes to do it"
        )
