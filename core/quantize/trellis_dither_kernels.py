"""The compiled loops that put values on a dithered trellis and take them off again.

Importing this module imports numba, so it is only ever imported from inside a function of its callers. What readers depend
on is integers and single IEEE 754 operations on fp32 in a fixed order, which numba contracts only where fast math is asked
for: every machine gets the same bits.

A point of h half steps stands for ``(h / 2 - d) step``, d being the element's dither, an odd multiple of 2**-17 in (-1, 1):
points repeat after two steps, not after one. All arrays are flat and of one length n where nothing else is said;
``quarters`` (4,) are the steps of exponents 64 to 67, as in quantize/dither_kernels.py.
"""

import numpy as np

from shrinkpoint.arrays import Float32s, Float64s, Int8s, Int16s, Int32s, UInt8s, UInt16s
from shrinkpoint.quantize.dither_kernels import random_bits, step_of
from shrinkpoint.runtime.jit import jit, jit_part

__all__ = [
    "LIMIT",
    "expect",
    "halves",
    "places",
    "remember",
    "scaled",
    "sum_squares",
    "values",
]


LIMIT = 14_000
"""Steps that a value may be from 0."""

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
    """Where zeros are expected, in 1/256 of a step from point 0."""
    start = np.uint64(seed) << _32
    for i in range(out.size):
        out[i] = np.int16(np.int32(_bits(start, i) >> np.uint64(8)) - np.int32(256))


@jit
def scaled(
    x: Float32s, exponents: UInt8s, quarters: Float32s, seed: int, even: Int16s, out: Float32s
) -> bool:
    """Weights in steps, plus the dither, from the points ``even`` (half steps) on; False if one is beyond `LIMIT`."""
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
    """Add the squares of weights less where they were, in steps, to ``squares`` (129,), by exponent, and to ``counts`` how many
    these are. Arguments as those of `expect`."""
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
def carry(
    x: Float32s,
    errors: Int8s,
    exponents_before: UInt8s,
    quarters_before: Float32s,
    exponents: UInt8s,
    quarters: Float32s,
    share: np.float32,
    out: Float32s,
) -> None:
    """Weights plus a share of their former noise, ``errors`` / 64 steps: of the steps of before or of now, the narrower ones."""
    q0, q1, q2, q3 = quarters[0], quarters[1], quarters[2], quarters[3]
    p0, p1, p2, p3 = quarters_before[0], quarters_before[1], quarters_before[2], quarters_before[3]
    for i in range(out.size):
        step = min(step_of(q0, q1, q2, q3, exponents[i]), step_of(p0, p1, p2, p3, exponents_before[i]))
        out[i] = x[i] + (share * np.float32(errors[i]) * _OF_OFFSET) * step


@jit
def note_errors(x: Float32s, restored: Float32s, exponents: UInt8s, quarters: Float32s, out: Int8s) -> None:
    """The noise: what was restored less the weight, in 1/64 step."""
    q0, q1, q2, q3 = quarters[0], quarters[1], quarters[2], quarters[3]
    parts, most = np.float32(64), np.float32(127)
    for i in range(out.size):
        error = (restored[i] - x[i]) / step_of(q0, q1, q2, q3, exponents[i]) * parts
        out[i] = np.int8(np.int32(np.floor(min(max(error, -most), most) + _HALF)))


@jit
def values(points: Int16s, exponents: UInt8s, quarters: Float32s, seed: int, out: Float32s) -> None:
    """The weights that points stand for: a subtraction and a product."""
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
    moved: np.float32,
    exponents: UInt8s,
    quarters: Float32s,
    seed: int,
    even: Int16s,
    out: Int16s,
) -> None:
    """Where weights are expected on a trellis: the nearest even point, in half steps, and the place from there.

    They are expected ``moved * offsets`` / 64 of the steps that the noise of before was of, ``quarters_before``, from the
    values ``before``.
    """
    start = np.uint64(seed) << _32
    q0, q1, q2, q3 = quarters[0], quarters[1], quarters[2], quarters[3]
    p0, p1, p2, p3 = quarters_before[0], quarters_before[1], quarters_before[2], quarters_before[3]
    bound = np.float32(LIMIT)
    low, high = np.float32(-256), np.float32(255)
    for i in range(out.size):
        offset = (moved * np.float32(offsets[i])) * step_of(p0, p1, p2, p3, exponents_before[i])
        # 2**-6 times a product is exact, unless the result is about to be subnormal, which counts as zero
        mean = before[i] + (offset * _OF_OFFSET if abs(offset) >= _LEAST_OFFSET else _ZERO)
        place = mean / step_of(q0, q1, q2, q3, exponents[i]) + _dither(start, i)
        place = min(max(place, -bound), bound)
        near = np.floor(place * _HALF + _HALF) * _TWO
        even[i] = np.int16(np.int32(near * _TWO))
        out[i] = np.int16(np.int32(min(max(np.floor((place - near) * _PARTS), low), high)))


@jit
def halves(even: Int16s, here: Int16s, seed: int, limit: int, out: UInt8s) -> None:
    """How large the expected weight is, in half steps up to ``limit``."""
    start = np.uint64(seed) << _32
    most = np.int32(limit)
    for i in range(out.size):
        dither = np.int32(_bits(start, i) >> np.uint64(8)) - np.int32(256)
        size = abs((np.int32(even[i]) << 7) + np.int32(here[i]) - dither)
        out[i] = np.uint8(min((size + np.int32(64)) >> 7, most))


@jit
def remember(
    errors: Int32s, gains: UInt16s, exponents: UInt8s, carried: int, offsets: Int8s, out: Int8s
) -> None:
    """How far from its point each weight is expected, in 1/64 of the steps that the noise is of.

    Args:
        errors: points less places, in 1/256 of this checkpoint's steps.
        gains: (256,), `Expectation.gains`.
        exponents: of each element.
        carried: `Expectation`'s share, in 1/16.
        offsets: the same for the points of before.
        out: receives it.
    """
    share = np.int32(carried)
    for i in range(out.size):
        back = (np.int32(512) - errors[i] * np.int32(gains[exponents[i]])) >> 10
        back += (np.int32(offsets[i]) * share + np.int32(8)) >> 4
        out[i] = np.int8(min(max(back, -127), 127))
