"""Whether the bound holds on trainings that nobody tuned for: ten restores each, beside the undisturbed run.

    python examples/benchmarks/bound.py [--only gpt,lora] [--seeds 3] [--undisturbed 8] [--parts spread,nudged] [--workers 2] [--quick]
        [--scheme excp] [--options '{"alpha": 0.001}'] [--config '{"search_overhead": 0.2}'] [--budget 0.005]
        [--table listed | more | fast | states | schemes | all] [--fresh] [--cache FILE]

Each training is run undisturbed, and restored from the store after ten of its eleven checkpoints, which are spread evenly over the
run (`spread`). A `nudged` run restores nothing, and has an error of a millionth in its weights
instead. After each of them the model, the optimizers and the checkpointer are thrown away and made anew. The final losses are
measured on data apart from the probe's. All options are the library's defaults, unless others are given: --options of the scheme,
--config of Checkpointer and Advanced, --budget for max_degradation. Trainings that have abilities from before, or parameters that
are frozen, are asked for these as well. With --undisturbed there are more seeds of undisturbed runs, for a better spread.

Every run is one row of a CSV file (results/bound.csv, bound_schemes.csv; with --quick, whose small models give no real numbers, in
build), so that the bench may be stopped, continued and extended: cells that are there are not measured again, unless --fresh is
given. --table measures nothing and prints what is there, of a group of trainings (`listed`, `more`, `fast`), of every kind of
optimizer state (`states`), or of the other schemes (`schemes`). --only takes such names of groups as well.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: cells are what runs side by side

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.append(str(Path(__file__).parent / "baselines"))

from baselines import BASELINES
from bound_run import KEYS, PARTS, Setting, Task, measure
from bound_table import SAME, document, rows_of, schemes, states
from cells import Cell, Cells, filled
from common import names, parsed
from trainings import GROUPS, KINDS

from shrinkpoint.errors import ConfigError
from shrinkpoint.schemes.catalogue import SCHEMES


def tasks(options: argparse.Namespace) -> Iterator[Task]:
    """List all that was asked for: the undisturbed run of each training and seed, then its restored ones."""
    for seed in range(1, max(options.seeds, options.undisturbed) + 1):
        for name in options.only:
            parts = [part for part in options.parts if part != "plain"]
            for part in ("plain", *(parts if seed <= options.seeds else ())):
                yield Task(name=name, seed=seed, part=part, quick=options.quick, setting=options.setting)


def _outcome(cell: Cell) -> str:
    """A line to look at while the bench runs."""
    if "bytes" not in cell:
        return f"{cell['final']:.4f}"
    ratio = cell["raw_bytes"] / cell["bytes"]
    return f"{cell['final']:.4f}, {ratio:.1f}x, reported {100 * cell['cost']:+.2f} (<{100 * cell['cost_high']:.2f}) %"


def read(given: Sequence[str] | None = None) -> argparse.Namespace:
    options = parsed(
        __doc__, given, only="listed", seeds=3, undisturbed=0, parts="spread", scheme="auto", options="{}", config="{}",
        budget=0.0, workers=1, quick=False, table="", fresh=False, cache="",
    )  # fmt: skip
    options.only = [name for asked in names(options.only) for name in GROUPS.get(asked, (asked,))]
    options.parts = names(options.parts)
    known = {*KINDS, *PARTS, *SCHEMES, *BASELINES, *GROUPS, "all", ""}
    if (
        wrong := {*options.only, *options.parts, options.scheme, options.table or "schemes"}
        - known
        - {"schemes"}
    ):
        sys.exit(f"there is no {', '.join(sorted(wrong))}: see --help")
    try:
        config = json.loads(options.config) | ({"max_degradation": options.budget} if options.budget else {})
        changed, others = (json.dumps(one, sort_keys=True) for one in (json.loads(options.options), config))
        options.setting = Setting(scheme=options.scheme, options=changed, config=others)
        options.setting.build()
    except (ConfigError, TypeError, ValueError) as error:
        sys.exit(str(error))
    return options


def table(cells: Cells, which: str, quick: bool) -> str:
    rows = rows_of(cells, quick=quick)
    if which == "schemes":
        return "\n".join(schemes(rows))
    if which == "all":
        return document(rows)
    listed = [row for row in rows if row.training in GROUPS[which]]
    if which == "states":
        return "\n".join(states(listed))
    return document([row for row in listed if (row.scheme, row.options) == SAME])


def main() -> None:
    options = read()
    name = "bound_schemes" if options.scheme != "auto" or options.table == "schemes" else "bound"
    cells = filled(name, KEYS, list(tasks(options)), measure, options, _outcome)
    print(table(cells, options.table or "all", options.quick))


if __name__ == "__main__":
    main()
