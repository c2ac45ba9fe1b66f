"""When a step log pays: expected time lost to failures with and without one, in closed form (after Daly, 2006).

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
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

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
    """Time lost, as a share of the work; infinite where the training makes no progress.

    Args:
        interval: tau, seconds of work between two saves.
        costs: of failures and saves.
    """
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
