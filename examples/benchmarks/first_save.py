"""What the first restore and save on a fresh machine cost: python examples/benchmarks/first_save.py (some minutes)

There the coders are compiled first. The first table has CPU seconds, of all threads and children, in fresh processes with an empty
cache of compiled code and once more with what the first one has left there: of a process that restores a base and two deltas of
scheme ``auto``, of one that makes and restores them, of ``shrinkpoint compile``, and of one that only imports numba and shrinkpoint.
``--cpu`` prints no more than that. What follows is what it costs the training beside it.

Two trainings, each in a process of its own with an empty cache of compiled code, save once
after some seconds: one lets a process of its own compile (``compile_ahead``, the default), the other compiles in the thread that
saves. Given are the time of a training step until the save is committed over that afterwards in the same process, and
when that was. The steps are many small operations on one thread, as in a loop that keeps an accelerator busy, so that a GIL
held elsewhere is felt; the machine needs a second core.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

import torch
from torch import nn

from shrinkpoint import Checkpointer, Saver, SaverConfig
from shrinkpoint.errors import ShrinkpointWarning
from shrinkpoint.state.roles import describe_training

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


def save(folder: str, saves: int = 3) -> None:
    """Make checkpoints of a small training with the defaults of scheme ``auto``, compiling in this process."""
    warnings.simplefilter("ignore", ShrinkpointWarning)  # that nothing is evaluated
    torch.set_num_threads(1)
    torch.manual_seed(0)
    parts = nn.Embedding(2000, 128), nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128), nn.LayerNorm(128)
    model = nn.Sequential(*parts, nn.Linear(128, 2000))
    optimizer = torch.optim.AdamW(model.parameters())
    describe = describe_training(model, [optimizer], model_path=("model",), optimizers_path=("optimizers",))
    saver = Saver(folder, SaverConfig(compile_ahead=False))
    for number in range(saves):
        for _ in range(10):
            tokens = torch.randint(2000, (64,))
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(tokens), tokens.roll(1)).backward()
            optimizer.step()
        state = {"model": model.state_dict(), "optimizers": [optimizer.state_dict()]}
        saver.save(state, step=10 * number + 10, describe=describe, wait=True)
    saver.close()


def cpu_seconds(command: list[str], cache: str) -> float:
    """User and system time of a process and its children."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = {**os.environ, "NUMBA_CACHE_DIR": cache, "PYTHONWARNINGS": "ignore"}
    subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def print_cpu_seconds() -> None:
    """The first table."""
    with tempfile.TemporaryDirectory() as folder:
        run = str(Path(folder) / "run")
        save(run)
        again = "import sys; sys.argv[0] = 'shrinkpoint'; from shrinkpoint.cli.app import app; app()"
        rows = {
            "imports": [sys.executable, "-c", "import numba, shrinkpoint"],
            "a restore": [sys.executable, __file__, "--run", "restore", "--folder", run],
            "all that auto needs": [sys.executable, __file__, "--run", "auto"],
            "shrinkpoint compile": [sys.executable, "-c", again, "compile"],
        }
        print("CPU seconds           empty cache   filled")
        for name, command in rows.items():
            with tempfile.TemporaryDirectory() as cache:
                empty, filled = cpu_seconds(command, cache), cpu_seconds(command, cache)
            print(f"{name:20} {empty:12.1f} {filled:8.1f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--first", type=float, default=10.0, help="seconds until the save (default 10)")
    parser.add_argument("--after", type=float, default=20.0, help="seconds to train after it (default 20)")
    parser.add_argument("--run", choices=("ahead", "beside", "restore", "auto"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--cpu", action="store_true", help="only the first table")
    options = parser.parse_args()
    if options.run == "restore":
        Saver(options.folder).restore()
        return
    if options.run:
        with tempfile.TemporaryDirectory() as folder:
            if options.run == "auto":
                save(folder)
                Saver(folder).restore()
                return
            print(json.dumps(train(folder, options.run == "ahead", options.first, options.after)))
        return
    print_cpu_seconds()
    if options.cpu:
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
