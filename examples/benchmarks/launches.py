"""How much a save slows a thread that launches many small operations, as a training on a GPU does.

    python examples/benchmarks/launches.py [--width 512] [--layers 6] [--threads 1] [--saves 3] [--only auto,lossless]

Each operation takes Python's lock, and waits where another thread has it. A training on the CPU hardly notices, since its operations are
long. So the thread here passes one vector through a stack of tiny layers, whose time is that of launching them, before and while a save of
a GPT is coded and written to memory; between saves the GPT is trained for two steps. What that thread waits for a processor does not count.
But two processors may be one core, or share a cache, so the first row has a thread that computes without the lock: what is slower there
is not the lock. `torch.save` in a thread of its own is measured too.
"""

from __future__ import annotations

import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from common import TextTraining, in_memory_folder, parsed, show
from gpt import GPTConfig
from torch import nn

from shrinkpoint.checkpointer import Checkpointer
from shrinkpoint.config import Advanced

_PASSES = 20  # in a row, timed together
_BEFORE = 500  # such rows of passes
_LARGE, _TIMES = 1 << 26, 30  # of the thread that needs no lock


def _queued() -> float:
    """Seconds for which this thread has waited for a processor, where Linux tells."""
    known = Path("/proc/thread-self/schedstat")
    return int(known.read_text().split()[1]) / 1e9 if known.exists() else 0.0


def _stack() -> nn.Module:
    blocks = (nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64)) for _ in range(8))
    return nn.Sequential(*blocks)


@dataclass
class _Launches:
    """Seconds of some passes through a stack of tiny layers, and the longest that one pass took."""

    passes: list[float] = field(default_factory=list)
    longest: float = 0.0
    _stack: nn.Module = field(default_factory=_stack)

    def add(self) -> None:
        vector = torch.zeros(1, 64)
        began = last = time.perf_counter()
        queued = _queued()
        with torch.no_grad():
            for _ in range(_PASSES):
                self._stack(vector)
                now = time.perf_counter()
                self.longest = max(self.longest, now - last)
                last = now
        queued = _queued() - queued
        self.passes.append((time.perf_counter() - began - queued) / _PASSES)


def _slowed(start: Callable[[], Callable[[], bool]]) -> list[str]:
    """Cells of one row: launches before and during what `start` begins; it returns a function that says whether that is over."""
    before, during = _Launches(), _Launches()
    for _ in range(_BEFORE):
        before.add()
    is_over = start()
    began = time.perf_counter()
    during.add()
    while not is_over():
        during.add()
    seconds = time.perf_counter() - began
    # Means of both: on a machine that has other work, too, a mean is longer than a median, whether something is saved or not.
    usual = statistics.mean(before.passes)
    slower = statistics.mean(during.passes) / usual - 1
    longest = (f"{1e3 * one.longest:.1f}" for one in (before, during))
    return [f"{seconds:.1f}", f"{1e6 * usual:.0f}", f"{slower:+.0%}", *longest]


def _lock_free() -> Callable[[], bool]:
    """Begin to compute something in another thread, for some seconds, which takes the lock a few times in all."""
    numbers = torch.zeros(_LARGE)
    return _thread(lambda: [numbers.sin_() for _ in range(_TIMES)])


def _thread(work: Callable[[], object]) -> Callable[[], bool]:
    thread = threading.Thread(target=work)
    thread.start()
    return lambda: not thread.is_alive()


def _save(checkpointer: Checkpointer, step: int) -> Callable[[], Callable[[], bool]]:
    def start() -> Callable[[], bool]:
        checkpointer.step(step)
        checkpointer.save(step)
        return lambda: checkpointer.flush(0)

    return start


def _measure(arguments: Any, folder: str) -> list[list[str]]:
    config = GPTConfig(width=arguments.width, layers=arguments.layers, heads=8, block=64, batch=2)
    training = TextTraining(config)
    training.step()
    print(f"{training.count / 1e6:.1f} million parameters", flush=True)
    rows: list[list[str]] = []

    def add(name: str, save: int, start: Callable[[], Callable[[], bool]]) -> None:
        rows.append([name, str(save), *_slowed(start)])
        print(*rows[-1], flush=True)

    add("a thread that needs no lock", 1, _lock_free)
    state = training.state()
    add("torch.save in a thread", 1, lambda: _thread(lambda: torch.save(state, f"{folder}/full.pt")))
    for scheme in arguments.only:
        options = {"scheme": scheme, "advanced": Advanced(threads=arguments.threads), "every": None}
        checkpointer = Checkpointer(f"{folder}/{scheme}", training.model, training.optimizer, **options)
        for save in range(1, arguments.saves + 1):
            for _ in range(2):
                training.step()
            add(f"shrinkpoint, {scheme}", save, _save(checkpointer, 2 * save))
        checkpointer.close()
    return rows


def main() -> None:
    options = parsed(__doc__, width=512, layers=6, threads=1, saves=3, only=["lossless", "auto"])
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=in_memory_folder()) as folder:
        rows = _measure(options, folder)
    show(
        " | save | seconds | a pass, us | slower meanwhile | longest before, ms | longest meanwhile, ms",
        rows,
        " ",
    )


if __name__ == "__main__":
    main()
