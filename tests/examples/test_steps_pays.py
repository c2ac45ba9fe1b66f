"""The closed forms of the time that failures take agree with a simulated training."""

import math
import random
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
sys.path += [str(EXAMPLES), str(EXAMPLES / "benchmarks")]
from steps_waste import Costs, LogCosts, best_interval, waste_with_log, waste_without_log

# seconds: a demo on two cores; 1.3 B on a spot GPU; 7 B on 64 GPUs; 70 B on 1024
CASES = {
    "demo": (
        Costs(mtbf=3600, stall=0.013, lag=13, restart=20),
        LogCosts(overhead=0.01, segment=1, lag=0.5, replay=0.05),
    ),
    "spot": (
        Costs(mtbf=7200, stall=0.5, lag=120, restart=60),
        LogCosts(overhead=0.02, segment=8, lag=2, replay=0.1),
    ),
    "cluster": (
        Costs(mtbf=3600, stall=1, lag=300, restart=90),
        LogCosts(overhead=0.02, segment=10, lag=5, replay=0.1),
    ),
    "large": (
        Costs(mtbf=10800, stall=3, lag=900, restart=120),
        LogCosts(overhead=0.02, segment=16, lag=5, replay=0.1),
    ),
    "stalled": (
        Costs(mtbf=3600, stall=20, lag=30, restart=60),
        LogCosts(overhead=0.03, segment=4, lag=1, replay=0.3),
    ),
}
FAILURES = 20_000


def simulate(
    failures: int, interval: float, costs: Costs, log: LogCosts | None = None, seed: int = 0
) -> float:
    """Live through random failures, second by second as a process has them, and measure the waste.

    Args:
        failures: how many to live through.
        interval: work between two saves.
        costs: of failures and saves.
        log: of a log of every step, if there is one.
        seed: of the failures.

    Returns:
        Time beyond the work, as a share of it.
    """
    rng = random.Random(seed)
    slow = 1 + (log.overhead if log else 0.0)
    wall = done = committed = 0.0
    for _ in range(failures):
        begin, progress = wall, done
        fails = begin + rng.expovariate(1 / costs.mtbf)
        # a save is due at every multiple of the interval; one that a failure has prevented, at once
        due = (math.floor(committed / interval + 1e-9) + 1) * interval
        wall, waiting = begin, []
        while True:
            work = max(0.0, due - progress) * slow
            if wall + work >= fails:
                progress += (fails - wall) / slow
                break
            wall, progress = wall + work, max(progress, due)
            if wall + costs.stall >= fails:
                break
            wall += costs.stall
            # many whole periods at once, none of whose saves is still under way at the failure
            period = interval * slow + costs.stall
            skipped = math.floor((fails - wall - costs.lag) / period) - 1
            if skipped > 0:
                wall, progress = wall + skipped * period, progress + skipped * interval
            waiting.append((wall + costs.lag, progress))
            due = (math.floor(progress / interval + 1e-9) + 1) * interval
        committed = max([committed, *(reached for when, reached in waiting if when <= fails)])
        wall = fails
        if log is None:
            done, replayed = committed, 0.0
        else:
            written = max(0.0, math.floor((progress - log.lag) / log.segment) * log.segment)
            done = max(committed, min(written, progress))
            replayed = log.replay * (done - committed)
        # a failure in a recovery begins it again
        while (next_failure := rng.expovariate(1 / costs.mtbf)) < costs.restart + replayed:
            wall += next_failure
        wall += costs.restart + replayed
    return wall / done - 1


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("times", [1.0, 3.0])
def test_the_forms_agree_with_a_simulation(case, times):
    """At the best interval, and at three times that, which somebody may have chosen."""
    costs, log = CASES[case]
    interval = times * best_interval(costs)
    assert simulate(FAILURES, interval, costs) == pytest.approx(waste_without_log(interval, costs), rel=0.03)
    interval = times * best_interval(costs, log)
    assert simulate(FAILURES, interval, costs, log) == pytest.approx(
        waste_with_log(interval, costs, log), rel=0.03
    )


@pytest.mark.parametrize("case", CASES)
def test_no_other_interval_is_better(case):
    costs, log = CASES[case]
    for interval, waste in (
        (best_interval(costs), lambda tau: waste_without_log(tau, costs)),
        (best_interval(costs, log), lambda tau: waste_with_log(tau, costs, log)),
    ):
        assert interval >= costs.lag * (1 - 1e-9)
        for factor in (0.5, 0.9, 1.1, 2.0):
            assert waste(max(costs.lag, factor * interval)) >= waste(interval) * (1 - 1e-9)
