"""Subtractive dither: uniform offsets that encoder and decoder both generate from a seed.

Quantizing ``x + d`` and subtracting d again leaves an error that is uniform and independent of x (Schuchman 1964; Zamir
and Feder 1992): there is no bias towards a level that would accumulate when a run is restored
again and again, and the error's variance is half of stochastic rounding's on average.
"""

import numpy as np

from shrinkpoint.arrays import Float32s

__all__ = ["SEEDS", "dither"]

SEEDS = 2**32
"""Seeds are below."""


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
