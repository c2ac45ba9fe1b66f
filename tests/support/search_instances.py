"""Random search problems whose answer is known, and a loop that plays the trainer's part."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from shrinkpoint.schemes.inshrinkerator.search import Search
from shrinkpoint.schemes.inshrinkerator.space import Configuration, ConfigurationSpace

SMALL = ConfigurationSpace(
    bins=(4, 8, 16), prune=(0.4, 0.2, 0.0), protect=(0.001, 0.01), embedding_bins=(16, 32)
)


@dataclass(frozen=True, kw_only=True)
class Problem:
    space: ConfigurationSpace
    size: dict[Configuration, float]
    degradation: dict[Configuration, float]
    bound: float

    @property
    def smallest(self) -> float | None:
        """Size of the true optimum, by brute force."""
        return min((self.size[c] for c, d in self.degradation.items() if d <= self.bound), default=None)


@lru_cache
def at_least_as_mild(space: ConfigurationSpace) -> dict[Configuration, list[Configuration]]:
    """For each configuration those that are at least as mild."""
    return {
        harsh: [mild for mild in space.configurations if space.at_least_as_mild(mild, harsh)]
        for harsh in space.configurations
    }


def random_problem(seed: int, space: ConfigurationSpace) -> Problem:
    """Degradations that only rise towards harsher configurations, of any shape; sizes without any order."""
    rng = random.Random(seed)
    configurations = space.configurations
    sharpness = rng.choice((1, 4, 16))
    if rng.random() < 0.5:
        raw = {c: rng.random() ** sharpness for c in configurations}
    else:
        slopes = [rng.random() ** 2 for _ in range(4)]
        raw = {
            c: sum(slope * (-step) for slope, step in zip(slopes, space.steps(c), strict=True))
            + 0.3 * rng.random() * (c.metric == "magnitude")
            for c in configurations
        }
    worst = {harsh: max(raw[mild] for mild in milder) for harsh, milder in at_least_as_mild(space).items()}
    if rng.random() < 0.3:  # many ties
        size = {c: float(rng.randrange(6)) for c in configurations}
    else:
        trend = rng.choice((0.0, 1.0, 20.0))
        size = {c: trend * sum(space.steps(c)) + 10 * rng.random() + 1 for c in configurations}
    values = [*sorted(worst.values()), min(worst.values()) - 1]
    return Problem(space=space, size=size, degradation=worst, bound=rng.choice(values))


@dataclass(frozen=True)
class Found:
    """What a search has found, and the degradations that it asked for, in order."""

    chosen: Configuration | None
    reason: str
    answers: dict[Configuration, float]

    @property
    def degradation(self) -> float | None:
        return None if self.chosen is None else self.answers[self.chosen]

    @property
    def measured(self) -> list[Configuration]:
        return list(self.answers)


def run(search: Search, degradation: Callable[[Configuration], float]) -> Found:
    """Answer every request of a search at once."""
    asked = []
    while True:
        asked.append(search.request)
        outcome = search.answer(degradation(search.request))
        if outcome is not None:
            assert asked == list(search.answers)  # nothing twice
            return Found(outcome.chosen, outcome.reason, search.answers)


def harshness(space: ConfigurationSpace, configuration: Configuration) -> int:
    """Steps from the mildest configuration, over all axes."""
    return sum(space.shape) - len(space.shape) - sum(space.steps(configuration))


def steep_size(space: ConfigurationSpace) -> Callable[[Configuration], float]:
    """Sizes that fall with every step towards harsher; no two are equal."""
    number = {c: n for n, c in enumerate(space.configurations)}
    return lambda c: 1000.0 - 10 * harshness(space, c) + number[c] / 1000


NOT_FINITE = (math.nan, math.inf, -math.inf)
