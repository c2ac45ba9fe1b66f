"""Guided exhaustive search (Inshrinkerator, arXiv 2306.11800, Algorithm 4): the smallest feasible configuration.

Predicting a size is cheap, measuring a degradation is not. Along every axis quality rises while the size may go either
way: pruning fewer weights, for instance, can make a checkpoint *smaller*, because the mask costs entropy. The search
therefore looks up the size of every configuration before it decides what to measure, and infers qualities only:

* a configuration with a milder one that is no larger can never be the only answer, and is left out at the start;
* after a feasible measurement, everything at least as large is out;
* after an infeasible one, everything harsher is out.

What is left shrinks until nothing smaller than the best remains, so the answer is the true optimum whenever quality is
monotone, whatever the sizes are.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Generator, Mapping
from functools import lru_cache

from shrinkpoint.quality.inshrinkerator_search.outcome import (
    Evaluation,
    Predict,
    Search,
    Trail,
    predict_sizes,
    significantly_lower,
)
from shrinkpoint.schemes.inshrinkerator.space import Configuration, ConfigurationSpace

__all__ = ["count_contradictions", "guided_exhaustive", "smallest_feasible"]


def guided_exhaustive(
    space: ConfigurationSpace,
    predict: Predict,
    max_degradation: float,
    *,
    max_evaluations: int = 45,
    noise: float = 0.0005,
) -> Search:
    """Search the whole space, all metrics together, for the smallest configuration within the bound.

    This is the guided exhaustive search of Inshrinkerator (arXiv 2306.11800, Algorithm 4) with two changes. Sizes are
    bounded configuration by configuration instead of being taken as monotone. The next configuration to measure is the
    one that rules out the most in its worse case, over all metrics at once, instead of the middle of a box of one
    metric. Both only lower the number of measurements.

    Args:
        space: the configurations to choose between.
        predict: predicted bytes; called once per distinct configuration when the search starts.
        max_degradation: the bound on the relative rise of the loss.
        max_evaluations: stop after so many measurements with the best configuration known by then.
        noise: standard error of a measured degradation. When a milder configuration measures worse than a harsher one
            by more than it explains, quality is not monotone, and neighbours of the winner that were ruled out without
            a measurement are measured too.

    Returns:
        The search. Its outcome is exact unless the reason says that the measurements ran out.

    Raises:
        ConfigError: ``max_evaluations`` is below 1, or (when the search runs) a predicted size is NaN.
    """
    return _exhaustive(space, predict, Trail(max_degradation, max_evaluations), noise)


def _exhaustive(space: ConfigurationSpace, predict: Predict, trail: Trail, noise: float) -> Search:
    sizes = predict_sizes(space.configurations, predict)
    winner, open_size = yield from smallest_feasible(space, sizes, trail)
    contradictions = count_contradictions(space, trail.evaluations, noise)
    remarks = []
    if open_size is not None:
        known = (
            "no feasible one is known"
            if winner is None
            else f"{1 - open_size / winner.predicted_bytes:.1%} at most"
        )
        remarks.append(f"the limit on evaluations was reached, what could still be gained: {known}")
    if contradictions:
        remarks.append(
            f"{contradictions} pairs of measurements contradict that milder is better, so the neighbours were measured"
        )
        if winner is not None:
            winner = yield from _recheck_neighbours(space, sizes, trail, winner)
    count = len(trail.evaluations)
    found = (
        f"no configuration is within the bound, by {count} evaluations"
        if winner is None
        else f"({winner.configuration}) is the smallest within the bound, by {count} evaluations"
    )
    return trail.outcome(winner, "exhaustive", "; ".join([found, *remarks]))


def smallest_feasible(
    space: ConfigurationSpace, sizes: Mapping[Configuration, float], trail: Trail
) -> Generator[Configuration, float, tuple[Evaluation | None, float | None]]:
    """Find the smallest feasible configuration among those that ``sizes`` holds.

    Args:
        space: the space, which gives the order of mildness.
        sizes: predicted bytes of the configurations to choose between.
        trail: where measurements are recorded and limited.

    Returns:
        The best evaluation, if any is feasible; and the smallest predicted size that was neither measured nor ruled out
        when the measurements ran out, None if the search is complete.
    """
    order = _order(space)
    # Of two that are equally large the milder one comes first, so that the other is left out.
    ascending = sorted(
        sizes, key=lambda configuration: (sizes[configuration], -sum(space.steps(configuration)))
    )
    candidates = []
    covered = 0
    for configuration in ascending:
        number = order.number[configuration]
        if not covered >> number & 1:
            candidates.append(number)
        covered |= order.harsher[number]
    best: Evaluation | None = None
    while candidates and trail.left:
        # With one measurement left and nothing found, only the mildest has a good chance.
        rank = len(candidates) - 1 if best is None and trail.left == 1 else _halving_rank(order, candidates)
        number = candidates[rank]
        configuration = space.configurations[number]
        evaluation = yield from trail.measure(configuration, sizes[configuration])
        if evaluation.feasible:
            best = evaluation
            candidates = candidates[:rank]
        else:
            candidates = [other for other in candidates if not order.harsher[number] >> other & 1]
    return best, sizes[space.configurations[candidates[0]]] if candidates else None


def _halving_rank(order: _Order, candidates: list[int]) -> int:
    """The rank whose measurement rules out the most candidates in the worse of its two results."""
    mask = sum(1 << number for number in candidates)

    def worse_case(rank: int) -> int:
        if_infeasible = (order.harsher[candidates[rank]] & mask).bit_count()
        if_feasible = len(candidates) - rank
        return min(if_feasible, if_infeasible)

    return max(range(len(candidates)), key=worse_case)


def count_contradictions(space: ConfigurationSpace, evaluations: Collection[Evaluation], noise: float) -> int:
    """Pairs of measurements in which the milder configuration is significantly worse than the harsher one."""
    return sum(
        space.at_least_as_mild(mild.configuration, harsh.configuration)
        and significantly_lower(harsh.degradation, mild.degradation, noise)
        for mild, harsh in itertools.permutations(evaluations, 2)
    )


def _recheck_neighbours(
    space: ConfigurationSpace, sizes: Mapping[Configuration, float], trail: Trail, winner: Evaluation
) -> Generator[Configuration, float, Evaluation]:
    """Measure the smaller neighbours of the winner that were ruled out by inference; the first feasible one wins."""
    moves = (-1, 0, 1)
    smaller = {
        neighbour
        for neighbour in space.around(winner.configuration, moves, embedding_moves=moves)
        if sizes[neighbour] < winner.predicted_bytes and trail.find(neighbour) is None
    }
    for neighbour in sorted(smaller, key=lambda configuration: (sizes[configuration], str(configuration))):
        if not trail.left:
            break
        evaluation = yield from trail.measure(neighbour, sizes[neighbour])
        if evaluation.feasible:
            return evaluation
    return winner


class _Order:
    """The order of mildness as bit sets: ``harsher[n]`` holds ``n`` and everything harsher than it."""

    def __init__(self, space: ConfigurationSpace) -> None:
        self.number = {configuration: n for n, configuration in enumerate(space.configurations)}
        self.harsher = [1 << n for n in range(len(self.number))]
        # Ascending positions: whatever is one step harsher is complete before it is used.
        for configuration in sorted(space.configurations, key=lambda c: sum(space.steps(c))):
            n = self.number[configuration]
            for predecessor in self._one_step_harsher(space, configuration):
                self.harsher[n] |= self.harsher[self.number[predecessor]]

    @staticmethod
    def _one_step_harsher(
        space: ConfigurationSpace, configuration: Configuration
    ) -> Generator[Configuration, None, None]:
        steps = space.steps(configuration)
        # One that prunes nothing is milder than those of every metric.
        metrics = (configuration.metric,) if configuration.prune else space.metrics
        for metric, axis in itertools.product(metrics, range(len(steps))):
            if steps[axis]:
                yield space.at(metric, [step - (at == axis) for at, step in enumerate(steps)])


@lru_cache(maxsize=8)
def _order(space: ConfigurationSpace) -> _Order:
    return _Order(space)
