"""Measurements that are kept in a CSV file, so that a bench may be stopped, continued and extended."""

from __future__ import annotations

import csv
import hashlib
import json
import math
import multiprocessing
import os
import platform
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar

import torch

import shrinkpoint

sys.path.append(str(Path(__file__).resolve().parents[1]))  # before what the benches import of examples/

Cell = dict[str, Any]

RESULTS = Path(__file__).parent / "results"
_TEXTS = {"library", "machine"}
"""Columns whose values are no JSON."""


_T = TypeVar("_T")
"""What a cell is measured of; its `key` is its place among the cells."""


class Cells:
    """The cells of a file, one row each.

    Args:
        path: made when the first cell is put.
        keys: columns that tell cells apart.
    """

    def __init__(self, path: Path, *keys: str) -> None:
        self.path, self._keys = path, keys
        self._cells: dict[tuple[str, ...], Cell] = {}
        if path.exists():
            with path.open(newline="") as file:
                for row in csv.DictReader(file):
                    cell = {name: _read(name in (*keys, *_TEXTS), text) for name, text in row.items()}
                    self._cells[self._place(cell)] = {n: v for n, v in cell.items() if v is not None}

    def __iter__(self) -> Iterator[Cell]:
        return iter(self._cells.values())

    def get(self, key: Mapping[str, Any]) -> Cell | None:
        return self._cells.get(self._place(key))

    def put(self, key: Mapping[str, Any], result: Mapping[str, Any]) -> None:
        """Keep a result; on return it is in the file."""
        place = self._place(key)
        told = dict(zip(self._keys, place, strict=True)) | {
            n: _rounded(v) for n, v in result.items() if v is not None
        }
        self._cells[place] = told
        columns = list(dict.fromkeys([*self._keys, *(name for cell in self for name in cell)]))
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_suffix(".part")
        with part.open("w", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(columns)
            for cell in self:
                writer.writerow(_written(name in (*self._keys, *_TEXTS), cell.get(name)) for name in columns)
        part.rename(self.path)

    def _place(self, key: Mapping[str, Any]) -> tuple[str, ...]:
        return tuple("" if key.get(name) is None else str(key[name]) for name in self._keys)


def _read(text: bool, written: str) -> Any:
    return written if text else json.loads(written) if written else None


def _written(text: bool, value: Any) -> str:
    return "" if value is None else str(value) if text else json.dumps(value)


def _rounded(value: Any) -> Any:
    """The same as it will be read: ten digits, string keys; what is not finite is None."""
    if isinstance(value, Mapping):
        return {str(name): _rounded(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.10g}") if math.isfinite(value) else None
    return value


def filled(
    name: str, keys: Sequence[str], planned: Sequence[Any], measure: Callable[[Any], Cell], options: Any,
    told: Callable[[Cell], str] = lambda _: "",
) -> Cells:  # fmt: skip
    """Measure what is missing in processes of one thread each, and keep it.

    Args:
        name: of the file in results/; in build/bench/ with ``quick``, whose small models give no real numbers.
        keys: columns that tell cells apart.
        planned: all that is asked for.
        measure: makes a cell, in another process.
        options: the command line's: another file as ``cache``; so many ``workers``; ``fresh`` measures again what is there,
            ``table`` nothing at all.
        told: what is to be printed of a result.

    Returns:
        All cells of the file. Where some failed, what went wrong is printed, and the process ends; the others are kept.
    """
    folder = Path(__file__).resolve().parents[2] / "build" / "bench" if options.quick else RESULTS
    cells, failed = Cells(Path(options.cache or folder / f"{name}.csv"), *keys), 0
    missing = list({str(t.key): t for t in planned if options.fresh or cells.get(t.key) is None}.values())
    if options.table or not missing:
        return cells
    with multiprocessing.get_context("spawn").Pool(
        options.workers, initializer=torch.set_num_threads, initargs=(1,)
    ) as pool:
        for task, result in pool.imap_unordered(partial(_measured, measure), missing):
            named = ", ".join(str(value) for value in task.key.values() if value not in ("", {}, False))
            if isinstance(result, str):
                failed += 1
                print(f"{named} failed:\n{result}", file=sys.stderr, flush=True)
                continue
            cells.put(task.key, result)
            now = time.strftime("%H:%M:%S")
            print(f"{now}  {named}: {result['seconds']:.0f} s {told(result)}", file=sys.stderr, flush=True)
    if failed:
        sys.exit(f"{failed} cells failed: see above; the others are kept, and --table prints them")
    return cells


def _measured(measure: Callable[[_T], Cell], task: _T) -> tuple[_T, Cell | str]:
    began = time.perf_counter()
    try:
        result = measure(task)
    except Exception:  # noqa: BLE001
        return task, traceback.format_exc()
    return task, {**result, "seconds": round(time.perf_counter() - began, 1)}


@cache
def library_digest() -> str:
    """Another one whenever the library's source has changed: which of its states a cell was measured with."""
    hashed = hashlib.sha256()
    # `Path.rglob` passes by packages that are links, as in a checkout whose parts are linked together
    walked = os.walk(Path(shrinkpoint.__file__).parent, followlinks=True)
    sources = (Path(folder, file) for folder, _, files in walked for file in files if file.endswith(".py"))
    for path in sorted(sources):
        hashed.update(path.read_bytes())
    return hashed.hexdigest()[:12]


@cache
def machine_digest() -> str:
    """Another one on another kind of processor, whose sums are rounded otherwise: some trainings then end elsewhere."""
    info = Path("/proc/cpuinfo")
    told = info.read_text() if info.exists() else platform.processor()
    lines = dict.fromkeys(
        line for line in told.splitlines() if line.startswith(("model", "cpu family", "flags"))
    )
    versions = f"{torch.__version__} {torch.backends.cpu.get_cpu_capability()}"
    return hashlib.sha256("\n".join([versions, *(lines or [told])]).encode()).hexdigest()[:12]
