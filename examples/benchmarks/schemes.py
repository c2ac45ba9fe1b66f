"""Every scheme on real trainings: how small, how fast, and what it costs after restores. Writes docs/schemes.md, .svg and .jsonl.

    python examples/benchmarks/schemes.py [--quick] [--models gpt,gpt-999,conv] [--seeds 3] [--every 50,500]
        [--only auto,excp:'alpha 0.001'] [--parts chain,restores,speed,slice] [--workers 2] [--cache FOLDER] [--plan]

Every measurement is one cell of a cache, so that the bench may be stopped, continued, run in pieces and extended; cells that
are there are not measured again, unless --fresh is given. --plan tells what is missing, and how long it will take by what
the cells so far took. At 500 steps the trainings are long: only `chain` is measured there, on four saves, unless
--parts says otherwise. Runs are restored with the few settings that stand for their scheme, and with those that --only names
in full. `speed` is measured on the first training alone, after everything else and one at a time. The cells that a page was
made of stand beside it: `--table --cache docs` makes it again.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: cells are what runs side by side

import argparse
import multiprocessing
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]

from schemes_cache import Cache, Key, digest, line_of
from schemes_measure import measure_chain, measure_restores, measure_slice, measure_speed
from schemes_models import MODELS, Course, Undisturbed
from schemes_picture import picture
from schemes_settings import SETTINGS, SLICED, Setting, chosen, known
from schemes_summary import rows_of
from schemes_table import document, name_of

MEASURES = {
    "chain": measure_chain,
    "restores": measure_restores,
    "slice": measure_slice,
    "speed": measure_speed,
}
MARKS, QUICK_MARKS = (0, 5, 20, 40), (0, 1, 2, 4)
SAVES, WIDE_SAVES, QUICK_SAVES = 10, 4, 3
WIDE = 200
"""From so many steps on, spacing is wide."""
ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Cell:
    """One measurement."""

    part: str
    course: Course
    setting: Setting

    @property
    def key(self) -> Key:
        """Its place in the cache."""
        course, setting = self.course, self.setting
        return Key(
            part=self.part,
            model=course.model,
            every=course.every,
            seed=course.seed,
            scheme=setting.scheme,
            setting=setting.label,
            options=digest({"course": course.key, "setting": setting.key}),
        )


def course_of(model: str, seed: int, every: int | None, quick: bool, saves: int | None = None) -> Course:
    """One training, with this bench's numbers for what is None."""
    every = every or (8 if quick else 50)
    return Course(
        model=model,
        seed=seed,
        every=every,
        saves=saves or (QUICK_SAVES if quick else WIDE_SAVES if every >= WIDE else SAVES),
        marks=QUICK_MARKS if quick else MARKS,
        quick=quick,
        held_out=4 if quick else Course.held_out,
    )


def courses(arguments: argparse.Namespace) -> list[Course]:
    """The trainings, in the order of the tables."""
    return [
        course_of(model, seed, every, arguments.quick, arguments.saves)
        for every in arguments.every
        for model in arguments.models
        for seed in range(1, arguments.seeds + 1)
    ]


def cells(arguments: argparse.Namespace, *, every_restore: bool = False) -> Iterator[Cell]:
    """All that was asked for, in the order of the tables; one seed after the other.

    Args:
        arguments: what was asked for.
        every_restore: with the restores of settings that do not stand for their scheme: a table shows them where some were
            named once.
    """
    planned = courses(arguments)
    for course in planned:
        for part in arguments.parts or (("chain",) if course.every >= WIDE else tuple(MEASURES)):
            if part == "speed" and course != planned[0]:
                continue
            settings = chosen(SLICED if part == "slice" else SETTINGS, arguments.only)
            for setting in settings:
                named = f"{setting.scheme}:{setting.label}" in arguments.only
                if part != "restores" or setting.restores or named or every_restore:
                    yield Cell(part, course, setting)


def _train(folder: Path, course: Course) -> tuple[Course, float]:
    started = time.perf_counter()
    Undisturbed(course, folder).train()
    return course, time.perf_counter() - started


def _measure(folder: Path, cell: Cell) -> tuple[Cell, dict[str, Any] | str]:
    """The result, or the traceback: hours of other cells must not be lost to one."""
    started = time.perf_counter()
    try:
        result = MEASURES[cell.part](Undisturbed(cell.course, folder), cell.setting)
    except Exception:  # noqa: BLE001
        return cell, traceback.format_exc()
    return cell, {**result, "seconds": round(time.perf_counter() - started, 1)}


def _one_thread() -> None:
    torch.set_num_threads(1)


def _told(what: str, seconds: float) -> None:
    print(f"{time.strftime('%H:%M:%S')}  {what}: {seconds:.0f} s", flush=True)


def measure(missing: Sequence[Cell], cache: Cache, folder: Path, workers: int) -> int:
    """Train what is not trained, then fill the cache; cells for speed at the end, alone.

    Returns:
        How many cells failed; what went wrong is printed.
    """
    runs = folder / "runs"
    needed = [c for c in dict.fromkeys(cell.course for cell in missing) if not Undisturbed(c, runs).ready]
    context = multiprocessing.get_context("spawn")
    with context.Pool(workers, initializer=_one_thread) as pool:
        for course, seconds in pool.imap_unordered(partial(_train, runs), needed):
            _told(f"{course.model}, every {course.every}, seed {course.seed}: undisturbed run", seconds)
        together = [cell for cell in missing if cell.part != "speed"]
        failed = _fill(cache, pool.imap_unordered(partial(_measure, runs), together))
    return failed + _fill(cache, (_measure(runs, cell) for cell in missing if cell.part == "speed"))


def _fill(cache: Cache, results: Iterator[tuple[Cell, dict[str, Any] | str]]) -> int:
    failed = 0
    for cell, result in results:
        key = cell.key
        name = f"{key.model}, every {key.every}, seed {key.seed}: {key.part} of {key.scheme}, {key.setting}"
        if isinstance(result, str):
            failed += 1
            print(f"{name} failed:\n{result}", file=sys.stderr, flush=True)
        else:
            cache.put(key, result)
            _told(name, result["seconds"])
    return failed


def plan(missing: Sequence[Cell], cache: Cache, folder: Path) -> str:
    """What is missing, and how long it will take in one process, as far as cells of its kind were measured."""
    lines, total = [], 0.0
    for kind in dict.fromkeys((cell.course.model, cell.course.every, cell.part) for cell in missing):
        taken = [
            result["seconds"]
            for key, result in cache.items()
            if (key.model, key.every, key.part) == kind and "seconds" in result
        ]
        count = sum((cell.course.model, cell.course.every, cell.part) == kind for cell in missing)
        each = sum(taken) / len(taken) if taken else None
        total += count * (each or 0.0)
        words = f"{each:.0f} s each" if each is not None else "of unknown length"
        lines.append(f"{kind[0]}, every {kind[1]}: {count} cells of {kind[2]}, {words}")
    runs = [
        c for c in dict.fromkeys(cell.course for cell in missing) if not Undisturbed(c, folder / "runs").ready
    ]
    steps = sum(course.steps for course in runs)
    lines.append(f"cells: {total / 3600:.1f} hours in one process, as far as known")
    lines.append(f"undisturbed runs: {len(runs)} of {steps} steps together")
    return "\n".join(lines)


def write(planned: Sequence[Cell], cache: Cache, out: Path) -> None:
    """The document and the picture of what is in the cache, and beside them the cells that they are made of."""
    found = [(cell.key, result) for cell in planned if (result := cache.get(cell.key)) is not None]
    if not found:
        return
    rows = rows_of(found)
    marks = planned[0].course.marks
    out.mkdir(parents=True, exist_ok=True)
    seeds = sorted({key.seed for key, _ in found})
    (out / "schemes.md").write_text(document(rows, marks, seeds))
    (out / "schemes.svg").write_text(picture(rows, marks[-1], name_of))
    if not out.samefile(cache.folder):  # where it would be read again, and count
        (out / "schemes.jsonl").write_text("".join(f"{line_of(key, result)}\n" for key, result in found))
    print(f"written: {out / 'schemes.md'}, .svg and .jsonl")


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="small models, few steps: minutes, and no real numbers"
    )
    parser.add_argument("--models", type=_names, default=list(MODELS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--every", type=lambda text: [int(n) for n in _names(text)], default=None)
    parser.add_argument("--saves", type=int, default=None, help="10; 4 at wide spacing")
    parser.add_argument(
        "--only", action="append", default=[], help="a scheme, or scheme:setting; may be given again"
    )
    parser.add_argument("--parts", type=_names, default=None, help=", ".join(MEASURES))
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--cache", type=Path, default=ROOT / "build" / "bench-schemes")
    parser.add_argument("--out", type=Path, default=None, help="docs; with --quick, the cache's folder")
    parser.add_argument("--plan", action="store_true", help="tell what is missing, and measure nothing")
    parser.add_argument("--fresh", action="store_true", help="measure again what is there")
    parser.add_argument(
        "--table", action="store_true", help="write the table of what is there, and measure nothing"
    )
    arguments = parser.parse_args()
    arguments.every = arguments.every or ([8] if arguments.quick else [50, 500])
    arguments.out = arguments.out or (arguments.cache if arguments.quick else ROOT / "docs")
    try:
        arguments.only = known(arguments.only)
    except ValueError as error:
        parser.error(str(error))
    unknown = {*arguments.models} - {*MODELS} | {*(arguments.parts or ())} - {*MEASURES}
    if unknown:
        parser.error(
            f"there is no {', '.join(sorted(unknown))}; models: {', '.join(MODELS)}; parts: {', '.join(MEASURES)}"
        )
    return arguments


def main() -> None:
    arguments = _arguments()
    cache = Cache(arguments.cache)
    planned = list(cells(arguments))
    missing = [cell for cell in planned if arguments.fresh or cell.key not in cache]
    missing.sort(key=lambda cell: (cell.course.every, cell.course.seed))  # all models before a second seed
    if arguments.plan:
        print(plan(missing, cache, arguments.cache))
        return
    failed = 0
    if missing and not arguments.table:
        _one_thread()
        failed = measure(missing, cache, arguments.cache, arguments.workers)
    write(list(cells(arguments, every_restore=True)), cache, arguments.out)
    if failed:
        sys.exit(f"{failed} cells failed: see above; the others are kept")


if __name__ == "__main__":
    main()
