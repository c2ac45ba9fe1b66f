"""Experiment 5: how long a recovery takes, with a step log and by computing the steps again."""

from __future__ import annotations

import statistics
import tempfile
import time
from dataclasses import dataclass
from typing import Any

import torch
from common import TextTraining
from demo_report import markdown_table
from gpt import GPTConfig

from shrinkpoint.checkpointer import Checkpointer
from shrinkpoint.steps.options import StepLog

_CASES = ((5, 5), (10, 5), (20, 5), (50, 5), (48, 8))
"""Steps since the checkpoint, and in a segment; 8 is the default for a model of this size."""
_TIMES = 7
"""Recoveries of each kind, of which the medians are printed."""


@dataclass(frozen=True)
class Recovered:
    """What a recovery takes with segments of the default length."""

    restore: float
    """Seconds to restore a checkpoint."""
    ratio: float
    """A replayed step, of a step of training."""


class _Generator:
    """The generator of the data, as an object with a state."""

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator

    def state_dict(self) -> dict[str, Any]:
        return {"state": self._generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._generator.set_state(state["state"])


def _start(config: GPTConfig, run: str, log: str | None, segment: int) -> tuple[TextTraining, Any]:
    training = TextTraining(config)
    more: dict[str, Any] = {}
    if log is not None:
        more = {"step_log": StepLog(segment_steps=segment, overhead=None, url=log)}
    checkpointer = Checkpointer(
        run,
        training.model,
        training.optimizer,
        scheme="lossless",
        scheduler=training.scheduler,
        data=_Generator(training.generator),
        **more,
    )
    return training, checkpointer


def print_recovery(config: GPTConfig, log: str) -> Recovered:
    """Print the table, and return its last line's measurements: both ways lead to the same weights, bit by bit."""
    print(
        "\nExperiment 5: recovery after so many steps since the last checkpoint (the paper: -83.2 % at 10)\n"
    )
    with tempfile.TemporaryDirectory() as folder:
        found = [
            _measured(lost, segment, config, f"{folder}/{lost}", f"{log}/{lost}") for lost, segment in _CASES
        ]
    headings = [
        "steps since the checkpoint",
        "in segments of",
        "replayed from the log",
        "computed again",
        "less",
    ]
    print(
        *markdown_table([*headings, "a replayed step, of a training step"], [line for line, _ in found]),
        sep="\n",
    )
    return found[-1][1]


def _measured(lost: int, segment: int, config: GPTConfig, run: str, log: str) -> tuple[list[str], Recovered]:
    base = 2 * segment
    training, checkpointer = _start(config, run, log, segment)
    checkpointer.resume()
    for step in range(1, base + lost + 1):
        training.step()
        checkpointer.step(step)
        if step == base:
            checkpointer.save(step, wait=True)
    checkpointer.step_log.flush()
    checkpointer.saver.close()

    def resumed(log: str | None) -> tuple[float, TextTraining]:
        fresh, own = _start(config, run, log, segment)
        started = time.perf_counter()
        reached = own.resume()
        seconds = time.perf_counter() - started
        expected = base if log is None else base + lost
        assert reached == expected, f"{reached} instead of {expected}"
        if own.step_log is not None:
            own.step_log.close(whole=False)
        own.saver.close()
        return seconds, fresh

    resumed(None)  # reads and compiles what the first of all would otherwise pay for
    pairs = [(resumed(None), resumed(log)) for _ in range(_TIMES)]
    restored, taken = (statistics.median(pair[way][0] for pair in pairs) for way in (0, 1))
    again, replayed = pairs[-1][0][1], pairs[-1][1][1]
    started = time.perf_counter()
    for _ in range(lost):
        again.step()
    steps = time.perf_counter() - started
    for one in (again, replayed):
        assert all(map(torch.equal, one.weights(), training.weights())), "another state than the training's"
    computed = restored + steps
    ratio = max(0.0, taken - restored) / steps
    times = f"{taken:.2f} s", f"{computed:.2f} s", f"{1 - taken / computed:.1%}", f"{ratio:.3f}"
    return [str(lost), str(segment), *times], Recovered(restored, ratio)
