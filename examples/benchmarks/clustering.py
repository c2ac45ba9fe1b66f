"""Codebooks from a histogram beside scikit-learn's KMeans on the elements: python examples/benchmarks/clustering.py

The published clustering (Inshrinkerator, arXiv 2306.11800, Algorithm 3) is there, too: weighted k-means++ seeding, then
Lloyd's iterations, on the buckets. All get the same weights, and errors are measured on the elements, with the nearest
centroid. Times and errors are relative to scikit-learn's in the same run.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
from sklearn.cluster import KMeans

from shrinkpoint.arrays import Float64s
from shrinkpoint.quantize.clustering import assign, optimal_clusters, sample_weights
from shrinkpoint.quantize.sketch import SignedHistogram


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--elements", type=int, default=1_000_000)
    parser.add_argument("--clusters", type=int, nargs="+", default=[16, 32])
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    data = (
        np.random.default_rng(0).standard_t(df=5, size=options.elements) * 0.02
    )  # heavy-tailed, as weights are
    weight = torch.from_numpy(data.astype(np.float32))
    optimal_clusters(np.zeros(1), np.ones(1), 1)  # compiles
    print(f"{weight.numel():,} float32 weights, {torch.get_num_threads()} threads")
    for k in options.clusters:
        compare(weight, k, options.rounds)


def compare(weight: torch.Tensor, k: int, rounds: int) -> None:
    ways: dict[str, Callable[[], torch.Tensor]] = {
        "sklearn KMeans (k-means++, 1 start)": lambda: by_sklearn(weight, k),
        "optimal_clusters, lambda 0": lambda: by_histogram(weight, k, 0.0),
        "optimal_clusters, lambda 0.1": lambda: by_histogram(weight, k, 0.1),
        "published, lambda 0": lambda: by_seeding(weight, k),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    errors = {}
    for _ in range(rounds):
        for name, way in ways.items():
            started = time.perf_counter()
            codebook = way()
            times[name].append(time.perf_counter() - started)
            errors[name] = mean_squared_error(weight, codebook)
    first = next(iter(ways))
    for name in ways:
        speed = statistics.median(times[first]) / statistics.median(times[name])
        print(f"k={k:3} {name:36} {speed:7.1f} x as fast, error x {errors[name] / errors[first]:.4f}")


def mean_squared_error(weight: torch.Tensor, codebook: torch.Tensor) -> float:
    return float((codebook[assign(weight, codebook).int()].double() - weight.double()).square().mean())


def by_sklearn(weight: torch.Tensor, k: int) -> torch.Tensor:
    fitted = KMeans(k, n_init=1, max_iter=100, random_state=0).fit(weight.numpy().reshape(-1, 1))
    return torch.from_numpy(np.sort(fitted.cluster_centers_.ravel()).astype(np.float32))


def by_histogram(weight: torch.Tensor, k: int, magnitude_share: float) -> torch.Tensor:
    histogram = SignedHistogram().add(weight).histogram()
    return optimal_clusters(histogram.values, sample_weights(histogram, magnitude_share), k)


def by_seeding(weight: torch.Tensor, k: int) -> torch.Tensor:
    histogram = SignedHistogram().add(weight).histogram()
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


if __name__ == "__main__":
    main()
