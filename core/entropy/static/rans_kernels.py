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
from shrinkpoint.entropy.static.tables import SCALE_BITS
from shrinkpoint.runtime.jit import jit, jit_part

LOWER = 1 << 32
"""States are in [LOWER, LOWER * 2^16), unless they started from less."""

_WORD_BITS = 16
_LIMIT_SHIFT = 32 - SCALE_BITS + _WORD_BITS
_SLOT_MASK = (1 << SCALE_BITS) - 1
_LOW32 = (1 << 32) - 1


@jit
def encode(
    symbols: UInt8s, contexts: UInt8s, step: int, entries: Int64s, words: UInt16s, states: Int64s
) -> int:
    """Encode a chunk, symbol i on state i modulo the number of states, which is a power of two.

    Validated by the caller: symbols and contexts index ``entries`` (n_contexts, alphabet), whose frequencies are not 0
    and in the high halves, with first slots in the low ones; ``words`` holds two words per symbol. ``step`` is 1, or 0
    where ``contexts`` is one zero.

    Returns:
        The first used index of ``words``, which is filled from its end; ``states`` then have their last values.
    """
    position, last = words.size, states.size - 1
    for i in range(symbols.size - 1, -1, -1):
        x, entry = states[i & last], entries[contexts[i * step], symbols[i]]
        frequency = entry >> 32
        limit = frequency << _LIMIT_SHIFT
        while x >= limit:
            position -= 1
            words[position] = x & 0xFFFF
            x >>= _WORD_BITS
        quotient = np.int64(np.float64(x) / np.float64(frequency))
        states[i & last] = quotient * ((1 << SCALE_BITS) - frequency) + x + (entry & _LOW32)
    return position


@jit_part
def _pop(x: Integer, row: Integer, lookup: UInt8s, shift: int, entries: Int64s) -> tuple[Integer, Integer]:
    """Take one symbol off a state under table ``row``; the state comes back without renormalisation."""
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
def _refill(x: Integer, words: UInt16s, position: int) -> tuple[Integer, int]:
    """Read words until a state is back in its interval, or none are left, as where it started from less than LOWER."""
    while x < LOWER and position < words.size:
        x = (x << _WORD_BITS) | np.int64(words[position])
        position += 1
    return x, position


@jit
def decode(
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
    """Fill ``out`` from one or four states, the inverse of `encode`; False if the words do not end where they must.

    Validated by the caller: contexts index ``rows``, rows index ``lookup`` and ``entries``, every table covers all 2^20
    slots, states are in [0, 2^48). They end with the values from which the encoder started: that is the caller's to check.
    """
    position, last = 0, states.size - 1
    whole = out.size & ~3 if last else 0
    x0, x1, x2, x3 = states[0], states[1 & last], states[2 & last], states[3 & last]
    for i in range(0, whole, 4):
        x0, symbol0 = _pop(x0, rows[contexts[i * step]], lookup, shift, entries)
        x1, symbol1 = _pop(x1, rows[contexts[(i + 1) * step]], lookup, shift, entries)
        x2, symbol2 = _pop(x2, rows[contexts[(i + 2) * step]], lookup, shift, entries)
        x3, symbol3 = _pop(x3, rows[contexts[(i + 3) * step]], lookup, shift, entries)
        out[i], out[i + 1], out[i + 2], out[i + 3] = symbol0, symbol1, symbol2, symbol3
        x0, position = _refill(x0, words, position)
        x1, position = _refill(x1, words, position)
        x2, position = _refill(x2, words, position)
        x3, position = _refill(x3, words, position)
    states[3 & last], states[2 & last], states[1 & last], states[0] = x3, x2, x1, x0
    for i in range(whole, out.size):
        x, symbol = _pop(states[i & last], rows[contexts[i * step]], lookup, shift, entries)
        states[i & last], position = _refill(x, words, position)
        out[i] = symbol
    return bool(position == words.size)
