"""What it costs to keep every step: our logs, torch.save, a background save, differences of the state, and LowDiff's top-k log."""

from __future__ import annotations

import math
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from common import TextTraining
from demo_report import markdown_table
from gpt import GPTConfig
from steps_errors import TopK
from torch import Tensor

from shrinkpoint.checkpointer import Checkpointer
from shrinkpoint.steps.options import StepLog

_BLOCK = 8
_TOLERATED = 0.035  # of the training time, in experiment 4
_FULL_EVERY = 20  # steps, in experiment 7
_SHARE = 0.01


@dataclass
class Method:
    """One way to keep every step, with what it took."""

    name: str
    seconds: list[float] = field(default_factory=list)
    waited: float = 0.0
    """Seconds of the training's thread in it."""
    waited_cpu: float = 0.0
    """CPU seconds of the training's thread in it."""
    thread_cpu: float = 0.0
    """CPU seconds of the training's thread, in all."""
    cpu: float = 0.0
    """CPU seconds of the process, training included."""
    bytes: int = 0


@dataclass
class Begun:
    """What was measured before the timed steps."""

    save_stall: float
    """Seconds that training waited for a checkpoint."""
    save_lag: float
    """Seconds from then until it was committed."""
    segment_stall: float
    """Seconds that the end of a segment of the exact log takes, beyond any other step: capture, digest, waiting."""
    segment_lag: float
    """Seconds from the end of a segment until it was written."""


@dataclass
class Measured:
    """Everything that was measured, in seconds and bytes."""

    parameters: int
    state_bytes: int
    methods: dict[str, Method]
    steps: int
    begun: Begun
    small_every: int
    small_share: float | None

    @property
    def step(self) -> float:
        """Seconds of a step without anything."""
        return statistics.median(self.methods["nothing"].seconds)

    def overhead(self, name: str) -> float:
        """The time that training waits for a method, relative to the rest of its time: of one thread, so that other work on the
        machine affects both alike."""
        method = self.methods[name]
        return method.waited / (sum(method.seconds) - method.waited)

    def computing(self, name: str) -> float:
        """As `overhead`, in CPU time: other work on the machine does not affect it."""
        method = self.methods[name]
        return method.waited_cpu / (method.thread_cpu - method.waited_cpu)

    def background(self, name: str) -> float:
        """CPU time of the whole process that a method adds, relative."""
        return self.methods[name].cpu / self.methods["nothing"].cpu - 1


class _Runner:
    """A training that calls `keep` after each step."""

    def __init__(self, method: Method, training: TextTraining, keep: Callable[[int], None]) -> None:
        self.method, self.training, self.keep = method, training, keep
        self.done = 0

    def step(self, *, timed: bool = True) -> None:
        started, cpu, own = time.perf_counter(), time.process_time(), time.thread_time()
        self.training.step()
        kept, kept_own = time.perf_counter(), time.thread_time()
        self.done += 1
        self.keep(self.done)
        ended, ended_own = time.perf_counter(), time.thread_time()
        if timed:
            self.method.seconds.append(ended - started)
            self.method.waited += ended - kept
            self.method.waited_cpu += ended_own - kept_own
            self.method.thread_cpu += ended_own - own
            self.method.cpu += time.process_time() - cpu


def _nothing(training: TextTraining, method: Method, folder: Path) -> Callable[[int], None]:
    return lambda step: None


def _torch_save(training: TextTraining, method: Method, folder: Path) -> Callable[[int], None]:
    def keep(step: int) -> None:
        state = {"model": training.model.state_dict(), "optimizer": training.optimizer.state_dict()}
        torch.save(state, folder / "full.pt")
        method.bytes += (folder / "full.pt").stat().st_size

    return keep


def _background(training: TextTraining, method: Method, folder: Path) -> Callable[[int], None]:
    """As CheckFreq: a copy, and its writing while the next step is computed; the step after that waits for it."""
    thread: list[threading.Thread] = []

    def keep(step: int) -> None:
        copied = training.state()
        if thread:
            thread.pop().join()
        writer = threading.Thread(target=torch.save, args=(copied, folder / "full.pt"))
        writer.start()
        thread.append(writer)
        method.bytes += 12 * training.count

    return keep


def _differences(training: TextTraining, method: Method, folder: Path) -> Callable[[int], None]:
    """Naive differential checkpoints: the largest 1 % of what the whole state has changed by, closed loop."""
    read: dict[str, Tensor] = {}

    def flat() -> dict[str, Tensor]:
        states = [training.optimizer.state[p] for p in training.parameters if p in training.optimizer.state]
        moments = {f"{i}/{key}": s[key] for i, s in enumerate(states) for key in ("exp_avg", "exp_avg_sq")}
        return {str(i): p.detach() for i, p in enumerate(training.parameters)} | moments

    def keep(step: int) -> None:
        parts = []
        for name, value in flat().items():
            before = read.setdefault(name, torch.zeros_like(value)).view(-1)
            change = value.reshape(-1) - before
            places = change.abs().topk(max(1, int(_SHARE * change.numel()))).indices
            before[places] += change[places]
            parts += [places.to(torch.int32), change[places]]
        torch.save(parts, folder / "difference.pt")
        method.bytes += sum(part.nbytes for part in parts)

    return keep


def _top_k(training: TextTraining, method: Method, folder: Path) -> Callable[[int], None]:
    log = TopK(_SHARE, feedback=False)

    def keep(step: int) -> None:
        kept = log.record([p.grad for p in training.parameters if p.grad is not None])
        places = [torch.nonzero(record.reshape(-1)).to(torch.int32) for record in kept]
        values = [
            record.reshape(-1)[where.long().view(-1)] for record, where in zip(kept, places, strict=True)
        ]
        torch.save([places, values], folder / "gradient.pt")
        method.bytes = log.bytes

    return keep


_OTHERS: dict[str, Callable[[TextTraining, Method, Path], Callable[[int], None]]] = {
    "nothing": _nothing,
    "torch.save": _torch_save,
    "background save (CheckFreq)": _background,
    "differences, top 1 % (naive DC)": _differences,
    "gradients, top 1 % (LowDiff)": _top_k,
}
EXACT, _SMALL, _BOUNDED = (
    "step_log='exact'",
    "step_log='small', every step",
    "step_log='small', overhead=0.02",
)


def measure_costs(config: GPTConfig, log: str, blocks: int) -> Measured:
    """Train with every method in turn, some steps each."""
    every, share = _bounded(config, log, blocks)
    options = {
        EXACT: StepLog(),  # its defaults: segments of 8 steps here
        _SMALL: StepLog(kind="small", segment_steps=_BLOCK, overhead=None),
        _BOUNDED: StepLog(kind="small", segment_steps=_BLOCK, overhead=None, every=every),
    }
    with tempfile.TemporaryDirectory() as folder:
        runners = [_other(name, config, Path(folder)) for name in _OTHERS]
        ours = {
            name: _ours(name, config, f"{folder}/{index}", log, options[name])
            for index, name in enumerate(options)
        }
        begun = _begin(runners, ours)
        marks = {
            name: (c.step_log.bytes, c.step_log.blocked_s, c.step_log.blocked_cpu_s)
            for name, (_, c) in ours.items()
        }
        before = {runner.method.name: runner.method.bytes for runner in runners}
        for _ in range(blocks):
            for runner in (*runners, *(runner for runner, _ in ours.values())):
                for _ in range(_BLOCK):
                    runner.step()
        for runner in runners:
            runner.method.bytes -= before[runner.method.name]
        for name, (runner, checkpointer) in ours.items():
            written, blocked, blocked_cpu = marks[name]
            checkpointer.step_log.flush()
            runner.method.bytes = checkpointer.step_log.bytes - written
            runner.method.waited = checkpointer.step_log.blocked_s - blocked
            runner.method.waited_cpu = checkpointer.step_log.blocked_cpu_s - blocked_cpu
            assert checkpointer.step_log.off is None, checkpointer.step_log.off
            checkpointer.saver.close()
    methods = {r.method.name: r.method for r in (*runners, *(runner for runner, _ in ours.values()))}
    count = runners[0].training.count
    return Measured(count, 12 * count, methods, blocks * _BLOCK, begun, every, share)


def _bounded(config: GPTConfig, log: str, blocks: int) -> tuple[int, float | None]:
    """The interval that the overhead bound leads to, and the last measured share, in a training that is alone."""
    with tempfile.TemporaryDirectory() as folder:
        options = StepLog(kind="small", segment_steps=_BLOCK)
        runner, checkpointer = _ours("", config, folder, log, options)
        _warm_up(runner)
        checkpointer.save(runner.done, wait=True)
        _warm_up(runner, checkpointer)
        for _ in range(max(6, blocks) * _BLOCK):
            runner.step()
        checkpointer.saver.close()
        return checkpointer.step_log.every, checkpointer.step_log.share


def _other(name: str, config: GPTConfig, folder: Path) -> _Runner:
    method, training = Method(name), TextTraining(config)
    own = folder / str(len(name))
    own.mkdir()
    return _Runner(method, training, _OTHERS[name](training, method, own))


def _ours(name: str, config: GPTConfig, run: str, log: str, options: StepLog) -> tuple[_Runner, Any]:
    training = TextTraining(config)
    checkpointer = Checkpointer(
        run,
        training.model,
        training.optimizer,
        scheme="lossless",
        step_log=replace(options, url=log),
        scheduler=training.scheduler,
    )
    assert checkpointer.resume() == 0
    return _Runner(Method(name), training, lambda step: checkpointer.step(step) and None), checkpointer


def _warm_up(runner: _Runner, checkpointer: Any = None) -> None:
    """Two segments of steps that are not timed."""
    for _ in range(2 * _BLOCK):
        runner.step(timed=False)
        if checkpointer is not None:
            checkpointer.step_log.flush()


def _begin(runners: list[_Runner], ours: dict[str, tuple[_Runner, Any]]) -> Begun:
    """Steps that are not timed, and the checkpoint that the logs begin with."""
    for runner in runners:
        _warm_up(runner)
    stall = lag = 0.0
    for name, (runner, checkpointer) in ours.items():
        _warm_up(runner)
        started = time.perf_counter()
        stall = checkpointer.save(runner.done, wait=True).blocked_s
        lag = time.perf_counter() - started - stall
        if name != EXACT:
            _warm_up(runner, checkpointer)  # the log of the next steps refers to it
    stalls, lags = _segments(*ours[EXACT])
    return Begun(stall, lag, stalls, lags)


def _segments(runner: _Runner, checkpointer: Any) -> tuple[float, float]:
    """Of the exact log: seconds that the last step of a segment waits beyond the others, and until it is written."""
    log = checkpointer.step_log
    waited: dict[bool, list[float]] = {True: [], False: []}
    lags = []
    for step in range(1, 4 * _BLOCK + 1):
        ends, before = step % _BLOCK == 0, log.blocked_s
        runner.step(timed=False)
        waited[ends].append(log.blocked_s - before)
        if ends:
            started = time.perf_counter()
            log.flush()
            lags.append(time.perf_counter() - started)
    middle = statistics.median
    return max(0.0, middle(waited[True]) - middle(waited[False])), middle(lags)


def print_costs(found: Measured) -> None:
    """Experiments 1 and 4."""
    print(
        f"\n{found.parameters / 1e6:.2f} million parameters, {found.steps} steps of {1e3 * found.step:.0f} ms with each method"
    )
    print(
        "\nExperiment 1: training time when every step is kept. Experiment 4: how often, if that may add 3.5 %\n"
    )
    rows = []
    for name, method in found.methods.items():
        if name != "nothing":
            added = found.overhead(name)
            shares = [f"{added:+.2%}", f"{found.computing(name):+.2%}", f"{found.background(name):+.1%}"]
            shares.append(f"{statistics.median(method.seconds) / found.step - 1:+.1%}")
            often = f"{max(1, math.ceil(added / _TOLERATED))} steps"
            rows.append([name, *shares, often, f"{method.bytes / found.steps / found.parameters:.3f}"])
    headings = ["every step", "training waits", "of its thread's CPU time", "CPU time, background included"]
    headings += ["medians of the steps", "at most every", "bytes per parameter and step"]
    print(*markdown_table(headings, rows), sep="\n")
    begun = found.begun
    share = "not measured" if found.small_share is None else f"{found.small_share:.1%}"
    print(
        f"\nof the exact log, the end of a segment takes {1e3 * begun.segment_stall:.2f} ms beyond other steps, and it is written {1e3 * begun.segment_lag:.0f} ms later"
        f"\nwith overhead=0.02 the small log ends with every={found.small_every}, and measured its share as {share}"
    )


def print_storage(found: Measured) -> None:
    """Experiment 7 and table III."""
    print(f"\nExperiment 7, table III: bytes per step where a full state is kept every {_FULL_EVERY} steps\n")
    full = found.state_bytes / found.parameters
    rows = [["a full state each step", f"{full:.2f}", "1.0x"]]
    for name in ("differences, top 1 % (naive DC)", "gradients, top 1 % (LowDiff)", EXACT, _SMALL):
        each = full / _FULL_EVERY + found.methods[name].bytes / found.steps / found.parameters
        rows.append([name, f"{each:.3f}", f"{full / each:.1f}x"])
    print(
        *markdown_table(["", "bytes per parameter and step", "less than a full state each step"], rows),
        sep="\n",
    )
