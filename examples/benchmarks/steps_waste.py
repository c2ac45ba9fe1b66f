"""Experiment 3 and table I of LowDiff: expected loss of time to failures, by the costs of this run and the models of both.

Only the failures and the time of a restart are assumed; `_Constants` lists, and the tables print, what was measured.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from steps_costs import EXACT, Measured
from steps_pays import Costs, LogCosts, best_interval, waste_with_log, waste_without_log
from steps_recovery import Recovered

_HOURS = (0.1, 0.5, 1.0, 2.0)
_RESTART = 60.0
_SEGMENT = 8  # steps, of a model of this size
_FREQUENCIES = (10, 20, 50, 100, 200)  # steps per full checkpoint
_BATCHES = (1, 2, 4, 8, 16)  # steps per batch


def paper_optimum(*, size: float, bandwidth: float, mtbf: float, merge: float) -> tuple[float, float]:
    """Equation 10: the best frequency of full checkpoints, per second, and seconds of training in a batch.

    Args:
        size: bytes of a full checkpoint.
        bandwidth: of its writing, bytes per second; training is taken to wait for it.
        mtbf: mean time between failures.
        merge: seconds to merge one batch at a recovery.
    """
    batch = (2 * size * merge * mtbf / bandwidth) ** (1 / 3)
    return merge / batch**2, batch


def paper_waste(
    frequency: float, batch: float, *, size: float, bandwidth: float, mtbf: float, merge: float, load: float
) -> float:
    """Equation 8, for each second of training: `load` is the time to read a full checkpoint."""
    lost = batch / 2 + load + merge / 2 * (1 / (frequency * batch) - 1)
    return lost / mtbf + size / bandwidth * frequency


def corrected_optimum(
    *, stall: float, mtbf: float, replay_ratio: float, write_stall: float
) -> tuple[float, float]:
    """The same where a save stalls training for `stall` and each step is replayed: seconds between full checkpoints, and
    seconds of training in a segment whose write stalls for `write_stall`."""
    return math.sqrt(2 * mtbf * stall / replay_ratio), math.sqrt(2 * mtbf * write_stall)


@dataclass
class _Constants:
    """Seconds, unless said otherwise."""

    step: float
    written: float
    """That training waits for torch.save."""
    bandwidth: float
    """Bytes per second of torch.save, for the paper's model, in which training waits for all of it."""
    load: float
    """Of the restore of a checkpoint."""
    stall: float
    """That training waits for a background save."""
    lag: float
    """From then until it is committed."""
    segment_stall: float
    segment_lag: float
    replay: float
    """A replayed step, of a step of training."""

    @classmethod
    def of(cls, found: Measured, recovered: Recovered) -> _Constants:
        written = found.methods["torch.save"].waited / found.steps
        begun = found.begun
        return cls(
            found.step,
            written,
            found.state_bytes / written,
            recovered.restore,
            begun.save_stall,
            begun.save_lag,
            begun.segment_stall,
            begun.segment_lag,
            recovered.ratio,
        )

    def show(self) -> str:
        """For people."""
        return (
            f"measured in this run: a step takes {1e3 * self.step:.0f} ms; training waits {1e3 * self.written:.1f} ms for torch.save"
            f" ({self.bandwidth / 1e6:.0f} MB/s), {1e3 * self.stall:.1f} ms for a background save, committed {self.lag:.2f} s later, and"
            f" {1e3 * self.segment_stall:.2f} ms for the end of a segment, written {1e3 * self.segment_lag:.0f} ms later; a restore takes"
            f" {self.load:.2f} s, a replayed step {self.replay:.3f} of a step. Assumed: {_RESTART:.0f} s to start again"
        )


def print_waste(found: Measured, recovered: Recovered) -> None:
    """Print both tables, after the constants that they are computed from."""
    constants = _Constants.of(found, recovered)
    print(f"\n{constants.show()}")
    print("\nExperiment 3: expected loss of time to failures, restarts included, each at its best interval\n")
    print("| MTBF | torch.save | saved in the background | with step_log='exact' | with LowDiff's top 1 % |")
    print("|---:|---:|---:|---:|---:|")
    for hours in _HOURS:
        print(_experiment_3(found, constants, 3600 * hours))
    _table_1(found, constants, 3600.0)


def _experiment_3(found: Measured, known: _Constants, mtbf: float) -> str:
    restart = _RESTART + known.load
    sync = Costs(mtbf=mtbf, stall=known.written, lag=0.0, restart=restart)
    ours = Costs(mtbf=mtbf, stall=known.stall, lag=known.lag, restart=restart)
    cells = [waste_without_log(best_interval(sync), sync), waste_without_log(best_interval(ours), ours)]
    for name in (EXACT, "gradients, top 1 % (LowDiff)"):
        overhead = max(0.0, found.overhead(name))
        # LowDiff's log is written as it is recorded, with the training waiting for it.
        steps, lag = (_SEGMENT, known.segment_lag) if name == EXACT else (1, 0.0)
        log = LogCosts(overhead=overhead, segment=steps * known.step, lag=lag, replay=known.replay)
        cells.append(waste_with_log(best_interval(ours, log), ours, log))
    return f"| {mtbf / 3600:g} h | " + " | ".join(f"{cell:.2%}" for cell in cells) + " |"


def _table_1(found: Measured, known: _Constants, mtbf: float) -> None:
    step, merge = known.step, known.replay * known.step
    model = {"size": found.state_bytes, "bandwidth": known.bandwidth, "mtbf": mtbf, "merge": merge}
    print(
        "\nTable I: loss of time by the paper's equation 8, MTBF 1 h; steps per full checkpoint, steps per batch\n"
    )
    print("| | " + " | ".join(f"{batch}" for batch in _BATCHES) + " |\n|---:|" + "---:|" * len(_BATCHES))
    for every in _FREQUENCIES:
        cells = [
            f"{paper_waste(1 / (every * step), batch * step, load=known.load, **model):.3%}"
            if batch <= every
            else ""
            for batch in _BATCHES
        ]
        print(f"| {every} | " + " | ".join(cells) + " |")
    frequency, batch = paper_optimum(**model)
    interval, segment = corrected_optimum(
        stall=known.stall, mtbf=mtbf, replay_ratio=known.replay, write_stall=known.segment_stall
    )
    print(
        f"\npaper's f*, b*: a full checkpoint every {1 / frequency / step:.0f} steps, batches of {max(1, round(batch / step))} (loss"
        f" {paper_waste(frequency, batch, load=known.load, **model):.3%}); corrected (each step is replayed, a save and the end of a"
        f" segment stall training for the times above): every {interval / step:.0f} steps, segments of"
        f" {max(1, round(segment / step))}"
    )
