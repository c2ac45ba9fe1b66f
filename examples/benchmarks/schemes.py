"""Every scheme on real trainings: how small, and what it costs after restores.

    python examples/benchmarks/schemes.py [--quick] [--models gpt,gpt-999,conv] [--seeds 3] [--every 50,500]
        [--only auto,excp:'alpha 0.001'] [--parts chain,restores] [--workers 2] [--table] [--fresh] [--cache FILE]

Every measurement is one row of a CSV file, so that the bench may be stopped, continued and extended; cells that are there are not
measured again, unless --fresh is given. At 500 steps the trainings are long: only `chain` is measured there, on four saves, unless
--parts says otherwise. Runs are restored with the few settings that stand for their scheme, and with those that --only names in full.
--table prints what is there and measures nothing.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: cells are what runs side by side

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[number]) for number in (0, 1)]

from cells import RESULTS, Cells, fill, names, unknown
from schemes_run import KEYS, MODELS, PARTS, WIDE, Course, Task, measure
from schemes_settings import SETTINGS, chosen, known
from schemes_table import document, rows_of

ROOT = Path(__file__).resolve().parents[2]


def tasks(arguments: argparse.Namespace) -> Iterator[Task]:
    """List all that was asked for, in the order of the tables; all models before a second seed."""
    for every in arguments.every:
        for seed in range(1, arguments.seeds + 1):
            for model in arguments.models:
                course = Course(model=model, seed=seed, every=every, quick=arguments.quick)
                for part in arguments.parts or (("chain",) if every >= WIDE else PARTS):
                    for setting in chosen(SETTINGS, arguments.only):
                        named = f"{setting.scheme}:{setting.label}" in arguments.only
                        if part == "chain" or setting.restores or named:
                            yield Task(course=course, part=part, setting=setting)


def parsed(given: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="small models, few steps: no real numbers")
    parser.add_argument("--models", type=names, default=list(MODELS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--every", type=lambda text: [int(number) for number in names(text)])
    parser.add_argument(
        "--only", action="append", default=[], help="a scheme, or scheme:setting; may be given again"
    )
    parser.add_argument("--parts", type=names, help=", ".join(PARTS))
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--cache", type=Path, help="results/schemes.csv; with --quick, in build")
    parser.add_argument("--fresh", action="store_true", help="measure again what is there")
    parser.add_argument("--table", action="store_true", help="print what is there, and measure nothing")
    arguments = parser.parse_args(given)
    arguments.every = arguments.every or ([8] if arguments.quick else [50, 500])
    arguments.cache = (
        arguments.cache or (ROOT / "build" / "bench" if arguments.quick else RESULTS) / "schemes.csv"
    )
    try:
        arguments.only = known(arguments.only)
    except ValueError as error:
        parser.error(str(error))
    if wrong := unknown([*arguments.models, *(arguments.parts or ())], [*MODELS, *PARTS]):
        parser.error(f"there is no {wrong}; models: {', '.join(MODELS)}; parts: {', '.join(PARTS)}")
    return arguments


def main() -> None:
    arguments = parsed()
    cells = Cells(arguments.cache, *KEYS)
    missing = [task for task in tasks(arguments) if arguments.fresh or cells.get(task.key) is None]
    failed = 0 if arguments.table else fill(missing, measure, cells, arguments.workers)
    marks = Course(model="gpt", seed=1, every=50, quick=arguments.quick).marks
    print(document(rows_of(cells, quick=arguments.quick), marks))
    if failed:
        sys.exit(f"{failed} cells failed: see above; the others are kept")


if __name__ == "__main__":
    main()
