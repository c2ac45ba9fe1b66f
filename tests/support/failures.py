"""A training with random failures, second by second as a process has them: what the closed forms are compared with."""

import math
import random

from shrinkpoint.steps.pays import Costs, LogCosts


def simulate(
    failures: int, interval: float, costs: Costs, log: LogCosts | None = None, seed: int = 0
) -> float:
    """The measured waste.

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
