"""Kernels of trellis-coded quantization with subtractive dither: scaling, prediction and reconstruction.

Importing this module imports numba, so it is only ever imported from inside a function of its callers. Decoding uses
integers and single IEEE 754 operations on fp32 in a fixed order, which numba contracts only under fast math: every
machine gets the same bits.

A point of h half steps has the value ``(h / 2 - d) step``, d being the element's dither, an odd multiple of 2**-17 in
(-1, 1): the lattice has a period of two steps, not of one. All arrays are flat and of one length n where nothing else
is said; ``quarters`` (4,) are the steps of exponents 64 to 67, as in quantize/dither_kernels.py.
"""

import numpy as np

from shrinkpoint.arrays import Float32s, Float64s, Int8s, Int16s, UInt8s, UInt16s
from shrinkpoint.quantize.dither_kernels import random_bits, step_of
from shrinkpoint.runtime.jit import jit, jit_part

__all__ = [
    "LIMIT",
    "expect",
    "places",
    "remember",
    "scaled",
    "sum_squares",
    "values",
]


LIMIT = 14_000
"""Largest magnitude of a value, in steps."""

_47, _32 = np.uint64(47), np.uint64(32)
_HALF, _UNIT, _WHOLE, _TWO = np.float32(0.5), np.float32(2.0**-16), np.float32(1), np.float32(2)
_PARTS, _OF_OFFSET = np.float32(256), np.float32(2.0**-6)
# Products below count as zero, as in quantize/dither_kernels.py.
_ZERO = np.float32(0)
_LEAST_OFFSET = np.float32(2.0**-118)


@jit_part
def _bits(start: np.uint64, i: int) -> np.uint64:
    """The 17 bits of an element's dither."""
    bits: np.uint64 = random_bits(start, i) >> _47
    return bits


@jit_part
def _dither(start: np.uint64, i: int) -> np.float32:
    return (np.float32(np.int32(_bits(start, i))) + _HALF) * _UNIT - _WHOLE


@jit
def places(seed: int, out: Int16s) -> None:
    """Predictions for weights expected to be zero, in 1/256 of a step from point 0."""
    start = np.uint64(seed) << _32
    for i in range(out.size):
        out[i] = np.int16(np.int32(_bits(start, i) >> np.uint64(8)) - np.int32(256))


@jit
def scaled(
    x: Float32s, exponents: UInt8s, quarters: Float32s, seed: int, even: Int16s, out: Float32s
) -> bool:
    """Weights in steps, plus the dither, relative to the points ``even`` (half steps); False if one is beyond
    `LIMIT`."""
    start = np.uint64(seed) << _32
    q0, q1, q2, q3 = quarters[0], quarters[1], quarters[2], quarters[3]
    largest = _ZERO
    for i in range(out.size):
        whole = x[i] / step_of(q0, q1, q2, q3, exponents[i])
        moved = (whole + _dither(start, i)) - np.float32(even[i]) * _HALF
        largest = max(largest, max(abs(whole), abs(moved)))
        out[i] = moved
    return bool(largest <= np.float32(LIMIT))


@jit
def sum_squares(
    x: Float32s,
    before: Float32s,
    offsets: Int8s,
    exponents_before: UInt8s,
    quarters_before: Float32s,
    exponents: UInt8s,
    quarters: Float32s,
    squares: Float64s,
    counts: Float64s,
) -> None:
    """Accumulate the squared prediction errors, in steps, in ``squares`` (129,) by exponent, and their number in
    ``counts``.

    Arguments as those of `expect`.
    """
    q0, q1, q2, q3 = quarters[0], quarters[1], quarters[2], quarters[3]
    p0, p1, p2, p3 = quarters_before[0], quarters_before[1], quarters_before[2], quarters_before[3]
    for i in range(x.size):
        mean = before[i] + (np.float32(offsets[i]) * _OF_OFFSET) * step_of(
            p0, p1, p2, p3, exponents_before[i]
        )
        error = np.float64((x[i] - mean) / step_of(q0, q1, q2, q3, exponents[i]))
        squares[exponents[i]] += error * error
        counts[exponents[i]] += 1.0


@jit
def values(points: Int16s, exponents: UInt8s, quarters: Float32s, seed: int, out: Float32s) -> None:
    """The weights that points represent: a subtraction and a product."""
    start = np.uint64(seed) << _32
    q0, q1, q2, q3 = quarters[0], quarters[1], quarters[2], quarters[3]
    for i in range(out.size):
        out[i] = (np.float32(points[i]) * _HALF - _dither(start, i)) * step_of(q0, q1, q2, q3, exponents[i])


@jit
def expect(
    before: Float32s,
    offsets: Int8s,
    exponents_before: UInt8s,
    quarters_before: Float32s,
    exponents: UInt8s,
    quarters: Float32s,
    seed: int,
    even: Int16s,
    out: Int16s,
) -> None:
    """Predict the weights' positions: the nearest even point, in half steps, and the offset from it in 1/256 step.

    The prediction is the value ``before`` plus ``offsets`` / 64 of the former step size (``exponents_before``,
    ``quarters_before``).
    """
    start = np.uint64(seed) << _32
    q0, q1, q2, q3 = quarters[0], quarters[1], quarters[2], quarters[3]
    p0, p1, p2, p3 = quarters_before[0], quarters_before[1], quarters_before[2], quarters_before[3]
    bound = np.float32(LIMIT)
    low, high = np.float32(-256), np.float32(255)
    for i in range(out.size):
        offset = np.float32(offsets[i]) * step_of(p0, p1, p2, p3, exponents_before[i])
        # 2**-6 times a product is exact, unless the result is about to be subnormal, which counts as zero
        mean = before[i] + (offset * _OF_OFFSET if abs(offset) >= _LEAST_OFFSET else _ZERO)
        place = mean / step_of(q0, q1, q2, q3, exponents[i]) + _dither(start, i)
        place = min(max(place, -bound), bound)
        near = np.floor(place * _HALF + _HALF) * _TWO
        even[i] = np.int16(np.int32(near * _TWO))
        out[i] = np.int16(np.int32(min(max(np.floor((place - near) * _PARTS), low), high)))


@jit
def remember(points: Int16s, places: Int16s, gains: UInt16s, exponents: UInt8s, out: Int8s) -> None:
    """How far from its restored value each weight is expected, in 1/64 of the step size.

    Args:
        points: in half steps.
        places: where they were expected, in 1/256 step.
        gains: (256,), `Expectation.gains`.
        exponents: of each element.
        out: receives it.
    """
    for i in range(out.size):
        error = np.int32(points[i]) * np.int32(128) - np.int32(places[i])
        back = (np.int32(512) - error * np.int32(gains[exponents[i]])) >> 10
        out[i] = np.int8(min(max(back, -127), 127))
