"""The tables of the bench of the bound, in Markdown."""

from __future__ import annotations

import json
import platform
import re
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from bound_summary import SAME, Mean, Row, rows_of
from bound_trainings import KINDS, TUNED
from demo_report import markdown_table

__all__ = ["document"]

_NONE = "-"
_VARIED = re.compile(r"'[^']*'|[-+]?\d[\d.e+-]*%?")

_HEAD = """# The bound, measured on {count} trainings

Written by `python examples/benchmarks/bound.py` ({versions}). Each training is run undisturbed, and once more so that
it is thrown away and restored from the store after ten of its eleven checkpoints, all options at their defaults. Losses are those on
data apart from the probe's, changes are relative to the undisturbed run of the same seed. The measurements are in
[{file}]({file}); `--table` writes this page from them.

- **ratio**: bytes of all eleven checkpoints in memory over those stored; median over the seeds.
- **reported**: the sum of the costs in the library's reports of the ten checkpoints (`cost`), in brackets the upper end of all of them
  (`cost_high`), which includes what lost steps of the moments cost and, once, the reserve for what no measurement at a save sees
  ([search.md](search.md#what-the-report-adds)); `?` where some were not measured at all, `exact` counts those that were stored exactly.
- **truth**: change of the final loss, for each seed, and **mean**: of all seeds, with its standard error.
- **spread**: standard deviation of the undisturbed runs' final losses over the seeds, of their mean; in brackets how many.
- **a millionth**: change of the final loss of an undisturbed run whose weights were all changed by a millionth of themselves at the
  same ten steps, mean and standard error of the seeds that were tried: the effect of errors that no scheme could avoid.
- **kept**: the mean is at most +1 %, but for two standard errors, so are those of other losses, those of earlier abilities are at most
  +0.2 %, and no frozen element has changed. **chaotic**: a millionth changes the final loss by more than a per cent, and by more than
  the restores do, in the mean of its sizes. Such runs end anywhere, and only `lossless` reproduces their losses.
- **reported bound holds**: the mean of the reported upper ends is no less than that of the truth, but for two standard errors.

Judged is the mean over the seeds of what restores do to each, as the spread of the seeds hides harm wherever it is large.

Ratios below 8 have two causes. *Late* checkpoints are a few steps apart, and weights hardly move in between: noise stays below that
movement, and of moments a restore may lose 1 % of those steps. Muon, Lion and SGD keep no second moment, which takes the fewest
bits of all, and Muon and Lion use the first one's direction alone, of which an eighth as much may be lost
([auto.md](auto.md#first-moments)).

Constants of the library are chosen on the trainings of the first table. On those of the second they are only reported.
"""

_RECOMPUTED = """**Recomputed**: {cells} cells were measured with {libraries} earlier states of this library, whose reports had no `cost_delay`, and
each a tenth of the reserve in `cost_high`. Costs and upper ends were computed for this page by the present functions
(`shrinkpoint.quality.restore_budget`), from the other numbers of these reports: the degradation, its upper end, the held-out losses and the
lost steps. Lost progress of their first checkpoints is not in them. Sizes, losses and updates are as those states made them."""


def _percent(value: float | None, digits: int = 2) -> str:
    return _NONE if value is None else f"{100 * value:+.{digits}f}"


def _mean(changes: Iterable[float]) -> str:
    """The mean with its standard error."""
    found = list(changes)
    if not found:
        return _NONE
    mean = Mean.of(found)
    error = f" ± {100 * mean.error:.2f}" if mean.seeds > 1 else ""
    return f"{_percent(mean.value)}{error} ({mean.seeds})"


def _each(values: Iterable[float | None]) -> str:
    return ", ".join(map(_percent, values))


def _yes(flag: bool | None) -> str:
    return _NONE if flag is None else "yes" if flag else "no"


def _reported(row: Row) -> str:
    said = []
    for found in row.reports.values():
        high = f" (<{_percent(found.high)})" if found.high != found.mean else ""
        exact = f", exact {found.exact}" if found.exact else ""
        blind = f", ? {found.unmeasured}" if found.unmeasured else ""
        said.append(f"{_percent(found.mean)}{high}{exact}{blind}")
    return "; ".join(said)


def _kept(row: Row) -> str:
    if not row.truths:
        return _NONE
    return f"{'kept' if row.kept else '**not kept**'}{', chaotic' if row.is_chaotic else ''}"


def _other(row: Row) -> str:
    """Changes of abilities and of other losses than the final one, by their names."""
    parts = [f"{name} {_each(values)}" for name, values in {**row.abilities, **row.also}.items()]
    if any(row.frozen.values()):
        parts.append(f"frozen elements changed: {', '.join(map(str, row.frozen.values()))}")
    return "; ".join(parts) or _NONE


def _main_table(rows: Sequence[Row]) -> list[str]:
    lines = []
    for row in rows:
        lines.append(
            [
                _title(row),
                f"{row.ratio:.3g}x",
                _reported(row),
                _each(row.truths.values()),
                _mean(row.truths.values()),
                _NONE if row.spread is None else f"{100 * row.spread:.2f} ({len(row.plain)})",
                _mean(row.luck.values()),
                _other(row),
                _kept(row),
                _yes(row.covered),
            ]
        )
    headings = [
        "training",
        "ratio",
        "reported, %",
        "truth, %",
        "mean, %",
        "spread, %",
        "a millionth, %",
        "other losses, %",
        "",
        "reported bound holds",
    ]
    return markdown_table(headings, lines)


def _title(row: Row) -> str:
    late = ", ten late restores" if row.part == "late" else ""
    return f"{KINDS[row.training].title}{late}" if row.training in KINDS else f"{row.training}{late}"


def _number(value: object, form: Callable[[float], str]) -> str | None:
    """A number of a report, or several by name."""
    if isinstance(value, (int, float)):
        return form(value)
    if isinstance(value, Mapping):
        told = [f"{name}: {form(item)}" for name, item in value.items() if isinstance(item, (int, float))]
        return ", ".join(told) or None
    return None


def _range(values: Sequence[float]) -> str:
    return f"{min(values):.2f} to {max(values):.2f}" if values else _NONE


def _updates(rows: Sequence[Row]) -> list[str]:
    """Errors and lengths of the first updates after a restore, relative to the true ones."""
    lines = []
    for row in rows:
        errors, lengths = row.reported("update_error"), row.reported("update_length")
        if errors or lengths:
            names = sorted({*errors, *lengths})
            lines += [
                [
                    _title(row) + (f", {name}" if name else ""),
                    _range(errors.get(name, [])),
                    _range(lengths.get(name, [])),
                    "yes" if lengths.get(name) and max(lengths[name]) <= 1.05 else "no",
                ]
                for name in names
            ]
    if not lines:
        return []
    headings = ["training", "error", "length", "length at most 1.05"]
    said = "The update after a restore compared with the true one: its relative error, and its relative length, as reported at the saves."
    return ["## Updates after a restore", "", said, "", *markdown_table(headings, lines), ""]


def _costs(rows: Sequence[Row]) -> list[str]:
    lines = []
    for row in rows:
        cells = row.cells.values()
        train = sum(cell["train_s"] for cell in cells)
        numbers = (
            sum(save[name] for cell in cells for save in cell["saves"])
            for name in ("search_s", "blocked_s", "encode_s")
        )
        count = sum(save["evaluations"] for cell in cells for save in cell["saves"]) / len(row.cells)
        search, blocked, encode = (100 * number / train for number in numbers)
        last = _each(row.last.values())
        lines.append(
            [
                _title(row),
                f"{train / len(row.cells):.1f} s",
                f"{count:.0f}",
                f"{search:.1f}",
                f"{blocked:.2f}",
                f"{encode:.0f}",
                last,
            ]
        )
    headings = [
        "training",
        "steps take",
        "evaluations",
        "evaluating",
        "blocked",
        "encoding",
        "last one restored, %",
    ]
    said = (
        "Evaluating and probing, waiting for snapshots, and encoding in the background, in percent of the seconds of the steps alone."
        " These trainings are of seconds: at one save an hour it is a thousandth of that. Last: the loss right after a restore of the"
        " very last checkpoint, relative to that of the run which wrote it."
    )
    return ["## What it costs", "", said, "", *markdown_table(headings, lines), ""]


def _verdict(name: str, rows: Sequence[Row]) -> list[str]:
    judged = [row for row in rows if row.truths]
    kept, chaotic = sum(row.kept for row in judged), {row.training: 1 for row in judged if row.is_chaotic}
    within = [one for row in judged for one in row.within.values()]
    known = [row for row in judged if row.covered is not None]
    missed = [row.training for row in known if not row.covered]
    also = f"; chaotic: {', '.join(chaotic)}" if chaotic else ""
    lines = [
        f"- {name}: **{kept} of {len(judged)} kept** in the mean of their seeds{also}. {sum(within)} of {len(within)} runs end at +1 %"
        " or below.",
        f"- {name}: **the reported bound holds for {len(known) - len(missed)} of {len(known)}** that reported one.",
    ]
    return [*lines, f"- {name}: it does not hold for {', '.join(missed)}."] if missed else lines


def _section(rows: Sequence[Row]) -> list[str]:
    halves = {
        "chosen on these": [row for row in rows if row.training in TUNED],
        "only reported": [row for row in rows if row.training not in TUNED],
    }
    lines = [line for name, half in halves.items() if half for line in _verdict(name, half)]
    for name, half in halves.items():
        if half:
            lines += ["", f"### Trainings: {name}", "", *_main_table(half)]
    return [*lines, "", *_updates(rows), *_costs(rows), *_warnings(rows)]


def _warnings(rows: Sequence[Row]) -> list[str]:
    """The warnings, and where they were given; of those that differ in numbers or names alone, one."""
    told: dict[str, list[tuple[str, str]]] = {}
    for row in rows:
        for text in dict.fromkeys(text for cell in row.cells.values() for text in cell["warnings"]):
            told.setdefault(_VARIED.sub("#", text), []).append((text, f"{row.training} ({row.part})"))
    if not told:
        return []
    lines = ["## Warnings", ""]
    for found in told.values():
        alike = f" ({len(found) - 1} more differ in numbers or names)" if len(found) > 1 else ""
        lines.append(
            f"- {', '.join(dict.fromkeys(place for _, place in found))}: {' '.join(found[0][0].split())}{alike}"
        )
    return [*lines, ""]


def document(cells: Iterable[tuple[dict, dict]], *, quick: bool = False, file: str = "bound.jsonl") -> str:
    """The page.

    Args:
        cells: keys and results, of any trainings and settings; of trainings that have changed since, they are left out.
        quick: of the quick forms, or of the real ones.
        file: the cells' file name, in the page's folder.
    """
    rows = rows_of(cells, quick=quick)
    settings = dict.fromkeys((row.scheme, row.options) for row in rows)
    count = len({row.training for row in rows})
    versions = f"torch {torch.__version__.split('+')[0]}, Python {platform.python_version()}"
    lines = [_HEAD.format(count=count, versions=versions, file=file)]
    mixed = {
        "states of the library": {cell.get("library") for row in rows for cell in row.cells.values()},
        "kinds of processors": {
            cell.get("machine") for row in rows for cell in (*row.cells.values(), *row.plain.values())
        },
    }
    for kind, different in mixed.items():
        if len(different) > 1:
            lines += [
                f"**Cells of {len(different)} {kind} are mixed here: `--stale` measures anew.**",
                "",
            ]
    defaults = [row for row in rows if (row.scheme, row.options) == SAME]
    states = {cell.get("library") for row in defaults for cell in row.cells.values()}
    if len(states) == 1 < len(mixed["states of the library"]):
        lines += ["All restored runs of the library's defaults are of one state of the library.", ""]
    again = [cell for row in rows for seed, cell in row.cells.items() if row.reports[seed].recomputed]
    if again:
        lines += [
            _RECOMPUTED.format(cells=len(again), libraries=len({cell["library"] for cell in again})),
            "",
        ]
    for setting in sorted(settings, key=lambda one: (one != SAME, one)):
        mine = [row for row in rows if (row.scheme, row.options) == setting]
        if setting != SAME:
            scheme, options = setting
            more = (
                ""
                if options == SAME[1]
                else f", {' '.join(f'{k}={v}' for k, v in json.loads(options).items())}"
            )
            lines += [f"# `{scheme}`{more}", ""]
        lines += _section(mine)
    return "\n".join(lines).rstrip() + "\n"
