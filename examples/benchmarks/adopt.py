"""What adopt=True costs and what it brings, on the trainings of the bench of the bound. Prints the tables of docs/adopt.md.

    python examples/benchmarks/adopt.py [--only gpt,lora] [--saves 10,40,200] [--seeds 3] [--workers 2]
        [--quick] [--table] [--fresh] [--cache FILE]

Each training is run for each number of saves undisturbed, with a checkpointer that does not adopt, and with one that does.
Nothing is restored: with adoption a restored run is the run itself, bit for bit (tests/campaigns/test_kill_adoption.py), and
without it docs/bound.md measures what ten restores cost. Saves are at least five steps apart; where the training has fewer steps,
all three runs are made longer. Final losses are measured on data apart from the probe's. The spread is that of the undisturbed runs
of docs/bound.jsonl, which has more seeds.

Every run is one cell of a file of JSON lines, so that the bench may be stopped, continued and extended: cells that are there
are not measured again, unless --fresh is given. --table prints what is there and measures nothing.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported

import argparse
import multiprocessing
import statistics
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]

from bound_cache import Cells
from bound_run import library_digest, machine_digest
from bound_summary import ABILITY_LIMIT, LIMIT, rows_of
from bound_training import Kind, Training
from bound_trainings import KINDS, LISTED, source_digest

import shrinkpoint

ROOT = Path(__file__).resolve().parents[2]
PLAIN, WITHOUT, WITH = "undisturbed", "without", "with"
_CLOSEST = 5
_HEAD = """\
| training | saves, steps apart | ratio without | with | size with / without | change of the final loss, % | spread, % | other losses, % | kept | adopt, s per save | s per GB of state | evaluations, s per save | adopt + copies, share of training |
|---|---|---|---|---|---|---|---|---|---|---|---|---|"""


@dataclass(frozen=True, kw_only=True)
class Task:
    """One run."""

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
        key: dict[str, Any] = {
            "training": self.name,
            "source": source_digest(KINDS[self.name]),
            "seed": self.seed,
            "way": self.way,
            "steps": self.kind.steps(self.quick),
            "quick": self.quick,
        }
        return key if self.way == PLAIN else {**key, "saves": self.saves}


def measure(task: Task) -> dict[str, Any]:
    """The run's losses, what its saves reported, and the seconds of its own steps."""
    kind = task.kind
    training, steps, seconds = kind.build(task.seed, kind, task.quick), kind.steps(task.quick), 0.0
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        checkpointer = None if task.way == PLAIN else _checkpointer(folder, training, task, steps)
        for index in range(steps):
            started = time.perf_counter()
            training.step(index)
            seconds += time.perf_counter() - started
            if checkpointer is not None:
                checkpointer.step(index + 1)
                checkpointer.flush()  # coding beside the training would take its time on so few processors
        if checkpointer is not None:
            checkpointer.close()
        reports = checkpointer.reports() if checkpointer is not None else []
    return {
        "final": training.final(),
        "abilities": {name: loss() for name, loss in training.abilities.items()},
        "also": {name: loss() for name, loss in training.also.items()},
        "seconds": seconds,
        "saves": [_noted(report) for report in reports],
        "library": library_digest(),
        "machine": machine_digest(),
    }


def _noted(report: shrinkpoint.SaveReport) -> dict[str, Any]:
    names = (
        "step",
        "kind",
        "bytes",
        "raw_bytes",
        "adopt_s",
        "search_s",
        "blocked_s",
        "degradation",
        "reason",
    )
    return {name: getattr(report, name) for name in names}


def _checkpointer(folder: str, training: Training, task: Task, steps: int) -> shrinkpoint.Checkpointer:
    adopting = {"adopt": True, "adoptions": steps // task.every} if task.way == WITH else {}
    checkpointer = shrinkpoint.Checkpointer(
        folder,
        training.model,
        list(training.optimizers),
        every=task.every,
        evaluate=training.probe,
        train_loss=training.train_loss,
        clip_grad_norm=training.clip,
        save_last=False,
        busy="wait",
        **adopting,
        **training.saved,
    )
    checkpointer.resume()
    return checkpointer


def spreads() -> dict[str, tuple[float, int]]:
    """By training, the standard deviation of undisturbed runs' final losses, of their mean, and the number of seeds."""
    rows = rows_of(iter(Cells(ROOT / "docs" / "bound.jsonl")))
    return {row.training: (row.spread, len(row.plain)) for row in rows if row.spread is not None}


def table(cells: Cells, tasks: Sequence[Task]) -> str:
    """A row for each training and number of saves of which all three runs are there, for one seed at least."""
    lines, known = [_HEAD], spreads()
    asked = dict.fromkeys((task.name, task.saves) for task in tasks)
    for name, saves in asked:
        some = [task for task in tasks if (task.name, task.saves, task.way) == (name, saves, WITH)]
        found = [runs for task in some if None not in (runs := _runs(cells, task)).values()]
        if found:
            lines.append(_row(some[0], found, *known.get(name, (0.0, 0))))
    return "\n".join(lines)


def _runs(cells: Cells, task: Task) -> dict[str, Any]:
    return {way: cells.get(replace(task, way=way).key) for way in (PLAIN, WITHOUT, WITH)}


def _row(task: Task, found: Sequence[Mapping[str, Any]], spread: float, seeds: int) -> str:
    changes = [_change(runs[WITH]["final"], runs[PLAIN]["final"]) for runs in found]
    others = {
        name: [_change(runs[WITH][kind][name], runs[PLAIN][kind][name]) for runs in found]
        for kind in ("abilities", "also")
        for name in found[0][PLAIN][kind]
    }
    abilities = [change for name in found[0][PLAIN]["abilities"] for change in others[name]]
    near = all(change <= max(LIMIT, 2 * spread) for change in changes)
    kept = near and all(change <= ABILITY_LIMIT for change in abilities)
    later = [save for runs in found for save in runs[WITH]["saves"][1:]]  # the first one searches
    raw = later[0]["raw_bytes"] / 1e9
    adopt = statistics.mean(save["adopt_s"] or 0.0 for save in later)
    copies = statistics.mean(save["blocked_s"] for save in later)
    search = statistics.mean(save["search_s"] for save in later)
    between = statistics.mean(runs[WITH]["seconds"] for runs in found) / task.saves
    ratio = {way: statistics.median(_ratio(runs[way]) for runs in found) for way in (WITHOUT, WITH)}
    size = statistics.median(_stored(runs[WITH]) / _stored(runs[WITHOUT]) for runs in found)
    beside = "; ".join(f"{name} {_percents(values)}" for name, values in others.items())
    columns = [
        task.kind.title,
        f"{len(found[0][WITH]['saves'])}, {task.every}",
        f"{ratio[WITHOUT]:.3g}x",
        f"{ratio[WITH]:.3g}x",
        f"{size:.2f}",
        _percents(changes),
        f"{100 * spread:.2f} ({seeds})",
        beside or "-",
        "kept" if kept else "**not kept**",
        f"{adopt:.3f}",
        f"{adopt / raw:.0f}",
        f"{search:.3f}",
        f"{(adopt + copies) / between:.1%}",
    ]
    return f"| {' | '.join(columns)} |"


def _change(loss: float, undisturbed: float) -> float:
    return (loss - undisturbed) / abs(undisturbed)


def _percents(changes: Sequence[float]) -> str:
    return ", ".join(f"{100 * change:+.2f}" for change in changes)


def _stored(run: Mapping[str, Any]) -> int:
    return sum(save["bytes"] for save in run["saves"])


def _ratio(run: Mapping[str, Any]) -> float:
    return sum(save["raw_bytes"] for save in run["saves"]) / _stored(run)


def tasks_of(arguments: argparse.Namespace) -> Iterator[Task]:
    """All runs that were asked for; those of one seed after the other, and of few saves before those of many."""
    for seed in range(1, arguments.seeds + 1):
        for saves in arguments.saves:
            for name in arguments.only:
                for way in (PLAIN, WITHOUT, WITH):
                    yield Task(name=name, seed=seed, saves=saves, way=way, quick=arguments.quick)


def _one_thread() -> None:
    torch.set_num_threads(1)


def _measured(task: Task) -> tuple[Task, dict[str, Any] | str]:
    """The result, or the traceback: other cells must not be lost to one."""
    try:
        return task, measure(task)
    except Exception:  # noqa: BLE001
        return task, traceback.format_exc()


def fill(tasks: Sequence[Task], cells: Cells, workers: int) -> int:
    """Measure them; returns how many failed. What went wrong is printed."""
    failed = 0
    with multiprocessing.get_context("spawn").Pool(workers, initializer=_one_thread) as pool:
        for task, result in pool.imap_unordered(_measured, tasks):
            named = f"{task.name}, seed {task.seed}, {task.saves} saves, {task.way}"
            if isinstance(result, str):
                failed += 1
                print(f"{named} failed:\n{result}", file=sys.stderr, flush=True)
                continue
            cells.put(task.key, result)
            ratio = f", {_ratio(result):.3g}x" if result["saves"] else ""
            print(
                f"{time.strftime('%H:%M:%S')}  {named}: {result['final']:.5g}{ratio}",
                file=sys.stderr,
                flush=True,
            )
    return failed


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", type=_names, default=list(LISTED), help=", ".join(KINDS))
    parser.add_argument(
        "--saves", type=lambda text: [int(number) for number in _names(text)], default=[10, 40]
    )
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="small models, few steps: no real numbers")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--fresh", action="store_true")
    parser.add_argument("--cache", type=Path, default=ROOT / "docs" / "adopt.jsonl")
    arguments = parser.parse_args()
    unknown = {*arguments.only} - {*KINDS}
    if unknown:
        parser.error(f"there is no {', '.join(sorted(unknown))}: see --help")
    cells, tasks = Cells(arguments.cache), list(tasks_of(arguments))
    by_key = {str(task.key): task for task in tasks}  # undisturbed runs are asked for more than once
    missing = [task for task in by_key.values() if arguments.fresh or cells.get(task.key) is None]
    failed = 0 if arguments.table else fill(missing, cells, arguments.workers)
    print(table(cells, tasks))
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
