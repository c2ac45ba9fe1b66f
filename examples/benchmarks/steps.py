"""What an exact step log costs a training, and what a replayed step takes, on the demo's GPT.

    OMP_NUM_THREADS=1 python examples/benchmarks/steps.py [--blocks 12] [--log /dev/shm/steps-bench]

Two trainings alternate in one process, some steps each, one with a log: what else a machine does meets both alike. Then the one with the
log is resumed, and its steps since the checkpoint are replayed. Shares and ratios are of medians; on a machine that does other things,
look at the shares and at the CPU time.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported

import argparse
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

from gpt import GPT, GPTConfig, build_optimizer, load_corpus

from shrinkpoint.checkpointer import Checkpointer
from shrinkpoint.steps.options import StepLog

_BLOCK = 8


class _Training:
    """One GPT on random windows of the corpus; `url` for the one that is logged."""

    def __init__(self, text: torch.Tensor, config: GPTConfig, url: str | None, log: str) -> None:
        torch.manual_seed(1)
        self._text, self._config = text, config
        self.model = GPT(config)
        built: Any = build_optimizer(self.model, config)
        self.optimizer, self.scheduler = built if isinstance(built, tuple) else (built, None)
        self.checkpointer = None
        self.seconds: list[float] = []
        self.cpu: list[float] = []
        if url is not None:
            more = {} if self.scheduler is None else {"scheduler": self.scheduler}
            self.checkpointer = Checkpointer(
                url,
                self.model,
                self.optimizer,
                scheme="lossless",
                save_last=False,
                step_log=StepLog(segment_steps=_BLOCK),
                step_log_url=log,
                **more,
            )

    def step(self, step: int) -> None:
        """One step, timed with all that the log does in it."""
        started, cpu = time.perf_counter(), time.thread_time()
        places = torch.randint(len(self._text) - self._config.block - 1, (self._config.batch,))
        windows = torch.stack([self._text[place : place + self._config.block + 1] for place in places])
        self.optimizer.zero_grad()
        self.model.loss(windows.long()).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()
        if self.checkpointer is not None:
            self.checkpointer.step(step + 1)
        self.seconds.append(time.perf_counter() - started)
        self.cpu.append(time.thread_time() - cpu)


def _timed_replay(log: Any) -> list[float]:
    """Where the seconds of the next replay will stand, reading and checksums included, the checkpoint's restore not."""
    recover, seconds = log.recover, []

    def timed(*arguments: Any) -> int:
        started = time.perf_counter()
        reached = recover(*arguments)
        seconds.append(time.perf_counter() - started)
        return reached

    log.recover = timed
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--log", default=None, help="default: a folder in /dev/shm, or a temporary one")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    text, _ = load_corpus()
    config = GPTConfig()
    shared = "/dev/shm" if Path("/dev/shm").is_dir() else None
    log = arguments.log or tempfile.mkdtemp(prefix="steps-bench-", dir=shared)
    with tempfile.TemporaryDirectory() as folder:
        plain, logged = _Training(text, config, None, log), _Training(text, config, f"{folder}/run", log)
        assert logged.checkpointer is not None
        assert logged.checkpointer.resume() == 0
        for step in range(2 * _BLOCK):  # warm, and the rehearsal over
            plain.step(step)
            logged.step(step)
        base = 2 * _BLOCK
        logged.checkpointer.save(base, wait=True)
        steps = logged.checkpointer.step_log
        assert steps is not None
        steps.flush()
        plain.seconds, plain.cpu, logged.seconds, logged.cpu = [], [], [], []
        blocked, written = steps.blocked_s, steps.bytes
        for block in range(arguments.blocks):
            for training in (plain, logged):
                for step in range(_BLOCK):
                    training.step(base + block * _BLOCK + step)
        done = arguments.blocks * _BLOCK
        blocked, written = steps.blocked_s - blocked, steps.bytes - written
        steps.flush()
        logged.checkpointer.saver.close()
        again = _Training(text, config, f"{folder}/run", log)
        assert again.checkpointer is not None
        assert again.checkpointer.step_log is not None
        replay = _timed_replay(again.checkpointer.step_log)
        reached = again.checkpointer.resume()
        assert reached == base + done, f"{reached} instead of {base + done}: {steps.off}"
        same = all(
            torch.equal(a, b)
            for a, b in zip(again.model.parameters(), logged.model.parameters(), strict=True)
        )
        parameters = sum(p.numel() for p in logged.model.parameters())
        again.checkpointer.saver.close()
    if arguments.log is None:
        shutil.rmtree(log, ignore_errors=True)
    middle = statistics.median
    print(
        f"{parameters / 1e6:.2f} million parameters, {done} steps, {steps.written} written, weights equal: {same}\n"
    )
    print("| | |\n|---|---:|")
    print(
        f"| step without a log, median (least) | {1e3 * middle(plain.seconds):.1f} ({1e3 * min(plain.seconds):.1f}) ms |"
    )
    print(f"| step with one | {1e3 * middle(logged.seconds):.1f} ({1e3 * min(logged.seconds):.1f}) ms |")
    print(f"| blocked by the log, of the training's time | {blocked / sum(logged.seconds):.2%} |")
    print(f"| training time, medians | {middle(logged.seconds) / middle(plain.seconds) - 1:+.2%} |")
    print(f"| training thread's CPU time, means | {sum(logged.cpu) / sum(plain.cpu) - 1:+.2%} |")
    print(f"| bytes per parameter and step | {written / done / parameters:.2f} |")
    print(f"| a replayed step, of a step without a log | {replay[0] / done / middle(plain.seconds):.3f} |")


if __name__ == "__main__":
    main()
