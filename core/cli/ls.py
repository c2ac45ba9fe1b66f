"""``shrinkpoint ls``: the checkpoints of a run."""

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from shrinkpoint.cli.output import (
    adopted_text,
    age,
    bytes_text,
    console,
    counted,
    degradation_text,
    exact_texts,
    in_all_text,
    number,
    print_table,
    ratio_text,
)
from shrinkpoint.cli.runs import (
    Answer,
    OptionsOf,
    Url,
    answering,
    describe_manifest,
    find_damage,
    keys_of,
    of_stores,
    open_run,
    runs_below,
)
from shrinkpoint.errors import FormatError, ShrinkpointWarning
from shrinkpoint.store.connect import StorageOptions as Options
from shrinkpoint.store.keys import STEPS_PREFIX
from shrinkpoint.store.manifest import Manifest
from shrinkpoint.store.objects import ObjectsBelow
from shrinkpoint.store.run import RunStore
from shrinkpoint.warn import warn

if TYPE_CHECKING:
    from shrinkpoint.steps.reader import LogOverview

_SHOWN_METRICS = 3
_NAMED = 4


@of_stores
@answering
def ls(url: Url, options_of: OptionsOf) -> Answer:
    """List the checkpoints of a run, newest first, or the runs of a folder; damaged ones and those with NaN or infinity are marked."""
    options = options_of(url)
    below = runs_below(url, options)
    if below:
        runs = _runs(url, below, options)
        return Answer({"url": url, "runs": runs}, lambda: _print_runs(runs))
    _, found = survey(open_run(url, options))
    return Answer(found, lambda: _print(found, url))


def survey(run: RunStore) -> tuple[list[Manifest], dict[str, Any]]:
    """Return a run's manifests, newest first, and what a listing says of them and of the run, as JSON."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ShrinkpointWarning)  # what it would warn of is returned
        manifests = run.manifests()
    sizes = run.sizes()
    named = keys_of(run, manifests)
    others = [size for key, size in sizes.items() if key not in named]
    pins, log = _pins(run), _step_log(run)
    return manifests, {
        "url": run.display,
        "stored_bytes": sum(sizes.values()) - sum(others),
        "unlisted_bytes": sum(others),
        "unlisted_containers": len(others),
        "checkpoints": [
            {
                **describe_manifest(manifest),
                "pins": sorted(name for name, seq in pins.items() if seq == manifest.seq),
                "damage": find_damage(run, manifest, sizes),
            }
            for manifest in manifests
        ],
        "unreadable": [
            {"key": damaged.key, "reason": damaged.reason, "needs_newer_version": damaged.unsupported}
            for damaged in run.damaged
        ],
        "step_log": None if log is None else asdict(log),
    }


def _step_log(run: RunStore) -> "LogOverview | None":
    segments = ObjectsBelow(run.objects, STEPS_PREFIX)
    if not run.exists() or not (listed := segments.list("")):
        return None
    from shrinkpoint.steps.reader import overview

    return overview(segments, listed, run.run_id())


def logged_text(log: Mapping[str, Any], url: str) -> str:
    """Return what a run's step log is good for, from its overview."""
    size = f"{counted(log['segments'], 'segment')}, {bytes_text(log['bytes'])}"
    if log["kind"] is None:
        return f"and a step log of {size}, whose newest segments are damaged"
    reached = "" if log["last_step"] is None else f" up to step {log['last_step']}"
    use = (
        f"`shrinkpoint export {url} FILE --step N` writes the weights of any logged step"
        if log["kind"] == "small"
        else "a resume replays it"
    )
    return f"and a step log ({log['kind']!r}){reached}: {size}; {use}"


def _pins(run: RunStore) -> Mapping[str, int]:
    try:
        return run.pins()
    except FormatError as error:  # the checkpoints are worth showing all the same
        warn(f"the pins are not shown: {error}")
        return {}


def _raw_bytes(checkpoints: Sequence[Mapping[str, Any]]) -> int | None:
    """Return what checkpoints would take uncompressed; None where that is not known of all."""
    sizes = [checkpoint["raw_bytes"] for checkpoint in checkpoints]
    return None if None in sizes else sum(sizes)


def _runs(url: str, names: Sequence[str], options: Options) -> list[dict[str, Any]]:
    """Return what `ls` says of the runs of a folder, the one that was written last first."""
    runs: list[dict[str, Any]] = []
    for name in names:
        _, found = survey(open_run(f"{url.rstrip('/')}/{name}", options))
        rows = found["checkpoints"]
        newest = rows[0] if rows else {}
        bad = sum(row["damage"] is not None for row in rows) + len(found["unreadable"])
        stored, raw = found["stored_bytes"], _raw_bytes(rows)
        runs.append(
            {"run": name, "checkpoints": len(rows), "newest_step": newest.get("step"), "stored_bytes": stored, "raw_bytes": raw,
             "wall_time": newest.get("wall_time"), "damaged": bad}
        )  # fmt: skip
    return sorted(runs, key=lambda run: -(run["wall_time"] or 0.0))


def _print_runs(runs: Sequence[Mapping[str, Any]]) -> None:
    rows = []
    for run in runs:
        stored, raw, last = (run[name] for name in ("stored_bytes", "raw_bytes", "wall_time"))
        ratio = ratio_text(raw / stored if raw and stored else None)
        written = "-" if last is None else age(last)
        sizes = bytes_text(stored), bytes_text(raw) if raw else "-", ratio
        rows.append((run["run"], str(run["checkpoints"]), number(run["newest_step"]), *sizes, written))
    columns = ("run", "checkpoints", "newest step", "on disk", "instead of", "ratio", "age")
    print_table(columns, rows, left=("run",), optional=("instead of", "checkpoints"), crop="run")
    for one in runs:
        if one["damaged"]:
            damaged = counted(one["damaged"], "checkpoint")
            console().print(f"{one['run']}: {damaged} DAMAGED; `shrinkpoint ls` of this run says how")


def _print(found: Mapping[str, Any], url: str) -> None:
    checkpoints, others = found["checkpoints"], found["unlisted_containers"]
    metrics = list(dict.fromkeys(name for checkpoint in checkpoints for name in checkpoint["metrics"]))
    metrics.sort(key=lambda name: ("loss" in name) + ("val" in name))  # what is likeliest missed comes last
    metrics = metrics[-_SHOWN_METRICS:]
    columns = ("seq", "step", "kind", "bytes", "ratio", "chain", "degradation", "age", *metrics)
    rows = []
    for each in checkpoints:
        sizes = bytes_text(each["bytes"]), ratio_text(each["ratio"])
        chain = f"{bytes_text(each['chain_bytes'])} in {each['chain_length']}"
        noted = (
            degradation_text(each),
            age(each["wall_time"]),
            *(number(each["metrics"].get(name)) for name in metrics),
        )
        rows.append((str(each["seq"]), str(each["step"]), each["kind"], *sizes, chain, *noted))
    if rows:
        steps = {checkpoint["step"] for checkpoint in checkpoints}
        optional = (*(("seq",) if len(steps) == len(rows) else ()), *metrics)
        print_table(columns, rows, left=("kind",), optional=optional)
    out, raw, stored = console(), _raw_bytes(checkpoints), found["stored_bytes"]
    for remark in remarks_on(checkpoints, found["unreadable"]):
        out.print(remark)
    ratio = f" instead of {bytes_text(raw)}, {ratio_text(raw / stored)}" if raw and stored else ""
    count = counted(len(checkpoints), "checkpoint")
    out.print(f"{count} in {found['url']}: {bytes_text(stored)} on disk{ratio}")
    cost = in_all_text(checkpoints)
    if cost is not None:
        out.print(f"a restore may raise the loss by at most {cost}, the run's reserve included")
    if others:
        size = f"{counted(others, 'container')}, {bytes_text(found['unlisted_bytes'])}"
        unreadable = ", or of those that are unreadable" if found["unreadable"] else ""
        out.print(
            f"and {size}, that none of these needs: of removed checkpoints, which wait for the end of their grace (`shrinkpoint undelete`"
            f" brings them back), or of a save in progress{unreadable}"
        )
    if found["step_log"] is not None:
        out.print(logged_text(found["step_log"], url))


def remarks_on(
    checkpoints: Iterable[Mapping[str, Any]], unreadable: Iterable[Mapping[str, Any]]
) -> list[str]:
    """Return what is worth knowing of some checkpoints only: damage, what is exact, pins."""
    remarked: dict[str, list[str]] = {}
    for checkpoint in checkpoints:
        for remark in _remarks(checkpoint):
            remarked.setdefault(remark, []).append(str(checkpoint["step"]))
    lines = []
    for remark, of in remarked.items():
        more = f" and {len(of) - _NAMED} more" if len(of) > _NAMED else ""
        lines.append(f"step{'s' if len(of) > 1 else ''} {', '.join(of[:_NAMED])}{more}: {remark}")
    for damaged in unreadable:
        word = "NEEDS A NEWER SHRINKPOINT" if damaged["needs_newer_version"] else "UNREADABLE"
        lines.append(f"{word} {damaged['key']}: {damaged['reason']}")
    return lines


def _remarks(checkpoint: Mapping[str, Any]) -> list[str]:
    parts = [f"DAMAGED: {checkpoint['damage']}"] if checkpoint["damage"] else []
    if checkpoint["parts"]:
        parts.append(counted(checkpoint["parts"], "part"))
    parts += exact_texts(checkpoint["exact"])
    if checkpoint["not_finite"]:
        parts.append(f"NOT FINITE: {checkpoint['not_finite']}")
    if (adopted := adopted_text(checkpoint)) is not None:
        parts.append(adopted)
    if checkpoint["weights_only"]:
        parts.append("weights only")
    return [*parts, *(f"pinned: {name}" for name in checkpoint["pins"])]
