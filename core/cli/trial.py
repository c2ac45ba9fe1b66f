"""``shrinkpoint try``: how small an existing checkpoint would be, before anything is changed."""

import warnings
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shrinkpoint.cli.output import bytes_text, console, counted, print_table
from shrinkpoint.cli.runs import Answer, answering
from shrinkpoint.errors import ConfigError, ShrinkpointWarning
from shrinkpoint.runtime.progress import waiting_for
from shrinkpoint.schemes.exactness import explained

if TYPE_CHECKING:
    from shrinkpoint.io.trial import Result


_SAMPLE = 12_000_000
_WARM = 100_000
_UNTRAINED = ", or not trained by the optimizer"


@answering
def try_schemes(
    checkpoint: Annotated[
        Path, typer.Argument(metavar="FILE_OR_FOLDER", help="A checkpoint of any framework.")
    ],
    later: Annotated[
        Path | None,
        typer.Argument(
            metavar="LATER_FILE", help="A later one of the same training: shows how small deltas are."
        ),
    ] = None,
) -> Answer:
    """Show how small each scheme would make a checkpoint, and at what error.

    Nothing is written. Reads files of torch.save, Lightning, Composer and
    safetensors, folders of Hugging Face's Trainer and of
    torch.distributed.checkpoint, and executes nothing. Of a large one a
    sample is coded; brackets are 95 % intervals over tensors (bootstrap).
    """
    # torch, for which the command line does not wait
    from shrinkpoint.io.ordinary import describe_state, read_ordinary
    from shrinkpoint.io.trial import ROWS, left_exact, sampled, tried
    from shrinkpoint.state.training import TrainingState

    with waiting_for(f"reading {checkpoint}") as waiting, warnings.catch_warnings():
        warnings.simplefilter("ignore", ShrinkpointWarning)  # of schemes that are slow, as the table shows
        read = [read_ordinary(path) for path in (checkpoint, later) if path is not None]
        one, known = read[0], [each.step for each in read if each.step is not None]
        if len(known) > 1 and known[1] <= known[0]:
            raise ConfigError(
                f"{later} is of step {known[1]}, which is not after step {known[0]} of {checkpoint}: name the earlier one first"
            )
        state, *after = (TrainingState.capture(each.state, describe_state(each.state)) for each in read)
        step = one.step or 0
        more = (after[0], read[1].step or step + 1) if after else None
        parts, small = (sampled(state, limit, *after) for limit in (_SAMPLE, _WARM))
        results = {}
        for row in ROWS:
            waiting.say(f"trying {row}, whose coders are compiled once")
            tried(row, small, state, step, more)  # compiles its coders
            results[row] = tried(row, parts, state, step, more)
    exact = [
        {"reason": explained(code) + (_UNTRAINED if code == "buffer" else ""), "tensors": len(specs),
         "bytes": sum(spec.nbytes for spec in specs), "such_as": max(specs, key=lambda spec: spec.nbytes).name}
        for code, specs in left_exact(state).items()
    ]  # fmt: skip
    whole = one.state if isinstance(one.state, Mapping) else {}
    report = {
        "path": str(checkpoint), "kind": one.kind, "steps": [each.step for each in read], "bytes": one.bytes, "state_bytes": state.nbytes,
        "tensors": len(state.specs), "all_of_it": not parts[0].points, "schemes": {row: asdict(found) for row, found in results.items()},
        "exact": exact, "no_tensors": sorted(str(key) for key in whole if not TrainingState.capture(whole[key]).specs),
    }  # fmt: skip
    return Answer(report, lambda: _print(report, results))


def _print(report: Mapping[str, Any], results: "Mapping[str, Result]") -> None:
    out, size = console(), report["state_bytes"]
    steps = " and ".join("unknown" if step is None else str(step) for step in report["steps"])
    out.print(
        f"{report['kind']} checkpoint, {'steps' if len(report['steps']) > 1 else 'step'} {steps}: {counted(report['tensors'], 'tensor')}, {bytes_text(size)}"
        + ("" if report["all_of_it"] else "; a sample of it was coded")
    )
    columns = ["scheme", "base", "delta", "weights", "moments", "s/GB", "kept"]
    rows = [
        [row, _ratio(found.base), _ratio(found.delta), _percent(found.weights), _percent(found.moments),
         f"{found.cpu_s_per_gb:.0f}", f"{found.kept:.2f}x"]
        for row, found in results.items()
    ]  # fmt: skip
    print_table(columns, rows, left=["scheme"])
    best = results["auto, usual"]
    delta = "" if best.delta is None else f", {bytes_text(size * best.delta[0])} as a delta"
    out.print(
        f"With auto, usual: {bytes_text(size)} become {bytes_text(size * best.base[0])} as a base{delta}."
    )
    if best.delta is None:
        out.print("Most checkpoints of a run are deltas: name a later one, too, to see them.")
    out.print("weights, moments: relative error. s/GB: CPU seconds. kept: host memory that")
    out.print("the next delta needs, of the state's size. auto, mild: without a loss to")
    out.print("measure; auto, usual: where it begins with one, and adapts.")
    for part in report["exact"]:
        out.print(
            f"exact: {counted(part['tensors'], 'tensor')}, {bytes_text(part['bytes'])}: {part['reason']}, such as {part['such_as']}"
        )
    if report["no_tensors"]:
        out.print(f"no tensors, stored as they are: {', '.join(report['no_tensors'])}")


def _ratio(found: tuple[float, float, float] | None) -> str:
    if found is None:
        return "-"
    mean, low, high = (f"{1 / value:.1f}" if 1 / value < 10 else f"{1 / value:.0f}" for value in found)
    return f"{mean}x" + (f" ({high}-{low})" if found[1] != found[2] else "")


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.3g}%"
