"""How fast and how exact the quantile sketch is beside exact quantiles: python examples/benchmarks/sketch.py

All times are taken in turns in one process and are given relative to the sketch's, so that they carry over between
machines better than seconds do.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

from shrinkpoint.quantize.sketch import QuantileSketch, SignedHistogram

SHARES = [0.0005, 0.1, 0.3, 0.5, 0.9, 0.99, 0.9995]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--elements", type=int, default=10_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    generator = torch.Generator().manual_seed(0)
    weight = (torch.randn(options.elements, generator=generator) * 0.02).to(options.device)
    scores = weight.abs()
    rank = int(0.9 * (scores.numel() - 1))

    ways: dict[str, Callable[[], object]] = {
        "QuantileSketch, 7 quantiles": lambda: by_sketch(scores),
        "SignedHistogram": lambda: SignedHistogram().add(weight).histogram(),
        "torch.log per element, 1 histogram": lambda: by_logarithm(scores),
        "torch.kthvalue, 1 quantile": lambda: torch.kthvalue(scores, rank + 1).values.item(),
        "torch.sort, any quantiles": lambda: scores.sort().values[rank].item(),
        "numpy.quantile, 7 quantiles": lambda: np.quantile(scores.cpu().numpy(), SHARES),
    }
    if scores.numel() <= 1 << 24:  # the limit of torch.quantile
        shares = torch.tensor(SHARES, device=scores.device)
        ways["torch.quantile, 7 quantiles"] = lambda: torch.quantile(scores, shares)
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(options.rounds):
        for name, way in ways.items():
            started = time.perf_counter()
            way()
            times[name].append(time.perf_counter() - started)

    base = statistics.median(times["QuantileSketch, 7 quantiles"])
    print(f"{scores.numel():,} scores on {scores.device}, {torch.get_num_threads()} threads")
    print(f"sketch: {base / scores.numel() * 1e9:.2f} ns per element")
    for name, taken in times.items():
        print(f"{name:36} {statistics.median(taken) / base:8.2f} x the sketch's time")
    ordered = scores.sort().values.double()
    found = by_sketch(scores)
    exact = [ordered[int(share * (scores.numel() - 1))].item() for share in SHARES]
    worst = max(abs(value / truth - 1) for value, truth in zip(found, exact, strict=True))
    buckets = len(SignedHistogram().add(weight).histogram().values)
    print(f"worst relative error {worst:.5f} (of a whole bucket: at most 0.02); {buckets} signed buckets")


def by_sketch(scores: torch.Tensor) -> list[float]:
    """The lower edges of the buckets that hold the quantiles."""
    sketch = QuantileSketch().add(scores)
    return [sketch.threshold_below(share) for share in SHARES]


def by_logarithm(scores: torch.Tensor, alpha: float = 0.01) -> torch.Tensor:
    """The textbook sketch: one logarithm per element."""
    width = np.log((1 + alpha) / (1 - alpha))
    counts = torch.zeros(8192, dtype=torch.int64, device=scores.device)
    for chunk in torch.split(scores, 1 << 18):
        buckets = chunk.clamp(min=1e-30).log_().div_(width).ceil_().int().add_(4096)
        found = torch.bincount(buckets)
        counts[: found.numel()] += found
    return counts


if __name__ == "__main__":
    main()
