"""``shrinkpoint report``: a page about a run, or about the runs of a folder."""

import json
import math
import secrets
import shlex
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from shrinkpoint.cli import page
from shrinkpoint.cli.ls import logged_text, remarks_on, survey
from shrinkpoint.cli.output import (
    bytes_text,
    console,
    counted,
    in_all_text,
    number,
    ratio_text,
)
from shrinkpoint.cli.page import Column, finite
from shrinkpoint.cli.runs import StorageOptions, Url, open_run, parse_storage_options, runs_below
from shrinkpoint.cli.show import contents_of, layers_of
from shrinkpoint.cli.verify import verify_run
from shrinkpoint.engine.address import Address
from shrinkpoint.errors import ChainError, ConfigError, FormatError, ShrinkpointWarning, StoreError
from shrinkpoint.runtime.progress import waiting_for
from shrinkpoint.store.connect import StorageOptions as Options
from shrinkpoint.version import __version__

_ROWS, _CHANGES, _REMARKS, _CURVES, _METRICS, _SETTINGS = 480, 120, 120, 3, 5, 7
"""How many a page shows at most: checkpoints or layers, changes of settings, remarks, losses, other metrics, settings."""
_METRIC = "metric "
_DETAILED = 40
"""Runs of a folder that are shown one by one."""
_VERIFIED = "Every byte was read, and every tensor compared with its digest."
_LISTED = "Every file is there in its size; --verify reads every byte."

_WAYS = {
    "torch-loop": (
        "own loop",
        "Checkpointer({url}, model, optimizer).resume()",
        "checkpointer.resume(step={step})",
    ),
    "lightning": (
        "Lightning",
        "Trainer(callbacks=[CompressedCheckpoint({url})]).fit(model)",
        "trainer.fit(model, ckpt_path={at})",
    ),
    "composer": (
        "Composer",
        "Trainer(..., callbacks=[CompressedCheckpoint({url})]).fit()",
        'torch.save(shrinkpoint.load({at}), "older.pt")  # for load_path="older.pt"',
    ),
    "transformers": (
        "Hugging Face Trainer",
        "Trainer(..., callbacks=[CompressedCheckpoint({url})]).train()",
        "trainer.train(resume_from_checkpoint={at})",
    ),
}
"""By a state's format: the framework, and how a script continues from the newest checkpoint, and from another one."""


@dataclass(frozen=True)
class _Run:
    name: str
    found: Mapping[str, Any]
    """See `survey`."""
    rows: Sequence[Mapping[str, Any]]
    """Its checkpoints by step, with sums up to each."""
    newest: Mapping[str, Any] | None
    """The newest sound one."""
    contents: Mapping[str, Any] | None
    """See `contents_of`, of that one."""
    framework: str | None
    verified: bool

    @property
    def stored(self) -> int:
        return int(self.found["stored_bytes"])

    @property
    def raw(self) -> float | None:
        return self.rows[-1]["raw_sum"] if self.rows else 0.0

    @property
    def damaged(self) -> int:
        return sum(row["damage"] is not None for row in self.rows) + len(self.found["unreadable"])


def report(
    url: Url,
    output: Annotated[
        str, typer.Option("--output", metavar="FILE", help="The page; -o FILE is the same.")
    ] = "report.html",
    verify: Annotated[
        bool, typer.Option("--verify", help="Read and check every byte, as `verify --all` does.")
    ] = False,
    storage_options: StorageOptions = None,
    option: Annotated[
        list[str] | None,
        typer.Option(
            "--option", "-o", metavar="KEY=VALUE", help="An option of the store, as in all commands."
        ),
    ] = None,
) -> None:
    """Write a page about a run, or the runs of a folder: how small, how safe, how to resume; one file that loads no other."""
    given = [text for text in option or () if "=" not in text]
    target = Path(given[-1] if given else output).expanduser()
    _check_target(target)
    options = parse_storage_options(url, storage_options, [text for text in option or () if "=" in text])
    below, runs = runs_below(url, options), []
    with waiting_for(f"reading {url}") as waiting:
        for name in below or [""]:
            waiting.say(f"reading {name or url}")
            runs.append(_read(f"{url.rstrip('/')}/{name}" if name else url, name, options, verify=verify))
    shown = url if below else runs[0].found["url"]
    parts = _sweep_parts(runs) if below else _run_parts(runs[0], _ROWS)
    made = f"{shown} · shrinkpoint {__version__}, {_when(time.time())}"
    _write(target, page.document(shown.rstrip("/").rpartition("/")[2], made, parts))
    count, damaged = sum(len(run.rows) for run in runs), sum(run.damaged for run in runs)
    console().print(f"wrote {target}: {counted(count, 'checkpoint')}, {bytes_text(target.stat().st_size)}")
    if verify and damaged:
        console().print(f"{counted(damaged, 'checkpoint')} DAMAGED: the page says how")
        raise typer.Exit(1)


def _check_target(target: Path) -> None:
    if not target.parent.is_dir():
        raise ConfigError(f"the folder {target.parent} does not exist: create it first")
    if target.is_dir():
        raise ConfigError(f"{target} is a folder: name a file")
    try:
        ours = not target.exists() or page.GENERATOR.encode() in target.read_bytes()[:1000]
    except OSError as error:
        raise StoreError(f"{target} exists and cannot be read: {error}") from error
    if not ours:
        raise ConfigError(f"{target} exists and is no report: choose another name with -o")


def _write(target: Path, text: str) -> None:
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    try:
        temporary.write_text(text, encoding="utf-8", errors="replace")
        temporary.replace(target)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        raise StoreError(f"{target} could not be written: {error}") from error


# ---- what is stored of a run


def _read(url: str, name: str, options: Options, *, verify: bool) -> _Run:
    from shrinkpoint.coding.selective import header_of

    run = open_run(url, options)
    manifests, found = survey(run)
    rows = found["checkpoints"]
    if verify and rows:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ShrinkpointWarning)
            results = verify_run(run, Address(url=url), everything=True, with_unreadable=False)
        errors = {result["key"]: result["error"] for result in results}  # of another listing than the rows
        for row in rows:
            row["damage"] = errors.get(row["key"], row["damage"])
    at = next((at for at, row in enumerate(rows) if row["damage"] is None), None)
    contents, framework = None, None
    if at is not None:
        with suppress(FormatError, ChainError):  # `verify` says so
            header = header_of(run, manifests[at].chain[-1])
            contents = contents_of(header, rows[at]["bytes"])
            contents["chain"] = [{"key": ref.key, "bytes": ref.total} for ref in manifests[at].chain]
            tree = header.tree if isinstance(header.tree, dict) else {}
            framework = "lightning" if "pytorch-lightning_version" in tree else str(tree.get("format"))
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
        row["in_all"] = in_all_text([row])
        row |= {_METRIC + metric: value for metric, value in row["metrics"].items()}
        losses = [finite(row["metrics"][metric]) for metric in _losses(row["metrics"])]
        row["loss"] = next((loss for loss in losses if loss is not None), finite(row["baseline"]))
    newest = None if at is None else rows[at]
    shown = name or run.display.rstrip("/").rpartition("/")[2]
    framework = framework if framework in _WAYS else None
    return _Run(shown, found, [row for row, _ in ordered], newest, contents, framework, verify)


def _losses(metrics: Mapping[str, Any]) -> list[str]:
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


# ---- the page of one run


def _run_parts(run: _Run, limit: int) -> Iterator[str]:
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
        yield page.section(
            f"Inside the checkpoint of step {run.newest['step']}", _contents(run.contents, limit)
        )
    yield page.section("Health", [_health(run)])
    if run.newest is not None:
        yield page.section("How to use it", [page.codes(_uses(run, run.newest["step"]))], "")


def _size_card(runs: Sequence[_Run]) -> str:
    stored, count = sum(run.stored for run in runs), counted(sum(len(run.rows) for run in runs), "checkpoint")
    raw = sum(math.nan if run.raw is None else run.raw for run in runs)
    if not stored or not finite(raw):
        return page.card("How small", bytes_text(stored), f"{count} on disk.")
    text = f"{count} on disk: {bytes_text(stored)}, where torch.save takes {bytes_text(raw)}."
    return page.card("How small", f"{raw / stored:.1f} times smaller", text)


def _safety_card(runs: Sequence[_Run]) -> str:
    rows, damaged = [row for run in runs for row in run.rows], sum(run.damaged for run in runs)
    count = len(rows) + sum(len(run.found["unreadable"]) for run in runs)
    if not count:
        return page.card("How safe", "no checkpoint yet", "Nothing was committed so far.", alarm=True)
    known = sum(
        bool(row["not_finite"] or row["adopted"] or row["measured"] in ("measured", "exact")) for row in rows
    )
    quality = (
        f"What a restore costs was not measured for {len(rows) - known} of them."
        if known < len(rows)
        else "Every checkpoint is bit-exact."
        if all(row["measured"] == "exact" for row in rows)
        else f"A restore may raise the loss by at most {in_all_text(rows) or '0%'}, reserve included."
    )
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
        return page.card("How to resume", f"from step {step}", again, code=_way(run))
    sound = [row["step"] for row in run.rows if not row["not_finite"] and row["damage"] is None]
    way = f"The last finite one is of step {sound[-1]}:" if sound else "The run has no finite one."
    code = _way(run, sound[-1]) if sound else ""
    return page.card("How to resume", f"step {step} is not finite", f"{bad}.", way, code=code, alarm=True)


def _way(run: _Run, step: int | None = None) -> str:
    _, newest, other = _WAYS.get(run.framework or "", ("", "{url}", "{at}"))
    url, at = (json.dumps(text) for text in (run.found["url"], f"{run.found['url']}#step={step}"))
    return (newest if step is None else other).format(url=url, at=at, step=step)


def _facts(run: _Run) -> Iterator[tuple[str, str]]:
    first, last = run.rows[0], run.rows[-1]
    schemes = ", ".join(dict.fromkeys(str(row["scheme"]) for row in run.rows if row["scheme"]))
    if run.framework is not None:
        yield "written by", _WAYS[run.framework][0]
    steps = f"{len(run.rows)}, steps {first['step']} to {last['step']}"
    yield "checkpoints", f"{steps}, scheme {schemes}" if schemes else steps
    sessions = len({row["session"] for row in run.rows})
    turns = f", by {sessions} processes in turn" if sessions > 1 else ""
    yield "last saved", _when(max(row["wall_time"] for row in run.rows)) + turns
    waits = (("copies_sum", "snapshots"), ("evaluations_sum", "evaluations"), ("adoptions_sum", "adoption"))
    spent = [f"{_seconds(last[key])} for {what}" for key, what in waits if last[key]]
    yield "training waited", " and ".join(spent) or "not at all, as far as is noted"
    if run.newest is not None:
        files = counted(run.newest["chain_length"], "file")
        yield "a resume reads", f"{bytes_text(run.newest['chain_bytes'])} in {files}"


def _figures(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    def drawn(
        title: str,
        axis: Callable[[Any], str],
        curves: Mapping[str, str],
        *more: str,
        note: str = "",
        **scale: Any,
    ) -> str:
        rest = {_TITLES.get(key, key.removeprefix(_METRIC)): key for key in more}
        columns = [*_columns(curves, drawn=True), *_columns(rest)]
        return page.figure(title, rows, columns, axis=axis, note=note, **(scale or {"floor": 0.0}))

    sizes = {"torch.save": "raw_bytes", "a restore reads": "chain_bytes", "own file": "bytes"}
    yield drawn("Bytes of each checkpoint", bytes_text, sizes, "kind", "chain_length")
    sizes = {"torch.save": "raw_sum", "on disk": "disk_sum"}
    note = "Of the checkpoints that are kept, and what they build on."
    yield drawn("Bytes of the run, up to each step", bytes_text, sizes, note=note)
    ratios = {"this checkpoint": "ratio", "the run so far": "ratio_sum"}
    yield drawn("How many times smaller than torch.save", _times, ratios)
    names = list(dict.fromkeys(name for row in rows for name in row["metrics"]))
    losses = {name: _METRIC + name for name in _losses(dict.fromkeys(names))[:_CURVES]}
    others = [_METRIC + name for name in names if name not in losses][:_METRICS]
    note = "A gap is a loss that was not noted, or is NaN or infinite."
    yield drawn("Loss", _short, {**losses, "measured at the save": "baseline"}, *others, note=note, log=True)
    rises = {"measured, with its interval": "degradation", "allowed": "allowed"}
    note = "Relative to the loss. In all: with lost progress, or the run's reserve."
    ends = ("degradation_low", "degradation_high", "in_all", "measured")
    yield drawn("What a restore raises the loss by", _percent, rises, *ends, note=note)
    waits = {
        "for snapshots": "copies_sum",
        "for evaluations": "evaluations_sum",
        "for adoption": "adoptions_sum",
    }
    note = "For the checkpoints that are kept."
    each = ("blocked_s", "search_s", "encode_s")
    yield drawn("Seconds that training waited, up to each step", _seconds, waits, *each, note=note)


def _settings(rows: Sequence[Mapping[str, Any]]) -> str:
    steps: dict[str, list[float]] = {}
    for row in rows:
        steps.setdefault(str(row["configuration"] or "not noted"), []).append(row["step"])
    changes = [
        row for at, row in enumerate(rows) if not at or rows[at - 1]["configuration"] != row["configuration"]
    ]
    most = {name for name, _ in Counter({name: len(of) for name, of in steps.items()}).most_common(_SETTINGS)}
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
    note = "" if contents["exact"] else "A lossless scheme gives no reasons: all is exact."
    yield page.bars("What is exact, and why", contents["exact"], columns, share="share", note=note)
    columns = _columns({"file": "key", "bytes": "bytes"})
    note = "The base first, and the checkpoint's own file last."
    yield page.bars("What a restore reads", contents["chain"], columns, share="bytes", note=note)


def _health(run: _Run) -> str:
    lines, others = remarks_on(reversed(run.rows), run.found["unreadable"]), run.found["unlisted_containers"]
    if others:
        size = bytes_text(run.found["unlisted_bytes"])
        lines.append(
            f"{counted(others, 'container')}, {size}, of removed checkpoints or of a save in progress"
        )
    if run.found["step_log"] is not None:
        lines.append(logged_text(run.found["step_log"], run.found["url"]))
    if len(lines) > _REMARKS:
        lines[_REMARKS:] = [f"and {len(lines) - _REMARKS} more: `shrinkpoint ls` has all"]
    seen = _VERIFIED if run.verified else "Files and their sizes were looked at; --verify reads every byte."
    return page.bars("Remarks", [{"line": line} for line in lines], _columns({"what": "line"}), note=seen)


def _uses(run: _Run, step: int) -> Mapping[str, str]:
    url, at = run.found["url"], f"{run.found['url']}#step={step}"
    return {
        "Continue from the newest checkpoint": _way(run),
        "Go back to one": _way(run, step),
        "Its weights alone": f"model.load_state_dict(shrinkpoint.load_weights({json.dumps(at)}))",
        "An ordinary file": f"shrinkpoint export {shlex.quote(at)} model.ckpt",
        "Read and check every byte": f"shrinkpoint verify {shlex.quote(url)} --all",
    }


# ---- the page of a folder


def _sweep_parts(runs: Sequence[_Run]) -> Iterator[str]:
    runs = sorted(runs, key=lambda run: -max((row["wall_time"] for row in run.rows), default=0.0))
    bad = [run.name for run in runs if run.newest is not None and run.newest["not_finite"]]
    state = f"{counted(len(bad), 'run')} not finite" if bad else counted(len(runs), "run")
    text = "A script that is started again with its run's URL continues by itself."
    alarm = (
        f"Not finite: {', '.join(bad[:3])}{' and more' if len(bad) > 3 else ''}. The way back is below."
        if bad
        else ""
    )
    resume = page.card("How to resume", state, *([alarm] if bad else []), text, alarm=bool(bad))
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
    each = (page.folded(run.name, "".join(_run_parts(run, limit))) for run in runs[:_DETAILED])
    yield page.section("One by one", each, "runs")
    if len(runs) > _DETAILED:
        yield page.paragraph(
            f"{len(runs) - _DETAILED} more runs are in the table above only: make a page of each."
        )


def _overview(run: _Run) -> Mapping[str, Any]:
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


def _times(ratio: float) -> str:
    return f"{ratio:.3g}x"


def _short(loss: float) -> str:
    return f"{loss:.4g}"


def _percent(rise: float) -> str:
    return f"{100 * rise:.3g}%"


def _seconds(spent: float) -> str:
    return f"{spent:.2g} s" if spent < 99.5 else f"{spent:.0f} s"


def _when(seconds: float) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds))
    except (OverflowError, ValueError, OSError):
        return "at an unknown time"


_TEXTS: Mapping[str, Callable[[Any], str]] = {
    **dict.fromkeys(("bytes", "raw_bytes", "chain_bytes", "raw_sum", "disk_sum"), bytes_text),
    **dict.fromkeys(("ratio", "ratio_sum"), ratio_text),
    **dict.fromkeys(("degradation", "degradation_low", "degradation_high", "allowed"), _percent),
    **dict.fromkeys(
        ("copies_sum", "evaluations_sum", "adoptions_sum", "blocked_s", "search_s", "encode_s"), _seconds
    ),
    "share": "{:.1%}".format,
    "bits_per_element": "{:.2f}".format,
    "wall_time": _when,
}
_TITLES = {
    "chain_length": "files",
    "degradation_low": "from",
    "degradation_high": "to",
    "in_all": "at most, in all",
    "measured": "known",
    "blocked_s": "this snapshot",
    "search_s": "these evaluations",
    "encode_s": "coding in the background",
}
_OVERVIEW = {
    "run": "run",
    "newest step": "step",
    "checkpoints": "checkpoints",
    "on disk": "bytes",
    "ratio": "ratio_sum",
    "loss": "loss",
    "a restore costs": "in_all",
    "state": "state",
    "last saved": "wall_time",
}
_DASHED = ("raw_bytes", "raw_sum", "baseline", "allowed")
_ENDS = {"degradation": ("degradation_low", "degradation_high")}
_WORDS = ("name", "role", "kind", "measured", "key", "reason", "configuration", "line", "run")
