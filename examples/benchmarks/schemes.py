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
from collections.abc import Iterator, Sequence
from pathlib import Path

from cells import RESULTS, Cells, fill
from common import parsed
from schemes_run import KEYS, MODELS, PARTS, SETTINGS, WIDE, Course, Task, chosen, known, measure
from schemes_table import document, rows_of


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
    """Read the command line."""
    options = parsed(
        __doc__, given, quick=False, models=list(MODELS), seeds=3, every=[50, 500], only="", parts=list(PARTS),
        workers=1, cache="", fresh=False, table=False,
    )  # fmt: skip
    options.every = [8] if options.quick else options.every
    folder = Path(__file__).resolve().parents[2] / "build" / "bench" if options.quick else RESULTS
    options.cache = Path(options.cache or folder / "schemes.csv")
    try:
        options.only = known([options.only] if options.only else [])
    except ValueError as error:
        sys.exit(str(error))
    return options


def main() -> None:
    options = read()
    cells = Cells(options.cache, *KEYS)
    failed = fill(list(tasks(options)), measure, cells, options)
    marks = Course(model="gpt", seed=1, every=50, quick=options.quick).marks
    print(document(rows_of(cells, quick=options.quick), marks))
    if failed:
        sys.exit(f"{failed} cells failed: see above; the others are kept")


if __name__ == "__main__":
    main()
