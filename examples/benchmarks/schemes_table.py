"""The tables of the bench of schemes, in Markdown: how small, what it costs, and who is smallest under a bound."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from cells import Cell
from common import markdown_table

BOUND = 0.005
"""Of the loss after the last mark's resumed steps."""
RESTORES_BOUND = 0.01
"""Of the final loss of a run that is restored from every checkpoint."""

_NONE = "-"
_TITLES = {
    "gpt": "GPT, AdamW (0.9, 0.95)",
    "gpt-999": "GPT, AdamW (0.9, 0.999)",
    "conv": "Convolutional network, AdamW (0.9, 0.999)",
}
_OURS, _RIVAL = "auto", "excp"

_HEAD = """# The schemes, measured

The demo's GPT and a causal dilated convolutional network over the same text are trained with up to {seeds} seeds. Each undisturbed run
is coded as one chain of checkpoints, a base and its deltas; ratios are those of whole files (weights: of their sections). Every number
is the mean over the seeds, `±` half of the way from the least to the greatest.

- **at a restore, {marks}**: held-out loss of a run that continues from a restored state, against the undisturbed
  run at the same step, so many optimizer steps after the restore; mean over restores of two checkpoints, the
  middle one and the last.
- **restored n times**: final loss of a run that is restored from every one of its n checkpoints, evenly
  spread, against the undisturbed one; and how small its files were.
- "moments too" codes Adam's moments in levels, where the papers do not change them; "refilled"
  repairs what docs of the options call a defect. ExCP's base is stored in full as published, "lossy base" has
  its moments clustered.
"""


@dataclass(frozen=True)
class Spread:
    """One number from several seeds."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Over the seeds."""
        return sum(self.values) / len(self.values)

    @property
    def half(self) -> float:
        """Half of the way from the least to the greatest."""
        return (max(self.values) - min(self.values)) / 2

    def __str__(self) -> str:
        low, high = min(self.values), max(self.values)
        return f"{self.mean:.3g}x" + (f" ({low:.3g} to {high:.3g})" if len(self.values) > 1 else "")


@dataclass
class Row:
    """One setting on one training, by seed."""

    model: str
    every: int
    scheme: str
    setting: str
    chain: dict[int, Cell] = field(default_factory=dict)
    restores: dict[int, Cell] = field(default_factory=dict)

    def of(self, part: str, number: Callable[[Cell], float]) -> Spread | None:
        """A number of every seed's cell; None if there is none."""
        cells: dict[int, Cell] = getattr(self, part)
        return Spread(tuple(number(cells[seed]) for seed in sorted(cells))) if cells else None


def rows_of(cells: Iterable[Cell], *, quick: bool = False) -> list[Row]:
    """Make one row for each setting and training, in the order in which they come."""
    rows: dict[tuple[str, int, str, str], Row] = {}
    for cell in cells:
        if cell["quick"] == str(quick):
            place = (cell["model"], int(cell["every"]), cell["scheme"], cell["setting"])
            getattr(rows.setdefault(place, Row(*place)), cell["part"])[int(cell["seed"])] = cell
    return list(rows.values())


def ratio(cell: Cell, kind: str | None = None, *, weights: bool = False) -> float:
    """Raw bytes over stored ones of a chain's checkpoints of one kind; None counts all kinds."""
    raw, stored = ("raw_weights", "weights") if weights else ("raw", "stored")
    sizes = [cell["sizes"][one] for one in ("base", "delta") if kind in (None, one)]
    return sum(size[raw] for size in sizes) / max(1, sum(size[stored] for size in sizes))


def _delta(cell: Cell) -> float:
    return ratio(cell, "delta")


@dataclass(frozen=True)
class Best:
    """The smallest setting of a scheme under a bound, found for every seed by itself."""

    ratios: dict[int, float]
    settings: dict[int, str]

    def __str__(self) -> str:
        return str(Spread(tuple(self.ratios[seed] for seed in sorted(self.ratios))))

    def over(self, other: Best) -> Spread | None:
        """How many times smaller than another scheme's, by the seeds that both were measured with."""
        seeds = sorted(set(self.ratios) & set(other.ratios))
        return Spread(tuple(self.ratios[seed] / other.ratios[seed] for seed in seeds)) if seeds else None


def best_under(
    rows: Iterable[Row], part: str, rise: Callable[[Cell], float], bound: float, size: Callable[[Cell], float]
) -> Best | None:
    """Find the smallest setting among rows of one scheme and training whose loss rises by at most `bound`.

    A kind of cell, `part`, tells the `rise` of the loss and the `size`, a ratio. None if for some seed no setting holds the bound.
    """
    best, seeds = Best({}, {}), set()
    for row in rows:
        cells: dict[int, Cell] = getattr(row, part)
        seeds |= set(cells)
        for seed, cell in cells.items():
            if rise(cell) <= bound and size(cell) > best.ratios.get(seed, 0.0):
                best.ratios[seed], best.settings[seed] = size(cell), row.setting
    return best if seeds and seeds == set(best.ratios) else None


def _after_resuming(rows: Iterable[Row], mark: int, size: Callable[[Cell], float]) -> Best | None:
    return best_under(rows, "chain", lambda cell: cell["rises"][str(mark)], BOUND, size)


def _after_restores(rows: Iterable[Row]) -> Best | None:
    return best_under(rows, "restores", lambda cell: cell["rise"], RESTORES_BOUND, ratio)


def _times(spread: Spread | None) -> str:
    return _NONE if spread is None else f"{spread.mean:.3g}x" if spread.mean < 100 else f"{spread.mean:.0f}x"


def _percent(spread: Spread | None) -> str:
    if spread is None:
        return _NONE
    around = f" ±{100 * spread.half:.2f}" if len(spread.values) > 1 else ""
    return f"{100 * spread.mean:+.2f}{around} %"


def _table(rows: Sequence[Row], marks: Sequence[int]) -> list[str]:
    headings = [
        "scheme",
        "setting",
        "base",
        "delta",
        "chain",
        "weights: base",
        "delta",
        "chain",
        "at a restore",
    ]
    headings += [f"+{mark}" for mark in marks if mark] + ["restored n times", "its deltas", "its chain"]
    lines = []
    for row in rows:
        line = [row.scheme, row.setting]
        for weights in (False, True):
            for kind in ("base", "delta", None):
                line.append(
                    _times(row.of("chain", lambda cell, k=kind, w=weights: ratio(cell, k, weights=w)))
                )
        line += [_percent(row.of("chain", lambda cell, m=mark: cell["rises"][str(m)])) for mark in marks]
        line.append(_percent(row.of("restores", lambda cell: cell["rise"])))
        lines.append([*line, _times(row.of("restores", _delta)), _times(row.of("restores", ratio))])
    return markdown_table(headings, lines)


def _smallest(rows: Sequence[Row], mark: int) -> list[str]:
    """The smallest setting of every scheme that holds the bound."""
    lines = []
    for scheme in dict.fromkeys(row.scheme for row in rows if row.chain):
        mine = [row for row in rows if row.scheme == scheme]
        bests = [*(_after_resuming(mine, mark, size) for size in (_delta, ratio)), _after_restores(mine)]
        found = [
            (str(best), ", ".join(dict.fromkeys(best.settings.values()))) if best else (_NONE, _NONE)
            for best in bests
        ]
        lines.append([scheme, *(cell for pair in found for cell in pair)])
    headings = ["scheme", "delta", "setting", "chain", "setting", "restored n times: chain", "setting"]
    return markdown_table(headings, lines)


def _seeds(rows: Sequence[Row]) -> list[str]:
    """Which settings were measured with how many seeds."""
    measured: dict[int, int] = {}
    for row in rows:
        count = len({*row.chain} | {*row.restores})
        measured[count] = measured.get(count, 0) + 1
    if len(measured) == 1:
        return [f"Seeds: {next(iter(measured))}."]
    told = (
        f"{count} {'seed' if count == 1 else 'seeds'}: {n} settings" for count, n in sorted(measured.items())
    )
    return [f"Measured with {'; '.join(told)} (those with a `±`)."]


def _verdicts(rows: Sequence[Row], mark: int) -> list[str]:
    """How many times smaller ours is than its strongest rival."""
    halves = {name: [row for row in rows if row.scheme == name] for name in (_OURS, _RIVAL)}
    lines = []
    for words, size in (("deltas", _delta), ("whole chains", ratio)):
        best = {name: _after_resuming(half, mark, size) for name, half in halves.items()}
        ours, theirs = best.values()
        smaller = ours.over(theirs) if ours and theirs else None
        if smaller is not None:
            said = f"`{_OURS}` under {100 * BOUND:g} % after {mark} resumed steps is **{smaller} smaller** than `{_RIVAL}`'s best"
            lines.append(f"- {words}: {said} under the same bound.")
        else:
            missing = "`, `".join(name for name, one in best.items() if not one)
            lines.append(
                f"- {words}: no setting of `{missing}` stays within {100 * BOUND:g} % with every seed."
            )
    restored = _after_restores(halves[_OURS])
    if restored is not None:
        lines.append(
            f"- restored at every checkpoint: `{_OURS}` under {100 * RESTORES_BOUND:g} % reaches {restored}."
        )
    return lines


def document(rows: Sequence[Row], marks: Sequence[int]) -> str:
    """Write all tables; losses were compared after the resumed steps of the marks."""
    after = ", ".join(f"+{mark}" for mark in marks if mark)
    seeds = max((len(row.chain) for row in rows), default=0)
    lines = [_HEAD.format(seeds=seeds, marks=after)]
    for model, every in dict.fromkeys((row.model, row.every) for row in rows):
        of_it = [row for row in rows if (row.model, row.every) == (model, every)]
        lines += [
            f"## {_TITLES.get(model, model)}, {every} steps between checkpoints",
            "",
            *_seeds(of_it),
            "",
        ]
        said = f"The smallest settings under {100 * BOUND:g} % after {marks[-1]} resumed steps, for every seed by itself"
        lines += [
            *_verdicts(of_it, marks[-1]),
            "",
            said,
            f"(restored n times: under {100 * RESTORES_BOUND:g} %):",
            "",
        ]
        lines += [*_smallest(of_it, marks[-1]), "", "All settings:", "", *_table(of_it, marks), ""]
    return "\n".join(lines).rstrip()
