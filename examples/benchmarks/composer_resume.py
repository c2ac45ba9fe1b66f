"""How exactly interrupted Composer runs continue: with Composer's own checkpoints, and with shrinkpoint's.

    python examples/benchmarks/composer_resume.py [--only TEXT] >examples/benchmarks/results/composer_resume.csv

Each case of the tests is trained whole, without any checkpoint, and interrupted and continued, with another seed, in
both ways. The two continued runs are compared with the whole one: every batch, loss and learning rate, weights, buffers,
optimizer, algorithms and evaluations. An epoch has 8 batches; the model has batch norm and dropout. *Read again* counts the batches
that the continued run reads beyond those that it trains on; with workers, which read ahead, it differs a little from run to run.
--only takes cases whose name contains a text. The cases after the first count cannot be continued exactly either way.
"""

from __future__ import annotations

import csv
import logging
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

import torch
from common import parsed
from support.composer_cases import CASES, IMPOSSIBLE, Case
from support.composer_data import BATCH
from support.composer_models import Outcome, Setup, assert_continues, fit

import shrinkpoint
from shrinkpoint.callbacks.composer import CompressedCheckpoint

COLUMNS = ("case", "native exact", "ours exact", "native read again", "ours read again")

Fit = Callable[..., Outcome]


@dataclass(frozen=True)
class Result:
    exact: str
    again: str


@cache
def whole(setup: Setup) -> Outcome:
    return fit(setup=setup)


@contextmanager
def native(interval: Any) -> Iterator[Fit]:
    with tempfile.TemporaryDirectory() as folder:
        own = {"save_folder": folder, "save_interval": interval, "run_name": "run", "autoresume": True}

        def run(*callbacks: Any, **options: Any) -> Outcome:
            return fit(*callbacks, **own, save_overwrite=True, **options)

        yield run


@contextmanager
def ours(interval: Any) -> Iterator[Fit]:
    with tempfile.TemporaryDirectory() as folder:

        def run(*callbacks: Any, **options: Any) -> Outcome:
            saving = CompressedCheckpoint(
                folder, save_interval=interval, scheme="lossless", advanced=shrinkpoint.Advanced(busy="wait")
            )
            return fit(saving, *callbacks, **options)

        yield run


def interrupted(case: Case, way: Callable[[Any], Any]) -> Result:
    """Interrupt and continue a run in one of the two ways."""
    with way(case.interval) as run:
        for crash in case.crashes:
            run(crash, setup=case.setup)
        rest = run(setup=case.setup, seed=999)
    start = rest.trace[0][2]
    if start == 0:
        return Result("starts anew", "")
    once = replace(case.setup, fits=(), duration=(case.setup.fits or (case.setup.duration,))[-1])
    again = rest.reads - (whole(once).reads - BATCH * start)
    try:
        assert_continues(_without_generators(whole(case.setup)), _without_generators(rest))
    except AssertionError:
        return Result("no", f"{again / BATCH:.0f}")
    return Result("yes", f"{again / BATCH:.0f}")


def _without_generators(outcome: Outcome) -> Outcome:
    """What training has come to: generators of which nothing was drawn any more do not count against a run."""
    return replace(outcome, final={name: value for name, value in outcome.final.items() if name != "rng"})


def rows(cases: dict[str, Case]) -> Iterator[list[str]]:
    """Measure each case, and count those that are continued exactly."""
    exact = [0, 0]
    for name, case in cases.items():
        results = [interrupted(case, way) for way in (native, ours)]
        exact = [count + (result.exact == "yes") for count, result in zip(exact, results, strict=True)]
        yield [name, *(result.exact for result in results), *(result.again for result in results)]
    yield [f"exact of {len(cases)}", *map(str, exact), "", ""]


def main() -> None:
    options = parsed(__doc__, only="")
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    table = csv.writer(sys.stdout, lineterminator="\n")
    table.writerow(COLUMNS)
    for cases in (CASES, IMPOSSIBLE):
        for row in rows({name: case for name, case in cases.items() if options.only in name}):
            table.writerow(row)
            sys.stdout.flush()


if __name__ == "__main__":
    main()
