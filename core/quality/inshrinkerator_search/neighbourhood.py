"""Local searches around the configuration in use: the steady state between exhaustive searches."""

from __future__ import annotations

from shrinkpoint.quality.inshrinkerator_search.guided import smallest_feasible
from shrinkpoint.quality.inshrinkerator_search.outcome import (
    Evaluation,
    Predict,
    Search,
    Trail,
    predict_sizes,
    significantly_lower,
)
from shrinkpoint.schemes.inshrinkerator.space import Configuration, ConfigurationSpace

__all__ = ["delta_neighbourhood", "reprobe"]


def delta_neighbourhood(
    space: ConfigurationSpace,
    predict: Predict,
    incumbent: Configuration,
    max_degradation: float,
    *,
    group: int = 8,
    noise: float = 0.0005,
) -> Search:
    """Check the configuration in use and, if it no longer holds, move to a milder neighbour.

    The search of Inshrinkerator (arXiv 2306.11800) between two exhaustive ones, with a distance of 1. It measures the
    incumbent and its twins under the other metrics, takes a twin that is significantly better, then goes through the
    configurations at most one step milder in bins, prune and protect by ascending predicted size and stops at the first
    feasible one. It never becomes harsher. As sizes are not monotone, a milder configuration may be smaller than the
    incumbent and is then preferred.

    Args:
        space: the configurations to choose between.
        predict: predicted bytes; called for at most ten configurations.
        incumbent: the configuration in use.
        max_degradation: the bound on the relative rise of the loss.
        group: how many measurements may be made in all.
        noise: standard error of a measured degradation.

    Returns:
        The search. It chooses None when no candidate is feasible: an exhaustive search has to follow.

    Raises:
        ConfigError: ``incumbent`` is not of the space, ``group`` is below 1, or a predicted size is NaN.
    """
    return _neighbourhood(space, predict, space.canonical(incumbent), Trail(max_degradation, group), noise)


def _neighbourhood(
    space: ConfigurationSpace, predict: Predict, incumbent: Configuration, trail: Trail, noise: float
) -> Search:
    twins = space.twins(incumbent)
    sizes = predict_sizes((incumbent, *twins), predict)
    centre = first = yield from trail.measure(incumbent, sizes[incumbent])
    for twin in twins:
        if not trail.left:
            break
        other = yield from trail.measure(twin, sizes[twin])
        if _is_better(other, centre, noise):
            centre = other
    switched = "" if centre is first else f"; pruning by {centre.configuration.metric} was better"
    sizes |= predict_sizes(space.around(centre.configuration, (0, 1)), predict)
    candidates = [c for c in sizes if space.at_least_as_mild(c, centre.configuration)]
    for candidate in sorted(candidates, key=lambda c: (sizes[c], c != centre.configuration)):
        evaluation = trail.find(candidate)
        if evaluation is None:
            if not trail.left:
                break
            evaluation = yield from trail.measure(candidate, sizes[candidate])
        if evaluation.feasible:
            moved = "is still" if evaluation is first else "is now"
            return trail.outcome(
                evaluation,
                "neighbourhood",
                f"({candidate}) {moved} the smallest of its neighbourhood within the bound{switched}",
            )
    if centre.feasible:
        reason = (
            f"({centre.configuration}) is within the bound and no smaller neighbour was found to be{switched}"
        )
        return trail.outcome(centre, "neighbourhood", reason)
    reason = f"nothing at most one step milder than ({centre.configuration}) was found within the bound"
    return trail.outcome(None, "neighbourhood", f"{reason}: an exhaustive search has to follow{switched}")


def _is_better(other: Evaluation, centre: Evaluation, noise: float) -> bool:
    if other.feasible != centre.feasible:
        return other.feasible
    return significantly_lower(other.degradation, centre.degradation, noise)


def reprobe(
    space: ConfigurationSpace,
    predict: Predict,
    incumbent: Configuration,
    max_degradation: float,
    *,
    max_evaluations: int = 8,
) -> Search:
    """Look for a smaller configuration within one step of the incumbent, harsher ones included.

    The published search never becomes harsher, so that one unlucky measurement costs size for the rest of the training.
    This one undoes that: the exact search of :mod:`shrinkpoint.quality.inshrinkerator_search.guided` over the smaller configurations of the
    box around the incumbent (all four axes, its metric).

    Args:
        space: the configurations to choose between.
        predict: predicted bytes; called for the box, at most 81 configurations.
        incumbent: the configuration in use.
        max_degradation: the bound on the relative rise of the loss.
        max_evaluations: how many measurements may be made in all.

    Returns:
        The search. It chooses None, after one measurement, when the incumbent itself is no longer within the bound.

    Raises:
        ConfigError: ``incumbent`` is not of the space, ``max_evaluations`` is below 1, or a predicted size is NaN.
    """
    return _reprobe(space, predict, space.canonical(incumbent), Trail(max_degradation, max_evaluations))


def _reprobe(space: ConfigurationSpace, predict: Predict, incumbent: Configuration, trail: Trail) -> Search:
    moves = (-1, 0, 1)
    sizes = predict_sizes(space.around(incumbent, moves, embedding_moves=moves), predict)
    here = yield from trail.measure(incumbent, sizes[incumbent])
    if not here.feasible:
        return trail.outcome(None, "reprobe", f"({incumbent}) is no longer within the bound")
    smaller = {c: size for c, size in sizes.items() if size < here.predicted_bytes}
    found, _ = yield from smallest_feasible(space, smaller, trail)
    if found is None:
        return trail.outcome(
            here, "reprobe", f"({incumbent}) stays: no smaller neighbour was found within the bound"
        )
    return trail.outcome(
        found, "reprobe", f"({found.configuration}) is smaller than ({incumbent}) and within the bound"
    )
