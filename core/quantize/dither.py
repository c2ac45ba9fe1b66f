"""Subtractive dither: uniform offsets that encoder and decoder both generate from a seed.

Quantizing ``x + d`` and subtracting d again leaves an error that is uniform and independent of x (Schuchman 1964; Zamir
and Feder 1992): there is no bias towards a level that would accumulate when a run is restored
again and again, and the error's variance is half of stochastic rounding's on average.

A value near the border of its quantization cell is the most likely to leave it. Coders get the distance to the border
in classes of half an octave, which are finest near it: nearly all non-zero levels of small values have a dither close
to +-1/2.
"""

from functools import lru_cache
from itertools import pairwise

import numpy as np

from shrinkpoint.arrays import Float32s, Int16s, Int64s, UInt8s

__all__ = ["EDGE_CLASSES", "EDGE_PLACES", "SEEDS", "dither", "dither_edges", "edge_starts", "edge_table"]

SEEDS = 2**32
"""Seeds are below."""

EDGE_CLASSES = 20
"""Number of classes of positions in a cell, ascending from its lower to its upper border."""

# distances from a border in 1/512 of a cell at which classes end, half an octave each
_ENDS = (8, 11, 16, 23, 32, 45, 64, 91, 128, 256)
_BELOW = tuple((start + end) // 4 - 128 for start, end in pairwise((0, *_ENDS)))

EDGE_PLACES = (*_BELOW, *(-place for place in reversed(_BELOW)))
"""The middle of each class, in 1/256 of a cell from its middle."""


def dither(seed: int, count: int, *, first: int = 0) -> Float32s:
    """Offsets of one tensor's elements.

    Args:
        seed: 0 to 2**32 - 1.
        count: how many.
        first: number of the first one.

    Returns:
        fp32 (count,), odd multiples of 2**-17 in (-1/2, 1/2): element i depends on `seed` and i alone (SplitMix64 as a
        counter-based generator; Steele, Lea and Flood 2014).
    """
    from shrinkpoint.quantize import dither_kernels  # numba

    out = np.empty(count, np.float32)
    dither_kernels.offsets(seed, first, out)
    return out


def dither_edges(seed: int, count: int) -> UInt8s:
    """The class of each element's offset, 0 to `EDGE_CLASSES` - 1, its cell being from -1/2 to 1/2."""
    from shrinkpoint.quantize import dither_kernels  # numba

    out = np.empty(count, np.uint8)
    dither_kernels.edges(seed, edge_starts(), out)
    return out


@lru_cache(maxsize=1)
def edge_table() -> UInt8s:
    """uint8 (512,): the class of each of 512 equal parts of a cell."""
    distance = np.minimum(np.arange(512), np.arange(512)[::-1])
    near = np.searchsorted(np.array(_ENDS), distance, side="right")
    classes: Int64s = np.where(np.arange(512) < 256, near, EDGE_CLASSES - 1 - near)
    return classes.astype(np.uint8)


@lru_cache(maxsize=1)
def edge_starts() -> Int16s:
    """int16 (`EDGE_CLASSES` - 1,): the part at which each class but the first begins."""
    return (np.flatnonzero(np.diff(edge_table())) + 1).astype(np.int16)
