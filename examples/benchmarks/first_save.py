"""What the first save on a fresh machine costs training: python examples/benchmarks/first_save.py (some minutes)

There the coders are compiled first. Two trainings, each in a process of its own with an empty cache of compiled code, save once
after some seconds: one lets a process of its own compile (``compile_ahead``, the default), the other compiles in the thread that
saves. Given are the time of a training step until the save is committed over that afterwards in the same process, and
when that was. The steps are many small operations on one thread, as in a loop that keeps an accelerator busy, so that a GIL
held elsewhere is felt; the machine needs a second core.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

from shrinkpoint import Checkpointer

_LAYERS, _WIDTH = 24, 96


def train(folder: str, ahead: bool, first_s: float, after_s: float) -> dict[str, float]:
    """Train, save once, and go on for a while after that is committed."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers = [part for _ in range(_LAYERS) for part in (nn.Linear(_WIDTH, _WIDTH), nn.Tanh())]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters())
    began = time.perf_counter()
    checkpointer = Checkpointer(folder, model, optimizer, evaluate=lambda: 1.0, compile_ahead=ahead)
    opened = time.perf_counter()
    steps: list[tuple[float, float]] = []
    saved, committed = False, None
    while committed is None or time.perf_counter() < committed + after_s:
        started = time.perf_counter()
        batch = torch.randn(16, _WIDTH)
        optimizer.zero_grad()
        (model(batch) - batch).square().mean().backward()
        optimizer.step()
        steps.append((started, time.perf_counter() - started))
        if committed is None and checkpointer.saver.reports():
            committed = time.perf_counter()
        checkpointer.saver.poll()
        if not saved and started > opened + first_s:
            saved = checkpointer.save(len(steps)) is not None
    checkpointer.close()
    usual = statistics.mean(taken for started, taken in steps if started > committed)
    before = [taken for started, taken in steps if started < committed]
    return {
        "opening": opened - began,
        "slowdown": statistics.mean(before) / usual,
        "longest": max(before) / usual,
        "committed": committed - opened,
        "lost": sum(before) - usual * len(before),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--first", type=float, default=10.0, help="seconds until the save (default 10)")
    parser.add_argument("--after", type=float, default=20.0, help="seconds to train after it (default 20)")
    parser.add_argument("--run", choices=("ahead", "beside"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(train(folder, options.run == "ahead", options.first, options.after)))
        return
    print("coders compiled     step time   longest step   committed after   training lost   opening the run")
    for how, name in (("ahead", "in a process"), ("beside", "in a thread")):
        with tempfile.TemporaryDirectory() as cache:
            command = [sys.executable, __file__, "--run", how]
            command += ["--first", str(options.first), "--after", str(options.after)]
            environment = {**os.environ, "NUMBA_CACHE_DIR": str(Path(cache))}
            said = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
        found = json.loads(said)
        print(
            f"{name:16} {found['slowdown']:10.2f} x {found['longest']:12.0f} x {found['committed']:15.0f} s"
            f" {found['lost']:13.1f} s {found['opening']:15.1f} s"
        )


if __name__ == "__main__":
    main()
