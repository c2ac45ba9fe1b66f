"""``shrinkpoint ls``: the checkpoints of a run."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from shrinkpoint.cli.options import AsJson, Pairs, StorageOptions, Url, parse_storage_options
from shrinkpoint.cli.output import (
    adopted_text,
    age,
    bytes_text,
    console,
    degradation_text,
    exact_texts,
    number,
    print_json,
    print_table,
    ratio_text,
)
from shrinkpoint.cli.runs import OpenRun, describe_manifest, find_damage, open_run
from shrinkpoint.errors import FormatError, ShrinkpointWarning
from shrinkpoint.store.below import ObjectsBelow
from shrinkpoint.store.keys import STEPS_PREFIX
from shrinkpoint.warn import warn

if TYPE_CHECKING:
    from shrinkpoint.steps.overview import LogOverview

__all__ = ["ls"]

_SHOWN_METRICS = 3


def ls(
    url: Url, storage_options: StorageOptions = None, option: Pairs = None, as_json: AsJson = False
) -> None:
    """List the checkpoints of a run, newest first; damaged ones and those with NaN or infinity are marked with the reason."""
    run = open_run(url, parse_storage_options(url, storage_options, option))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ShrinkpointWarning)  # the table shows what it would warn of
        manifests = run.store.manifests()
    sizes = run.sizes()
    named = run.keys(manifests)
    live, others = (
        [size for key, size in sizes.items() if (key in named) is wanted] for wanted in (True, False)
    )
    pins = _pins(run)
    checkpoints = [
        describe_manifest(manifest)
        | {
            "pins": sorted(name for name, seq in pins.items() if seq == manifest.seq),
            "damage": find_damage(run, manifest, sizes),
        }
        for manifest in manifests
    ]
    unreadable = [
        {"key": damaged.key, "reason": damaged.reason, "needs_newer_version": damaged.unsupported}
        for damaged in run.store.damaged
    ]
    log = _step_log(run)
    if as_json:
        print_json(
            {
                "url": run.store.display,
                "stored_bytes": sum(live),
                "unlisted_bytes": sum(others),
                "unlisted_containers": len(others),
                "checkpoints": checkpoints,
                "unreadable": unreadable,
                "step_log": None if log is None else asdict(log),
            }
        )
        return
    _print(checkpoints, unreadable)
    out = console()
    out.print(f"{len(checkpoints)} checkpoints, {bytes_text(sum(live))} stored in {run.store.display}")
    if others:
        out.print(
            f"and {len(others)} containers, {bytes_text(sum(others))}, that none of these needs: of removed"
            " checkpoints, which wait for the end of their grace (`shrinkpoint undelete` brings them back), or of a save"
            f" in progress{', or of those that are unreadable' if unreadable else ''}"
        )
    if log is not None:
        out.print(_logged(log, url))


def _step_log(run: OpenRun) -> "LogOverview | None":
    segments = ObjectsBelow(run.objects, STEPS_PREFIX)
    if not run.store.exists() or not (listed := segments.list("")):
        return None
    from shrinkpoint.steps.overview import overview

    return overview(segments, listed, run.store.run_id())


def _logged(log: "LogOverview", url: str) -> str:
    size = f"{log.segments} segments, {bytes_text(log.bytes)}"
    if log.kind is None:
        return f"and a step log of {size}, whose newest segments are damaged"
    reached = "" if log.last_step is None else f" up to step {log.last_step}"
    use = (
        f"`shrinkpoint export {url} FILE --step N` writes the weights of any logged step"
        if log.kind == "small"
        else "a resume replays it"
    )
    return f"and a step log ({log.kind!r}){reached}: {size}; {use}"


def _pins(run: OpenRun) -> Mapping[str, int]:
    try:
        return run.store.pins()
    except FormatError as error:  # the checkpoints are worth showing all the same
        warn(f"the pins are not shown: {error}")
        return {}


def _print(checkpoints: Sequence[Mapping[str, Any]], unreadable: Sequence[Mapping[str, Any]]) -> None:
    columns = ("seq", "step", "kind", "chain", "bytes", "ratio", "degradation", "age", "metrics", "remarks")
    rows = [
        (
            str(checkpoint["seq"]),
            str(checkpoint["step"]),
            checkpoint["kind"],
            str(checkpoint["chain_length"]),
            bytes_text(checkpoint["bytes"]),
            ratio_text(checkpoint["ratio"]),
            degradation_text(checkpoint),
            age(checkpoint["wall_time"]),
            _metrics(checkpoint["metrics"]),
            _remarks(checkpoint),
        )
        for checkpoint in checkpoints
    ]
    if rows:
        print_table(columns, rows, left=("kind", "metrics", "remarks"))
    for damaged in unreadable:
        word = "NEEDS A NEWER SHRINKPOINT" if damaged["needs_newer_version"] else "UNREADABLE"
        console().print(f"{word} {damaged['key']}: {damaged['reason']}")


def _metrics(metrics: Mapping[str, Any]) -> str:
    shown = [f"{name}={number(value)}" for name, value in list(metrics.items())[:_SHOWN_METRICS]]
    return " ".join(shown + (["..."] if len(metrics) > _SHOWN_METRICS else []))


def _remarks(checkpoint: Mapping[str, Any]) -> str:
    pins = ", ".join(checkpoint["pins"])
    parts = [f"DAMAGED: {checkpoint['damage']}"] if checkpoint["damage"] else []
    if checkpoint["parts"]:
        parts.append(f"{checkpoint['parts']} parts")
    parts += exact_texts(checkpoint["exact"])
    if checkpoint["not_finite"]:
        parts.append(f"NOT FINITE: {checkpoint['not_finite']}")
    if (adopted := adopted_text(checkpoint)) is not None:
        parts.append(adopted)
    if checkpoint["weights_only"]:
        parts.append("weights only")
    return "; ".join([*parts, *([f"pinned: {pins}"] if pins else [])])
