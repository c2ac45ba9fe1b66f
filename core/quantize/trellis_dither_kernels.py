"""Kernels of trellis-coded quantization with subtractive dither: scaling, prediction and reconstruction.

Importing this module imports numba, so it is only ever imported from inside a function of its callers. Decoding uses
integers and single IEEE 754 operations on fp32 in a fixed order, which numba contracts only under fast math: every
machine gets the same bits.

A point of h half steps has the value ``(h / 2 - d) step``, d being the element's dither, an odd multiple of 2**-17 in
(-1, 1): the lattice has a period of two steps, not of one. All arrays are flat and of one length n where nothing else
is said; ``quarters`` are the steps of exponents 64 to 67, and ``exponents`` those of the elements' steps.
"""

from typing import NamedTuple

import numpy as np

from shrinkpoint.arrays import Float32s, Float64s, Indices, Int8s, Int16s, UInt8s, UInt16s
from shrinkpoint.quantize.viterbi_kernels import LANES, Search, search
from shrinkpoint.runtime.jit import jit, jit_inlined, jit_part

Quarters = tuple[np.float32, ...]

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


class Known(NamedTuple):
    """What is known of weights before they are quantized; all of one length, or empty.

    Attributes:
        values: what was restored of them.
        offsets: how far from there each is expected, in 1/64 of the former step.
        exponents: of the former steps.
        quarters: of the same.
    """

    values: Float32s
    offsets: Int8s
    exponents: UInt8s
    quarters: Quarters


@jit_part
def random_bits(start: np.uint64, i: int) -> np.uint64:
    """64 bits of an element's own (SplitMix64 as a counter-based generator); ``start`` is the seed, shifted by 32."""
    bits = (np.uint64(i) + _ONE + start) * _WEYL
    bits = (bits ^ (bits >> _30)) * _MIX_1
    bits = (bits ^ (bits >> _27)) * _MIX_2
    return bits ^ (bits >> _31)


@jit_part
def step_of(quarters: Quarters, exponent: np.uint8) -> np.float32:
    """``quarters[e % 4] * 2 ** (e // 4 - 16)``, of which the product is exact."""
    k = np.int32(exponent)
    low = quarters[1] if k & 1 else quarters[0]
    high = quarters[3] if k & 1 else quarters[2]
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


@jit_inlined
def _place_of_zero(start: np.uint64, i: int) -> np.int16:
    return np.int16(np.int32(_bits(start, i) >> np.uint64(8)) - np.int32(256))


@jit
def places(seed: int, first: int, out: Int16s) -> None:
    """Predictions for weights expected to be zero, those from the ``first`` on, in 1/256 of a step from point 0."""
    start = (np.uint64(seed) << _32) + np.uint64(first)
    for i in range(out.size):
        out[i] = _place_of_zero(start, i)


@jit
def points(x: Float32s, exponents: UInt8s, quarters: Quarters, seed: int, out: Int16s) -> bool:
    """The points of values, in half steps, the inverse of `values`; False where a value is not that of any point."""
    start = np.uint64(seed) << _32
    sound = True
    for i in range(out.size):
        step, dither = step_of(quarters, exponents[i]), _dither(start, i)
        point = np.rint(min(max(x[i] / step + dither, -_BOUND), _BOUND) * _TWO)
        sound &= (point * _HALF - dither) * step == x[i]
        out[i] = np.int16(np.int32(point))
    return bool(sound)


@jit
def sum_squares(
    x: Float32s, known: Known, exponents: UInt8s, quarters: Quarters, squares: Float64s, counts: Float64s
) -> None:
    """Accumulate the squared prediction errors, in steps, in ``squares`` (129,) by exponent, and their number in
    ``counts``."""
    for i in range(x.size):
        offset = np.float32(known.offsets[i]) * _OF_OFFSET
        mean = known.values[i] + offset * step_of(known.quarters, known.exponents[i])
        error = np.float64((x[i] - mean) / step_of(quarters, exponents[i]))
        squares[exponents[i]] += error * error
        counts[exponents[i]] += 1.0


@jit
def values(
    points: Int16s, exponents: UInt8s, quarters: Quarters, seed: int, first: int, out: Float32s
) -> None:
    """Compute the weights that points represent, those from the ``first`` on: a subtraction and a product."""
    start = (np.uint64(seed) << _32) + np.uint64(first)
    for i in range(out.size):
        out[i] = (np.float32(points[i]) * _HALF - _dither(start, i)) * step_of(quarters, exponents[i])


@jit_inlined
def _expected(known: Known, i: int, step: np.float32, dither: np.float32) -> tuple[np.float32, np.int16]:
    """Compute the even point nearest to where a weight is expected, in steps, and the place from there, in 1/256 of a step."""
    offset = np.float32(known.offsets[i]) * step_of(known.quarters, known.exponents[i])
    # 2**-6 times a product is exact, unless the result is about to be subnormal, which counts as zero
    mean = known.values[i] + (offset * _OF_OFFSET if abs(offset) >= _LEAST_OFFSET else _ZERO)
    place = min(max(mean / step + dither, -_BOUND), _BOUND)
    near = np.floor(place * _HALF + _HALF) * _TWO
    part = min(max(np.floor((place - near) * _PARTS), np.float32(-256)), np.float32(255))
    return near, np.int16(np.int32(part))


@jit
def expect(
    known: Known,
    exponents: UInt8s,
    quarters: Quarters,
    seed: int,
    first: int,
    even: Int16s,
    places: Int16s,
) -> None:
    """Predict the positions of the weights from the ``first`` on: the nearest even point, in half steps, and the offset from
    it in 1/256 step."""
    start = (np.uint64(seed) << _32) + np.uint64(first)
    for i in range(even.size):
        near, places[i] = _expected(known, i, step_of(quarters, exponents[i]), _dither(start, i))
        even[i] = np.int16(np.int32(near * _TWO))


@jit
def reach(points: Int16s, even: Int16s, farthest: int) -> bool:
    """Make even points those that ``points`` are from them; False if one is farther from 0 than so many half steps."""
    largest = np.int32(0)
    for i in range(even.size):
        point = np.int32(even[i]) + np.int32(points[i])
        largest = max(largest, abs(point))
        even[i] = np.int16(point)
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


@jit
def quantize(
    x: Float32s,
    known: Known,
    exponents: UInt8s,
    quarters: Quarters,
    seed: int,
    rows: Indices,
    columns: int,
    width: int,
    paths: tuple[int, int],
    room: Search,
    points: Int16s,
    places: Int16s,
    even: Int16s,
) -> bool:
    """Put weights on the nearest paths; False if one is too many steps from zero.

    Args:
        x: all weights.
        known: of all; empty where they are expected around zero.
        exponents: of all.
        quarters: of the same.
        seed: of the dither.
        rows: the only rows that are coded, one after another; empty for all.
        columns: of the matrix.
        width: elements of a path.
        paths: the first one, and the end.
        room: `viterbi_kernels.new_search` for the width.
        points: of the rows that are coded: receives points, in half steps from the even ones.
        places: as `expect` has it, of the rows that are coded.
        even: as `expect` has it, of the rows that are coded.
    """
    start = np.uint64(seed) << _32
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
                    step = step_of(quarters, exponents[i + k])
                    dither = _dither(start, i + k)
                    near, place = _ZERO, _place_of_zero(start, i + k)
                    if is_delta:
                        near, place = _expected(known, i + k, step, dither)
                    places[at + k], even[at + k] = place, np.int16(np.int32(near * _TWO))
                    whole = x[i + k] / step
                    moved = (whole + dither) - near
                    largest = max(largest, max(abs(whole), abs(moved)))
                    out[at - begin + k] = moved
                at += many
        if not largest <= _BOUND:
            return False
        search(room, some, width, last, first * width, points)
    return True
