"""The compiled loops of dithered quantization.

Importing this module imports numba, so it is only ever imported from inside a function of its callers. Kernels release
the GIL and keep no state. What decoders depend on is integers and single IEEE 754 operations on fp32 in a fixed order,
none of which is a product followed by a sum that a compiler might contract: every machine gets the same bits.

All arrays are flat and of one length n; tables have the length that is named. The caller has checked that exponents lie
within their table of steps and dithers within 2**32.
"""

import numpy as np
import numpy.typing as npt

from shrinkpoint.entropy.context_lowrank import jit

__all__ = [
    "EDGE_SLOTS",
    "carry",
    "edges",
    "halves",
    "largest_move",
    "levels",
    "moves",
    "nearest",
    "offsets",
    "points",
    "remember",
    "unlevel",
    "unmove",
]

F32 = npt.NDArray[np.float32]
I16 = npt.NDArray[np.int16]
I32 = npt.NDArray[np.int32]
U8 = npt.NDArray[np.uint8]

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
_SLOT_SHIFT = 7  # of the 16 bits of a dither
# Products below count as zero. Half of it is the least normal number, to which a product may be rounded that a process
# without subnormals takes for zero.
_LEAST = np.float32(2.0**-125)
_ZERO = np.float32(0)


@jit
def _bits(start: np.uint64, i: int) -> np.uint64:
    """The 16 bits of an element's dither (SplitMix64 as a counter-based generator)."""
    bits = (np.uint64(i) + _ONE + start) * _WEYL
    bits = (bits ^ (bits >> _SHIFTS[0])) * _MIX_1
    bits = (bits ^ (bits >> _SHIFTS[1])) * _MIX_2
    return (bits ^ (bits >> _SHIFTS[2])) >> _SHIFTS[3]


@jit
def _offset(start: np.uint64, i: int) -> np.float32:
    """16 bits and a half are exact in fp32, and so is every difference to a small integer."""
    return (np.float32(np.int32(_bits(start, i))) + _HALF) * _DOWN - _HALF


@jit
def _rint(x: np.float32) -> np.float32:
    return (x + _ROUND) - _ROUND


@jit
def offsets(seed: int, out: F32) -> None:
    """The dither of each element."""
    start = np.uint64(seed) << _SHIFTS[4]
    for i in range(out.size):
        out[i] = _offset(start, i)


@jit
def edges(seed: int, table: U8, out: U8) -> None:
    """``table`` (EDGE_SLOTS,) of the slot of each dither."""
    start = np.uint64(seed) << _SHIFTS[4]
    for i in range(out.size):
        out[i] = table[np.int64(_bits(start, i)) >> _SLOT_SHIFT]


@jit
def nearest(values: F32, exponents: U8, steps: F32, seed: int, limit: int, out: I16) -> bool:
    """The index of the lattice point nearest to each value; False if one is beyond ``limit``, at most 32767."""
    start = np.uint64(seed) << _SHIFTS[4]
    bound = np.float32(limit)
    inside = True
    for i in range(out.size):
        x = values[i] / steps[exponents[i]] + _offset(start, i)
        inside &= abs(x) <= bound
        out[i] = np.int16(_rint(min(max(x, -bound), bound)))
    return inside


@jit
def points(index: I16, exponents: U8, steps: F32, seed: int, out: F32) -> None:
    """The values of lattice points: a subtraction and a product."""
    start = np.uint64(seed) << _SHIFTS[4]
    for i in range(out.size):
        out[i] = (np.float32(index[i]) - _offset(start, i)) * steps[exponents[i]]


@jit
def carry(
    before: F32, exponents: U8, steps: F32, seed: int, limit: int, table: U8, index: I16, classes: U8
) -> None:
    """Where values lie on another lattice: the nearest point, and ``table`` (EDGE_SLOTS,) of the slot of its cell."""
    start = np.uint64(seed) << _SHIFTS[4]
    bound, slots, last = np.float32(limit), np.float32(EDGE_SLOTS), np.float32(EDGE_SLOTS - 1)
    for i in range(index.size):
        place = before[i] / steps[exponents[i]] + _offset(start, i)
        whole = _rint(min(max(place, -bound), bound))
        index[i] = np.int16(whole)
        # the difference to the nearest integer is exact, the sum with 1/2 need not be, but is one operation
        slot = ((place - whole) + _HALF) * slots
        classes[i] = table[np.int64(min(max(slot, _ZERO), last))]


@jit
def halves(index: I16, seed: int, reach: int, out: U8) -> None:
    """The value of each point in half steps, from -``reach`` to ``reach``, moved to begin at 0."""
    start = np.uint64(seed) << _SHIFTS[4]
    two = np.float32(2)
    for i in range(out.size):
        half = int(_rint((np.float32(index[i]) - _offset(start, i)) * two))
        out[i] = np.uint8(min(max(half, -reach), reach) + reach)


@jit
def largest_move(index: I16, predicted: I16) -> int:
    """The largest distance of an index from its prediction."""
    largest = np.int32(0)
    for i in range(index.size):
        largest = max(largest, abs(np.int32(index[i]) - np.int32(predicted[i])))
    return int(largest)


@jit
def moves(index: I16, predicted: I16, radius: int, out: U8, far: I32) -> int:
    """Symbols ``move + radius``; the moves beyond ``radius`` are ``2 * radius + 1`` and fill ``far``; how many these are."""
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
def unmove(symbols: U8, predicted: I16, radius: int, far: I32, limit: int, out: I16) -> bool:
    """Inverse of `moves`, ``far`` being as long as there are far symbols; False if an index is beyond ``limit``."""
    at = 0
    inside = True
    for i in range(out.size):
        symbol = int(symbols[i])
        if symbol <= 2 * radius:
            index = int(predicted[i]) + symbol - radius
        else:
            index = int(predicted[i]) + int(far[at])
            at += 1
        inside = inside and abs(index) <= limit
        out[i] = np.int16(min(max(index, -limit), limit))
    return inside


@jit
def remember(index: I16, predicted: I16, before: U8, table: U8, down: int, up: int, out: U8) -> None:
    """``up`` or ``down`` for what moved, ``table`` (256,) of what was known before for what did not."""
    for i in range(out.size):
        known = table[before[i]]
        known = np.uint8(up) if index[i] > predicted[i] else known
        out[i] = np.uint8(down) if index[i] < predicted[i] else known


@jit
def levels(values: F32, scale: F32, step: np.float32, seed: int, reach: int, out: U8) -> int:
    """Dithered levels ``rint(value / (step * scale) + d)`` within ``reach``, moved to begin at 0; the largest of all.

    Where a unit is zero or about to be subnormal the level is 0.
    """
    start = np.uint64(seed) << _SHIFTS[4]
    bound = np.float32(reach)
    largest = np.int32(0)
    for i in range(out.size):
        unit = step * scale[i]
        x = values[i] / max(unit, _LEAST) + _offset(start, i)
        level = np.int32(_rint(min(max(x, -bound), bound)))
        level = level if unit >= _LEAST else np.int32(0)
        largest = max(largest, abs(level))
        out[i] = np.uint8(level + reach)
    return int(largest)


@jit
def unlevel(symbols: U8, scale: F32, step: np.float32, seed: int, radius: int, out: F32) -> None:
    """``(level - d) * unit``; units and products that are about to be subnormal are zero, as in every process."""
    start = np.uint64(seed) << _SHIFTS[4]
    for i in range(out.size):
        unit = step * scale[i]
        level = np.float32(np.int32(symbols[i]) - np.int32(radius))
        value = (level - _offset(start, i)) * unit
        out[i] = value if unit >= _LEAST and abs(value) >= _LEAST else _ZERO
