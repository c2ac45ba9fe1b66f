"""What the page of a run, or of a folder's runs, shows: cards, figures, tables and texts."""

import json
import math
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from shrinkpoint.cli import page
from shrinkpoint.cli.ls import logged_text, remarks_on
from shrinkpoint.cli.output import bytes_text, counted, in_all_text, number, ratio_text
from shrinkpoint.cli.page import Column, finite
from shrinkpoint.cli.show import layers_of

METRIC = "metric "
"""Begins the key of a metric in a row."""

_ROWS, _CHANGES, _REMARKS, _CURVES, _METRICS, _SETTINGS = 480, 120, 120, 3, 5, 7
"""How many a page shows at most: checkpoints or layers, changes of settings, remarks, losses, other metrics, settings."""
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
class Run:
    """What is stored of a run."""

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
    """Of its state; see `_WAYS`."""
    verified: bool

    @property
    def stored(self) -> int:
        """Bytes on disk."""
        return int(self.found["stored_bytes"])

    @property
    def damaged(self) -> int:
        """How many of its checkpoints are."""
        return sum(row["damage"] is not None for row in self.rows) + len(self.found["unreadable"])


# ---- the page of one run


def losses_of(metrics: Mapping[str, Any]) -> list[str]:
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


def run_parts(run: Run, limit: int = _ROWS) -> Iterator[str]:
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


def _size_card(runs: Sequence[Run]) -> str:
    stored, count = sum(run.stored for run in runs), counted(sum(len(run.rows) for run in runs), "checkpoint")
    known = [run.rows[-1]["raw_sum"] for run in runs if run.rows]
    if not stored or None in known:
        return page.card("How small", bytes_text(stored), f"{count} on disk.")
    raw = sum(known)
    text = f"{count} on disk: {bytes_text(stored)}, where torch.save takes {bytes_text(raw)}."
    return page.card("How small", f"{raw / stored:.1f} times smaller", text)


def _safety_card(runs: Sequence[Run]) -> str:
    rows, damaged = [row for run in runs for row in run.rows], sum(run.damaged for run in runs)
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


def _resume_card(run: Run) -> str:
    if run.newest is None:
        text = "There is no checkpoint to continue from."
        return page.card("How to resume", "from the start", text, alarm=True)
    step, bad = run.newest["step"], run.newest["not_finite"]
    if not bad:
        again = "Start the training's script again: with this URL it continues by itself."
        if run.format not in _WAYS:
            again = "Export a checkpoint, as a file OUT.pt or the folder that it was, and give it to what wrote it."
        return page.card("How to resume", f"from step {step}", again, code=_way(run))
    sound = [row["step"] for row in run.rows if not row["not_finite"] and row["damage"] is None]
    way = f"The last finite one is of step {sound[-1]}:" if sound else "The run has no finite one."
    code = _way(run, sound[-1]) if sound else ""
    return page.card("How to resume", f"step {step} is not finite", f"{bad}.", way, code=code, alarm=True)


def _way(run: Run, step: int | None = None) -> str:
    _, newest, other = _WAYS.get(
        run.format, ("", "shrinkpoint export {url} OUT", "shrinkpoint export {at} OUT")
    )
    url, at = (json.dumps(text) for text in (run.found["url"], f"{run.found['url']}#step={step}"))
    return (newest if step is None else other).format(url=url, at=at, step=step)


def _facts(run: Run) -> Iterator[tuple[str, str]]:
    first, last = run.rows[0], run.rows[-1]
    schemes = ", ".join(dict.fromkeys(str(row["scheme"]) for row in run.rows if row["scheme"]))
    if run.format in _WAYS:
        yield "written by", _WAYS[run.format][0]
    steps = f"{len(run.rows)}, steps {first['step']} to {last['step']}"
    yield "checkpoints", f"{steps}, scheme {schemes}" if schemes else steps
    sessions = len({row["session"] for row in run.rows})
    turns = f", by {sessions} processes in turn" if sessions > 1 else ""
    yield "last written", when(max(row["wall_time"] for row in run.rows)) + turns
    spent = [f"{_seconds(last[key])} for {what}" for key, what in _WAITS.items() if last[key]]
    waited = "training waited" if run.format in _WAYS else "waited"
    yield waited, " and ".join(spent) or "not at all, as far as is noted"
    if run.newest is not None:
        files = counted(run.newest["chain_length"], "file")
        yield "a resume reads", f"{bytes_text(run.newest['chain_bytes'])} in {files}"


def _figures(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    def drawn(
        title: str, axis: _Text, curves: Mapping[str, str], *more: str, note: str = "", log: bool = False
    ) -> str:
        rest = {_TITLES.get(key, key.removeprefix(METRIC)): key for key in more}
        columns = [*_columns(curves, drawn=True), *_columns(rest)]
        return page.figure(title, rows, columns, axis=axis, note=note, log=log, floor=None if log else 0.0)

    sizes = {"torch.save": "raw_bytes", "a restore reads": "chain_bytes", "own file": "bytes"}
    yield drawn("Bytes of each checkpoint", bytes_text, sizes, "kind", "chain_length")
    sizes = {"torch.save": "raw_sum", "on disk": "disk_sum"}
    note = "Of the checkpoints that are kept, and what they build on."
    yield drawn("Bytes of the run, up to each step", bytes_text, sizes, note=note)
    ratios = {"this checkpoint": "ratio", "the run so far": "ratio_sum"}
    yield drawn("How many times smaller than torch.save", _times, ratios)
    names = list(dict.fromkeys(name for row in rows for name in row["metrics"]))
    losses = {name: METRIC + name for name in losses_of(dict.fromkeys(names))[:_CURVES]}
    others = [METRIC + name for name in names if name not in losses][:_METRICS]
    is_noted = losses or any(row["baseline"] is not None for row in rows)
    note = "A gap is a loss that was not noted, or is NaN or infinite." if is_noted else ""
    yield drawn("Loss", _short, {**losses, "measured at the save": "baseline"}, *others, note=note, log=True)
    rises = {"measured, with its interval": "degradation"}
    if any(row["degradation"] for row in rows):  # else all are exact, or none is measured
        rises["allowed"] = "allowed"
    note = "Relative to the loss. In all: with lost progress, or the run's reserve."
    ends = ("degradation_low", "degradation_high", "in_all", "measured")
    yield drawn("What a restore raises the loss by", _percent, rises, *ends, note=note)
    waits = {f"for {what}": key for key, what in _WAITS.items()}
    note = "For the checkpoints that are kept."
    each = ("blocked_s", "search_s", "encode_s")
    yield drawn("Seconds waited, up to each step", _seconds, waits, *each, note=note)


def _settings(rows: Sequence[Mapping[str, Any]]) -> str:
    steps: dict[str, list[float]] = {}
    for row in rows:
        steps.setdefault(str(row["configuration"] or "not noted"), []).append(row["step"])
    changes = [
        rows[0],
        *(row for last, row in pairwise(rows) if last["configuration"] != row["configuration"]),
    ]
    most = sorted(steps, key=lambda name: -len(steps[name]))[:_SETTINGS]
    shown = [(name, counted(len(of), "checkpoint"), of) for name, of in steps.items() if name in most]
    others = [step for name, of in steps.items() if name not in most for step in of]
    if others:
        shown.append((f"{len(steps) - len(most)} others", counted(len(others), "checkpoint"), others))
    columns = _columns({"from step": "step", "settings": "configuration", "why": "reason"})
    listed = page.table(_thinned(changes, _CHANGES), columns)
    return page.strips("Settings over time", shown, page.folded("Table of changes", listed))


def _contents(contents: Mapping[str, Any], limit: int) -> Iterator[str]:
    whole, layers = contents["bytes"] or 1, layers_of(contents["tensors"])
    which = f"The {limit} largest of {len(layers)}. " if len(layers) > limit else ""
    sizes = {"bytes": "bytes", "share": "share"}
    for what, totals, note in (
        ("role", contents["totals"], "A click on a column's title sorts by it."),
        ("layer", layers, f"{which}With the state of the optimizer."),
    ):
        rows = [{**total, "name": name, "share": total["bytes"] / whole} for name, total in totals.items()]
        rows.sort(key=lambda row: -row["bytes"])
        columns = _columns({what: "name", **sizes, "bits/element": "bits_per_element", "ratio": "ratio"})
        yield page.bars(f"Bytes by {what}", rows[:limit], columns, share="bytes", note=note)
    columns = _columns({"role": "role", **sizes, "tensors": "tensors", "because": "reason"})
    none = "A lossless scheme gives no reasons: all is exact."
    yield page.bars("What is exact, and why", contents["exact"], columns, share="share", none=none)
    columns = _columns({"file": "key", "bytes": "bytes"})
    note = "The base first, and the checkpoint's own file last."
    yield page.bars("What a restore reads", contents["chain"], columns, share="bytes", note=note)


def _health(run: Run) -> str:
    lines, others = remarks_on(reversed(run.rows), run.found["unreadable"]), run.found["unlisted_containers"]
    if others:
        size = f"{counted(others, 'container')}, {bytes_text(run.found['unlisted_bytes'])}"
        lines.append(f"{size}, of removed checkpoints or of a save in progress")
    if run.found["step_log"] is not None:
        lines.append(logged_text(run.found["step_log"], run.found["url"]))
    if len(lines) > _REMARKS:
        lines[_REMARKS:] = [f"and {len(lines) - _REMARKS} more: `shrinkpoint ls` has all"]
    seen = _VERIFIED if run.verified else "Files and their sizes were looked at; --verify reads every byte."
    return page.bars("Remarks", [{"line": line} for line in lines], _columns({"what": "line"}), note=seen)


def _uses(run: Run, step: int) -> Mapping[str, str]:
    url, at = run.found["url"], f"{run.found['url']}#step={step}"
    file = f"shrinkpoint export {shlex.quote(at)} model.ckpt"
    return {
        "Continue from the newest checkpoint": _way(run),
        "Go back to one": _way(run, step),
        "Its weights alone": f"model.load_state_dict(shrinkpoint.load_weights({json.dumps(at)}))",
        **({"An ordinary file": file} if run.format in _WAYS else {}),  # else the first two write one
        "Read and check every byte": f"shrinkpoint verify {shlex.quote(url)} --all",
    }


# ---- the page of a folder


def folder_parts(runs: Sequence[Run]) -> Iterator[str]:
    """Yield the parts of the page of a folder's runs."""
    runs = sorted(runs, key=lambda run: -max((row["wall_time"] for row in run.rows), default=0.0))
    bad = [run.name for run in runs if run.newest is not None and run.newest["not_finite"]]
    state = counted(len(bad or runs), "run")
    texts = ["A script that is started again with its run's URL continues by itself."]
    if bad:
        state += " not finite"
        texts[:0] = [
            f"Not finite: {', '.join(bad[:3])}{' and more' if bad[3:] else ''}. The way back is below."
        ]
    resume = page.card("How to resume", state, *texts, alarm=bool(bad))
    yield f'<div class="cards">{_size_card(runs)}{_safety_card(runs)}{resume}</div>'
    note = "The last written first. A click on a column's title sorts by it."
    rows = [_overview(run) for run in runs]
    yield page.section("Runs", [page.bars("All runs", rows, _columns(_OVERVIEW), share="bytes", note=note)])
    drawn = [(run.name, _thinned(run.rows, _CHANGES)) for run in runs if run.rows][: 2 * page.COLOURS]
    note = f"The {len(drawn)} runs that were written last." if len(drawn) < len(runs) else ""
    figures = []
    for title, key, axis in (("Loss", "loss", _short), ("How many times smaller", "ratio", _times)):
        lines = [page.Line(name, [(row["step"], finite(row[key])) for row in rows]) for name, rows in drawn]
        known = [(line.name, [y for _, y in line.points if y is not None]) for line in lines]
        cells = [{"run": name, "first": ys[0], "last": ys[-1], "least": min(ys)} for name, ys in known if ys]
        heads = [Column(name, name, axis, words=name == "run") for name in ("run", "first", "last", "least")]
        shown = page.table(cells, heads)
        figures.append(page.curves(title, lines, shown, axis=axis, log=key == "loss", note=note))
    yield page.section("Side by side", figures)
    limit = max(_ROWS // len(runs), 24)
    each = (page.folded(run.name, "".join(run_parts(run, limit))) for run in runs[:_DETAILED])
    yield page.section("One by one", each, "runs")
    if len(runs) > _DETAILED:
        more = len(runs) - _DETAILED
        yield page.paragraph(f"{more} more runs are in the table above only: make a page of each.")


def _overview(run: Run) -> Mapping[str, Any]:
    damaged = f"{run.damaged} damaged" if run.damaged else "verified" if run.verified else "complete"
    bad = run.newest is not None and run.newest["not_finite"]
    return {
        **(run.rows[-1] if run.rows else {}),
        "run": run.name,
        "checkpoints": len(run.rows),
        "bytes": run.stored,
        "in_all": in_all_text(run.rows),
        "state": f"{damaged}, newest not finite" if bad else damaged,
    }


# ---- columns and numbers


def _columns(titles: Mapping[str, str], *, drawn: bool = False) -> list[Column]:
    """Return a column for each title and key."""
    return [
        Column(title, key, _TEXTS.get(key, number), drawn, key in _DASHED, _ENDS.get(key), key in _WORDS)
        for title, key in titles.items()
    ]


_Text = Callable[[Any], str]
_times: _Text = "{:.3g}x".format
_short: _Text = "{:.4g}".format


def _percent(rise: float) -> str:
    return f"{100 * rise:.3g}%"


def _seconds(spent: float) -> str:
    return f"{spent:.2g} s" if spent < 99.5 else f"{spent:.0f} s"


def when(seconds: float) -> str:
    """Return a time of day."""
    try:
        return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds))
    except (OverflowError, ValueError, OSError):
        return "at an unknown time"


_WAITS = {"copies_sum": "snapshots", "evaluations_sum": "evaluations", "adoptions_sum": "adoption"}
_TEXTS: Mapping[str, _Text] = {
    **dict.fromkeys(("bytes", "raw_bytes", "chain_bytes", "raw_sum", "disk_sum"), bytes_text),
    **dict.fromkeys(("ratio", "ratio_sum"), ratio_text),
    **dict.fromkeys(("degradation", "degradation_low", "degradation_high", "allowed"), _percent),
    **dict.fromkeys((*_WAITS, "blocked_s", "search_s", "encode_s"), _seconds),
    "share": "{:.1%}".format,
    "bits_per_element": "{:.2f}".format,
    "wall_time": when,
}
_TITLES = {
    "chain_length": "files", "degradation_low": "from", "degradation_high": "to", "in_all": "at most, in all", "measured": "known",
    "blocked_s": "this snapshot", "search_s": "these evaluations", "encode_s": "coding in the background",
}  # fmt: skip
_OVERVIEW = {
    "run": "run", "newest step": "step", "checkpoints": "checkpoints", "on disk": "bytes", "ratio": "ratio_sum", "loss": "loss",
    "a restore costs": "in_all", "state": "state", "last written": "wall_time",
}  # fmt: skip
_DASHED = ("raw_bytes", "raw_sum", "baseline", "allowed")
_ENDS = {"degradation": ("degradation_low", "degradation_high")}
_WORDS = ("name", "role", "kind", "measured", "key", "reason", "configuration", "line", "run")
