"""Whether the bound holds on trainings that nobody tuned for: ten restores each, beside the undisturbed run. Writes docs/bound.md.

    python examples/benchmarks/bound.py [--only gpt,lora] [--seeds 3] [--undisturbed 8] [--parts spread,late] [--workers 2] [--quick]
        [--scheme excp] [--options '{"alpha": 0.001}'] [--config '{"search_overhead": 0.2}'] [--budget 0.005]
        [--plan | --table] [--fresh | --stale] [--cache FILE]

Each training is run undisturbed, and restored from the store after ten of its eleven checkpoints: those spread evenly over the
run (`spread`), or within its last tenth (`late`). A `nudged` run restores nothing, and has an error of a millionth in its weights instead. After each of them the model, the optimizers and the checkpointer are
thrown away and made anew. The final losses are measured on data apart from the probe's. All options are the library's
defaults, unless others are given. Trainings that have abilities from before, or parameters that are frozen, are asked for
these as well.

Every run is one cell of a file of JSON lines, so that the bench may be stopped, continued and extended: cells that are there
are not measured again, unless --fresh is given, or --stale for those of another state of the library or another kind of
processor. --plan tells what is missing, and how long it will take by what the cells so far took.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: cells are what runs side by side

import argparse
import json
import multiprocessing
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE / "baselines")]

from baselines import BASELINES
from bound_cache import Cells
from bound_run import PARTS, UNDISTURBED, Setting, Task, library_digest, machine_digest, measure
from bound_summary import reported_of
from bound_table import document
from bound_trainings import KINDS, LISTED

from shrinkpoint.errors import ConfigError
from shrinkpoint.schemes.catalogue import SCHEMES

ROOT = Path(__file__).resolve().parents[2]


def tasks(arguments: argparse.Namespace) -> Iterator[Task]:
    """All that was asked for: the undisturbed run of each training and seed, then its restored ones."""
    for seed in range(1, max(arguments.seeds, arguments.undisturbed) + 1):
        for name in arguments.only:
            kind = KINDS[name]
            asked = arguments.parts or ("spread", *(("late",) if kind.late else ()))
            parts = [part for part in asked if part != "plain" and not (part == "late" and kind.only_spread)]
            for part in ("plain", *(parts if seed <= arguments.seeds else ())):
                yield Task(name=name, seed=seed, part=part, quick=arguments.quick, setting=arguments.setting)


def missing_of(planned: Sequence[Task], cells: Cells, fresh: bool, stale: bool) -> list[Task]:
    """Those that are to be measured."""

    def wanted(task: Task) -> bool:
        found = cells.get(task.key)
        if found is None or fresh:
            return True
        here = {"library": library_digest(), "machine": machine_digest()}
        return stale and any(found.get(name, now) != now for name, now in here.items())

    return [task for task in planned if wanted(task)]


def _one_thread() -> None:
    torch.set_num_threads(1)


def _measure(task: Task) -> tuple[Task, dict[str, Any] | str]:
    """The result, or the traceback: hours of other cells must not be lost to one."""
    try:
        return task, measure(task)
    except Exception:  # noqa: BLE001
        return task, traceback.format_exc()


def _named(task: Task) -> str:
    setting = "" if task.part in UNDISTURBED else f", {task.setting.label}"
    return f"{task.name}, seed {task.seed}: {task.part}{setting}"


def fill(missing: Sequence[Task], cells: Cells, workers: int) -> int:
    """Measure them; returns how many failed. What went wrong is printed."""
    failed = 0
    with multiprocessing.get_context("spawn").Pool(workers, initializer=_one_thread) as pool:
        for task, result in pool.imap_unordered(_measure, missing):
            if isinstance(result, str):
                failed += 1
                print(f"{_named(task)} failed:\n{result}", file=sys.stderr, flush=True)
                continue
            cells.put(task.key, result)
            print(
                f"{time.strftime('%H:%M:%S')}  {_named(task)}: {result['seconds']:.0f} s,"
                f" {_outcome(task, result, cells)}",
                flush=True,
            )
    return failed


def _outcome(task: Task, result: dict[str, Any], cells: Cells) -> str:
    """A line to look at while the bench runs."""
    if task.part in UNDISTURBED:
        return f"{result['before']['final']:.4f} -> {result['final']:.4f}"
    stored = sum(save["bytes"] for save in result["saves"])
    ratio = sum(save["raw_bytes"] for save in result["saves"]) / stored
    undisturbed = cells.get(Task(name=task.name, seed=task.seed, part="plain", quick=task.quick).key)
    truth = (
        "" if undisturbed is None else f", truth {100 * (result['final'] / undisturbed['final'] - 1):+.2f} %"
    )
    reported = reported_of(result["saves"][:-1], task.key["config"])
    return f"{ratio:.1f}x, reported {100 * reported.mean:+.2f} (<{100 * reported.high:.2f}) %{truth}"


def plan(missing: Sequence[Task], cells: Cells) -> str:
    """What is missing, and how long it takes in one process, as far as cells of the same training were measured."""
    lines, total, unknown = [], 0.0, 0
    for name, part in dict.fromkeys((task.name, task.part) for task in missing):
        some = [task for task in missing if (task.name, task.part) == (name, part)]
        taken = [
            result["seconds"]
            for key, result in cells
            if (key["training"], key["part"], key["quick"]) == (name, part, some[0].quick)
        ]
        if taken:
            each = sum(taken) / len(taken)
            total += each * len(some)
            lines.append(f"{name}, {part}: {len(some)} cells of {each:.0f} s")
        else:
            unknown += len(some)
            lines.append(f"{name}, {part}: {len(some)} cells of unknown length")
    lines.append(
        f"{len(missing)} cells: {total / 60:.0f} minutes in one process, and {unknown} of unknown length"
    )
    return "\n".join(lines)


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _object(text: str) -> dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text} is not a JSON object")
    return value


def _arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", type=_names, default=list(LISTED), help=", ".join(KINDS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--undisturbed",
        type=int,
        default=0,
        help="seeds of undisturbed runs, for a better estimate of their spread",
    )
    parser.add_argument(
        "--parts",
        type=_names,
        default=None,
        help="spread, late, nudged; unless given, spread, and late for some trainings",
    )
    parser.add_argument("--scheme", choices=[*SCHEMES, *BASELINES], default="auto")
    parser.add_argument(
        "--options",
        type=_object,
        default={},
        help="""fields of the scheme's options, as JSON; for itmo {"width": 4}: it restores the same with a network of any width""",
    )
    parser.add_argument("--config", type=_object, default={}, help="fields of SaverConfig, as JSON")
    parser.add_argument("--budget", type=float, default=None, help="max_degradation, 0.01 unless given")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="small models, few steps: no real numbers")
    parser.add_argument("--cache", type=Path, default=None, help="docs/bound.jsonl; with --quick, in build")
    parser.add_argument("--out", type=Path, default=None, help="the cache's name, ending in .md")
    parser.add_argument("--fresh", action="store_true", help="measure again what is there")
    parser.add_argument(
        "--stale", action="store_true", help="measure again what another library or processor measured"
    )
    parser.add_argument("--plan", action="store_true", help="tell what is missing, and measure nothing")
    parser.add_argument("--table", action="store_true", help="write the tables of what is there")
    parser.add_argument("--prune", action="store_true", help="leave lines out of the cache that do not count")
    arguments = parser.parse_args(given)
    unknown = {*arguments.only} - {*KINDS} | {*(arguments.parts or ())} - {*PARTS}
    if unknown:
        parser.error(f"there is no {', '.join(sorted(unknown))}: see --help")
    if arguments.budget is not None:
        arguments.config["max_degradation"] = arguments.budget
    options, config = (json.dumps(one, sort_keys=True) for one in (arguments.options, arguments.config))
    arguments.setting = Setting(scheme=arguments.scheme, options=options, config=config)
    try:
        arguments.setting.build()
    except (ConfigError, TypeError) as error:
        parser.error(str(error))
    folder = ROOT / ("build/bench-bound" if arguments.quick else "docs")
    arguments.cache = arguments.cache or folder / "bound.jsonl"
    arguments.out = arguments.out or arguments.cache.with_suffix(".md")
    return arguments


def main() -> None:
    arguments = _arguments()
    cells = Cells(arguments.cache)
    missing = missing_of(list(tasks(arguments)), cells, arguments.fresh, arguments.stale)
    if arguments.plan:
        print(plan(missing, cells))
        return
    if arguments.prune:
        print(f"{cells.prune()} lines left out")
        return
    failed = 0
    if missing and not arguments.table:
        failed = fill(missing, cells, arguments.workers)
    text = document(cells, quick=arguments.quick, file=arguments.cache.name)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(text)
    print(text if arguments.table else f"written: {arguments.out}")
    if failed:
        sys.exit(f"{failed} cells failed: see above; the others are kept")


if __name__ == "__main__":
    main()
