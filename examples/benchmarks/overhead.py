"""What evaluations and probes take of a run of an hour, by the library's own account and by the clock.

    python examples/benchmarks/overhead.py [--minutes 60] [--only gpt] [--saves 11]

One training of the bench of the bound goes on for so long, all options at their defaults, and is saved as often as asked for, evenly.
Seconds are those of the training thread: its steps, and what it stood still for. Times on a machine that does other things
are no good, but their shares are, since all of them are taken from the same thread in the same minutes.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported

import argparse
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]

from bound_trainings import KINDS
from demo_report import markdown_table

from shrinkpoint.checkpointer import Checkpointer

_WARM_UP = 5
"""Steps by which the speed of the training is measured first."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--only", choices=list(KINDS), default="gpt")
    parser.add_argument("--saves", type=int, default=11)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    kind = KINDS[arguments.only]
    trial = kind.build(1, kind, False)
    started = time.perf_counter()
    for index in range(_WARM_UP):
        trial.step(index)
    guess = (time.perf_counter() - started) / _WARM_UP
    steps = max(arguments.saves, int(60 * arguments.minutes / guess))
    kind = replace(kind, every=max(1, steps // kind.SAVES))
    training = kind.build(1, kind, False)
    with tempfile.TemporaryDirectory() as folder:
        checkpointer = Checkpointer(
            f"{folder}/run",
            training.model,
            list(training.optimizers),
            evaluate=training.probe,
            train_loss=training.train_loss,
            clip_grad_norm=training.clip,
            **training.saved,
        )
        checkpointer.resume()
        began, done, stepping, saved = time.perf_counter(), 0, 0.0, 0
        while (passed := time.perf_counter() - began) < 60 * arguments.minutes:
            started = time.perf_counter()
            training.step(done)
            stepping += time.perf_counter() - started
            done += 1
            checkpointer.step(done)
            if passed >= 60 * arguments.minutes * (saved + 1) / (arguments.saves + 1):
                checkpointer.save(done)
                saved += 1
        whole = time.perf_counter() - began
        checkpointer.close()
        reports = checkpointer.reports()
    for report in reports:
        print(
            f"step {report.step}: {report.evaluations} evaluations, {report.search_s:.2f} s, probes {dict(report.resumed)}"
        )
    searching, blocked = (
        sum(report.search_s for report in reports),
        sum(report.blocked_s for report in reports),
    )
    probed = sum(bool(report.resumed) for report in reports)
    lines = [
        ["minutes", f"{whole / 60:.1f}"],
        ["steps", str(done)],
        ["checkpoints, of which probed", f"{len(reports)}, {probed}"],
        ["evaluations", str(sum(report.evaluations for report in reports))],
        ["evaluations and probes, of the whole time", f"{100 * searching / whole:.2f} %"],
        ["the library's own account (`overhead` of the last report)", f"{100 * reports[-1].overhead:.2f} %"],
        ["waiting for snapshots, of the whole time", f"{100 * blocked / whole:.3f} %"],
        ["all but the steps, of the whole time", f"{100 * (1 - stepping / whole):.2f} %"],
    ]
    print("\n".join(markdown_table([kind.title, ""], lines)))


if __name__ == "__main__":
    main()
