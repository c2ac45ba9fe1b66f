"""Kernels of trellis-coded quantization with subtractive dither: scaling, prediction and reconstruction.

Importing this module imports numba, so it is only ever imported from inside a function of its callers. Decoding uses
integers and single IEEE 754 operations on fp32 in a fixed order, which numba contracts only under fast math: every
machine gets the same bits.

A point of h half steps has the value ``(h / 2 - d) step``, d being the element's dither, an odd multiple of 2**-17 in
(-1, 1): the lattice has a period of two steps, not of one. All arrays are flat and of one length n where nothing else
is said; ``quarters`` (4,) are the steps of exponents 64 to 67.
"""

from typing import NamedTuple

import numpy as np

from shrinkpoint.arrays import Float32s, Float64s, Indices, Int8s, Int16s, UInt8s, UInt16s
from shrinkpoint.quantize.viterbi_kernels import LANES, Search, search
from shrinkpoint.runtime.jit import jit, jit_inlined, jit_part

__all__ = [
    "LIMIT",
    "Known",
    "expect",
    "places",
    "points",
    "quantize",
    "random_bits",
    "reach",
    "remember",
    "sum_squares",
    "values",
]


LIMIT = 14_000
"""Largest magnitude of a value, in steps."""

_47, _32 = np.uint64(47), np.uint64(32)
_HALF, _UNIT, _WHOLE, _TWO = np.float32(0.5), np.float32(2.0**-16), np.float32(1), np.float32(2)
_PARTS, _OF_OFFSET = np.float32(256), np.float32(2.0**-6)
_WEYL = np.uint64(0x9E37_79B9_7F4A_7C15)
_MIX_1, _MIX_2 = np.uint64(0xBF58_476D_1CE4_E5B9), np.uint64(0x94D0_49BB_1331_11EB)
_30, _27, _31, _ONE = np.uint64(30), np.uint64(27), np.uint64(31), np.uint64(1)
_OCTAVE_ZERO, _MANTISSA_BITS = 127 - 16, 23
_ZERO = np.float32(0)
_LEAST_OFFSET = np.float32(2.0**-118)  # products below count as zero
_BOUND = np.float32(LIMIT)


@jit_part
def random_bits(start: np.uint64, i: int) -> np.uint64:
    """64 bits of an element's own (SplitMix64 as a counter-based generator); ``start`` is the seed, shifted by 32."""
    bits = (np.uint64(i) + _ONE + start) * _WEYL
    bits = (bits ^ (bits >> _30)) * _MIX_1
    bits = (bits ^ (bits >> _27)) * _MIX_2
    return bits ^ (bits >> _31)


@jit_part
def step_of(q0: np.float32, q1: np.float32, q2: np.float32, q3: np.float32, exponent: np.uint8) -> np.float32:
    """``quarters[e % 4] * 2 ** (e // 4 - 16)``, of which the product is exact."""
    k = np.int32(exponent)
    low = q1 if k & 1 else q0
    high = q3 if k & 1 else q2
    octave = np.int32(((k >> 2) + _OCTAVE_ZERO) << _MANTISSA_BITS)
    return (high if k & 2 else low) * octave.view(np.float32)


@jit_part
def _bits(start: np.uint64, i: int) -> np.uint64:
    """Return the 17 bits of an element's dither."""
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
def points(x: Float32s, exponents: UInt8s, quarters: Float32s, seed: int, out: Int16s) -> bool:
    """The points of values, in half steps, the inverse of `values`; False where a value is not that of any point."""
    start = np.uint64(seed) << _32
    q0, q1, q2, q3 = quarters[0], quarters[1], quarters[2], quarters[3]
    sound = True
    for i in range(out.size):
        step, dither = step_of(q0, q1, q2, q3, exponents[i]), _dither(start, i)
        point = np.rint(min(max(x[i] / step + dither, -_BOUND), _BOUND) * _TWO)
        sound &= (point * _HALF - dither) * step == x[i]
        out[i] = np.int16(np.int32(point))
    return bool(sound)


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
    """Compute the weights that points represent: a subtraction and a product."""
    start = np.uint64(seed) << _32
    q0, q1, q2, q3 = quarters[0], quarters[1], quarters[2], quarters[3]
    for i in range(out.size):
        out[i] = (np.float32(points[i]) * _HALF - _dither(start, i)) * step_of(q0, q1, q2, q3, exponents[i])


@jit_inlined
def _expected(
    before: np.float32, offset: np.float32, step: np.float32, dither: np.float32
) -> tuple[np.float32, np.float32]:
    """Compute where a weight is expected, in steps, and the nearest even point."""
    # 2**-6 times a product is exact, unless the result is about to be subnormal, which counts as zero
    mean = before + (offset * _OF_OFFSET if abs(offset) >= _LEAST_OFFSET else _ZERO)
    place = min(max(mean / step + dither, -_BOUND), _BOUND)
    return place, np.floor(place * _HALF + _HALF) * _TWO


@jit_inlined
def _part_of(place: np.float32, near: np.float32) -> np.int16:
    return np.int16(np.int32(min(max(np.floor((place - near) * _PARTS), np.float32(-256)), np.float32(255))))


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
    for i in range(out.size):
        offset = np.float32(offsets[i]) * step_of(p0, p1, p2, p3, exponents_before[i])
        step = step_of(q0, q1, q2, q3, exponents[i])
        place, near = _expected(before[i], offset, step, _dither(start, i))
        even[i] = np.int16(np.int32(near * _TWO))
        out[i] = _part_of(place, near)


@jit
def reach(points: Int16s, even: Int16s, farthest: int, out: Int16s) -> bool:
    """Points from 0, of those from even points; False if one is farther from 0 than so many half steps."""
    largest = np.int32(0)
    for i in range(out.size):
        point = np.int32(even[i]) + np.int32(points[i])
        largest = max(largest, abs(point))
        out[i] = np.int16(point)
    return bool(largest <= farthest)


@jit
def remember(points: Int16s, places: Int16s, gains: UInt16s, exponents: UInt8s, out: Int8s) -> None:
    """Compute how far from its restored value each weight is expected, in 1/64 of the step size.

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
        out[i] = np.int8(min(max(int(back), -127), 127))


class Known(NamedTuple):
    """What is known of weights before they are quantized; all of one length, or empty.

    Attributes:
        values: what was restored of them.
        offsets: how far from there each is expected, in 1/64 of the former step.
        exponents: of the former steps.
        quarters: (4,).
    """

    values: Float32s
    offsets: Int8s
    exponents: UInt8s
    quarters: Float32s


@jit
def quantize(
    x: Float32s,
    known: Known,
    exponents: UInt8s,
    quarters: Float32s,
    seed: int,
    rows: Indices,
    columns: int,
    width: int,
    paths: tuple[int, int],
    room: Search,
    points: Int16s,
    places: Int16s,
    reached: Int16s,
) -> bool:
    """Put weights on the nearest paths; False if one is too many steps from zero.

    Args:
        x: weights.
        known: as `expect` takes it; empty where they are expected around zero.
        exponents: of all weights.
        quarters: (4,).
        seed: of the dither.
        rows: the only rows that are coded, one after another; empty for all.
        columns: of the matrix.
        width: elements of a path.
        paths: the first one, and the end.
        room: `viterbi_kernels.new_search` for the width.
        points: of the rows that are coded: receives points, in half steps from the even ones nearest to where they are expected.
        places: of the rows that are coded: receives where they are expected, in 1/256 step from the even points.
        reached: of all weights: receives points from zero.
    """
    start = np.uint64(seed) << _32
    q0, q1, q2, q3 = quarters[0], quarters[1], quarters[2], quarters[3]
    p0, p1, p2, p3 = known.quarters[0], known.quarters[1], known.quarters[2], known.quarters[3]
    is_delta = known.values.size > 0
    largest, size = _ZERO, points.size
    for first in range(paths[0], paths[1], LANES):
        some = min(LANES, paths[1] - first)
        last = min(width, size - (first + some - 1) * width)
        for lane in range(some):
            at = (first + lane) * width
            end, out = min(at + width, size), room.values[lane]
            begin = at
            while at < end:
                row = at // columns
                column = at - row * columns
                many = min(columns - column, end - at)
                i = (rows[row] if rows.size else row) * columns + column
                for k in range(many):
                    step = step_of(q0, q1, q2, q3, exponents[i + k])
                    dither = _dither(start, i + k)
                    near = _ZERO
                    if is_delta:
                        offset = np.float32(known.offsets[i + k]) * step_of(
                            p0, p1, p2, p3, known.exponents[i + k]
                        )
                        place, near = _expected(known.values[i + k], offset, step, dither)
                        places[at + k] = _part_of(place, near)
                    else:
                        bits = np.int32(_bits(start, i + k) >> np.uint64(8))
                        places[at + k] = np.int16(bits - np.int32(256))
                    reached[i + k] = np.int16(np.int32(near * _TWO))
                    whole = x[i + k] / step
                    moved = (whole + dither) - near
                    largest = max(largest, max(abs(whole), abs(moved)))
                    out[at - begin + k] = moved
                at += many
        if not largest <= _BOUND:
            return False
        search(room, some, width, last, first * width, points)
        at, end = first * width, min((first + some) * width, size)
        while at < end:
            row = at // columns
            column = at - row * columns
            many = min(columns - column, end - at)
            i = (rows[row] if rows.size else row) * columns + column
            for k in range(many):
                reached[i + k] = np.int16(np.int32(reached[i + k]) + np.int32(points[at + k]))
            at += many
    return True
