"""What adopt=True costs and what it brings, on the trainings of the bench of the bound.

    python examples/benchmarks/adopt.py [--only gpt,lora] [--saves 10,40,200] [--seeds 3] [--workers 2]
        [--quick] [--table] [--fresh] [--cache FILE]

Each training is run for each number of saves undisturbed, with a checkpointer that does not adopt, and with one that does.
Nothing is restored: with adoption a restored run is the run itself, bit for bit (tests/campaigns/test_kill_adoption.py), and
without it bound.py measures what ten restores cost. Saves are at least five steps apart; where the training has fewer
steps, all three runs are made longer. Final losses are measured on data apart from the probe's. The spread is that of the
undisturbed runs of results/bound.csv, which has more seeds.

Every run is one row of a CSV file, and is not measured again unless --fresh is given. --table prints what is there.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported

import itertools
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from bound_run import KEYS as BOUND_KEYS
from bound_run import checkpointed, losses
from bound_table import ABILITY_LIMIT, LIMIT, change, percents, rows_of
from cells import RESULTS, Cell, Cells, filled, library_digest, machine_digest
from common import names, parsed, show
from trainings import GROUPS, KINDS, Kind

import shrinkpoint

KEYS = ("training", "seed", "steps", "way", "saves", "quick")
WAYS = PLAIN, WITHOUT, WITH = "undisturbed", "without", "with"
_CLOSEST = 5


@dataclass(frozen=True, kw_only=True)
class Task:
    name: str
    """Of the training."""
    seed: int
    saves: int
    way: str
    """`PLAIN`, `WITHOUT` or `WITH`."""
    quick: bool = False

    @property
    def every(self) -> int:
        """Steps between saves."""
        return max(_CLOSEST, KINDS[self.name].steps(self.quick) // self.saves)

    @property
    def kind(self) -> Kind:
        """The training, as long as the saves need it."""
        kind = KINDS[self.name]
        if self.every * self.saves <= kind.steps(self.quick):
            return kind
        longer = -(-self.every * self.saves // kind.SAVES)
        return replace(kind, every=longer, quick_every=longer)

    @property
    def key(self) -> dict[str, Any]:
        """Of its cell; undisturbed runs of one length are one cell."""
        steps = self.kind.steps(self.quick)
        key = {"training": self.name, "seed": self.seed, "steps": steps, "way": self.way, "quick": self.quick}
        return key if self.way == PLAIN else {**key, "saves": self.saves}


def measure(task: Task) -> Cell:
    """Measure the run's losses, and what its saves took; of times, those of the saves after the first one, which searches."""
    kind, train_s = task.kind, 0.0
    training, steps = kind.make(task.seed, task.quick), kind.steps(task.quick)
    saved: Cell = {}
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        checkpointer = None
        if task.way != PLAIN:
            adopt = steps // task.every if task.way == WITH else False
            advanced = shrinkpoint.Advanced(busy="wait")
            checkpointer = checkpointed(training, folder, every=task.every, adopt=adopt, advanced=advanced)
            checkpointer.resume()
        for index in range(steps):
            started = time.perf_counter()
            training.step(index)
            train_s += time.perf_counter() - started
            if checkpointer is not None:
                checkpointer.step(index + 1)
                checkpointer.flush()  # coding beside the training would take its time on so few processors
        if checkpointer is not None:
            checkpointer.close()
            reports = checkpointer.reports()
            saved = {"count": len(reports), "state_bytes": reports[-1].raw_bytes}
            saved |= {name: sum(getattr(one, name) for one in reports) for name in ("bytes", "raw_bytes")}
            for name in ("adopt_s", "search_s", "blocked_s"):
                saved[name] = statistics.mean(getattr(one, name) or 0.0 for one in reports[1:])
    told = losses(training) | {"train_s": train_s, "library": library_digest(), "machine": machine_digest()}
    return {**told, **saved}


def table(cells: Cells, tasks: Sequence[Task]) -> None:
    """Print a row for each training and number of saves of which all three runs are there, for one seed at least."""
    rows = []
    bound = {row.training: row for row in rows_of(Cells(RESULTS / "bound.csv", *BOUND_KEYS))}
    for name, saves in dict.fromkeys((task.name, task.saves) for task in tasks):
        some = [task for task in tasks if (task.name, task.saves, task.way) == (name, saves, WITH)]
        found = [{way: cells.get(replace(task, way=way).key) for way in WAYS} for task in some]
        complete = [
            {way: run for way, run in runs.items() if run} for runs in found if None not in runs.values()
        ]
        if complete:
            row = bound.get(name)
            spread = (row.spread or 0.0, len(row.plain)) if row else (0.0, 0)
            rows.append(_row(some[0], complete, *spread))
    headings = "training | saves, steps apart | ratio without | with | size with / without | change of the final loss, %"
    headings += " | spread, % | other losses, % | kept | adopt, s per save | s per GB of state | evaluations, s per save"
    show(f"{headings} | adopt + copies, share of training", rows)


def _row(task: Task, found: Sequence[Mapping[str, Cell]], spread: float, seeds: int) -> list[str]:
    changes = [change(runs[WITH]["final"], runs[PLAIN]["final"]) for runs in found]
    others = {
        name: [change(runs[WITH][kind][name], runs[PLAIN][kind][name]) for runs in found]
        for kind in ("abilities", "also")
        for name in found[0][PLAIN][kind]
    }
    abilities = [one for name in found[0][PLAIN]["abilities"] for one in others[name]]
    near = all(one <= max(LIMIT, 2 * spread) for one in changes)
    kept = near and all(one <= ABILITY_LIMIT for one in abilities)
    adopt, copies, search = (
        statistics.mean(runs[WITH][name] for runs in found) for name in ("adopt_s", "blocked_s", "search_s")
    )
    between = statistics.mean(runs[WITH]["train_s"] for runs in found) / task.saves
    ratio = {
        way: statistics.median(runs[way]["raw_bytes"] / runs[way]["bytes"] for runs in found)
        for way in (WITHOUT, WITH)
    }
    size = statistics.median(runs[WITH]["bytes"] / runs[WITHOUT]["bytes"] for runs in found)
    return [
        task.kind.title,
        f"{found[0][WITH]['count']}, {task.every}",
        f"{ratio[WITHOUT]:.3g}x",
        f"{ratio[WITH]:.3g}x",
        f"{size:.2f}",
        percents(changes),
        f"{100 * spread:.2f} ({seeds})",
        "; ".join(f"{name} {percents(values)}" for name, values in others.items()) or "-",
        "kept" if kept else "**not kept**",
        f"{adopt:.3f}",
        f"{adopt / (found[0][WITH]['state_bytes'] / 1e9):.0f}",
        f"{search:.3f}",
        f"{(adopt + copies) / between:.1%}",
    ]


def main() -> None:
    options = parsed(
        __doc__, only=",".join(GROUPS["listed"]), saves=[10, 40], seeds=1, workers=1, quick=False, table=False, fresh=False,
        cache="",
    )  # fmt: skip
    only = names(options.only)
    if wrong := {*only} - {*KINDS}:
        sys.exit(f"there is no {', '.join(sorted(wrong))}: see --help")
    ways = itertools.product(range(1, options.seeds + 1), options.saves, only, WAYS)
    tasks = [
        Task(name=name, seed=seed, saves=saves, way=way, quick=options.quick)
        for seed, saves, name, way in ways
    ]
    table(filled("adopt", KEYS, tasks, measure, options), tasks)


if __name__ == "__main__":
    main()
