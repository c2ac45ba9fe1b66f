"""``shrinkpoint report``: a page about a run, or about the runs of a folder."""

import json
import math
import shlex
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any

import typer

from shrinkpoint.cli import look, page
from shrinkpoint.cli.output import bytes_text, counted, in_all_text
from shrinkpoint.cli.page import finite, seconds_text, when
from shrinkpoint.cli.runs import Answer, Url, open_run, runs_below
from shrinkpoint.errors import ChainError, ConfigError, FormatError, StoreError
from shrinkpoint.runtime.progress import waiting_for
from shrinkpoint.version import __version__

_METRIC = "metric "
"""Begins the key of a metric in a row."""

_ROWS, _CHANGES, _REMARKS, _CURVES, _METRICS, _SETTINGS = 480, 120, 120, 3, 5, 7
"""How many a page shows at most: checkpoints or layers, changes of settings, remarks, losses, other metrics, settings."""
_WAITS = {"copies_sum": "snapshots", "evaluations_sum": "evaluations", "adoptions_sum": "adoption"}
"""What training has waited for, by the key of the sum in a row."""
_DETAILED = 40
"""Runs of a folder that are shown one by one."""
_VERIFIED = "Every byte was read, and every tensor compared with its digest."
_LISTED = "Every file is there in its size; --verify reads every byte."

_WAYS = {
    "torch-loop": ("own loop", "Checkpointer({url}, model, optimizer).resume()", "checkpointer.resume(step={step})"),
    "lightning": ("Lightning", "Trainer(callbacks=[CompressedCheckpoint({url})]).fit(model)", "trainer.fit(model, ckpt_path={at})"),
    "composer": ("Composer", "Trainer(..., callbacks=[CompressedCheckpoint({url})]).fit()",
                 'torch.save(shrinkpoint.load({at}), "older.pt")  # for load_path="older.pt"'),
    "transformers": ("Hugging Face Trainer", "Trainer(..., callbacks=[CompressedCheckpoint({url})]).train()",
                     "trainer.train(resume_from_checkpoint={at})"),
}  # fmt: skip
"""By a state's format: the framework, and how a script continues from the newest checkpoint, and from another one."""


@dataclass(frozen=True)
class _Run:
    """Contain what a page shows of a run."""

    name: str
    found: Mapping[str, Any]
    """See `survey`."""
    rows: Sequence[Mapping[str, Any]]
    """Its checkpoints by step, with sums up to each."""
    newest: Mapping[str, Any] | None
    """The newest sound one."""
    contents: Mapping[str, Any] | None
    """See `contents_of`, of that one."""
    format: str
    """Of its state, see `_WAYS`; "folder" where it was imported from one."""
    adapters: bool
    """True of PEFT's adapters, which are not a whole model."""
    verified: bool


def report(
    url: Url,
    output: Annotated[
        str, typer.Option("--output", metavar="FILE", help="The page; -o FILE is the same.")
    ] = "report.html",
    verify: Annotated[
        bool, typer.Option("--verify", help="Read and check every byte, as `verify --all` does.")
    ] = False,
) -> Answer:
    """Write a page about a run, or the runs of a folder: how small, how safe, how to resume; one file that loads no other."""
    # torch, for which the command line does not wait
    from shrinkpoint.io.export import check_place, write_whole

    target = check_place(output)
    try:
        ours = not target.exists() or page.GENERATOR.encode() in target.read_bytes()[:1000]
    except OSError as error:
        raise StoreError(f"{target} exists and cannot be read: {error}") from error
    if not ours:
        raise ConfigError(f"{target} exists and is no report: choose another name with -o")
    below, runs = runs_below(url), []
    with waiting_for(f"reading {url}") as waiting:
        for name in below or [""]:
            waiting.say(f"reading {name or url}")
            runs.append(_read(f"{url.rstrip('/')}/{name}" if name else url, name, verify=verify))
    shown = url if below else runs[0].found["url"]
    made = f"{shown} · shrinkpoint {__version__}, {when(time.time())}"
    parts = _folder_parts(runs) if below else _run_parts(runs[0])
    text = page.document(shown.rstrip("/").rpartition("/")[2], made, parts)
    size = write_whole(target, lambda file: file.write_text(text, "utf-8", "replace"), force=True)
    count, damaged = sum(len(run.rows) for run in runs), sum(look.damaged_in(run.found) for run in runs)
    lines = [f"wrote {target}: {counted(count, 'checkpoint')}, {bytes_text(size)}"]
    if damaged:
        lines.append(f"{counted(damaged, 'checkpoint')} DAMAGED: the page says how")
    found = {"path": str(target), "bytes": size, "checkpoints": count, "damaged": damaged}
    return Answer(found, lines, verify and damaged > 0)


def _read(url: str, name: str, *, verify: bool) -> _Run:
    """Return what is stored of a run."""
    from shrinkpoint.coding.selective import header_of
    from shrinkpoint.io.ordinary import is_folder
    from shrinkpoint.state.frozen import ADAPTERS

    run = open_run(url)
    manifests, found = look.survey(run)
    rows = found["checkpoints"]
    if verify and rows:
        # of another listing than the rows
        errors = {result["key"]: result["error"] for result in look.verify_run(run)}
        for row in rows:
            row["damage"] = errors.get(row["key"], row["damage"])
    newest = next((at for at, row in enumerate(rows) if row["damage"] is None), None)
    contents, wrote, adapters = None, "", False
    if newest is not None:
        with suppress(FormatError, ChainError):  # `verify` says so
            header = header_of(run, manifests[newest].chain[-1])
            contents = look.contents_of(header, rows[newest]["bytes"])
            contents["chain"] = [{"key": ref.key, "bytes": ref.total} for ref in manifests[newest].chain]
            tree = header.tree if isinstance(header.tree, dict) else {}
            wrote = "lightning" if "pytorch-lightning_version" in tree else str(tree.get("format"))
            wrote, adapters = "folder" if is_folder(tree) else wrote, bool(tree.get(ADAPTERS))
    ordered = sorted(zip(rows, manifests, strict=True), key=lambda each: (each[1].step, each[1].position))
    seen: set[str] = set()
    sums = dict.fromkeys(("disk_sum", "raw_sum", "copies_sum", "evaluations_sum", "adoptions_sum"), 0.0)
    for row, manifest in ordered:
        sums["disk_sum"] += sum(ref.total for ref in manifest.chain if ref.key not in seen)
        seen.update(ref.key for ref in manifest.chain)
        sums["raw_sum"] += math.nan if finite(row["raw_bytes"]) is None else row["raw_bytes"]
        sums["copies_sum"] += finite(row["blocked_s"]) or 0.0
        sums["evaluations_sum"] += finite(row["search_s"]) or 0.0
        sums["adoptions_sum"] += (finite(row["adopt_s"]) or 0.0) + (finite(row["waited_s"]) or 0.0)
        row |= {total: finite(value) or None for total, value in sums.items()}
        row["ratio_sum"] = row["raw_sum"] / row["disk_sum"] if row["raw_sum"] and row["disk_sum"] else None
        row |= {_METRIC + metric: value for metric, value in row["metrics"].items()}
    which = next(iter(_losses_of(dict.fromkeys(metric for row in rows for metric in row["metrics"]))), None)
    for row in rows:
        row["loss"] = finite(row["baseline"] if which is None else row["metrics"].get(which))
        row["which"] = "measured at the save" if which is None else which
    shown = name or run.display.rstrip("/").rpartition("/")[2]
    best = None if newest is None else rows[newest]
    return _Run(shown, found, [row for row, _ in ordered], best, contents, wrote, adapters, verify)


# ---- the page of one run


def _losses_of(metrics: Iterable[str]) -> list[str]:
    """Return the names of losses, those of validations first."""
    names = [name for name in metrics if "loss" in name.lower()]
    return sorted(names, key=lambda name: not any(word in name.lower() for word in ("val", "eval")))


def _thinned(rows: Sequence[Mapping[str, Any]], limit: int) -> Sequence[Mapping[str, Any]]:
    """Return the rows, or of so many stretches those with the least and greatest size, cost and loss."""
    keys = ("bytes", "degradation", "loss")
    length = math.ceil(len(rows) * (2 * len(keys) + 1) / limit)
    if len(rows) <= limit:
        return rows
    kept = {len(rows) - 1, *range(0, len(rows), length)}
    for start in range(0, len(rows), length):
        for key in keys:
            stretch = range(start, min(start + length, len(rows)))
            there = [(value, at) for at in stretch if (value := finite(rows[at][key])) is not None]
            kept.update(at for _, at in ((min(there), max(there)) if there else ()))
    return [rows[at] for at in sorted(kept)]


def _run_parts(run: _Run, limit: int = _ROWS) -> Iterator[str]:
    """Yield the parts of a run's page, or of its place in a folder's."""
    yield f'<div class="cards">{_size_card([run])}{_safety_card([run])}{_resume_card(run)}</div>'
    rows = _thinned(run.rows, limit)
    if rows:
        yield page.facts(_facts(run))
        if len(rows) < len(run.rows):
            yield page.paragraph(
                f"Figures and tables show {len(rows)} of {len(run.rows)} checkpoints: of each stretch the least and greatest in"
                " size, cost and loss. `shrinkpoint ls --json` has all."
            )
        yield page.section("By training step", (*_figures(rows), _settings(run.rows)))
    if run.contents is not None and run.newest is not None:
        inside = f"Inside the checkpoint of step {run.newest['step']}"
        yield page.section(inside, _contents(run.contents, limit))
    yield page.section("Health", [_health(run)])
    if run.newest is not None:
        yield page.section("How to use it", [page.codes(_uses(run, run.newest["step"]))], "")


def _size_card(runs: Sequence[_Run]) -> str:
    stored = sum(run.found["stored_bytes"] for run in runs)
    count = counted(sum(len(run.rows) for run in runs), "checkpoint")
    known = [run.rows[-1]["raw_sum"] for run in runs if run.rows]
    if not stored or None in known:
        return page.card("How small", bytes_text(stored), f"{count} on disk.")
    raw = sum(known)
    text = f"{count} on disk: {bytes_text(stored)}, where torch.save takes {bytes_text(raw)}."
    return page.card("How small", f"{raw / stored:.1f} times smaller", text)


def _safety_card(runs: Sequence[_Run]) -> str:
    rows, damaged = [row for run in runs for row in run.rows], sum(look.damaged_in(run.found) for run in runs)
    count = len(rows) + sum(len(run.found["unreadable"]) for run in runs)
    if not count:
        return page.card("How safe", "no checkpoint yet", "Nothing was committed so far.", alarm=True)
    known = ("measured", "exact")
    unknown = sum(not (row["not_finite"] or row["adopted"] or row["measured"] in known) for row in rows)
    quality = f"A restore may raise the loss by at most {in_all_text(rows) or '0%'}, reserve included."
    if unknown:
        quality = f"What a restore costs was not measured for {unknown} of them."
    elif all(row["measured"] == "exact" for row in rows):
        quality = "Every checkpoint is bit-exact."
    if damaged:
        lost = any(run.newest is None for run in runs)
        text = "A run has no sound checkpoint." if lost else "A resume passes over what is damaged."
        return page.card("How safe", f"{damaged} of {count} damaged", text, quality, alarm=True)
    verified = all(run.verified for run in runs)
    state = f"{f'all {count} ' if count > 1 else ''}{'verified' if verified else 'complete'}"
    return page.card("How safe", state, _VERIFIED if verified else _LISTED, quality)


def _resume_card(run: _Run) -> str:
    if run.newest is None:
        text = "There is no checkpoint to continue from."
        return page.card("How to resume", "from the start", text, alarm=True)
    step, bad = run.newest["step"], run.newest["not_finite"]
    if not bad:
        again = "Start the training's script again: with this URL it continues by itself."
        if run.format not in _WAYS:
            again = f"Export a checkpoint as the {_out(run)[1]} that it was, and give that to what wrote it."
        return page.card("How to resume", f"from step {step}", again, code=_way(run))
    sound = [row["step"] for row in run.rows if not row["not_finite"] and row["damage"] is None]
    way = f"The last finite one is of step {sound[-1]}:" if sound else "The run has no finite one."
    code = _way(run, sound[-1]) if sound else ""
    return page.card("How to resume", f"step {step} is not finite", f"{bad}.", way, code=code, alarm=True)


def _way(run: _Run, step: int | None = None) -> str:
    out = _out(run)[0]
    _, newest, other = _WAYS.get(
        run.format, ("", f"shrinkpoint export {{url}} {out}", f"shrinkpoint export {{at}} {out}")
    )
    url, at = (json.dumps(text) for text in (run.found["url"], f"{run.found['url']}#step={step}"))
    return (newest if step is None else other).format(url=url, at=at, step=step)


def _out(run: _Run) -> tuple[str, str]:
    """Return the name of what an imported checkpoint is exported to, and what that is."""
    return ("OUT", "folder") if run.format == "folder" else ("OUT.pt", "file")


def _facts(run: _Run) -> Iterator[tuple[str, str]]:
    first, last = run.rows[0], run.rows[-1]
    schemes = ", ".join(dict.fromkeys(str(row["scheme"]) for row in run.rows if row["scheme"]))
    if run.format in _WAYS:
        yield "written by", _WAYS[run.format][0]
    steps = "1, step" if first is last else f"{len(run.rows)}, steps {first['step']} to"
    steps += f" {last['step']}"
    yield "checkpoints", f"{steps}, scheme {schemes}" if schemes else steps
    sessions = len({row["session"] for row in run.rows})
    turns = f", by {sessions} processes in turn" if sessions > 1 else ""
    yield "last written", when(max(row["wall_time"] for row in run.rows)) + turns
    spent = [f"{seconds_text(last[key])} for {what}" for key, what in _WAITS.items() if last[key]]
    waited = "training waited" if run.format in _WAYS else "waited"
    yield waited, " and ".join(spent) or "not at all, as far as is noted"
    if run.newest is not None:
        files = counted(run.newest["chain_length"], "file")
        yield "a resume reads", f"{bytes_text(run.newest['chain_bytes'])} in {files}"


def _figures(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    sizes = {"raw_bytes": "torch.save", "chain_bytes": "a restore reads", "bytes": "own file"}
    yield page.figure("Bytes of each checkpoint", rows, sizes, {"kind": "kind", "chain_length": "files"})
    note = "Of the checkpoints that are kept, and what they build on."
    sizes = {"raw_sum": "torch.save", "disk_sum": "on disk"}
    yield page.figure("Bytes of the run, up to each step", rows, sizes, note=note)
    ratios = {"ratio": "this checkpoint", "ratio_sum": "the run so far"}
    yield page.figure("How many times smaller than torch.save", rows, ratios)
    names = dict.fromkeys(name for row in rows for name in row["metrics"])
    losses = {_METRIC + name: name for name in _losses_of(names)[:_CURVES]}
    others = [name for name in names if _METRIC + name not in losses][:_METRICS]
    is_noted = losses or any(row["baseline"] is not None for row in rows)
    note = "A gap is a loss that was not noted, or is NaN or infinite." if is_noted else ""
    losses["baseline"] = "measured at the save"
    yield page.figure("Loss", rows, losses, {_METRIC + name: name for name in others}, log=True, note=note)
    rises = {"degradation": "measured, with its interval"}
    if any(row["degradation"] for row in rows):  # else all are exact, or none is measured
        rises["allowed"] = "allowed"
    ends = {"degradation_low": "from", "degradation_high": "to", "cost_high": "at most, in all"}
    note = "Relative to the loss. In all: with lost progress, or the run's reserve."
    more = {**ends, "measured": "known"}
    yield page.figure("What a restore raises the loss by", rows, rises, more, note=note)
    waits = {key: f"for {what}" for key, what in _WAITS.items()}
    each = {"blocked_s": "this snapshot", "search_s": "these evaluations", "encode_s": "coding, meanwhile"}
    note = "For the checkpoints that are kept."
    yield page.figure("Seconds waited, up to each step", rows, waits, each, note=note)


def _settings(rows: Sequence[Mapping[str, Any]]) -> str:
    names = [str(row["configuration"] or "not noted") for row in rows]
    most, steps = dict(Counter(names).most_common(_SETTINGS)), dict[str, list[float]]()
    for row, name in zip(rows, names, strict=True):
        steps.setdefault(name if name in most else "others", []).append(row["step"])
    changes = [
        rows[0],
        *(row for last, row in pairwise(rows) if last["configuration"] != row["configuration"]),
    ]
    columns = {"step": "from step", "configuration": "settings", "reason": "why"}
    listed = page.table(_thinned(changes, _CHANGES), columns)
    return page.strips("Settings over time", steps, page.folded("Table of changes", listed))


def _contents(contents: Mapping[str, Any], limit: int) -> Iterator[str]:
    whole, layers = contents["bytes"] or 1, look.layers_of(contents["tensors"])
    which = f"The {limit} largest of {len(layers)}. " if len(layers) > limit else ""
    sizes = {"bytes": "bytes", "share": "share"}
    for what, totals, note in (
        ("role", contents["totals"], "A click on a column's title sorts by it."),
        ("layer", layers, f"{which}With the state of the optimizer."),
    ):
        rows = [{**total, "name": name, "share": total["bytes"] / whole} for name, total in totals.items()]
        rows.sort(key=lambda row: -row["bytes"])
        columns = {"name": what, **sizes, "bits_per_element": "bits/element", "ratio": "ratio"}
        yield page.bars(f"Bytes by {what}", rows[:limit], columns, "bytes", note)
    columns = {"role": "role", **sizes, "tensors": "tensors", "reason": "because"}
    none = "A lossless scheme gives no reasons: all is exact."
    yield page.bars("What is exact, and why", contents["exact"], columns, "share", none=none)
    note = "The base first, and the checkpoint's own file last."
    columns = {"key": "file", "bytes": "bytes"}
    yield page.bars("What a restore reads", contents["chain"], columns, "bytes", note)


def _health(run: _Run) -> str:
    lines = [*look.remarks_on(reversed(run.rows), run.found["unreadable"]), *look.more_in(run.found)]
    if len(lines) > _REMARKS:
        lines[_REMARKS:] = [f"and {len(lines) - _REMARKS} more: `shrinkpoint ls` has all"]
    seen = _VERIFIED if run.verified else "Files and their sizes were looked at; --verify reads every byte."
    return page.bars("Remarks", [{"line": line} for line in lines], {"line": "what"}, note=seen)


def _uses(run: _Run, step: int) -> Mapping[str, str]:
    url, at = run.found["url"], f"{run.found['url']}#step={step}"
    weights, others = f"shrinkpoint.load_weights({json.dumps(at)})", {}
    if run.format in _WAYS:
        weights = f"model.load_state_dict({weights}{', strict=False' if run.adapters else ''})"
        what, out = ("PEFT's files", "OUT") if run.adapters else ("An ordinary file", "model.ckpt")
        others[what] = f"shrinkpoint export {shlex.quote(at)} {out}"
    return {
        "Continue from the newest checkpoint": _way(run),
        "Go back to one": _way(run, run.rows[max(len(run.rows) - 2, 0)]["step"]),
        "Its weights alone": weights if run.format in _WAYS else f"{weights}  # by their names in the file",
        **others,  # of what was imported, the first two write it
        "Read and check every byte": f"shrinkpoint verify {shlex.quote(url)} --all",
    }


# ---- the page of a folder


def _folder_parts(runs: Sequence[_Run]) -> Iterator[str]:
    """Yield the parts of the page of a folder's runs."""
    runs = sorted(runs, key=lambda run: -max((row["wall_time"] for row in run.rows), default=0.0))
    bad = [run.name for run in runs if run.newest is not None and run.newest["not_finite"]]
    state = counted(len(bad or runs), "run")
    texts = ["A script that is started again with its run's URL continues by itself."]
    if any(run.format not in _WAYS for run in runs):
        texts = ["How each continues is said below."]
    if bad:
        state += " not finite"
        texts[:0] = [
            f"Not finite: {', '.join(bad[:3])}{' and more' if bad[3:] else ''}. The way back is below."
        ]
    resume = page.card("How to resume", state, *texts, alarm=bool(bad))
    yield f'<div class="cards">{_size_card(runs)}{_safety_card(runs)}{resume}</div>'
    note = "The last written first. A click on a column's title sorts by it."
    columns = {
        "run": "run", "step": "newest step", "checkpoints": "checkpoints", "bytes": "on disk", "ratio_sum": "ratio", "loss": "last loss", "which": "which loss",
        "cost_high": "a restore costs, at most", "state": "state", "wall_time": "last written",
    }  # fmt: skip
    table = page.bars("All runs", [_overview(run) for run in runs], columns, "bytes", note)
    yield page.section("Runs", [table])
    drawn = [(run.name, _thinned(run.rows, _CHANGES)) for run in runs if run.rows][: 2 * page.COLOURS]
    note = f"The {len(drawn)} runs that were written last." if len(drawn) < len(runs) else ""
    figures = []
    for title, key in (("Loss", "loss"), ("How many times smaller", "ratio")):
        lines = [page.Line(name, [(row["step"], finite(row[key])) for row in rows]) for name, rows in drawn]
        known = [(line.name, [y for _, y in line.points if y is not None]) for line in lines]
        cells = [{"run": name, "first": ys[0], "last": ys[-1], "least": min(ys)} for name, ys in known if ys]
        shown = page.table(cells, {name: name for name in ("run", "first", "last", "least")})
        figures.append(page.curves(title, lines, shown, key, log=key == "loss", note=note))
    yield page.section("Side by side", figures)
    limit = max(_ROWS // len(runs), 24)
    each = (page.folded(run.name, "".join(_run_parts(run, limit))) for run in runs[:_DETAILED])
    yield page.section("One by one", each, "runs")
    if len(runs) > _DETAILED:
        more = len(runs) - _DETAILED
        yield page.paragraph(f"{more} more runs are in the table above only: make a page of each.")


def _overview(run: _Run) -> Mapping[str, Any]:
    damaged, costs = look.damaged_in(run.found), [finite(row["cost_high"]) for row in run.rows]
    state = f"{damaged} damaged" if damaged else "verified" if run.verified else "complete"
    if run.newest is not None and run.newest["not_finite"]:
        state += ", newest not finite"
    return {
        **(run.rows[-1] if run.rows else {}),
        "run": run.name,
        "loss": next((row["loss"] for row in reversed(run.rows) if row["loss"] is not None), None),
        "checkpoints": len(run.rows),
        "bytes": run.found["stored_bytes"],
        "cost_high": max((cost for cost in costs if cost is not None), default=None),
        "state": state,
    }
