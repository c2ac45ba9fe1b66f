"""Whether the bound holds on trainings that nobody tuned for: ten restores each, beside the undisturbed run.

    python examples/benchmarks/bound.py [--only gpt,lora] [--seeds 3] [--undisturbed 8] [--parts spread,late] [--workers 2] [--quick]
        [--scheme excp] [--options '{"alpha": 0.001}'] [--config '{"search_overhead": 0.2}'] [--budget 0.005]
        [--plan | --table [listed | more | fast | states | schemes]] [--fresh | --stale] [--cache FILE]

Each training is run undisturbed, and restored from the store after ten of its eleven checkpoints: those spread evenly over the
run (`spread`), or within its last tenth (`late`). A `nudged` run restores nothing, and has an error of a millionth in its weights
instead. After each of them the model, the optimizers and the checkpointer are thrown away and made anew. The final losses are
measured on data apart from the probe's. All options are the library's defaults, unless others are given. Trainings that have
abilities from before, or parameters that are frozen, are asked for these as well.

Every run is one row of a CSV file, so that the bench may be stopped, continued and extended: cells that are there are not measured
again, unless --fresh is given (as after a change of a training), or --stale for those of another state of the library or another
kind of processor. --plan tells what is missing, and how long it will take by what the cells so far took. --table prints what is
there, of a group of trainings (`listed`, `more`, `fast`), of every kind of optimizer state (`states`), or of the other schemes
(`schemes`). --only takes such names of groups as well.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: cells are what runs side by side

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[number]) for number in (0, 1)] + [
    str(Path(__file__).parent / "baselines")
]

from baselines import BASELINES
from bound_run import KEYS, PARTS, UNDISTURBED, Setting, Task, measure
from bound_table import SAME, document, rows_of, schemes, states
from cells import RESULTS, Cell, Cells, fill, library_digest, machine_digest, names, unknown
from trainings import GROUPS, KINDS

from shrinkpoint.errors import ConfigError
from shrinkpoint.schemes.catalogue import SCHEMES

ROOT = Path(__file__).resolve().parents[2]


def tasks(arguments: argparse.Namespace) -> Iterator[Task]:
    """List all that was asked for: the undisturbed run of each training and seed, then its restored ones."""
    for seed in range(1, max(arguments.seeds, arguments.undisturbed) + 1):
        for name in arguments.only:
            kind = KINDS[name]
            asked = arguments.parts or ("spread", *(("late",) if kind.late else ()))
            parts = [part for part in asked if part != "plain" and not (part == "late" and kind.only_spread)]
            for part in ("plain", *(parts if seed <= arguments.seeds else ())):
                yield Task(name=name, seed=seed, part=part, quick=arguments.quick, setting=arguments.setting)


def missing_of(planned: Sequence[Task], cells: Cells, fresh: bool, stale: bool) -> list[Task]:
    """Choose those that are to be measured."""
    here = {"library": library_digest(), "machine": machine_digest()} if stale else {}

    def wanted(task: Task) -> bool:
        found = cells.get(task.key)
        if found is None or fresh:
            return True
        compared = ("machine",) if task.part in UNDISTURBED else tuple(here)
        return any(found.get(name) != here[name] for name in compared if name in here)

    return [task for task in planned if wanted(task)]


def plan(missing: Sequence[Task], cells: Cells) -> str:
    """Tell what is missing, and how long it takes in one process, as far as cells of the same training were measured."""
    lines, total, new = [], 0.0, 0
    for name, part in dict.fromkeys((task.name, task.part) for task in missing):
        count = sum((task.name, task.part) == (name, part) for task in missing)
        quick = str(missing[0].quick)
        alike = [
            cell for cell in cells if (cell["training"], cell["part"], cell["quick"]) == (name, part, quick)
        ]
        each = sum(cell["seconds"] for cell in alike) / len(alike) if alike else 0.0
        total, new = total + each * count, new + (0 if alike else count)
        lines.append(f"{name}, {part}: {count} cells of {f'{each:.0f} s' if alike else 'unknown length'}")
    return "\n".join(
        [
            *lines,
            f"{len(missing)} cells: {total / 60:.0f} minutes in one process, and {new} of unknown length",
        ]
    )


def _outcome(cell: Cell) -> str:
    """A line to look at while the bench runs."""
    if "bytes" not in cell:
        return f"{cell['final']:.4f}"
    ratio = cell["raw_bytes"] / cell["bytes"]
    return f"{cell['final']:.4f}, {ratio:.1f}x, reported {100 * cell['cost']:+.2f} (<{100 * cell['cost_high']:.2f}) %"


def _object(text: str) -> dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text} is not a JSON object")
    return value


def parsed(given: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", type=names, default=list(GROUPS["listed"]), help=", ".join(KINDS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--undisturbed", type=int, default=0, help="seeds of undisturbed runs, for a better spread"
    )
    parser.add_argument(
        "--parts", type=names, help="spread, late, nudged; unless given, spread, and late for some"
    )
    parser.add_argument("--scheme", choices=[*SCHEMES, *BASELINES], default="auto")
    itmo = 'for itmo {"width": 4}: it restores the same with a network of any width'
    parser.add_argument(
        "--options", type=_object, default={}, help=f"fields of the scheme's options, as JSON; {itmo}"
    )
    parser.add_argument(
        "--config", type=_object, default={}, help="other options of Checkpointer and Advanced, as JSON"
    )
    parser.add_argument("--budget", type=float, help="max_degradation, 0.01 unless given")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="small models, few steps: no real numbers")
    parser.add_argument(
        "--cache", type=Path, help="results/bound.csv, bound_schemes.csv; with --quick, in build"
    )
    parser.add_argument("--fresh", action="store_true", help="measure again what is there")
    parser.add_argument("--stale", action="store_true", help="and what another library or processor measured")
    parser.add_argument("--plan", action="store_true", help="tell what is missing, and measure nothing")
    parser.add_argument(
        "--table",
        choices=[*GROUPS, "schemes", "all"],
        nargs="?",
        const="all",
        help="print it, and measure nothing",
    )
    arguments = parser.parse_args(given)
    arguments.only = [name for asked in arguments.only for name in GROUPS.get(asked, (asked,))]
    if wrong := unknown([*arguments.only, *(arguments.parts or ())], [*KINDS, *PARTS]):
        parser.error(f"there is no {wrong}: see --help")
    if arguments.budget is not None:
        arguments.config["max_degradation"] = arguments.budget
    options, config = (json.dumps(one, sort_keys=True) for one in (arguments.options, arguments.config))
    arguments.setting = Setting(scheme=arguments.scheme, options=options, config=config)
    try:
        arguments.setting.build()
    except (ConfigError, TypeError) as error:
        parser.error(str(error))
    folder = ROOT / "build" / "bench" if arguments.quick else RESULTS
    others = arguments.scheme != "auto" or arguments.table == "schemes"
    arguments.cache = arguments.cache or folder / ("bound_schemes.csv" if others else "bound.csv")
    return arguments


def table(cells: Cells, which: str, quick: bool) -> str:
    """Print a page."""
    rows = rows_of(cells, quick=quick)
    if which == "schemes":
        return "\n".join(schemes(rows))
    if which == "all":
        return document(rows)
    listed = [row for row in rows if row.training in GROUPS[which] and row.part == "spread"]
    if which == "states":
        return "\n".join(states(listed))
    return document([row for row in listed if (row.scheme, row.options) == SAME])


def main() -> None:
    arguments = parsed()
    cells = Cells(arguments.cache, *KEYS)
    missing = missing_of(list(tasks(arguments)), cells, arguments.fresh, arguments.stale)
    if arguments.plan:
        print(plan(missing, cells))
        return
    failed = 0
    if not arguments.table:
        failed = fill(missing, measure, cells, arguments.workers, _outcome)
    print(table(cells, arguments.table or "all", arguments.quick))
    if failed:
        sys.exit(f"{failed} cells failed: see above; the others are kept")


if __name__ == "__main__":
    main()
