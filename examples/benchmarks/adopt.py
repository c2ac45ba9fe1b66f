"""What adopt=True costs and what it brings, on the trainings of the bench of the bound. Prints the tables of docs/adopt.md.

    python examples/benchmarks/adopt.py [--only gpt,recommender,lstm] [--saves 10,40] [--seed 1] [--effort default] [--quick]

Each training is run three times for each number of saves: undisturbed, with a checkpointer that does not adopt, and with one that
does. Nothing is restored: with adoption a restored run is the run itself, bit for bit (tests/campaigns/test_kill_adoption.py), and
without it docs/bound.md measures what ten restores cost. Saves are at least five steps apart; where the training has fewer steps,
all three runs are made longer. Final losses are measured on data apart from the probe's, against the undisturbed run.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported

import argparse
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]

from bound_training import Kind, Training
from bound_trainings import KINDS

import shrinkpoint
from shrinkpoint.schemes.auto.options import AutoOptions

_CLOSEST = 5
_HEAD = """\
| training | saves, steps apart | without: ratio | final loss | with: ratio | final loss | size with / without | adopt, s per save | s per GB of state | evaluations, s per save | adopt + copies, share of training |
|---|---|---|---|---|---|---|---|---|---|---|"""


@dataclass(frozen=True)
class _Run:
    final: float
    seconds: float
    """Of the training's own steps."""
    reports: Sequence[shrinkpoint.SaveReport] = ()

    @property
    def bytes(self) -> int:
        return sum(report.bytes for report in self.reports)

    @property
    def ratio(self) -> float:
        return sum(report.raw_bytes for report in self.reports) / self.bytes


def _run(kind: Kind, seed: int, quick: bool, every: int | None, **options: Any) -> _Run:
    training = kind.build(seed, kind, quick)
    steps, seconds = kind.steps(quick), 0.0
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        checkpointer = None if every is None else _checkpointer(folder, training, every, options)
        for index in range(steps):
            started = time.perf_counter()
            training.step(index)
            seconds += time.perf_counter() - started
            if checkpointer is not None:
                checkpointer.step(index + 1)
                checkpointer.flush()  # coding beside the training would take its time on so few processors
        if checkpointer is not None:
            checkpointer.close()
        return _Run(training.final(), seconds, checkpointer.reports() if checkpointer else ())


def _checkpointer(
    folder: str, training: Training, every: int, options: dict[str, Any]
) -> shrinkpoint.Checkpointer:
    checkpointer = shrinkpoint.Checkpointer(
        folder,
        training.model,
        list(training.optimizers),
        every=every,
        evaluate=training.probe,
        train_loss=training.train_loss,
        clip_grad_norm=training.clip,
        save_last=False,
        busy="wait",
        **options,
        **training.saved,
    )
    checkpointer.resume()
    return checkpointer


def _line(kind: Kind, seed: int, saves: int, effort: str, quick: bool) -> str:
    every = max(_CLOSEST, kind.steps(quick) // saves)
    if every * saves > kind.steps(quick):
        longer = -(-every * saves // kind.SAVES)
        kind = replace(kind, every=longer, quick_every=longer)
    chosen = {"options": AutoOptions(effort=effort)}
    count = kind.steps(quick) // every
    plain = _run(kind, seed, quick, None)
    without = _run(kind, seed, quick, every, **chosen)
    adopting = _run(kind, seed, quick, every, adopt=True, adoptions=count, **chosen)
    reports = adopting.reports
    first, *others = reports
    raw = first.raw_bytes / 1e9
    adopt = sum(report.adopt_s or 0.0 for report in others) / max(len(others), 1)
    search = sum(report.search_s for report in others) / max(len(others), 1)
    copies = sum(report.blocked_s for report in others) / max(len(others), 1)
    share = (adopt + copies) * len(others) / (adopting.seconds * len(others) / count)
    return (
        f"| {kind.title} | {count}, {every} | {without.ratio:.1f}x | {_rise(without, plain)} | {adopting.ratio:.1f}x |"
        f" {_rise(adopting, plain)} | {adopting.bytes / without.bytes:.2f} | {adopt:.3f} | {adopt / raw:.1f} | {search:.3f} |"
        f" {share:.1%} |"
    )


def _rise(run: _Run, plain: _Run) -> str:
    return f"{100 * (run.final / plain.final - 1):+.2f} %"


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", type=_names, default=["gpt", "recommender", "lstm"], help=", ".join(KINDS))
    parser.add_argument(
        "--saves", type=lambda text: [int(number) for number in _names(text)], default=[10, 40]
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--effort", choices=["fast", "default", "max"], default="default")
    parser.add_argument("--quick", action="store_true", help="small models, few steps: no real numbers")
    arguments = parser.parse_args()
    unknown = {*arguments.only} - {*KINDS}
    if unknown:
        parser.error(f"there is no {', '.join(sorted(unknown))}: see --help")
    torch.set_num_threads(1)
    print(_HEAD, flush=True)
    for name in arguments.only:
        for saves in arguments.saves:
            print(_line(KINDS[name], arguments.seed, saves, arguments.effort, arguments.quick), flush=True)


if __name__ == "__main__":
    main()
