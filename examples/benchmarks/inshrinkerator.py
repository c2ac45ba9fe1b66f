"""The parts of Inshrinkerator (arXiv 2306.11800) beside ours: its search, its quantiles and its clustering.

    python examples/benchmarks/inshrinkerator.py [--only search,sketch,clustering] [--instances 300] [--elements 10000000]
        [--rounds 5] [--device cpu]

search: how many measurements of quality the search over the full space of configurations needs. Each instance is a random problem whose
optimum is known by brute force: qualities that only fall towards harsher configurations, sizes that are not monotone. Compared are the
search of shrinkpoint and the division of the cube into boxes at their midpoints (Algorithm 4, with sizes bounded cell by cell).
sketch: how fast and how exact the quantile sketch is beside exact quantiles. clustering: codebooks from a histogram, and by the published
weighted k-means++ seeding with Lloyd's iterations (Algorithm 3), beside scikit-learn's KMeans on the elements, of which there are a tenth;
errors are measured on these, with the nearest centroid. Times are taken in turns in one process and given as ratios.
"""

import heapq
import itertools
import math
import random
import statistics
import time
from collections.abc import Callable, Mapping
from statistics import mean
from typing import Any

import numpy as np
import torch
from common import parsed, show

from shrinkpoint.arrays import Float64s
from shrinkpoint.quantize.clustering import assign, optimal_codebooks, sample_weights
from shrinkpoint.quantize.sketch import Sketch
from shrinkpoint.schemes.inshrinkerator.search import Search
from shrinkpoint.schemes.inshrinkerator.space import Configuration, ConfigurationSpace, Metric

SHARES = [0.0005, 0.1, 0.3, 0.5, 0.9, 0.99, 0.9995]
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


Asked = Callable[[Configuration], bool]


def ours(sizes: Table, holds: Asked, limit: int) -> tuple[float | None, int]:
    search, outcome = Search("exhaustive", SPACE, sizes.__getitem__, 0.5, limit=limit), None
    while outcome is None:
        outcome = search.answer(0.0 if holds(search.request) else 1.0)
    return None if outcome.chosen is None else sizes[outcome.chosen], len(search.answers)


def boxes(sizes: Table, holds: Asked, limit: int) -> tuple[float | None, int]:
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


def search(options: Any) -> None:
    rng, rows = random.Random(0), []
    losses = {"modelled": modelled_losses, "arbitrary": arbitrary_losses}
    for spread, (name, made) in itertools.product((0.03, 0.2), losses.items()):
        counts: dict[str, list[int]] = {"shrinkpoint": [], "midpoint boxes": []}
        exact = dict.fromkeys(counts, 0)
        for _ in range(options.instances):
            sizes, raw = modelled_sizes(rng, spread), made(rng)
            loss = {harsh: max(raw[mild] for mild in milder) for harsh, milder in MILDER.items()}
            bound = rng.choice(sorted(loss.values()))
            feasible = {c for c in loss if loss[c] <= bound}
            optimum = min(sizes[c] for c in feasible)
            for label, by in (("shrinkpoint", ours), ("midpoint boxes", boxes)):
                found, count = by(sizes, feasible.__contains__, 45)
                counts[label].append(count)
                exact[label] += found == optimum
        for label, taken in counts.items():
            tail, share = sorted(taken)[int(0.95 * len(taken))], exact[label] / options.instances
            rows.append(
                [f"{spread:.0%}", name, label, f"{mean(taken):.1f}", tail, max(taken), f"{share:.1%}"]
            )
    title = f"{len(SPACE.configurations)} configurations, {options.instances} problems per row, limit 45"
    show("sizes deviate by | losses | search | mean | 95th percentile | max | optimum found", rows, title)


# --- quantiles and codebooks --------------------------------------------------------------------------------


def seconds_of(ways: Mapping[str, Callable[[], Any]], rounds: int) -> tuple[dict[str, float], dict[str, Any]]:
    """Median seconds of each way, taken in turns, and what each has found."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    found = {}
    for name, way in itertools.chain.from_iterable(itertools.repeat(tuple(ways.items()), rounds)):
        started = time.perf_counter()
        found[name] = way()
        times[name].append(time.perf_counter() - started)
    return {name: statistics.median(taken) for name, taken in times.items()}, found


def sketch(options: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = (torch.randn(options.elements, generator=generator) * 0.02).to(options.device)
    scores = weight.abs()
    rank = int(0.9 * (scores.numel() - 1))
    ways: dict[str, Callable[[], object]] = {
        "sketch, 7 quantiles": lambda: by_sketch(scores),
        "histogram": lambda: Sketch().add(weight).histogram(),
        "torch.log per element, 1 histogram": lambda: by_logarithm(scores),
        "torch.kthvalue, 1 quantile": lambda: torch.kthvalue(scores, rank + 1).values.item(),
        "torch.sort, any quantiles": lambda: scores.sort().values[rank].item(),
        "numpy.quantile, 7 quantiles": lambda: np.quantile(scores.cpu().numpy(), SHARES),
    }
    if scores.numel() <= 1 << 24:  # the limit of torch.quantile
        shares = torch.tensor(SHARES, device=scores.device)
        ways["torch.quantile, 7 quantiles"] = lambda: torch.quantile(scores, shares)
    times, found = seconds_of(ways, options.rounds)
    base = times["sketch, 7 quantiles"]
    title = f"{scores.numel():,} scores on {scores.device}; sketch: {base / scores.numel() * 1e9:.2f} ns per element"
    show(
        "quantiles | x the sketch's time",
        [[name, f"{taken / base:.2f}"] for name, taken in times.items()],
        title,
    )
    ordered = scores.sort().values.double()
    exact = [ordered[int(share * (scores.numel() - 1))].item() for share in SHARES]
    pairs = zip(found["sketch, 7 quantiles"], exact, strict=True)
    worst = max(abs(value / truth - 1) for value, truth in pairs)
    buckets = len(found["histogram"].values)
    print(f"worst relative error {worst:.5f} (of a whole bucket: at most 0.02); {buckets} signed buckets")


def by_sketch(scores: torch.Tensor) -> list[float]:
    """The lower edges of the buckets that hold the quantiles."""
    found = Sketch().add(scores)
    return [found.threshold_below(share) for share in SHARES]


def by_logarithm(scores: torch.Tensor, alpha: float = 0.01) -> torch.Tensor:
    """The textbook sketch: one logarithm per element."""
    width = np.log((1 + alpha) / (1 - alpha))
    counts = torch.zeros(8192, dtype=torch.int64, device=scores.device)
    for chunk in torch.split(scores, 1 << 18):
        buckets = chunk.clamp(min=1e-30).log_().div_(width).ceil_().int().add_(4096)
        found = torch.bincount(buckets)
        counts[: found.numel()] += found
    return counts


def clustering(options: Any) -> None:
    """Print the times and errors of codebooks, of weights whose distribution is heavy-tailed, as that of trained ones is."""
    count = options.elements // 10
    data = np.random.default_rng(0).standard_t(df=5, size=count) * 0.02
    weight, rows = torch.from_numpy(data.astype(np.float32)), []
    optimal_codebooks(np.zeros(1), np.ones(1), [1])  # compiles
    for k in (16, 32):
        ways = {
            "sklearn KMeans (k-means++, 1 start)": lambda k=k: by_sklearn(weight, k),
            "optimal codebook, lambda 0": lambda k=k: by_histogram(weight, k, 0.0),
            "optimal codebook, lambda 0.1": lambda k=k: by_histogram(weight, k, 0.1),
            "published, lambda 0": lambda k=k: by_seeding(weight, k),
        }
        times, found = seconds_of(ways, options.rounds)
        errors = {name: mean_squared_error(weight, codebook) for name, codebook in found.items()}
        first = next(iter(ways))
        for name in ways:
            ratios = f"{times[first] / times[name]:.1f} x", f"x {errors[name] / errors[first]:.4f}"
            rows.append([k, name, *ratios])
    show("k | codebook | as fast | error", rows, f"{weight.numel():,} float32 weights")


def mean_squared_error(weight: torch.Tensor, codebook: torch.Tensor) -> float:
    return float((codebook[assign(weight, codebook).int()].double() - weight.double()).square().mean())


def by_sklearn(weight: torch.Tensor, k: int) -> torch.Tensor:
    from sklearn.cluster import KMeans

    fitted = KMeans(k, n_init=1, max_iter=100, random_state=0).fit(weight.numpy().reshape(-1, 1))
    return torch.from_numpy(np.sort(fitted.cluster_centers_.ravel()).astype(np.float32))


def by_histogram(weight: torch.Tensor, k: int, magnitude_share: float) -> torch.Tensor:
    histogram = Sketch().add(weight).histogram()
    return optimal_codebooks(histogram.values, sample_weights(histogram, magnitude_share), [k])[k]


def by_seeding(weight: torch.Tensor, k: int) -> torch.Tensor:
    """Weighted k-means++ seeding, then Lloyd's iterations, on the buckets."""
    histogram = Sketch().add(weight).histogram()
    values, weights = histogram.values, sample_weights(histogram, 0.0)
    centres, previous = _seeded(values, weights, k, np.random.default_rng(0)), np.inf
    for _ in range(100):
        inner = np.searchsorted(values, (centres[:-1] + centres[1:]) / 2, side="right")
        splits = np.concatenate(([0], inner, [len(values)]))
        error = float(weights @ (values - np.repeat(centres, np.diff(splits))) ** 2)
        if previous - error <= 1e-6 * previous < np.inf:
            break
        previous, starts = error, splits[:-1][np.diff(splits) > 0]
        centres = np.add.reduceat(weights * values, starts) / np.add.reduceat(weights, starts)
    return torch.from_numpy(np.unique(centres.astype(np.float32)))


def _seeded(values: Float64s, weights: Float64s, k: int, generator: np.random.Generator) -> Float64s:
    """k-means++: the first centre by weight, each further one by weight times squared distance to the nearest."""
    centres: list[float] = []
    odds, distances = weights, np.full(len(values), np.inf)
    while len(centres) < k:
        centres.append(float(values[generator.choice(len(values), p=odds / odds.sum())]))
        distances = np.minimum(distances, (values - centres[-1]) ** 2)
        odds = weights * distances
    return np.asarray(np.unique(np.array(centres)))


SECTIONS = {section.__name__: section for section in (search, sketch, clustering)}


def main() -> None:
    sizes = {"instances": 300, "elements": 10_000_000, "rounds": 5}
    options = parsed(__doc__, only=list(SECTIONS), device="cpu", **sizes)
    for name in options.only:
        SECTIONS[name](options)


if __name__ == "__main__":
    main()
