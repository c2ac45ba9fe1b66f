"""Kernels of uniform quantization with subtractive dither.

Importing this module imports numba, so it is only ever imported from inside a function of its callers. Kernels release
the GIL and keep no state. Decoding uses integers and single IEEE 754 operations on fp32 in a fixed order,
none of which is a product followed by a sum that a compiler might contract: every machine gets the same bits.

Most are written so that they vectorise: no table is looked up where arithmetic gives the same bits, and no loop has two
results. All arrays are flat and of one length n; tables have the length that is named. The caller has checked that
exponents are 0 to 128 and dithers within 2**32. ``quarters`` (4,) are the steps of exponents 64 to 67.
"""

import numpy as np

from shrinkpoint.arrays import Float32s, Int16s, Int32s, UInt8s
from shrinkpoint.runtime.jit import jit, jit_part

__all__ = [
    "EDGE_SLOTS",
    "carry",
    "edges",
    "halves",
    "largest_move",
    "moves",
    "nearest",
    "offsets",
    "points",
    "random_bits",
    "remember",
    "step_of",
    "unmove",
]


EDGE_SLOTS = 512
"""Equal parts of a cell, of which tables give the class."""

_WEYL = np.uint64(0x9E37_79B9_7F4A_7C15)
_MIX_1, _MIX_2 = np.uint64(0xBF58_476D_1CE4_E5B9), np.uint64(0x94D0_49BB_1331_11EB)
_SHIFTS = np.uint64(30), np.uint64(27), np.uint64(31), np.uint64(48), np.uint64(32)
_ONE = np.uint64(1)
_HALF, _DOWN = np.float32(0.5), np.float32(2.0**-16)
_ROUND = np.float32(
    1.5 * 2**23
)  # added and taken away, it rounds what is below 2**22 to the nearest even integer
_OCTAVE_ZERO, _MANTISSA_BITS = 127 - 16, 23
_BLOCK = 1024
_SLOT_SHIFT = 7  # of the 16 bits of a dither
_ZERO = np.float32(0)


@jit_part
def random_bits(start: np.uint64, i: int) -> np.uint64:
    """64 bits of an element's own (SplitMix64 as a counter-based generator); ``start`` is the seed, shifted by 32."""
    bits = (np.uint64(i) + _ONE + start) * _WEYL
    bits = (bits ^ (bits >> _SHIFTS[0])) * _MIX_1
    bits = (bits ^ (bits >> _SHIFTS[1])) * _MIX_2
    return bits ^ (bits >> _SHIFTS[2])


@jit_part
def _bits(start: np.uint64, i: int) -> np.uint64:
    """The 16 bits of an element's dither."""
    bits: np.uint64 = random_bits(start, i) >> _SHIFTS[3]
    return bits


@jit_part
def _offset(start: np.uint64, i: int) -> np.float32:
    """16 bits and a half are exact in fp32, and so is every difference to a small integer."""
    return (np.float32(np.int32(_bits(start, i))) + _HALF) * _DOWN - _HALF


@jit_part
def step_of(q0: np.float32, q1: np.float32, q2: np.float32, q3: np.float32, exponent: np.uint8) -> np.float32:
    """``quarters[e % 4] * 2 ** (e // 4 - 16)``, of which the product is exact."""
    k = np.int32(exponent)
    low = q1 if k & 1 else q0
    high = q3 if k & 1 else q2
    octave = np.int32(((k >> 2) + _OCTAVE_ZERO) << _MANTISSA_BITS)
    return (high if k & 2 else low) * octave.view(np.float32)


@jit_part
def _rint(x: np.float32) -> np.float32:
    return (x + _ROUND) - _ROUND


@jit
def offsets(seed: int, first: int, out: Float32s) -> None:
    """The dither of each element from the one of this number on."""
    start = (np.uint64(seed) << _SHIFTS[4]) + np.uint64(first)
    for i in range(out.size):
        out[i] = _offset(start, i)


def edges(seed: int, starts: Int16s, out: UInt8s) -> None:
    """The class of each dither's slot; classes 1 to k begin at the slots ``starts`` (k,)."""
    _edges(seed, starts, np.empty(_BLOCK, np.int16), out)


@jit
def _edges(seed: int, starts: Int16s, block: Int16s, out: UInt8s) -> None:
    start = np.uint64(seed) << _SHIFTS[4]
    for first in range(0, out.size, _BLOCK):
        classes = out[first : first + _BLOCK]
        slots = block[: classes.size]
        at = start + np.uint64(first)
        for i in range(classes.size):
            slots[i] = np.int16(_bits(at, i) >> np.uint64(_SLOT_SHIFT))
        classes[:] = 0
        for slot in starts:
            for i in range(classes.size):
                classes[i] += np.uint8(slots[i] >= slot)


@jit
def nearest(
    values: Float32s, exponents: UInt8s, quarters: Float32s, seed: int, limit: int, out: Int16s
) -> bool:
    """The index of the lattice point nearest to each value; False if one is beyond ``limit``, at most 32766."""
    start = np.uint64(seed) << _SHIFTS[4]
    q0, q1, q2, q3 = quarters[0], quarters[1], quarters[2], quarters[3]
    bound = np.float32(limit + 1)
    largest = np.int32(0)
    for i in range(out.size):
        x = values[i] / step_of(q0, q1, q2, q3, exponents[i]) + _offset(start, i)
        whole = np.int32(_rint(min(max(x, -bound), bound)))
        largest = max(largest, abs(whole))
        out[i] = np.int16(whole)
    return bool(largest <= limit)


@jit
def points(index: Int16s, exponents: UInt8s, quarters: Float32s, seed: int, out: Float32s) -> None:
    """The values of lattice points: a subtraction and a product."""
    start = np.uint64(seed) << _SHIFTS[4]
    q0, q1, q2, q3 = quarters[0], quarters[1], quarters[2], quarters[3]
    for i in range(out.size):
        out[i] = (np.float32(index[i]) - _offset(start, i)) * step_of(q0, q1, q2, q3, exponents[i])


@jit
def carry(
    before: Float32s,
    exponents: UInt8s,
    quarters: Float32s,
    seed: int,
    limit: int,
    table: UInt8s,
    index: Int16s,
    classes: UInt8s,
) -> None:
    """Predict indices on a new lattice from earlier values: the nearest point, and ``table`` (EDGE_SLOTS,) of its
    slot."""
    start = np.uint64(seed) << _SHIFTS[4]
    q0, q1, q2, q3 = quarters[0], quarters[1], quarters[2], quarters[3]
    bound, slots, last = np.float32(limit), np.float32(EDGE_SLOTS), np.float32(EDGE_SLOTS - 1)
    for i in range(index.size):
        place = before[i] / step_of(q0, q1, q2, q3, exponents[i]) + _offset(start, i)
        whole = _rint(min(max(place, -bound), bound))
        index[i] = np.int16(whole)
        # the difference to the nearest integer is exact, the sum with 1/2 need not be, but is one operation
        slot = ((place - whole) + _HALF) * slots
        classes[i] = table[np.int64(min(max(slot, _ZERO), last))]


@jit
def halves(index: Int16s, seed: int, limit: int, out: UInt8s) -> None:
    """The value of each point in half steps, clamped to +-``limit``, plus ``limit``."""
    start = np.uint64(seed) << _SHIFTS[4]
    two = np.float32(2)
    for i in range(out.size):
        half = int(_rint((np.float32(index[i]) - _offset(start, i)) * two))
        out[i] = np.uint8(min(max(half, -limit), limit) + limit)


@jit
def largest_move(index: Int16s, predicted: Int16s) -> int:
    """The largest distance of an index from its prediction."""
    largest = np.int32(0)
    for i in range(index.size):
        largest = max(largest, abs(np.int32(index[i]) - np.int32(predicted[i])))
    return int(largest)


@jit
def moves(index: Int16s, predicted: Int16s, radius: int, out: UInt8s, far: Int32s) -> int:
    """Symbols ``move + radius``; a move beyond ``radius`` is the escape ``2 * radius + 1`` and goes to ``far``.

    Returns:
        The number of escapes.
    """
    if largest_move(index, predicted) <= radius:
        for i in range(index.size):
            out[i] = np.uint8(np.int32(index[i]) - np.int32(predicted[i]) + np.int32(radius))
        return 0
    at = 0
    for i in range(index.size):
        move = np.int32(index[i]) - np.int32(predicted[i])
        if abs(move) <= radius:
            out[i] = np.uint8(move + radius)
        else:
            out[i] = np.uint8(2 * radius + 1)
            if at < far.size:
                far[at] = move
            at += 1
    return at


@jit
def unmove(symbols: UInt8s, predicted: Int16s, radius: int, far: Int32s, limit: int, out: Int16s) -> bool:
    """Inverse of `moves`, with one entry of ``far`` for each escape; False if an index is beyond ``limit``."""
    at, largest = 0, np.int32(0)
    if far.size == 0:
        for i in range(out.size):
            whole = np.int32(predicted[i]) + np.int32(symbols[i]) - np.int32(radius)
            largest = max(largest, abs(whole))
            out[i] = np.int16(whole)
        return bool(largest <= limit)
    for i in range(out.size):
        symbol = int(symbols[i])
        move = symbol - radius
        if symbol > 2 * radius:
            move = int(far[at])
            at += 1
        whole = np.int32(min(max(int(predicted[i]) + move, -limit - 1), limit + 1))
        largest = max(largest, abs(whole))
        out[i] = np.int16(whole)
    return bool(largest <= limit)


@jit
def remember(
    index: Int16s, predicted: Int16s, before: UInt8s, table: UInt8s, down: int, up: int, out: UInt8s
) -> None:
    """Update each element's history: ``up`` or ``down`` if it moved, otherwise ``table`` (256,) of its former
    history."""
    for i in range(out.size):
        known = table[before[i]]
        known = np.uint8(up) if index[i] > predicted[i] else known
        out[i] = np.uint8(down) if index[i] < predicted[i] else known
