"""The compiled loops of residual coding: bit patterns to classes and suffixes, and back.

Importing this module imports numba, so it is only ever imported from inside a function of its callers. Kernels release
the GIL, keep no state and are compiled on first use, once per width of elements. numba checks no bounds: every kernel
states what its caller must have validated. What is computed is stated in entropy/static/residuals.py; all of it is integers,
modulo 2^64.
"""

from typing import Any, NamedTuple

import numpy as np

from shrinkpoint.arrays import Int64s, Integer, Signed, UInt8s, UInt16s, UInt32s
from shrinkpoint.runtime.jit import jit, jit_part

__all__ = ["Blocks", "Classes", "Given", "classify", "new_blocks", "pack", "unpack"]

Plan = tuple[int, int, int, int, int, int]
"""Width in bits, cut, whether magnitudes are predicted, shares of previous and sibling, whether signs are aligned."""


class Given(NamedTuple):
    """What both sides know of a chunk.

    Attributes:
        previous: the same numbers of the checkpoint before.
        sibling: those of another tensor of the same shape.
        rows: offset of each row of the tensor, or of all numbers.
        columns: offset of each column, which cover the tensor in rows of so many; or one number that is not used.
        start: place of the chunk's first number in the tensor.
    """

    previous: Signed
    sibling: Signed
    rows: Int64s
    columns: Int64s
    start: int


class Classes(NamedTuple):
    """Of each symbol: least magnitude, bits of the suffix, and sign, 0 for a positive zero, else 1 or -1."""

    bases: Int64s
    widths: Int64s
    signs: Int64s


class Blocks(NamedTuple):
    """What kernels work on, of no use afterwards: `new_blocks`."""

    residuals: Int64s
    predictions: Int64s
    tops: Int64s
    keys: UInt16s


ZERO, ESCAPE, FIRST = 0, 1, 2
"""Keys: a positive zero, a class without a symbol, and the first of the classes of residuals."""
WHOLE = 64
"""Shares of a source are multiples of 1 / WHOLE."""

_SHARE_SHIFT = 6
_WORD_MASK = (1 << 32) - 1
_BLOCK = 2048
"""Numbers at a time: what does not depend on the stream runs in loops without branches, within the first cache."""


def new_blocks() -> Blocks:
    """For one call of a kernel."""
    residuals, predictions, tops = (np.zeros(_BLOCK, np.int64) for _ in range(3))
    return Blocks(residuals, predictions, tops, np.zeros(_BLOCK, np.uint16))


@jit_part
def _ordered(pattern: Integer, kept: Integer, turned: Integer) -> Integer:
    """A pattern as an integer in the order of the values, its own inverse, or as a magnitude: by the masks."""
    return (pattern & kept) ^ ((pattern >> 63) & turned)


@jit_part
def _masks(plan: Plan) -> tuple[Integer, Integer]:
    """What `_ordered` needs: the bits that it keeps, and those that a sign turns round."""
    magnitudes = (np.int64(1) << (np.int64(plan[0]) - np.int64(1))) - np.int64(1)
    if plan[2]:
        return magnitudes, np.int64(0)
    return np.int64(-1), magnitudes


@jit_part
def _add(out: Int64s, source: Signed, at: int, count: int, share: int, plan: Plan) -> None:
    """Add a share of a source's numbers to ``out``."""
    kept, turned = _masks(plan)
    shift, factor = np.int64(_SHARE_SHIFT), np.int64(share)
    if share == WHOLE:
        shift, factor = np.int64(0), np.int64(1)
    for i in range(count):
        out[i] += (_ordered(np.int64(source[at + i]), kept, turned) >> shift) * factor


@jit_part
def _predict(
    out: Int64s,
    given: Given,
    at: int,
    count: int,
    plan: Plan,
) -> None:
    """Fill ``out`` for the numbers at..at + count of a chunk that begins with number ``start`` of the tensor."""
    previous, sibling, rows, columns, start = given
    if columns.size > 1:
        row, column = (start + at) // columns.size, (start + at) % columns.size
        done = 0
        while done < count:
            stop = min(count, done + columns.size - column)
            offset = rows[row]
            for i in range(stop - done):
                out[done + i] = offset + columns[column + i]
            done, row, column = stop, row + 1, 0
    else:
        for i in range(count):
            out[i] = rows[0]
    if plan[3]:
        _add(out, previous, at, count, plan[3], plan)
    if plan[4]:
        _add(out, sibling, at, count, plan[4], plan)


@jit_part
def _residuals(
    out: Int64s,
    bits: Signed,
    given: Given,
    at: int,
    count: int,
    plan: Plan,
) -> None:
    """Fill ``out`` with the differences to the predictions, modulo 2^width, as signed integers."""
    _predict(out, given, at, count, plan)
    kept, turned = _masks(plan)
    unused = np.int64(64) - np.int64(plan[0])
    for i in range(count):
        difference = _ordered(np.int64(bits[at + i]), kept, turned) - out[i]
        out[i] = (difference << unused) >> unused
    if plan[5]:
        for i in range(count):
            sign = np.int64(given.previous[at + i]) >> 63
            out[i] = (((out[i] ^ sign) - sign) << unused) >> unused


@jit_part
def _key(pattern: Integer, residual: Any, size: Any, width: Integer, cut: Integer) -> Integer:
    """The class of a residual: by its length in bits within 2^cut of 0, by its bits above the cut elsewhere.

    Both are computed for every number: which one it takes cannot be foreseen, and a branch would cost more. ``size`` is the
    residual's, as a double; twice that and 1 has one bit more than it, and is exact where it matters.
    """
    double: Any = np.float64(2.0 * size + 1.0)
    length = (double.view(np.int64) >> 52) - 1023
    near = FIRST + 2 * length + (residual < 0)
    far = FIRST + 2 * cut + 2 + (residual >> cut) + (np.int64(1) << (width - 1 - cut))
    key = near if (abs(residual) >> cut) == 0 else far
    return np.int64(ZERO) if pattern == 0 else key


@jit_part
def _keys(bits: Signed, at: int, count: int, residuals: Int64s, plan: Plan, out: UInt16s) -> None:
    width, cut = np.int64(plan[0]), np.int64(plan[1])
    if width <= 32:  # processors convert many integers at a time only where these have 32 bits
        for i in range(count):
            size = np.float64(np.int32(abs(residuals[i])))
            out[i] = _key(np.int64(bits[at + i]), residuals[i], size, width, cut)
    else:
        for i in range(count):
            size = np.float64(abs(residuals[i]))
            out[i] = _key(np.int64(bits[at + i]), residuals[i], size, width, cut)


@jit
def classify(
    bits: Signed,
    given: Given,
    plan: Plan,
    blocks: Blocks,
    keys: UInt16s,
) -> None:
    """Write the class of each number of a chunk.

    Validated by the caller: ``previous`` and ``sibling`` have the size of ``bits`` where the plan reads them.
    """
    residuals = blocks.residuals
    for at in range(0, bits.size, _BLOCK):
        count = min(_BLOCK, bits.size - at)
        _residuals(residuals, bits, given, at, count, plan)
        _keys(bits, at, count, residuals, plan, keys[at : at + count])


@jit_part
def _put(
    words: UInt32s, position: Integer, pending: Integer, filled: Integer, value: Integer, width: Integer
) -> tuple[Integer, Integer, Integer]:
    """Append ``width`` <= 32 bits; fewer than 32 are pending between calls.

    The word is written before it is full, again and again: when it is cannot be foreseen.
    """
    pending |= value << filled
    filled += width
    words[position] = pending & _WORD_MASK
    full = filled >> 5
    return position + full, pending >> (full << 5), filled & 31


@jit
def pack(
    bits: Signed,
    given: Given,
    plan: Plan,
    index: UInt8s,
    classes: Classes,
    wide: bool,
    blocks: Blocks,
    symbols: UInt8s,
    words: UInt32s,
) -> Integer:
    """Write the symbol of each number, and its suffix into ``words``; return how many bits of those are used.

    Validated by the caller: as :func:`classify`; ``index`` maps every key that occurs to one of the ``classes``; ``words`` holds a
    word more than all suffixes; ``wide`` says whether any takes more than 32 bits, with its sign where that is apart.
    """
    bases, widths, signs = classes
    residuals, keys = blocks.residuals, blocks.keys
    position = 0
    pending = filled = np.int64(0)
    for at in range(0, bits.size, _BLOCK):
        count = min(_BLOCK, bits.size - at)
        _residuals(residuals, bits, given, at, count, plan)
        _keys(bits, at, count, residuals, plan, keys)
        for i in range(count):
            symbols[at + i] = index[keys[i]]
        for i in range(count):
            symbol = symbols[at + i]
            size = widths[symbol]
            suffix = (signs[symbol] * residuals[i] - bases[symbol]) & ((np.int64(1) << size) - 1)
            if plan[2]:
                own = np.int64(signs[symbol] != 0)
                if wide:
                    negative = np.int64(bits[at + i] < 0) & own
                    position, pending, filled = _put(words, position, pending, filled, negative, own)
                else:
                    suffix = (suffix << own) | (np.int64(bits[at + i] < 0) & own)
                    size += own
            if wide and size > 32:
                low = suffix & _WORD_MASK
                position, pending, filled = _put(words, position, pending, filled, low, np.int64(32))
                suffix = (suffix >> 32) & ((np.int64(1) << (size - 32)) - 1)
                size -= 32
            position, pending, filled = _put(words, position, pending, filled, suffix, size)
    words[position] = pending & _WORD_MASK
    return np.int64(position) * 32 + filled


@jit_part
def _get(
    words: UInt32s, position: Integer, pending: Integer, filled: Integer, width: Integer
) -> tuple[Integer, Integer, Integer, Integer]:
    """Take ``width`` <= 32 bits; from the last word on, which is 0, they are only counted."""
    empty = np.int64(filled < width)
    word = np.int64(words[min(position, words.size - 1)])
    pending |= (word & -empty) << filled
    filled += empty << 5
    value = pending & ((np.int64(1) << width) - 1)
    return position + empty, pending >> width, filled - width, value


@jit
def unpack(
    symbols: UInt8s,
    words: UInt32s,
    given: Given,
    plan: Plan,
    classes: Classes,
    wide: bool,
    blocks: Blocks,
    bits: Signed,
) -> Integer:
    """The inverse of :func:`pack`: fill ``bits``; return how many bits of ``words`` the symbols name.

    Validated by the caller: as :func:`pack`, and that symbols index the tables; the last of ``words`` is 0 and not part
    of the data; ``wide`` says whether any suffix takes more than 32 bits.
    """
    bases, widths, signs = classes
    residuals, predictions, tops = blocks.residuals, blocks.predictions, blocks.tops
    position = 0
    pending = filled = np.int64(0)
    for at in range(0, symbols.size, _BLOCK):
        count = min(_BLOCK, symbols.size - at)
        for i in range(count):
            symbol = symbols[at + i]
            size = widths[symbol]
            if plan[2]:
                own = np.int64(signs[symbol] != 0)
                position, pending, filled, negative = _get(words, position, pending, filled, own)
                tops[i] = -negative << (plan[0] - 1)
            low = shift = np.int64(0)
            if wide and size > 32:
                position, pending, filled, low = _get(words, position, pending, filled, np.int64(32))
                size -= 32
                shift = np.int64(32)
            position, pending, filled, high = _get(words, position, pending, filled, size)
            residuals[i] = signs[symbol] * (bases[symbol] + (low | (high << shift)))
        _predict(predictions, given, at, count, plan)
        _restore(residuals, predictions, tops, given.previous, at, count, plan, bits)
        for i in range(count):
            bits[at + i] &= -np.int64(signs[symbols[at + i]] != 0)
    return np.int64(position) * 32 - filled


@jit_part
def _restore(
    residuals: Int64s,
    predictions: Int64s,
    tops: Int64s,
    previous: Signed,
    at: int,
    count: int,
    plan: Plan,
    bits: Signed,
) -> None:
    """The inverse of :func:`_residuals`, with the sign bits in ``tops`` where magnitudes were predicted."""
    kept, turned = _masks(plan)
    unused = np.int64(64) - np.int64(plan[0])
    if plan[5]:
        for i in range(count):
            sign = np.int64(previous[at + i]) >> 63
            residuals[i] = (residuals[i] ^ sign) - sign
    for i in range(count):
        value = ((predictions[i] + residuals[i]) << unused) >> unused
        bits[at + i] = _ordered(value, kept, turned) | tops[i]
