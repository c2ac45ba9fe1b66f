"""The tables of the bench of the bound: for each training and setting, whether the promise was kept."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from bound_run import UNDISTURBED
from cells import Cell
from common import markdown_table
from trainings import KINDS, TUNED

LIMIT = 0.01
"""What ten restores may cost of the final loss."""
ABILITY_LIMIT = 0.002
"""What they may cost of an ability from before, which no probe measures."""
SAME = ("auto", "{}")
"""The setting that is the library's default."""
_NONE = "-"

_HEAD = """# The bound, measured on {count} trainings

Losses are those on data apart from the probe's, relative to the undisturbed run of the same seed; means have their standard error.

- **ratio**: bytes of all eleven checkpoints in memory over those stored; median over the seeds.
- **reported**: the sum of the costs in the reports of the ten checkpoints, in brackets its upper end; `?` counts those that were not
  measured at all, `exact` those that were stored exactly.
- **truth**: change of the final loss, for each seed. **spread**: standard deviation of the undisturbed runs' final losses.
- **a millionth**: change of the final loss by an error of a millionth of all weights at the same ten steps.
- **kept**: the mean is at most +1 %, but for two standard errors, so are those of other losses, those of earlier abilities are at most
  +0.2 %, and no frozen element has changed. **chaotic**: a millionth changes the final loss by more than a per cent, and by more than
  the restores do. **reported bound holds**: its mean is no less than that of the truth, but for two standard errors.
"""


@dataclass(frozen=True)
class Mean:
    """The mean of paired changes over the seeds."""

    value: float
    error: float
    """Its standard error; 0 where there is one seed."""
    seeds: int

    @property
    def low(self) -> float:
        """The least that the mean may be, but for two standard errors."""
        return self.value - 2 * self.error

    def __str__(self) -> str:
        error = f" ± {100 * self.error:.2f}" if self.seeds > 1 else ""
        return f"{_percent(self.value)}{error} ({self.seeds})"

    @classmethod
    def of(cls, changes: Iterable[float]) -> Mean:
        """Take the mean of any number of changes, of which one at least."""
        found = list(changes)
        error = statistics.stdev(found) / len(found) ** 0.5 if len(found) > 1 else 0.0
        return cls(statistics.mean(found), error, len(found))


@dataclass
class Row:
    """One training, restored under one setting, by seed."""

    training: str
    scheme: str
    options: str
    """Everything that is not at its default, as JSON."""
    cells: dict[int, Cell] = field(default_factory=dict)
    plain: dict[int, Cell] = field(default_factory=dict)
    """The undisturbed runs, of all seeds."""
    nudged: dict[int, Cell] = field(default_factory=dict)
    """Undisturbed runs with an error of a millionth in all weights where others are restored."""

    @property
    def title(self) -> str:
        return KINDS[self.training].title

    @property
    def ratio(self) -> float:
        """Bytes in memory over bytes stored of a whole chain, median over the seeds."""
        return statistics.median(cell["raw_bytes"] / cell["bytes"] for cell in self.cells.values())

    @property
    def spread(self) -> float | None:
        """Standard deviation of the undisturbed final losses, of their mean; None for a single seed."""
        finals = [cell["final"] for cell in self.plain.values()]
        return statistics.stdev(finals) / abs(statistics.mean(finals)) if len(finals) > 1 else None

    @property
    def truths(self) -> dict[int, float]:
        """Relative change of the final loss, of the seeds whose undisturbed run is there."""
        return self._changes(self.cells)

    @property
    def luck(self) -> dict[int, float]:
        """Relative change of the final loss by errors of a millionth, of the seeds that were tried."""
        return self._changes(self.nudged)

    def others(self, kind: str) -> dict[str, list[float]]:
        """Relative changes of further losses, by name: ``abilities`` from before, or those that are ``also`` measured."""
        changes: dict[str, list[float]] = {}
        for seed in self.truths:
            for name, loss in self.plain[seed][kind].items():
                changes.setdefault(name, []).append(change(self.cells[seed][kind][name], loss))
        return changes

    @property
    def mean(self) -> Mean:
        return Mean.of(self.truths.values())

    @property
    def is_chaotic(self) -> bool:
        """Whether errors of a millionth change the final loss by more than restores do, and by more than the limit."""
        luck, truths = ([abs(change) for change in one.values()] for one in (self.luck, self.truths))
        return bool(luck) and statistics.mean(luck) > max(LIMIT, statistics.mean(truths or [0.0]))

    @property
    def covered(self) -> bool | None:
        """Whether the mean of the reported upper ends is no less than the mean change, but for two errors; None where
        something was not measured."""
        cells = [self.cells[seed] for seed in self.truths]
        if not cells or any(cell["unmeasured"] for cell in cells):
            return None
        return statistics.mean(cell["cost_high"] for cell in cells) >= self.mean.low

    @property
    def kept(self) -> bool:
        """Whether the promise was kept: the mean changes over the seeds are within their limits, but for two standard errors."""
        losses = [self.mean, *(Mean.of(changes) for changes in self.others("also").values())]
        abilities = [Mean.of(changes) for changes in self.others("abilities").values()]
        limits = [(mean, LIMIT) for mean in losses] + [(mean, ABILITY_LIMIT) for mean in abilities]
        frozen = any(cell["frozen_changes"] for cell in self.cells.values())
        return all(mean.low <= limit for mean, limit in limits) and not frozen

    def _changes(self, cells: Mapping[int, Cell]) -> dict[int, float]:
        return {
            seed: change(cells[seed]["final"], self.plain[seed]["final"])
            for seed in cells
            if seed in self.plain
        }


def change(loss: float, undisturbed: float) -> float:
    """Give a change of a loss relative to what it was."""
    return (loss - undisturbed) / abs(undisturbed)


def rows_of(cells: Iterable[Cell], *, quick: bool = False) -> list[Row]:
    """Make one row for each training and setting, in the order of the trainings; of the quick forms or the others."""
    rows: dict[tuple[str, str, str], Row] = {}
    undisturbed: dict[tuple[str, str], dict[int, Cell]] = {}
    for cell in cells:
        name, seed, part = cell["training"], int(cell["seed"]), cell["part"]
        if cell["quick"] != str(quick):
            continue
        if part in UNDISTURBED:
            undisturbed.setdefault((part, name), {})[seed] = cell
            continue
        options = json.dumps({**json.loads(cell["options"]), **json.loads(cell["config"])}, sort_keys=True)
        place = (name, cell["scheme"], options)
        rows.setdefault(place, Row(*place)).cells[seed] = cell
    for row in rows.values():
        row.plain = undisturbed.get(("plain", row.training), {})
        row.nudged = dict(sorted(undisturbed.get(("nudged", row.training), {}).items()))
        row.cells = dict(sorted(row.cells.items()))
    order = list(KINDS)
    return sorted(rows.values(), key=lambda row: order.index(row.training))


def _percent(value: float | None) -> str:
    return _NONE if value is None else f"{100 * value:+.2f}"


def percents(values: Iterable[float | None]) -> str:
    """Write changes in percent."""
    return ", ".join(map(_percent, values))


def _reported(row: Row) -> str:
    said = []
    for cell in row.cells.values():
        high = f" (<{_percent(cell['cost_high'])})" if cell["cost_high"] != cell["cost"] else ""
        exact = f", exact {cell['exact']}" if cell["exact"] else ""
        blind = f", ? {cell['unmeasured']}" if cell["unmeasured"] else ""
        said.append(f"{_percent(cell['cost'])}{high}{exact}{blind}")
    return "; ".join(said)


def _kept(row: Row) -> str:
    if not row.truths:
        return _NONE
    return f"{'kept' if row.kept else '**not kept**'}{', chaotic' if row.is_chaotic else ''}"


def _other(row: Row) -> str:
    """Changes of abilities and of other losses than the final one, by their names."""
    found = {**row.others("abilities"), **row.others("also")}
    parts = [f"{name} {percents(values)}" for name, values in found.items()]
    frozen = [cell["frozen_changes"] for cell in row.cells.values()]
    if any(frozen):
        parts.append(f"frozen elements changed: {', '.join(map(str, frozen))}")
    return "; ".join(parts) or _NONE


def _main_table(rows: Sequence[Row]) -> list[str]:
    lines = [
        [
            row.title,
            f"{row.ratio:.3g}x",
            _reported(row),
            percents(row.truths.values()),
            str(row.mean) if row.truths else _NONE,
            _NONE if row.spread is None else f"{100 * row.spread:.2f} ({len(row.plain)})",
            str(Mean.of(row.luck.values())) if row.luck else _NONE,
            _other(row),
            _kept(row),
            _NONE if row.covered is None else "yes" if row.covered else "no",
        ]
        for row in rows
    ]
    headings = "training|ratio|reported, %|truth, %|mean, %|spread, %|a millionth, %|other losses, %||reported bound holds"
    return markdown_table(headings.split("|"), lines)


def _updates(row: Row) -> list[str]:
    """The error and the length of the next update, least and greatest of all checkpoints."""
    told = []
    for name in ("update_error", "update_length"):
        ends = [cell[name] for cell in row.cells.values() if name in cell]
        told.append(f"{min(ends)[0]:.2f} to {max(high for _, high in ends):.2f}" if ends else _NONE)
    return told


def states(rows: Sequence[Row]) -> list[str]:
    """Make a table of kinds of state: how small, and what restores do to the loss and to the next update."""
    lines = [
        [
            row.title,
            f"{row.ratio:.1f}x",
            str(row.mean),
            _NONE if row.spread is None else f"{100 * row.spread:.2f}",
            *_updates(row),
        ]
        for row in rows
    ]
    headings = ["optimizer", "ratio", "change of the loss, %", "spread, %", "next update: error", "length"]
    return markdown_table(headings, lines)


def _verdict(name: str, rows: Sequence[Row]) -> list[str]:
    judged = [row for row in rows if row.truths]
    kept, chaotic = sum(row.kept for row in judged), {row.training: 1 for row in judged if row.is_chaotic}
    within = [truth <= LIMIT for row in judged for truth in row.truths.values()]
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
    return [*lines, ""]


def document(rows: Sequence[Row]) -> str:
    """Write the page of the library's default setting, and of any other."""
    settings = dict.fromkeys((row.scheme, row.options) for row in rows)
    lines = [_HEAD.format(count=len({row.training for row in rows}))]
    for kind, column in (("states of the library", "library"), ("kinds of processors", "machine")):
        different = {cell.get(column) for row in rows for cell in row.cells.values()}
        if len(different) > 1:
            lines += [f"**Cells of {len(different)} {kind} are mixed here: `--fresh` measures anew.**", ""]
    for scheme, options in sorted(settings, key=lambda one: (one != SAME, one)):
        if (scheme, options) != SAME:
            changed = "".join(f", {name}={value}" for name, value in json.loads(options).items())
            lines += [f"# `{scheme}`{changed}", ""]
        lines += _section([row for row in rows if (row.scheme, row.options) == (scheme, options)])
    return "\n".join(lines).rstrip()


def schemes(rows: Sequence[Row]) -> list[str]:
    """Make a table with one row for each scheme: what ten restores do within the bound."""
    lines = []
    for scheme in dict.fromkeys(row.scheme for row in rows):
        mine = [row for row in rows if row.scheme == scheme and row.truths]
        cells = [cell for row in mine for cell in row.cells.values()]
        ratios = sorted(row.ratio for row in mine)
        worst = max(mine, key=lambda row: row.mean.value)
        held = [
            cell["cost_high"] >= row.truths[seed]
            for row in mine
            for seed, cell in row.cells.items()
            if seed in row.truths and not cell["unmeasured"]
        ]
        known = [row for row in mine if row.covered is not None]
        lines.append(
            [
                f"`{scheme}`",
                f"{len(mine)}, {len(cells)}",
                f"{statistics.median(ratios):.3g}x ({ratios[0]:.3g} to {ratios[-1]:.3g})",
                f"{sum(cell['exact'] for cell in cells)} of {10 * len(cells)}",
                f"{sum(row.kept for row in mine)} of {len(mine)}",
                f"{sum(bool(row.covered) for row in known)} of {len(known)}",
                f"{sum(held)} of {len(held)}",
                f"{worst.mean} {worst.training}",
            ]
        )
    headings = (
        "scheme|trainings, runs|ratio|stored exactly|kept|reported bound holds|in single runs|largest mean, %"
    )
    return markdown_table(headings.split("|"), lines)
