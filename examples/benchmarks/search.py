"""How many quality measurements the search over the full space of configurations needs.

    python examples/benchmarks/search.py [--instances 300]

Each instance is a random problem whose optimum is known by brute force: qualities that only fall towards harsher
configurations, sizes that are not monotone. Compared are the search of shrinkpoint and the division of the cube into
boxes at their midpoints (Inshrinkerator, arXiv 2306.11800, Algorithm 4, with sizes bounded cell by cell).
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import math
import random
from collections.abc import Callable
from statistics import mean

from shrinkpoint.schemes.inshrinkerator.search import Search
from shrinkpoint.schemes.inshrinkerator.space import Configuration, ConfigurationSpace, Metric

SPACE = ConfigurationSpace()
MILDER = {
    harsh: [mild for mild in SPACE.configurations if SPACE.at_least_as_mild(mild, harsh)]
    for harsh in SPACE.configurations
}
Table = dict[Configuration, float]
Cell = tuple[int, ...]


def entropy(fraction: float) -> float:
    if fraction in (0, 1):
        return 0.0
    return -fraction * math.log2(fraction) - (1 - fraction) * math.log2(1 - fraction)


def modelled_sizes(rng: random.Random, spread: float) -> Table:
    """Bits per weight by the entropy of the levels, 16 bits per protected weight, and a random deviation."""
    embeddings, occupancy = rng.uniform(0, 0.5), rng.uniform(0.3, 1)
    return {
        c: (
            (1 - embeddings) * (entropy(c.prune) + (1 - c.prune) * occupancy * math.log2(c.bins))
            + embeddings * occupancy * math.log2(c.embedding_bins)
            + 24 * c.protect
        )
        * (1 + rng.uniform(-spread, spread))
        for c in SPACE.configurations
    }


def modelled_losses(rng: random.Random) -> Table:
    """Quantization error ~ bins^-2, pruning error ~ prune^2, outliers, in random proportions."""
    bins, prune, protect, embedding = (10 ** rng.uniform(-1, 1) for _ in range(4))
    factor = {"sensitivity": 1.0, "magnitude": rng.uniform(0.5, 3)}
    return {
        c: (
            16 * bins / c.bins**2
            + 4 * prune * factor[c.metric] * c.prune**2
            + 0.02 * protect / c.protect**0.3
            + 64 * embedding / c.embedding_bins**2
        )
        * rng.uniform(1, 1.05)
        for c in SPACE.configurations
    }


def arbitrary_losses(rng: random.Random) -> Table:
    return {c: rng.random() ** 12 for c in SPACE.configurations}


def ours(sizes: Table, holds: Callable[[Configuration], bool], limit: int) -> tuple[float | None, int]:
    search, outcome = Search("exhaustive", SPACE, sizes.__getitem__, 0.5, limit=limit), None
    while outcome is None:
        outcome = search.answer(0.0 if holds(search.request) else 1.0)
    return None if outcome.chosen is None else sizes[outcome.chosen], len(search.answers)


def boxes(sizes: Table, holds: Callable[[Configuration], bool], limit: int) -> tuple[float | None, int]:
    """Best first over boxes of both metrics, bounded by the smallest size in the box."""

    def cells(low: Cell, high: Cell) -> list[Cell]:
        return list(itertools.product(*(range(a, b + 1) for a, b in zip(low, high, strict=True))))

    def bound(metric: Metric, low: Cell, high: Cell) -> float:
        return min(sizes[SPACE.at(metric, cell)] for cell in cells(low, high))

    last: Cell = tuple(length - 1 for length in SPACE.shape)
    heap: list[tuple[float, Metric, Cell, Cell]] = [
        (bound(metric, (0,) * 4, last), metric, (0,) * 4, last) for metric in SPACE.metrics
    ]
    heapq.heapify(heap)
    best: float | None = None
    measured: dict[Configuration, bool] = {}
    while heap and (best is None or heap[0][0] < best):
        _, metric, low, high = heapq.heappop(heap)
        middle = tuple((a + b) // 2 for a, b in zip(low, high, strict=True))
        configuration = SPACE.at(metric, middle)
        if configuration not in measured:
            if len(measured) == limit:
                break
            measured[configuration] = holds(configuration)
        if feasible := measured[configuration]:
            best = min(bound(metric, middle, last), math.inf if best is None else best)
        for axis in range(4):  # the cells that this measurement says nothing about, as disjoint boxes
            lower, upper = list(low), list(high)
            for earlier in range(axis):
                side, value = (lower, middle[earlier]) if feasible else (upper, middle[earlier])
                side[earlier] = value
            if feasible:
                upper[axis] = middle[axis] - 1
            else:
                lower[axis] = middle[axis] + 1
            if lower[axis] <= upper[axis]:
                first, end = tuple(lower), tuple(upper)
                heapq.heappush(heap, (bound(metric, first, end), metric, first, end))
    return best, len(measured)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--instances", type=int, default=300, help="random problems per row")
    instances = parser.parse_args().instances
    rng = random.Random(0)
    print(f"{len(SPACE.configurations)} configurations, {instances} problems per row, limit 45\n")
    print("| sizes deviate by | losses | search | mean | 95th percentile | max | optimum found |")
    print("|---|---|---|---|---|---|---|")
    for spread, (name, losses) in itertools.product(
        (0.03, 0.2), (("modelled", modelled_losses), ("arbitrary", arbitrary_losses))
    ):
        counts: dict[str, list[int]] = {"shrinkpoint": [], "midpoint boxes": []}
        exact = dict.fromkeys(counts, 0)
        for _ in range(instances):
            sizes, raw = modelled_sizes(rng, spread), losses(rng)
            loss = {harsh: max(raw[mild] for mild in milder) for harsh, milder in MILDER.items()}
            bound = rng.choice(sorted(loss.values()))
            feasible = {c for c in loss if loss[c] <= bound}
            optimum = min(sizes[c] for c in feasible)
            for label, search in (("shrinkpoint", ours), ("midpoint boxes", boxes)):
                found, count = search(sizes, feasible.__contains__, 45)
                counts[label].append(count)
                exact[label] += found == optimum
        for label, made in counts.items():
            tail = sorted(made)[int(0.95 * len(made))]
            share = exact[label] / instances
            print(
                f"| {spread:.0%} | {name} | {label} | {mean(made):.1f} | {tail} | {max(made)} | {share:.1%} |"
            )


if __name__ == "__main__":
    main()
