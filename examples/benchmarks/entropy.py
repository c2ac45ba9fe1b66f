"""Speed and size of the entropy coders on synthetic planes, next to zstd -3 on the same bytes.

    python examples/benchmarks/entropy.py --elements 16000000 --threads 2

A level plane of K + 2 levels in which a share of the levels moves by one centroid, coded against its predecessor; a
plane of a base, coded alone. "of entropy" is the size over the conditional entropy of the plane, "of zstd" is the size over that
of zstd -3.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import zstandard

from shrinkpoint.arrays import UInt8s
from shrinkpoint.entropy.static.tables import count_symbols, data_bits
from shrinkpoint.runtime.team import map_in_order
from shrinkpoint.schemes.inshrinkerator.level_deltas import LevelCoder, decode_levels, encode_levels

Result = TypeVar("Result")


@dataclass(frozen=True)
class Row:
    name: str
    symbols: int
    size: int
    encode_s: float
    decode_s: float
    entropy_bits: float
    zstd_size: int

    def __str__(self) -> str:
        bits = 8 * self.size / self.symbols
        of_entropy = 8 * self.size / self.entropy_bits
        encode, decode = (self.symbols / seconds / 1e6 for seconds in (self.encode_s, self.decode_s))
        speed = f"{encode:>9.0f}{decode:>9.0f}"
        return f"{self.name:<38}{speed}{bits:>10.4f} {of_entropy:>11.4f}{self.size / self.zstd_size:>9.3f}"


def best_of(repeats: int, function: Callable[[], Result]) -> tuple[float, Result]:
    """Shortest time in seconds, and the result; one call before compiles the kernels."""
    result = function()
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        result = function()
        times.append(time.perf_counter() - started)
    return min(times), result


def drifting_planes(count: int, bins: int, move: float, seed: int) -> tuple[UInt8s, UInt8s]:
    """Levels of weights that take a small normal step between two checkpoints, 20 % pruned, 1 % protected."""
    rng = np.random.default_rng(seed)
    previous = rng.choice(bins + 2, count, p=[0.2, 0.01] + [0.79 / bins] * bins).astype(np.uint8)
    steps = np.where(rng.random(count) < 0.5, 1, -1)
    moved = np.where((previous > 1) & (rng.random(count) < move), steps, 0)
    return np.clip(previous + moved, 0, bins + 1).astype(np.uint8), previous


def level_row(
    name: str,
    planes: tuple[UInt8s, UInt8s | None],
    levels: int,
    coder: LevelCoder,
    options: argparse.Namespace,
) -> Row:
    current, previous = planes
    before = levels if previous is not None else None

    def timed(work: Callable[[], Any]) -> tuple[float, Any]:
        def in_threads() -> Any:
            (result,) = map_in_order(lambda given: given(), [work], options.threads)
            return result

        return best_of(options.repeats, in_threads)

    encode_s, payload = timed(lambda: encode_levels(current, levels, previous, before, coder))
    decode_s, decoded = timed(lambda: decode_levels(payload, current.size, levels, previous, before))
    if not np.array_equal(decoded, current):
        raise SystemExit(f"{name}: decoding does not give the plane back")
    entropy = data_bits(count_symbols(current, previous, levels, levels)).sum()
    plane = current if previous is None else (current + (np.uint8(levels) - previous)) % np.uint8(levels)
    zstd_size = len(zstandard.compress(plane.tobytes(), 3))
    return Row(name, current.size, len(payload), encode_s, decode_s, entropy, zstd_size)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--elements", type=int, default=8_000_000, help="elements per plane (default 8000000)"
    )
    parser.add_argument("--bins", type=int, default=8, help="centroids per tensor (default 8)")
    parser.add_argument("--threads", type=int, default=1, help="threads of the coders (default 1)")
    parser.add_argument(
        "--repeats", type=int, default=3, help="timed runs, of which the best counts (default 3)"
    )
    options = parser.parse_args()
    levels = options.bins + 2
    print(
        f"{'plane (MSymbols/s)':<38}{'encode':>9}{'decode':>9}{'bits/sym':>10} "
        f"{'of entropy':>11}{'of zstd':>9}"
    )
    for coder in ("rans", "rle-huffman"):
        for move in (0.3, 0.06, 0.006, 0.0006):
            planes = drifting_planes(options.elements, options.bins, move, seed=1)
            print(
                level_row(f"levels, {100 * move:g} % move, {coder}", planes, levels, coder, options),
                flush=True,
            )
    alone, _ = drifting_planes(options.elements, options.bins, 0.0, seed=1)
    print(level_row("levels alone, rans", (alone, None), levels, "rans", options), flush=True)


if __name__ == "__main__":
    main()
