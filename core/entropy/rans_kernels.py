"""The compiled inner loops of the range coder.

Importing this module imports numba, so it is only ever imported from inside a function of its callers. Kernels release
the GIL, keep no state and are compiled on first use. numba checks no bounds: every kernel states what its caller must
have validated, and checks by itself whatever depends on the payload.

The range coder is rANS (J. Duda, arXiv 1311.2540, section 2.2) in 64-bit integers: states below 2^48 leave in 16-bit
words, and probabilities are multiples of 2^-20. A state stays below 2^53, hence ``floor(x / frequency)`` is exact in
one IEEE double division, which modern CPUs pipeline where they do not pipeline the integer one.
"""

import numpy as np

from shrinkpoint.arrays import Int64s, Integer, UInt8s, UInt16s
from shrinkpoint.entropy.tables import SCALE_BITS
from shrinkpoint.runtime.jit import jit, jit_part

__all__ = [
    "LOWER",
    "decode_four",
    "decode_one",
    "encode_four",
    "encode_one",
    "pop",
    "push",
    "refill",
]

LOWER = 1 << 32
"""States of the four-lane coder are in [LOWER, LOWER * 2^16)."""

_WORD_BITS = 16
_LIMIT_SHIFT = 32 - SCALE_BITS + _WORD_BITS
_SLOT_MASK = (1 << SCALE_BITS) - 1
_LOW32 = (1 << 32) - 1


@jit_part
def push(x: Integer, entry: Integer, words: UInt16s, position: int) -> tuple[Integer, int]:
    """Put one symbol on state ``x``; ``entry`` packs its frequency (high half) and first slot (low half)."""
    frequency = entry >> 32
    limit = frequency << _LIMIT_SHIFT
    if x >= limit:
        position -= 1
        words[position] = x & 0xFFFF
        x >>= _WORD_BITS
        if x >= limit:
            position -= 1
            words[position] = x & 0xFFFF
            x >>= _WORD_BITS
    quotient = np.int64(np.float64(x) / np.float64(frequency))
    return quotient * ((1 << SCALE_BITS) - frequency) + x + (entry & _LOW32), position


@jit
def encode_one(
    symbols: UInt8s, contexts: UInt8s, step: int, entries: Int64s, words: UInt16s
) -> tuple[int, Integer]:
    """Encode a chunk on one state that starts from 0.

    Validated by the caller: symbols and contexts index ``entries`` (n_contexts, alphabet), whose frequencies are not 0;
    ``words`` holds two words per symbol. ``step`` is 1, or 0 where ``contexts`` is one zero.

    Returns:
        The first used index of ``words``, which is filled from its end, and the final state.
    """
    x = np.int64(0)
    position = words.size
    for i in range(symbols.size - 1, -1, -1):
        x, position = push(x, entries[contexts[i * step], symbols[i]], words, position)
    return position, x


@jit
def encode_four(
    symbols: UInt8s, contexts: UInt8s, step: int, entries: Int64s, words: UInt16s, states: Int64s
) -> int:
    """As :func:`encode_one`, symbol i on state i mod 4; the states start from LOWER and end in ``states``."""
    x0 = x1 = x2 = x3 = np.int64(LOWER)
    position = words.size
    whole = symbols.size & ~3
    for i in range(symbols.size - 1, whole - 1, -1):
        entry = entries[contexts[i * step], symbols[i]]
        if i & 3 == 2:
            x2, position = push(x2, entry, words, position)
        elif i & 3 == 1:
            x1, position = push(x1, entry, words, position)
        else:
            x0, position = push(x0, entry, words, position)
    for i in range(whole - 4, -1, -4):
        x3, position = push(x3, entries[contexts[(i + 3) * step], symbols[i + 3]], words, position)
        x2, position = push(x2, entries[contexts[(i + 2) * step], symbols[i + 2]], words, position)
        x1, position = push(x1, entries[contexts[(i + 1) * step], symbols[i + 1]], words, position)
        x0, position = push(x0, entries[contexts[i * step], symbols[i]], words, position)
    states[0], states[1], states[2], states[3] = x0, x1, x2, x3
    return position


@jit_part
def pop(x: Integer, row: Integer, lookup: UInt8s, shift: int, entries: Int64s) -> tuple[Integer, Integer]:
    """Take one symbol off state ``x`` under table ``row``; the state comes back without renormalisation."""
    slot = x & _SLOT_MASK
    symbol = np.int64(lookup[row, slot >> shift])
    entry = entries[row, symbol]
    offset = slot - (entry & _LOW32)
    # The lookup names the first symbol that reaches into the slot's bucket; a table covers all slots, so this ends.
    while offset >= entry >> 32:
        symbol += 1
        entry = entries[row, symbol]
        offset = slot - (entry & _LOW32)
    return (entry >> 32) * (x >> SCALE_BITS) + offset, symbol


@jit_part
def refill(x: Integer, words: UInt16s, position: int) -> tuple[Integer, int]:
    """Read words until the state is back in its interval; past the end, only count them."""
    if x < LOWER:
        if position < words.size:
            x = (x << _WORD_BITS) | np.int64(words[position])
        position += 1
        if x < LOWER:
            if position < words.size:
                x = (x << _WORD_BITS) | np.int64(words[position])
            position += 1
    return x, position


@jit
def decode_one(
    out: UInt8s,
    contexts: UInt8s,
    step: int,
    rows: Int64s,
    lookup: UInt8s,
    shift: int,
    entries: Int64s,
    words: UInt16s,
    x: Integer,
) -> bool:
    """Fill ``out`` from one state, the inverse of :func:`encode_one`; False if the words do not end where they must.

    Validated by the caller: contexts index ``rows``, rows index ``lookup`` and ``entries``, every table covers all 2^20
    slots, 0 <= x < 2^48.
    """
    position = 0
    for i in range(out.size):
        x, symbol = pop(x, rows[contexts[i * step]], lookup, shift, entries)
        out[i] = symbol
        # The encoder's state started below LOWER and no word left it until it had passed it.
        while x < LOWER and position < words.size:
            x = (x << _WORD_BITS) | np.int64(words[position])
            position += 1
    return bool(x == 0 and position == words.size)


@jit
def decode_four(
    out: UInt8s,
    contexts: UInt8s,
    step: int,
    rows: Int64s,
    lookup: UInt8s,
    shift: int,
    entries: Int64s,
    words: UInt16s,
    states: Int64s,
) -> bool:
    """As :func:`decode_one`, from the four states of :func:`encode_four`."""
    x0, x1, x2, x3 = states[0], states[1], states[2], states[3]
    position = 0
    whole = out.size & ~3
    for i in range(0, whole, 4):
        x0, symbol0 = pop(x0, rows[contexts[i * step]], lookup, shift, entries)
        x1, symbol1 = pop(x1, rows[contexts[(i + 1) * step]], lookup, shift, entries)
        x2, symbol2 = pop(x2, rows[contexts[(i + 2) * step]], lookup, shift, entries)
        x3, symbol3 = pop(x3, rows[contexts[(i + 3) * step]], lookup, shift, entries)
        out[i], out[i + 1], out[i + 2], out[i + 3] = symbol0, symbol1, symbol2, symbol3
        x0, position = refill(x0, words, position)
        x1, position = refill(x1, words, position)
        x2, position = refill(x2, words, position)
        x3, position = refill(x3, words, position)
    for i in range(whole, out.size):
        x0, symbol0 = pop(x0, rows[contexts[i * step]], lookup, shift, entries)
        out[i] = symbol0
        x0, position = refill(x0, words, position)
        x0, x1, x2 = x1, x2, x0
    return bool(position == words.size and x0 == LOWER and x1 == LOWER and x2 == LOWER and x3 == LOWER)
