"""Where weights on a trellis are expected next: a Kalman filter for random walks that are seen through noise.

Noise need not be new in every checkpoint. Where weights hardly walk, most of what would be written is new noise: so
a share of the old one is carried over, which an encoder knows, and only the rest is new, of finer steps. Its mean square
stays the same, and it stays independent of the weights. Which share is best depends on how far weights walk: with none of
it, and with the noise of one lattice for ever, more is written than between these.

Between two checkpoints the weights of a tensor walk by about the same distance, since Adam normalises what it steps by; how
far that is in steps depends on the step alone, of which a tensor has `EXPONENTS`. So two numbers per tensor are all that the
filter needs: the *walk*, and the variance of the weights' previous places, expressed as the walk that would have caused it if it
had gone on for ever. Both are in quarter octaves of a square step of exponent 64, plus `NO_WALK`, which stands for none.

Source: R. Kalman, "A new approach to linear filtering and prediction problems" (1960), for a scalar.
"""

import math

import numpy as np

from shrinkpoint.arrays import Float64s, UInt16s
from shrinkpoint.entropy.trellis.states import NOISE, States
from shrinkpoint.schemes.auto.lattice_points import MAX_EXPONENT

__all__ = [
    "CARRIED",
    "EXPONENTS",
    "LAST_WALK",
    "NO_WALK",
    "Expectation",
    "best_share",
    "measure_walk",
    "step_ratio_of",
]


EXPONENTS = 4 * MAX_EXPONENT + 1
"""Of steps: quarter octaves."""

NO_WALK, LAST_WALK = 0, 160
"""Codes of the least and the greatest walk: none, and one of 2**20 steps. So much is known of weights that were only
seen once: as much as noise leaves."""

CARRIED = 16
"""Denominator of the share of carried noise, which is less than 1."""

_MIDDLE = 80
_FAR = 2.0**30
_SHARE = (
    2.1  # of the walk's root in noise: found by minimising the rate of ten checkpoints with Gaussian noise
)
_LEAST_SHARE = (
    1 / 16
)  # of errors' squares that the walk has at least: how well places are known is an estimate itself
# 2 ** (k / 4), written out: a library's power function may differ by a rounding from one machine to another
_QUARTERS = (1.0, 1.189207115002721, 1.4142135623730951, 1.681792830507429)


def _power(quarters: int) -> float:
    return math.ldexp(_QUARTERS[quarters % 4], quarters // 4)


def _walks(code: int) -> Float64s:
    """float64 (EXPONENTS,): the walk's mean square in square steps of each exponent."""
    if code == NO_WALK:
        return np.zeros(EXPONENTS)
    return np.array(
        [_power(code - _MIDDLE - 2 * above) for above in range(-2 * MAX_EXPONENT, 2 * MAX_EXPONENT + 1)]
    )


class Expectation:
    """Of a checkpoint's weights, given what was known of the one before.

    Args:
        variance_code: how well is known where the weights were, as a walk; None makes a base: nothing is.
        walk: how far they have walked since; of no use without `variance_code`.
        carried: share of the former noise that is in this one, in 1/16.
        states: of the trellis.

    Attributes:
        step_ratio: fp32: this checkpoint's step over the one that its noise is of.
        gains: uint16 (256,): how much of what a point lies beyond its place is noise, in 1/256 square of such steps.
        variance_code: how well is known then where the weights are.
    """

    step_ratio: np.float32
    gains: UInt16s
    variance_code: int

    def __init__(self, variance_code: int | None, walk: int, carried: int, states: States) -> None:
        share, noise = carried / CARRIED, NOISE[states]
        fresh = noise * (1.0 - share * share)
        self.step_ratio = step_ratio_of(carried)
        self.gains = np.zeros(256, np.uint16)
        if variance_code is None:
            self.variance_code = LAST_WALK
            return
        before = variances(variance_code, states)
        # of the point less its place, of the noise, and of both together
        innovation = (1.0 - share) * (1.0 - share) * before + _walks(walk) + fresh
        error = share * share * before + fresh
        both = fresh - share * (1.0 - share) * before
        gains = both / innovation
        self.gains[:EXPONENTS] = np.rint(256.0 * float(self.step_ratio) * gains).astype(np.uint16)
        left = float((error - both * gains)[2 * MAX_EXPONENT])
        self.variance_code = _code(left * left / max(noise - left, 1e-9))


def step_ratio_of(carried: int) -> np.float32:
    """How much finer steps are whose noise is only the part that is new."""
    share = carried / CARRIED
    return np.float32(math.sqrt(1.0 - share * share))


def variances(variance_code: int, states: States) -> Float64s:
    """float64 (EXPONENTS,): of where weights were, in square steps: what a filter settles at."""
    noise, walk = NOISE[states], _walks(variance_code)
    root = np.sqrt(walk * walk + 4.0 * noise * walk)
    # (root - walk) / 2 without what cancels
    return np.asarray(2.0 * noise * walk / (root + walk + 1e-300))


def measure_walk(squares: Float64s, counts: Float64s, variance_code: int, states: States) -> int:
    """The walk that errors show.

    Args:
        squares: float64 (EXPONENTS,), sums of the squares of weights less where they were expected, in square steps.
        counts: how many weights each exponent has.
        variance_code: how well was known where they were, as a walk.
        states: of the trellis.
    """
    unit = _walks(_MIDDLE)
    total = float((squares / unit).sum())
    before = float((counts * variances(variance_code, states) / unit).sum())
    return _code(max(total - before, _LEAST_SHARE * total) / max(float(counts.sum()), 1.0))


def best_share(walk: int, counts: Float64s, states: States) -> int:
    """How much noise to carry over, in 1/16.

    Args:
        walk: how far weights have walked.
        counts: float64 (EXPONENTS,), how many weights each exponent has.
        states: of the trellis.
    """
    if walk == NO_WALK:
        return CARRIED - 1
    octaves = np.log2(_walks(walk) / NOISE[states])
    typical = 2.0 ** (float((counts * octaves).sum()) / max(float(counts.sum()), 1.0))
    return min(round(CARRIED / (1.0 + _SHARE * math.sqrt(typical))), CARRIED - 1)


def _code(walk: float) -> int:
    if walk <= 0:
        return NO_WALK
    return min(max(round(4 * math.log2(min(walk, _FAR))) + _MIDDLE, NO_WALK), LAST_WALK)
