"""The compiled loops of `shrinkpoint.schemes.auto.log_levels`: exponents, their predictions, and levels from these.

Importing this module imports numba, so it is only ever imported from inside a function of its callers. What readers depend
on is integers, exact numbers in fp64, and single fp32 values: every machine gets the same bits. All arrays are flat and of one
length n where nothing else is said. Exponents are int16, in sixteenths of an octave, `NONE` for zeros. Level l of an element stands
for the exponent ``l * step + offset``, its offset being a dither of its own, 0 to ``step - 1``.
"""

from typing import NamedTuple

import numpy as np

from shrinkpoint.arrays import Bools, Float32s, Int8s, Int16s, Int32s, Integer
from shrinkpoint.quantize.trellis_dither_kernels import random_bits
from shrinkpoint.runtime.jit import jit, jit_inlined

PER_OCTAVE = 16
LOW, HIGH = -126 * PER_OCTAVE, 128 * PER_OCTAVE - 1
"""The exponents of normal numbers."""
NONE = -(2**15)
"""The exponent of zero."""

_48, _32 = np.uint64(48), np.uint64(32)
_HALF, _UNIT = np.float32(0.5), np.float32(2.0**-16)
_ZERO_LEVEL, _FARTHEST = -128, 127  # of packed ones
_OTHER = np.uint64(0x5BD1E995)  # another seed, for what readers need not know


class Prediction(NamedTuple):
    """The exponents that elements are expected to have: sums of a row's and a column's, or those of the checkpoint before, moved.

    Attributes:
        rows: int32 (rows,); empty where there are those of before.
        columns: int32 (columns,).
        before: int16 (n,), or empty.
        shift: is added to those.
        middle: taken in the place of those that are `NONE`.
    """

    rows: Int32s
    columns: Int32s
    before: Int16s
    shift: int
    middle: int


@jit_inlined
def _start(seed: int, first: int) -> np.uint64:
    """Return the start of `random_bits` by which element 0 has those of the ``first`` of all."""
    return (np.uint64(seed) << _32) + np.uint64(first)


@jit_inlined
def _offset(start: np.uint64, i: int, step: int) -> np.int32:
    bits = np.int64(random_bits(start, i) >> _48)
    return np.int32(((2 * bits + 1) * step) >> 17)


@jit_inlined
def _whole(number: Integer, inverse: float) -> np.int32:
    """A number of at most 20 bits over a step of at most five, rounded down: exact, for quotients are no nearer to a whole one."""
    return np.int32(np.floor((np.float64(number) + 0.5) * inverse))


@jit_inlined
def _expected(prediction: Prediction, i: int, row: int, column: int) -> np.int32:
    if prediction.before.size:
        before = np.int32(prediction.before[i])
        return np.int32((prediction.middle if before == NONE else before) + prediction.shift)
    return np.int32(prediction.rows[row] + prediction.columns[column])


@jit
def nearest(x: Float32s, step: int, seed: int, larger: float, first: int, out: Int16s) -> None:
    """Compute the exponents nearest to those of values that lie on levels, within `LOW` and `HIGH`.

    Args:
        x: finite.
        step: distance of two levels.
        seed: of the dither.
        larger: is added to all, in sixteenths of an octave.
        first: of the elements.
        out: receives exponents.
    """
    start, other = _start(seed, first), _start(np.uint64(seed) ^ _OTHER, first)
    inverse = 1.0 / step
    for i in range(out.size):
        if x[i] == 0:
            out[i] = NONE
            continue
        offset = _offset(start, i, step)
        # offsets are whole: what was restored before lies on whole exponents, and would be moved by a half on average
        bits = np.int32(random_bits(other, i) >> _48)
        whole = (np.float32(bits) + _HALF) * _UNIT - _HALF
        exact = np.log2(np.abs(np.float64(x[i]))) * PER_OCTAVE + np.float64(whole) + larger
        level = np.int32(np.rint((exact - np.float64(offset)) / step))
        level = max(level, -_whole(offset - LOW, inverse))
        out[i] = np.int16(min(level, _whole(HIGH - offset, inverse)) * step + offset)


@jit
def away(exponents: Int16s, first: int, prediction: Prediction, step: int, seed: int, out: Int16s) -> bool:
    """How far elements lie from where they are predicted, in steps; 0 for zeros. False if one lies on no level.

    Args:
        exponents: of all.
        first: of the elements whose distances ``out`` (any size) receives.
        prediction: of all.
        step: distance of two levels.
        seed: of the dither.
        out: receives the distances.
    """
    start, inverse, width = np.uint64(seed) << _32, 1.0 / step, max(prediction.columns.size, 1)
    row, column, sound = first // width, first % width, True
    for j in range(out.size):
        i = first + j
        exponent, offset = np.int32(exponents[i]), _offset(start, i, step)
        level = _whole(exponent - offset, inverse)
        predicted = _whole(_expected(prediction, i, row, column) - offset + step // 2, inverse)
        sound &= (level * step + offset == exponent) | (exponent == NONE)
        out[j] = np.int16(0 if exponent == NONE else level - predicted)
        column += 1
        if column == width:
            row, column = row + 1, 0
    return bool(sound)


@jit
def reach(
    distances: Int16s,
    zeros: Bools,
    prediction: Prediction,
    step: int,
    seed: int,
    first: int,
    out: Int16s,
) -> None:
    """Exponents of what lies so far from where it is predicted, the inverse of `away`.

    Args:
        distances: of the elements from the first on.
        zeros: of the same, or empty.
        prediction: of all.
        step: distance of two levels.
        seed: of the dither.
        first: of the elements.
        out: receives exponents.
    """
    start, inverse, width = _start(seed, first), 1.0 / step, max(prediction.columns.size, 1)
    row, column = first // width, first % width
    for i in range(out.size):
        offset = _offset(start, i, step)
        predicted = _whole(_expected(prediction, first + i, row, column) - offset + step // 2, inverse)
        exponent = (predicted + np.int32(distances[i])) * step + offset
        out[i] = np.int16(min(max(exponent, LOW), HIGH))
        if zeros.size and zeros[i]:
            out[i] = NONE
        column += 1
        if column == width:
            row, column = row + 1, 0


@jit
def pack(exponents: Int16s, step: int, seed: int, out: Int8s) -> tuple[bool, int]:
    """Put levels in one byte each: whether that holds them all, and what is to be added to them."""
    start, inverse = np.uint64(seed) << _32, 1.0 / step
    lowest, highest = np.int32(2**15), np.int32(-(2**15))
    for i in range(exponents.size):
        if exponents[i] != NONE:
            level = _whole(exponents[i] - _offset(start, i, step), inverse)
            lowest, highest = min(lowest, level), max(highest, level)
    middle = (lowest + highest) // 2 if lowest <= highest else 0
    fits = highest - lowest <= 2 * _FARTHEST
    for i in range(exponents.size):
        offset = _offset(start, i, step)
        level = _whole(exponents[i] - offset, inverse)
        fits &= (level * step + offset == exponents[i]) | (exponents[i] == NONE)
        out[i] = np.int8(_ZERO_LEVEL if exponents[i] == NONE else level - middle)
    return bool(fits), int(middle)


@jit
def unpack(levels: Int8s, middle: int, step: int, seed: int, first: int, out: Int16s) -> None:
    """Compute the exponents of packed levels, those from the ``first`` on."""
    start = _start(seed, first)
    for i in range(out.size):
        exponent = (np.int32(levels[i]) + middle) * step + _offset(start, i, step)
        out[i] = np.int16(NONE if levels[i] == _ZERO_LEVEL else exponent)


@jit
def values(exponents: Int16s, negative: Bools, parts: Float32s, out: Float32s) -> None:
    """Compute the numbers that exponents stand for.

    Args:
        exponents: within `LOW` and `HIGH`, or `NONE`.
        negative: whose signs are negative; empty where none is.
        parts: fp32 (16,), the powers of ``2 ** (1 / 16)``.
        out: receives them.
    """
    for i in range(out.size):
        exponent = np.int32(exponents[i])
        octave = np.int32(((exponent >> 4) + 127) << 23)
        value = parts[exponent & 15] * octave.view(np.float32) if exponent != NONE else np.float32(0)
        out[i] = -value if negative.size and negative[i] else value
