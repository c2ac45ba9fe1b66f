"""How exactly interrupted Composer runs continue: with Composer's own checkpoints, and with shrinkpoint's.

    python examples/benchmarks/composer_resume.py [--write docs/composer_resume.md] [--only TEXT]

Each case of the tests is trained whole, without any checkpoint, and interrupted and continued, with another seed, in
both ways. The two continued runs are compared with the whole one: every batch, loss and learning rate, weights, buffers,
optimizer, algorithms and evaluations.
"""

from __future__ import annotations

import argparse
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

import composer
import torch
from support.composer_cases import CASES, IMPOSSIBLE, Case
from support.composer_data import BATCH
from support.composer_models import Outcome, Setup, assert_continues, fit

import shrinkpoint
from shrinkpoint.callbacks.composer import CompressedCheckpoint

HEAD = """# How exactly a Composer run continues

Written by `python examples/benchmarks/composer_resume.py --write docs/composer_resume.md`, with Composer {composer} and
torch {torch}. Each case is trained whole, without checkpoints, and interrupted and continued, with another seed, by
Composer's own `save_folder` and `autoresume=True`, and by `CompressedCheckpoint(scheme="lossless")`. **Exact** means bit by
bit: every batch, loss, learning rate and evaluation after the interruption, and in the end weights, buffers, optimizer and
algorithms. An epoch has 8 batches; the model has batch norm and dropout.

*Read again* is how many batches of training data the continued run reads beyond those that it trains on; workers read ahead,
so with them it differs a little from run to run. Native runs are those with Composer's own checkpoints, which it does not
take on SIGTERM. [Resuming exactly](resuming.md) describes what is restored, how, and what cannot be.
"""

Fit = Callable[..., Outcome]


@dataclass(frozen=True)
class Result:
    """How one continued run compares."""

    exact: str
    again: str


@cache
def whole(setup: Setup) -> Outcome:
    return fit(setup=setup)


@contextmanager
def native(interval: Any) -> Iterator[Fit]:
    """Runs with Composer's own checkpoints."""
    with tempfile.TemporaryDirectory() as folder:
        own = {"save_folder": folder, "save_interval": interval, "run_name": "run", "autoresume": True}

        def run(*callbacks: Any, **options: Any) -> Outcome:
            return fit(*callbacks, **own, save_overwrite=True, **options)

        yield run


@contextmanager
def ours(interval: Any) -> Iterator[Fit]:
    """Runs with shrinkpoint's checkpoints."""
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


def table(cases: dict[str, Case]) -> Iterator[str]:
    yield "| case | native exact | ours exact | native read again | ours read again |"
    yield "|---|---|---|---:|---:|"
    exact = [0, 0]
    for name, case in cases.items():
        results = [interrupted(case, way) for way in (native, ours)]
        exact = [count + (result.exact == "yes") for count, result in zip(exact, results, strict=True)]
        cells = [name, *(result.exact for result in results), *(result.again for result in results)]
        yield f"| {' | '.join(cells)} |"
    yield f"| **exact of {len(cases)}** | **{exact[0]}** | **{exact[1]}** | | |"


def report(only: str) -> Iterator[str]:
    yield from HEAD.format(composer=composer.__version__, torch=torch.__version__.split("+")[0]).splitlines()
    yield ""
    yield from table({name: case for name, case in CASES.items() if only in name})
    yield ""
    yield "Not exact either way: a worker's generators cannot be set to a position without reading everything before it, and"
    yield "`train_subset_num_batches` is counted from the position that the data restores by itself."
    yield ""
    yield from table({name: case for name, case in IMPOSSIBLE.items() if only in name})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", type=Path, help="write the table to this file too")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    lines = []
    for line in report(options.only):
        print(line, flush=True)
        lines.append(line)
    if options.write is not None:
        options.write.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
