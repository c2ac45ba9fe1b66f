"""ExCP's quantizer alone: values with a mask to symbols 0 = pruned, 1.. = ascending clusters, and back.

Separate from `shrinkpoint.schemes.published.excp`, so that other entropy coders can use the same symbols.

Source: ExCP (arXiv 2406.11257), section 3.4, and ``compress_pythia.py`` of its repository.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from shrinkpoint.arrays import Bools, Float32s, UInt8s
from shrinkpoint.errors import CannotRepresentError
from shrinkpoint.quantize.clustering import assign
from shrinkpoint.schemes.codec_io import matrix_shape, normal

__all__ = [
    "Codebook",
    "Refill",
    "Symbols",
    "cluster",
    "refill_factors",
    "refill_values",
]

Codebook = Literal["float32", "float16"]
Refill = Literal["none", "mean", "factored"]
"""The restored value of a pruned second moment: zero as published, its tensor's mean, or row mean x column mean /
mean."""

_ITERATIONS = 25  # faiss.Kmeans' defaults, which the repository uses
_POINTS_PER_CLUSTER = 256
_SEED = 1234


@dataclass(frozen=True, kw_only=True)
class Symbols:
    """One quantized tensor before any entropy coding."""

    plane: UInt8s
    """0 = pruned, 1.. = cluster + 1; flat in C order."""
    codebook: Float32s
    """Strictly ascending, without the zero of symbol 0; at most 2^bits - 1."""

    def values(self) -> Float32s:
        """The values that the symbols represent."""
        table = np.concatenate([np.zeros(1, np.float32), self.codebook])
        values: Float32s = table[self.plane]
        return values


def cluster(values: Float32s, keep: Bools, bits: int, codebook: Codebook) -> Symbols:
    """Quantize the kept nonzero values to at most ``2^bits - 1`` clusters.

    Few enough distinct values are their own clusters, where the repository stores the tensor itself: the same values.

    Args:
        values: flat, finite.
        keep: flat; what is False becomes symbol 0.
        bits: 1..8.
        codebook: dtype that its values are rounded to.

    Raises:
        CannotRepresentError: a centroid is beyond fp16.
    """
    values = normal(values)
    mask = keep & (values != 0)
    kept, size = values[mask], (1 << bits) - 1
    centroids = _centroids(kept, size) if kept.size else np.empty(0, np.float32)
    if codebook == "float16":
        with np.errstate(over="ignore"):
            centroids = centroids.astype(np.float16).astype(np.float32)
        if not np.isfinite(centroids).all():
            raise CannotRepresentError("a cluster lies beyond the range of an fp16 codebook")
    # near the end of the range a mean may round to a subnormal, which decodes as zero, as in fp16
    centroids = np.unique(normal(centroids))
    plane = np.zeros(values.size, dtype=np.uint8)
    if kept.size:
        plane[mask] = assign(torch.from_numpy(kept), torch.from_numpy(centroids)).numpy() + 1
    return Symbols(plane=plane, codebook=centroids)


def _centroids(kept: Float32s, size: int) -> Float32s:
    distinct: Float32s = np.unique(kept[: 1 << 12])
    if distinct.size <= size and (distinct := np.unique(kept)).size <= size:
        return distinct
    return _kmeans(kept, size)


def _kmeans(kept: Float32s, size: int) -> Float32s:
    """Lloyd's algorithm as ``faiss.Kmeans(1, size)`` runs it: a sample of the points, random ones of them to start."""
    generator = np.random.default_rng(_SEED)
    points = kept
    if points.size > _POINTS_PER_CLUSTER * size:
        points = generator.choice(points, _POINTS_PER_CLUSTER * size, replace=False)
    points = np.sort(points).astype(np.float64)
    centres = np.unique(generator.choice(points, size, replace=False))
    sums = np.concatenate([[0.0], np.cumsum(points)])
    for _ in range(_ITERATIONS):
        inner = np.searchsorted(points, (centres[1:] + centres[:-1]) / 2)
        bounds = np.concatenate([[0], inner, [points.size]])
        members = np.diff(bounds)
        moved = np.diff(sums[bounds]) / np.maximum(members, 1)
        centres = np.unique(np.where(members > 0, moved, centres))
    final: Float32s = np.unique(centres.astype(np.float32))
    return final


def refill_factors(second: Float32s, shape: tuple[int, ...], refill: Refill) -> Float32s:
    """The stored values from which pruned second moments are refilled: none, the mean, or row and column means."""
    if refill == "none":
        return np.empty(0, np.float32)
    wide = second.astype(np.float64)
    if refill == "mean" or wide.max() <= 0:
        return normal(
            np.array([wide.mean()] * (1 if refill == "mean" else sum(matrix_shape(shape))), np.float32)
        )
    matrix = wide.reshape(matrix_shape(shape))
    rows = (
        matrix.mean(axis=1) / matrix.mean()
    )  # divided here, so that the decoder's one product cannot underflow
    return normal(np.concatenate([rows, matrix.mean(axis=0)]).astype(np.float32))


def refill_values(factors: Float32s, shape: tuple[int, ...]) -> Float32s:
    """The refill of every element, flat, from the result of `refill_factors`: stored numbers or one product of two."""
    rows, columns = matrix_shape(shape)
    if factors.size == 1:
        same: Float32s = np.full(rows * columns, factors[0], np.float32)
        return same
    with np.errstate(over="ignore", invalid="ignore"):
        return normal(np.multiply.outer(factors[:rows], factors[rows:]).reshape(-1))
