"""What step logs cost a training, what a recovery takes, and how both compare with LowDiff's experiments.

    OMP_NUM_THREADS=1 python examples/benchmarks/steps.py        (20 minutes)

``--sections cost,recovery,storage,waste,errors`` prints some of the tables. All ratios are of one run: trainings alternate in one
process, ``--blocks`` of eight steps each, so that other work on the machine affects all alike. The numbers of experiments and tables are
those of LowDiff (arXiv 2509.04084). The constants of the tables of failures are those of the same run, and printed with them. Errors are
of ``--seeds`` trainings, whose base comes after ``--before`` steps. ``--small`` has a tiny model, to see that it runs; ``--log`` is the
logs' folder, else one in memory.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported

import math
import shutil
import statistics
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from common import TextTraining, in_memory_folder, parsed, show
from gpt import GPTConfig
from steps_errors import TopK, report
from steps_waste import EXACT, LOWDIFF, Begun, Measured, Method, Recovered, print_waste
from torch import Tensor

from shrinkpoint.checkpointer import Checkpointer
from shrinkpoint.steps.options import StepLog

_BLOCK = 8
_TOLERATED = 0.035  # of the training time, in experiment 4
_FULL_EVERY = 20  # steps, in experiment 7
_SHARE = 0.01


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
    LOWDIFF: _top_k,
}
_SMALL, _BOUNDED = "step_log='small', every step", "step_log='small', overhead=0.02"


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
        marks = {name: _taken(checkpointer) for name, (_, checkpointer) in ours.items()}
        before = {runner.method.name: runner.method.bytes for runner in runners}
        for _ in range(blocks):
            for runner in (*runners, *(runner for runner, _ in ours.values())):
                for _ in range(_BLOCK):
                    runner.step()
        for runner in runners:
            runner.method.bytes -= before[runner.method.name]
        for name, (runner, checkpointer) in ours.items():
            checkpointer.step_log.flush()
            taken = [now - then for now, then in zip(_taken(checkpointer), marks[name], strict=True)]
            runner.method.bytes, runner.method.waited, runner.method.waited_cpu = taken
            assert checkpointer.step_log.log.off is None, checkpointer.step_log.log.off
            checkpointer.saver.close()
    methods = {r.method.name: r.method for r in (*runners, *(runner for runner, _ in ours.values()))}
    count = runners[0].training.count
    return Measured(count, 12 * count, methods, blocks * _BLOCK, begun, every, share)


def _taken(checkpointer: Any) -> tuple[int, float, float]:
    """Bytes of the log, and seconds and CPU seconds that training has waited for it."""
    log = checkpointer.step_log.log
    return log.bytes, log.blocked_s, log.blocked_cpu_s


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
        return checkpointer.step_log.log.every, checkpointer.step_log.log.share


def _other(name: str, config: GPTConfig, folder: Path) -> _Runner:
    method, training = Method(name), TextTraining(config)
    own = folder / str(len(name))
    own.mkdir()
    return _Runner(method, training, _OTHERS[name](training, method, own))


def _checkpointer(training: TextTraining, run: str, **more: Any) -> Checkpointer:
    own = training.scheduler
    return Checkpointer(run, training.model, training.optimizer, scheme="lossless", scheduler=own, **more)


def _ours(name: str, config: GPTConfig, run: str, log: str, options: StepLog) -> tuple[_Runner, Any]:
    training = TextTraining(config)
    log_options = replace(options, url=log)
    checkpointer = _checkpointer(training, run, step_log=log_options)
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
    log = checkpointer.step_log.log
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
    millions = f"{found.parameters / 1e6:.2f} million parameters"
    print(f"\n{millions}, {found.steps} steps of {1e3 * found.step:.0f} ms with each method")
    rows = []
    for name, method in found.methods.items():
        if name != "nothing":
            added = found.overhead(name)
            shares = [f"{added:+.2%}", f"{found.computing(name):+.2%}", f"{found.background(name):+.1%}"]
            shares.append(f"{statistics.median(method.seconds) / found.step - 1:+.1%}")
            often = f"{max(1, math.ceil(added / _TOLERATED))} steps"
            rows.append([name, *shares, often, f"{method.bytes / found.steps / found.parameters:.3f}"])
    title = (
        "Experiment 1: training time when every step is kept. Experiment 4: how often, if that may add 3.5 %"
    )
    headings = "every step | training waits | of its thread's CPU time | CPU time, background included"
    show(f"{headings} | medians of the steps | at most every | bytes per parameter and step", rows, title)
    begun = found.begun
    share = "not measured" if found.small_share is None else f"{found.small_share:.1%}"
    print(
        f"\nof the exact log, the end of a segment takes {1e3 * begun.segment_stall:.2f} ms beyond other steps, and it is written"
        f" {1e3 * begun.segment_lag:.0f} ms later\nwith overhead=0.02 the small log ends with every={found.small_every}, and"
        f" measured its share as {share}"
    )


def print_storage(found: Measured) -> None:
    """Experiment 7 and table III."""
    full = found.state_bytes / found.parameters
    rows = [["a full state each step", f"{full:.2f}", "1.0x"]]
    for name in ("differences, top 1 % (naive DC)", LOWDIFF, EXACT, _SMALL):
        each = full / _FULL_EVERY + found.methods[name].bytes / found.steps / found.parameters
        rows.append([name, f"{each:.3f}", f"{full / each:.1f}x"])
    title = f"Experiment 7, table III: bytes per step where a full state is kept every {_FULL_EVERY} steps"
    show(" | bytes per parameter and step | less than a full state each step", rows, title)


# --- recovery -----------------------------------------------------------------------------------------------

_CASES = ((5, 5), (10, 5), (20, 5), (50, 5), (48, 8))
"""Steps since the checkpoint, and in a segment; 8 is the default for a model of this size."""
_TIMES = 7
"""Recoveries of each kind, of which the medians are printed."""


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
    more = {} if log is None else {"step_log": StepLog(segment_steps=segment, overhead=None, url=log)}
    return training, _checkpointer(training, run, data=_Generator(training.generator), **more)


def print_recovery(config: GPTConfig, log: str) -> Recovered:
    """Print the table, and return its last line's measurements: both ways lead to the same weights, bit by bit."""
    with tempfile.TemporaryDirectory() as folder:
        found = [_measured(lost, size, config, f"{folder}/{lost}", f"{log}/{lost}") for lost, size in _CASES]
    title = "Experiment 5: recovery after so many steps since the last checkpoint (the paper: -83.2 % at 10)"
    headings = "steps since the checkpoint | in segments of | replayed from the log | computed again | less"
    show(f"{headings} | a replayed step, of a training step", [line for line, _ in found], title)
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


SECTIONS = ["cost", "recovery", "storage", "waste", "errors"]


def main() -> None:
    counts = {"blocks": 10, "seeds": 3, "before": 200}
    options = parsed(__doc__, sections=SECTIONS, log=None, small=False, **counts)
    wanted = {*options.sections}
    warnings.filterwarnings("ignore", message="The epoch parameter")  # torch's own, of its scheduler
    torch.set_num_threads(1)
    tiny = {"width": 32, "layers": 1, "heads": 2, "block": 32, "batch": 4}
    config = GPTConfig(**(tiny if options.small else {}))
    log = options.log or tempfile.mkdtemp(prefix="steps-bench-", dir=in_memory_folder())
    try:
        measured = (
            measure_costs(config, log, options.blocks) if wanted & {"cost", "storage", "waste"} else None
        )
        if "cost" in wanted:
            print_costs(measured)
        if "storage" in wanted:
            print_storage(measured)
        recovered = print_recovery(config, f"{log}/recovery") if wanted & {"recovery", "waste"} else None
        if "waste" in wanted:
            print_waste(measured, recovered)
        if "errors" in wanted:
            report(config, seeds=options.seeds, before=options.before)
    finally:
        if options.log is None:
            shutil.rmtree(log, ignore_errors=True)


if __name__ == "__main__":
    main()
