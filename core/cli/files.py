"""``shrinkpoint export``, ``import`` and ``try``: ordinary checkpoints, as files and folders."""

import glob
import os
import pkgutil
import sys
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from shrinkpoint.cli.output import bytes_text, counted, percent_text, table
from shrinkpoint.cli.runs import Answer, Seq, Step, Target, addressed, load, name_of, options_of
from shrinkpoint.errors import ConfigError, NoCheckpointError, ShrinkpointWarning
from shrinkpoint.runtime.progress import waiting_for
from shrinkpoint.schemes.exactness import explained

if TYPE_CHECKING:
    from shrinkpoint.io.importing import Imported
    from shrinkpoint.io.trial import Result

_SAMPLE = 12_000_000
_WARM = 100_000


# ---- export


def export(
    url: Target,
    out: Annotated[
        str,
        typer.Argument(
            metavar="OUT",
            help="*.ckpt or *.pt: everything; *.safetensors: the weights; a folder: PEFT's adapters, or the files of an imported one.",
        ),
    ],
    step: Step = None,
    seq: Seq = None,
    force: Annotated[bool, typer.Option("--force", help="Replace OUT if it exists.")] = False,
    max_shard_size: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="Of *.safetensors: several files of up to this, as 5GB, and an index."
        ),
    ] = None,
    step_log_url: Annotated[
        str | None,
        typer.Option(
            help="The folder of the small step log whose step --step names, if it is not in the run."
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
            decoded, _, manifest = load(address)
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
        notes = "the step log has the weights alone: no optimizer state", *exported.notes
        exported = replace(exported, step=address.step, notes=notes)
    found = {"path": str(exported.path), "files": [*map(str, exported.files)], "logged": logged}
    size = f"{exported.tensors} tensors, {bytes_text(exported.bytes)}"
    text = f"wrote {exported.path}: step {exported.step}, {size}"
    return Answer(asdict(exported) | found, [text], notes=exported.notes)


# ---- import


def import_run(
    checkpoints: Annotated[
        list[str],
        typer.Argument(
            metavar="FILES", help="Checkpoints of one training, or patterns in quotes: 'old/*.ckpt'."
        ),
    ],
    url: Annotated[str, typer.Argument(metavar="RUN", help="The run to make: a new folder, or URL.")],
    scheme: Annotated[str, typer.Option(help="auto rounds weights and moments.")] = "lossless",
    evaluate: Annotated[
        str | None,
        typer.Option(
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
    if Path(url).is_file():
        raise ConfigError(f"the last argument is the run to make, and {url} is a file")
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
        print("interrupted: the same command continues from here, and stores nothing twice", file=sys.stderr)
        raise typer.Exit(130) from None
    notes = done.notes
    if evaluate is not None and done.present:
        notes = (
            *notes,
            "--evaluate was not used for what was stored before: import into a new run to measure it",
        )
    return Answer({"url": url} | asdict(done), _of_imported(done, url, scheme), notes=notes)


def _of_imported(done: "Imported", url: str, scheme: str) -> Iterator[str]:
    ratio = done.original_bytes / max(done.bytes, 1)
    there = f"; {counted(len(done.present), 'checkpoint')} already stored" if done.present else ""
    yield f"imported {counted(len(done.imported), 'checkpoint')} into {url}{there}"
    yield f"{bytes_text(done.bytes)} instead of {bytes_text(done.original_bytes)}, {ratio:.1f}x"
    if scheme == "lossless":
        noted = " but for what is noted" if done.notes else ""
        yield f"Each was read back and is its original, bit by bit{noted}: the originals may be deleted. None was."
        return
    yield "Each was read back. Weights and moments are rounded, all else is the original's, bit by bit."
    yield f"What a restore costs: shrinkpoint ls {url}. No original was deleted."


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


# ---- try


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
        {"reason": explained(code) + (", or not trained by the optimizer" if code == "buffer" else ""),
         "tensors": len(specs), "bytes": sum(spec.nbytes for spec in specs), "such_as": max(specs, key=lambda spec: spec.nbytes).name}
        for code, specs in left_exact(state).items()
    ]  # fmt: skip
    whole = one.state if isinstance(one.state, Mapping) else {}
    report = {
        "path": str(checkpoint), "kind": one.kind, "steps": [each.step for each in read], "bytes": one.bytes, "state_bytes": state.nbytes,
        "tensors": len(state.specs), "all_of_it": not parts[0].points, "schemes": {row: asdict(found) for row, found in results.items()},
        "exact": exact, "no_tensors": sorted(str(key) for key in whole if not TrainingState.capture(whole[key]).specs),
    }  # fmt: skip
    return Answer(report, _of_trial(report, results))


def _of_trial(report: Mapping[str, Any], results: "Mapping[str, Result]") -> Iterator[str | Table]:
    size = report["state_bytes"]
    steps = " and ".join("unknown" if step is None else str(step) for step in report["steps"])
    yield (
        f"{report['kind']} checkpoint, {'steps' if len(report['steps']) > 1 else 'step'} {steps}: {counted(report['tensors'], 'tensor')}, {bytes_text(size)}"
        + ("" if report["all_of_it"] else "; a sample of it was coded")
    )
    rows = [
        {
            "scheme": row,
            "base": _ratio(found.base),
            "delta": _ratio(found.delta),
            "weights": percent_text(found.weights),
            "moments": percent_text(found.moments),
            "s/GB": f"{found.cpu_s_per_gb:.0f}",
            "kept": f"{found.kept:.2f}x",
        }
        for row, found in results.items()
    ]
    yield from table(rows, left=["scheme"])
    best = results["auto, usual"]
    delta = "" if best.delta is None else f", {bytes_text(size * best.delta[0])} as a delta"
    yield (f"With auto, usual: {bytes_text(size)} become {bytes_text(size * best.base[0])} as a base{delta}.")
    if best.delta is None:
        yield "Most checkpoints of a run are deltas: name a later one, too, to see them."
    yield "weights, moments: error relative to the values, not of the loss, which only"
    yield "a training measures. s/GB: CPU seconds. kept: host memory that"
    yield "the next delta needs, of the state's size. auto, mild: without a loss to"
    yield "measure; auto, usual: where it begins with one, and adapts."
    for part in report["exact"]:
        yield (
            f"exact: {counted(part['tensors'], 'tensor')}, {bytes_text(part['bytes'])}: {part['reason']}, such as {part['such_as']}"
        )
    if report["no_tensors"]:
        yield f"no tensors, stored as they are: {', '.join(report['no_tensors'])}"


def _ratio(found: tuple[float, float, float] | None) -> str:
    if found is None:
        return "-"
    mean, low, high = (f"{1 / value:.1f}" if 1 / value < 10 else f"{1 / value:.0f}" for value in found)
    return f"{mean}x" + (f" ({high}-{low})" if found[1] != found[2] else "")
