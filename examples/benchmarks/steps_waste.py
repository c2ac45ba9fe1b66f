"""Expected loss of time to failures, by the costs of a run: the closed forms, and LowDiff's experiment 3 and table I.

Failures are a Poisson process with a mean time M between them. A training that saves every tau seconds of work is
stalled for C at each save; the checkpoint is committed D later, in the background; a restart and a restore take R.
Without a log, all work since the last committed checkpoint is repeated:

    T = M / tau * exp((R + D) / M) * (exp((tau + C) / M) - 1)        seconds for each second of work

which is Daly's complete model (Future Generation Computer Systems 22, 2006, equation 20) with a commit lag: a failure comes before
k saves are committed with probability 1 - exp(-(k (tau + C) + D) / M), and every failure restarts the count. With a log
that costs the share o of the training's time, that is written in segments of b seconds and arrives g later, and is
replayed at rho of the time of training, b / 2 + g of work are lost, and the rest is replayed:

    T = (M + r) / (M / ((1 + o) (1 + C / tau)) - b / 2 - g),   r = M (exp((R + rho (tau / 2 + D)) / M) - 1)

To first order in 1 / M these are the forms of LowDiff's section on optimal intervals (arXiv 2509.04084, equation 8), corrected: a
save in the background stalls for C and not for its duration, and each step is replayed, not each batch of summed ones.

Only the failures and the time of a restart are assumed; the tables print what was measured.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field

from common import show

EXACT, LOWDIFF = "step_log='exact'", "gradients, top 1 % (LowDiff)"


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
    def written(self) -> float:
        """Seconds that training waits for torch.save; in the paper's model, for all of its writing."""
        return self.methods["torch.save"].waited / self.steps

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


@dataclass(frozen=True)
class Recovered:
    """What a recovery takes with segments of the default length."""

    restore: float
    """Seconds to restore a checkpoint."""
    ratio: float
    """A replayed step, of a step of training."""


# --- the closed forms ---------------------------------------------------------------------------------------

_GOLDEN = (math.sqrt(5) - 1) / 2
_ROUNDS = 80
_LONGEST = 50.0  # times M; no interval near it is of use


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Costs of failures and saves, all in seconds."""

    mtbf: float
    """M: mean time between failures of the whole training."""
    stall: float
    """C: time that training waits for a save."""
    lag: float
    """D: from a save's snapshot to its commit; also the shortest interval."""
    restart: float
    """R: from a failure to the first new step, without the replay of a log."""


@dataclass(frozen=True, kw_only=True)
class LogCosts:
    """Costs of a step log."""

    overhead: float
    """o: share of the training's time."""
    segment: float
    """b: seconds of training in one segment."""
    lag: float
    """g: seconds until a segment is written."""
    replay: float
    """rho: time to replay a step, relative to training it."""


def waste_without_log(interval: float, costs: Costs) -> float:
    """Time lost, as a share of the work, by seconds of work between two saves; infinite where the training makes no progress."""
    try:
        period = math.expm1((interval + costs.stall) / costs.mtbf)
        return costs.mtbf / interval * math.exp((costs.restart + costs.lag) / costs.mtbf) * period - 1
    except OverflowError:
        return math.inf


def waste_with_log(interval: float, costs: Costs, log: LogCosts) -> float:
    """The same with a log."""
    try:
        recovery = costs.mtbf * math.expm1(
            (costs.restart + log.replay * (interval / 2 + costs.lag)) / costs.mtbf
        )
    except OverflowError:
        return math.inf
    slowed = (1 + log.overhead) * (1 + costs.stall / interval)
    gained = costs.mtbf / slowed - log.segment / 2 - log.lag
    return (costs.mtbf + recovery) / gained - 1 if gained > 0 else math.inf


def best_interval(costs: Costs, log: LogCosts | None = None) -> float:
    """The interval between saves that loses the least time, in seconds of work; D or more, since saves do not
    overlap."""

    def waste(exponent: float) -> float:
        interval = math.exp(exponent)
        return waste_without_log(interval, costs) if log is None else waste_with_log(interval, costs, log)

    low = max(costs.lag, 1e-3)
    return math.exp(_least(waste, math.log(low), math.log(max(_LONGEST * costs.mtbf, 2 * low))))


def _least(function: Callable[[float], float], low: float, high: float) -> float:
    """The minimizer of a unimodal function, by golden-section search."""
    inner = [high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)]
    values = [function(place) for place in inner]
    for _ in range(_ROUNDS):
        if values[0] <= values[1]:
            high = inner[1]
            inner = [high - _GOLDEN * (high - low), inner[0]]
            values = [function(inner[0]), values[0]]
        else:
            low = inner[0]
            inner = [inner[1], low + _GOLDEN * (high - low)]
            values = [values[1], function(inner[1])]
    return (low + high) / 2


# --- the tables ---------------------------------------------------------------------------------------------

_HOURS = (0.1, 0.5, 1.0, 2.0)
_RESTART = 60.0
_SEGMENT = 8  # steps, of a model of this size
_FREQUENCIES = (10, 20, 50, 100, 200)  # steps per full checkpoint
_BATCHES = (1, 2, 4, 8, 16)  # steps per batch


def paper_optimum(*, size: float, bandwidth: float, mtbf: float, merge: float) -> tuple[float, float]:
    """Equation 10: the best frequency of full checkpoints, per second, and seconds of training in a batch.

    Training waits for a checkpoint's `size` to be written; a batch takes `merge` seconds at a recovery.
    """
    batch = (2 * size * merge * mtbf / bandwidth) ** (1 / 3)
    return merge / batch**2, batch


def paper_waste(
    frequency: float, batch: float, *, size: float, bandwidth: float, mtbf: float, merge: float, load: float
) -> float:
    """Equation 8, for each second of training: `load` is the time to read a full checkpoint."""
    lost = batch / 2 + load + merge / 2 * (1 / (frequency * batch) - 1)
    return lost / mtbf + size / bandwidth * frequency


def print_waste(found: Measured, recovered: Recovered) -> None:
    """Print both tables, after the constants that they are computed from."""
    begun = found.begun
    print(
        f"\nmeasured in this run: a step takes {1e3 * found.step:.0f} ms; training waits {1e3 * found.written:.1f} ms for torch.save"
        f" ({found.state_bytes / found.written / 1e6:.0f} MB/s), {1e3 * begun.save_stall:.1f} ms for a background save, committed"
        f" {begun.save_lag:.2f} s later, and {1e3 * begun.segment_stall:.2f} ms for the end of a segment, written"
        f" {1e3 * begun.segment_lag:.0f} ms later; a restore takes {recovered.restore:.2f} s, a replayed step {recovered.ratio:.3f} of a"
        f" step. Assumed: {_RESTART:.0f} s to start again"
    )
    title = "Experiment 3: expected loss of time to failures, restarts included, each at its best interval"
    headings = "MTBF | torch.save | saved in the background | with step_log='exact' | with LowDiff's top 1 %"
    show(headings, [_experiment_3(found, recovered, 3600 * hours) for hours in _HOURS], title)
    _table_1(found, recovered, 3600.0)


def _experiment_3(found: Measured, recovered: Recovered, mtbf: float) -> list[str]:
    begun, restart = found.begun, _RESTART + recovered.restore
    sync = Costs(mtbf=mtbf, stall=found.written, lag=0.0, restart=restart)
    ours = Costs(mtbf=mtbf, stall=begun.save_stall, lag=begun.save_lag, restart=restart)
    cells = [waste_without_log(best_interval(sync), sync), waste_without_log(best_interval(ours), ours)]
    for name in (EXACT, LOWDIFF):
        overhead = max(0.0, found.overhead(name))
        # LowDiff's log is written as it is recorded, with the training waiting for it.
        steps, lag = (_SEGMENT, begun.segment_lag) if name == EXACT else (1, 0.0)
        log = LogCosts(overhead=overhead, segment=steps * found.step, lag=lag, replay=recovered.ratio)
        cells.append(waste_with_log(best_interval(ours, log), ours, log))
    return [f"{mtbf / 3600:g} h", *(f"{cell:.2%}" for cell in cells)]


def _table_1(found: Measured, recovered: Recovered, mtbf: float) -> None:
    step, begun, bandwidth = found.step, found.begun, found.state_bytes / found.written
    model = {"size": found.state_bytes, "bandwidth": bandwidth, "mtbf": mtbf, "merge": recovered.ratio * step}

    def waste(frequency: float, batch: float) -> str:
        return f"{paper_waste(frequency, batch, load=recovered.restore, **model):.3%}"

    rows = [
        [every, *(waste(1 / (every * step), batch * step) if batch <= every else "" for batch in _BATCHES)]
        for every in _FREQUENCIES
    ]
    title = "Table I: loss of time by the paper's equation 8, MTBF 1 h; steps per full checkpoint, steps per batch"
    show(["", *map(str, _BATCHES)], rows, title)
    frequency, batch = paper_optimum(**model)
    interval = math.sqrt(2 * mtbf * begun.save_stall / recovered.ratio)
    segment = math.sqrt(2 * mtbf * begun.segment_stall)
    print(
        f"\npaper's f*, b*: a full checkpoint every {1 / frequency / step:.0f} steps, batches of {max(1, round(batch / step))} (loss"
        f" {waste(frequency, batch)}); corrected (each step is replayed, a save and the end of a segment stall training for the times"
        f" above): every {interval / step:.0f} steps, segments of {max(1, round(segment / step))}"
    )
