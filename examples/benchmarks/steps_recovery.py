"""Experiment 5: how long a recovery takes, with a step log and by computing the steps again."""

from __future__ import annotations

import statistics
import tempfile
import time
from dataclasses import dataclass
from typing import Any

import torch
from steps_task import GPTConfig, Training
from torch import Tensor

from shrinkpoint.checkpointer import Checkpointer
from shrinkpoint.steps.options import StepLog

__all__ = ["Recovered", "print_recovery"]

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


def _start(text: Tensor, config: GPTConfig, run: str, log: str | None, segment: int) -> tuple[Training, Any]:
    training = Training(text, config)
    more: dict[str, Any] = {}
    if log is not None:
        more = {"step_log": StepLog(segment_steps=segment, busy="wait"), "step_log_url": log}
    checkpointer = Checkpointer(
        run,
        training.model,
        training.optimizer,
        scheme="lossless",
        save_last=False,
        scheduler=training.scheduler,
        data=_Generator(training.generator),
        **more,
    )
    return training, checkpointer


def print_recovery(text: Tensor, config: GPTConfig, log: str) -> Recovered:
    """Print the table, and return its last line's measurements: both ways lead to the same weights, bit by bit."""
    print(
        "\nExperiment 5: recovery after so many steps since the last checkpoint (the paper: -83.2 % at 10)\n"
    )
    print(
        "| steps | in segments of | replayed from the log | computed again | less | a replayed step, of a training step |"
    )
    print("|---:|---:|---:|---:|---:|---:|")
    with tempfile.TemporaryDirectory() as folder:
        for lost, segment in _CASES:
            line, recovered = _measured(lost, segment, text, config, f"{folder}/{lost}", f"{log}/{lost}")
            print(line, flush=True)
    return recovered


def _measured(
    lost: int, segment: int, text: Tensor, config: GPTConfig, run: str, log: str
) -> tuple[str, Recovered]:
    base = 2 * segment
    training, checkpointer = _start(text, config, run, log, segment)
    checkpointer.resume()
    for step in range(1, base + lost + 1):
        training.step()
        checkpointer.step(step)
        if step == base:
            checkpointer.save(step, wait=True)
    checkpointer.step_log.flush()
    checkpointer.saver.close()

    def resumed(log: str | None) -> tuple[float, Training]:
        fresh, own = _start(text, config, run, log, segment)
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
    line = f"| {lost} | {segment} | {taken:.2f} s | {computed:.2f} s | {1 - taken / computed:.1%} | {ratio:.3f} |"
    return line, Recovered(restored, ratio)
