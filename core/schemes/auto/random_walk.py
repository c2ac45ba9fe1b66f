"""Where weights on a trellis are expected next: a Kalman filter for random walks that are seen through noise.

Between two checkpoints the weights of a tensor walk by about the same distance, since Adam normalises what it steps by; how
far that is in steps depends on the step alone, of which a tensor has `EXPONENTS`. So two numbers per tensor are all that the
filter needs: the *walk*, and the variance of the weights' previous places, expressed as the walk that would have caused it if it
had gone on for ever. Both are in quarter octaves of a square step of exponent 64, plus `NO_WALK`, which stands for none.

Source: R. Kalman, "A new approach to linear filtering and prediction problems" (1960), for a scalar.
"""

import math
from functools import cache

import numpy as np

from shrinkpoint.arrays import Float64s, UInt16s
from shrinkpoint.entropy.lanes.trellis import NOISE
from shrinkpoint.schemes.auto.row_and_column_steps import MAX_EXPONENT

EXPONENTS = 4 * MAX_EXPONENT + 1
"""Of steps: quarter octaves."""

NO_WALK, LAST_WALK = 0, 160
"""Codes of the least and the greatest walk: none, and one of 2**20 steps. So much is known of weights that were only
seen once: as much as noise leaves."""

_MIDDLE = 80
_FAR = 2.0**30
_LEAST_SHARE = (
    1 / 16
)  # of errors' squares that the walk has at least: how well places are known is an estimate itself
# 2 ** (k / 4), written out: a library's power function may differ by a rounding from one machine to another
_QUARTERS = (1.0, 1.189207115002721, 1.4142135623730951, 1.681792830507429)


@cache
def _walks(code: int) -> Float64s:
    """float64 (EXPONENTS,): the walk's mean square in square steps of each exponent."""
    if code == NO_WALK:
        return np.zeros(EXPONENTS)
    quarters = code - _MIDDLE - 2 * np.arange(-2 * MAX_EXPONENT, 2 * MAX_EXPONENT + 1)
    found = np.ldexp(np.array(_QUARTERS)[quarters % 4], quarters // 4)
    found.flags.writeable = False  # all callers share it
    return found


class Expectation:
    """Of a checkpoint's weights, given what was known of the one before.

    Args:
        variance_code: how well is known where the weights were, as a walk; None makes a base: nothing is.
        walk: how far they have walked since; of no use without `variance_code`.

    Attributes:
        gains: uint16 (256,): how much of what a point lies beyond its place is noise, in 1/256, by exponent.
        variance_code: how well is known then where the weights are.
    """

    gains: UInt16s
    variance_code: int

    def __init__(self, variance_code: int | None, walk: int) -> None:
        self.gains = np.zeros(256, np.uint16)
        if variance_code is None:
            self.variance_code = LAST_WALK
            return
        gains = NOISE / (variances(variance_code) + _walks(walk) + NOISE)
        self.gains[:EXPONENTS] = np.rint(256.0 * gains).astype(np.uint16)
        left = float((NOISE - NOISE * gains)[2 * MAX_EXPONENT])
        self.variance_code = _code(left * left / max(NOISE - left, 1e-9))


def variances(variance_code: int) -> Float64s:
    """float64 (EXPONENTS,): of where weights were, in square steps: what a filter settles at."""
    walk = _walks(variance_code)
    root = np.sqrt(walk * walk + 4.0 * NOISE * walk)
    # (root - walk) / 2 without what cancels
    return np.asarray(2.0 * NOISE * walk / (root + walk + 1e-300))


def measure_walk(squares: Float64s, counts: Float64s, variance_code: int) -> int:
    """Return the walk that errors show.

    Args:
        squares: float64 (EXPONENTS,), sums of the squares of weights less where they were expected, in square steps.
        counts: how many weights each exponent has.
        variance_code: how well was known where they were, as a walk.
    """
    unit = _walks(_MIDDLE)
    total = float((squares / unit).sum())
    before = float((counts * variances(variance_code) / unit).sum())
    return _code(max(total - before, _LEAST_SHARE * total) / max(float(counts.sum()), 1.0))


def _code(walk: float) -> int:
    if walk <= 0:
        return NO_WALK
    return min(max(round(4 * math.log2(min(walk, _FAR))) + _MIDDLE, NO_WALK), LAST_WALK)
