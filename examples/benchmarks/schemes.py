"""Every scheme on real trainings: how small, and what it costs after restores.

    python examples/benchmarks/schemes.py [--quick] [--models gpt,gpt-999,conv] [--seeds 3] [--every 50,500]
        [--only auto,excp:'alpha 0.001'] [--parts chain,restores] [--workers 2] [--table] [--fresh] [--cache FILE]

Every measurement is one row of a CSV file, so that the bench may be stopped, continued and extended; cells that are there are not
measured again, unless --fresh is given. At 500 steps the trainings are long: only `chain` is measured there, on four saves, unless
--parts says otherwise. Runs are restored with the few settings that stand for their scheme, and with those that --only names in full.
--table prints what is there and measures nothing. Small models and few steps (--quick) give no real numbers; their file is in build.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: cells are what runs side by side

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence

from cells import Cell, filled
from common import markdown_table, parsed
from schemes_run import KEYS, MODELS, PARTS, SETTINGS, WIDE, Course, Task, chosen, known, measure

BOUND = 0.005
"""Of the loss after the last mark's resumed steps."""
RESTORES_BOUND = 0.01
"""Of the final loss of a run that is restored from every checkpoint."""
_TITLES = {
    "gpt": "GPT, AdamW (0.9, 0.95)",
    "gpt-999": "GPT, AdamW (0.9, 0.999)",
    "conv": "Convolutional network, AdamW (0.9, 0.999)",
}
_OURS, _RIVAL = "auto", "excp"
Number = Callable[[Cell], float]


def tasks(options: argparse.Namespace) -> Iterator[Task]:
    """List all that was asked for, in the order of the tables; all models before a second seed."""
    for every in options.every:
        for seed in range(1, options.seeds + 1):
            for model in options.models:
                course = Course(model=model, seed=seed, every=every, quick=options.quick)
                for part in options.parts if every < WIDE or options.parts != [*PARTS] else ("chain",):
                    for setting in chosen(SETTINGS, options.only):
                        named = f"{setting.scheme}:{setting.label}" in options.only
                        if part == "chain" or setting.restores or named:
                            yield Task(course=course, part=part, setting=setting)


def read(given: Sequence[str] | None = None) -> argparse.Namespace:
    options = parsed(
        __doc__, given, quick=False, models=list(MODELS), seeds=3, every=[50, 500], only="", parts=list(PARTS),
        workers=1, cache="", fresh=False, table=False,
    )  # fmt: skip
    options.every = [8] if options.quick else options.every
    try:
        options.only = known([options.only] if options.only else [])
    except ValueError as error:
        sys.exit(str(error))
    return options


# --- tables -------------------------------------------------------------------------------------------------


def ratio(cell: Cell) -> float:
    """Raw bytes over stored ones, of a base and its deltas."""
    sizes = cell["sizes"].values()
    return sum(size["raw"] for size in sizes) / max(1, sum(size["stored"] for size in sizes))


def delta(cell: Cell) -> float:
    """Raw bytes over stored ones of the deltas."""
    return ratio({"sizes": {"delta": cell["sizes"]["delta"]}})


def smallest(cells: Iterable[Cell], part: str, rise: Number, bound: float, size: Number) -> dict[str, Cell]:
    """Find each seed's smallest setting whose loss rises by at most `bound`; none where no setting of some seed keeps it."""
    best: dict[str, Cell] = {}
    there = [cell for cell in cells if cell["part"] == part]
    for cell in there:
        if rise(cell) <= bound and size(cell) > (size(best[cell["seed"]]) if cell["seed"] in best else 0.0):
            best[cell["seed"]] = cell
    return dict(sorted(best.items())) if {*best} == {cell["seed"] for cell in there} else {}


def spread(values: Sequence[float]) -> str:
    """Write the mean, and the least and the greatest where there are several."""
    ends = f" ({min(values):.3g} to {max(values):.3g})" if len(values) > 1 else ""
    return f"{sum(values) / len(values):.3g}x{ends}"


def section(cells: Sequence[Cell], mark: int) -> Iterator[str]:
    """Say which setting of each scheme is the smallest, and how many times ours is smaller than its strongest rival."""
    ways: dict[str, tuple[str, Number, float, Number]] = {
        "deltas": ("chain", lambda cell: cell["rises"][str(mark)], BOUND, delta),
        "whole chains": ("chain", lambda cell: cell["rises"][str(mark)], BOUND, ratio),
        "restored n times": ("restores", lambda cell: cell["rise"], RESTORES_BOUND, ratio),
    }
    schemes = dict.fromkeys(cell["scheme"] for cell in cells if cell["part"] == "chain")
    found = {
        scheme: {n: smallest([c for c in cells if c["scheme"] == scheme], *way) for n, way in ways.items()}
        for scheme in schemes
    }
    for name, (*_, bound, size) in ways.items():
        ours, theirs = (found.get(scheme, {}).get(name, {}) for scheme in (_OURS, _RIVAL))
        if both := [size(ours[seed]) / size(theirs[seed]) for seed in ours if seed in theirs]:
            yield f"- {name}: `{_OURS}` is **{spread(both)} smaller** than the best of `{_RIVAL}` within {bound:.1%}"
    rows = []
    for scheme, bests in found.items():
        row = [scheme]
        for name, best in bests.items():
            settings = ", ".join(dict.fromkeys(cell["setting"] for cell in best.values()))
            row += [spread([ways[name][3](cell) for cell in best.values()]), settings] if best else ["-", "-"]
        rows.append(row)
    headings = ["scheme", "delta", "setting", "chain", "setting", "restored n times: chain", "setting"]
    yield from ("", *markdown_table(headings, rows))


def document(cells: Iterable[Cell], mark: int, quick: bool) -> Iterator[str]:
    """Write a section for each training: ratios of whole files within the limit `mark` steps after a restore."""
    courses: dict[tuple[str, str], list[Cell]] = {}
    for cell in cells:
        if cell["quick"] == str(quick):
            courses.setdefault((cell["model"], cell["every"]), []).append(cell)
    for (model, every), found in courses.items():
        yield f"\n## {_TITLES[model]}, {every} steps between checkpoints\n"
        yield from section(found, mark)


def main() -> None:
    options = read()
    cells = filled("schemes", KEYS, list(tasks(options)), measure, options)
    mark = Course(model="gpt", seed=1, every=50, quick=options.quick).marks[-1]
    print(*document(cells, mark, options.quick), sep="\n")


if __name__ == "__main__":
    main()
