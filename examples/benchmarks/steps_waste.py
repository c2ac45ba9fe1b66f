"""Experiments 3 and table I: expected loss of time to failures, by the measured costs and the models of both."""

from __future__ import annotations

from steps_costs import Measured
from steps_published import corrected_optimum, paper_optimum, paper_waste

from shrinkpoint.steps.pays import Costs, LogCosts, best_interval, waste_with_log, waste_without_log

__all__ = ["print_waste"]

_HOURS = (0.1, 0.5, 1.0, 2.0)
_RESTART = 60.0
_REPLAY = 0.1
_BANDWIDTH = 1e8  # bytes per second of a shared store, for the paper's model, in which training waits for it
_FREQUENCIES = (10, 20, 50, 100, 200)  # steps per full checkpoint
_BATCHES = (1, 2, 4, 8, 16)  # steps per batch


def print_waste(found: Measured) -> None:
    """Print both tables."""
    print(
        "\nExperiment 3: expected loss of time to failures, restarts of 60 s included, each at its best interval\n"
    )
    print("| MTBF | torch.save | saved in the background | with step_log='exact' | with LowDiff's top 1 % |")
    print("|---:|---:|---:|---:|---:|")
    for hours in _HOURS:
        print(_experiment_3(found, 3600 * hours))
    _table_1(found, 3600.0)


def _experiment_3(found: Measured, mtbf: float) -> str:
    step = found.step
    written = found.methods["torch.save"].waited / found.steps
    sync = Costs(mtbf=mtbf, stall=written, lag=0.0, restart=_RESTART)
    ours = Costs(mtbf=mtbf, stall=found.save_stall, lag=10 * step, restart=_RESTART)
    cells = [waste_without_log(best_interval(sync), sync), waste_without_log(best_interval(ours), ours)]
    for name in ("step_log='exact'", "gradients, top 1 % (LowDiff)"):
        overhead = max(0.0, found.overhead(name))
        log = LogCosts(overhead=overhead, segment=8 * step, lag=step, replay=_REPLAY)
        cells.append(waste_with_log(best_interval(ours, log), ours, log))
    return f"| {mtbf / 3600:g} h | " + " | ".join(f"{cell:.2%}" for cell in cells) + " |"


def _table_1(found: Measured, mtbf: float) -> None:
    step, merge = found.step, _REPLAY * found.step
    model = {"size": found.state_bytes, "bandwidth": _BANDWIDTH, "mtbf": mtbf, "merge": merge}
    load = found.state_bytes / _BANDWIDTH
    print(
        "\nTable I: loss of time by the paper's equation 8, MTBF 1 h; steps per full checkpoint, steps per batch\n"
    )
    print("| | " + " | ".join(f"{batch}" for batch in _BATCHES) + " |\n|---:|" + "---:|" * len(_BATCHES))
    for every in _FREQUENCIES:
        cells = [
            f"{paper_waste(1 / (every * step), batch * step, load=load, **model):.3%}"
            if batch <= every
            else ""
            for batch in _BATCHES
        ]
        print(f"| {every} | " + " | ".join(cells) + " |")
    frequency, batch = paper_optimum(**model)
    stall = found.save_stall
    interval, segment = corrected_optimum(stall=stall, mtbf=mtbf, replay_ratio=_REPLAY, write_stall=1e-3)
    print(
        f"\npaper's f*, b*: a full checkpoint every {1 / frequency / step:.0f} steps, batches of {max(1, round(batch / step))} (loss"
        f" {paper_waste(frequency, batch, load=load, **model):.3%}); corrected (a save stalls for {1e3 * stall:.1f} ms, each step is"
        f" replayed, a segment's write stalls for 1 ms): every {interval / step:.0f} steps, segments of {max(1, round(segment / step))}"
    )
