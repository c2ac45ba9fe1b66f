"""Static rANS on sixteen lanes: 32-bit states, 16-bit words, probabilities in 1/4096; and its tables.

Importing this module imports numba, so it is only ever imported from inside a function of its callers. The decoder is a part of the
walk (`shrinkpoint.entropy.lanes.walk_kernels`).

Sources: J. Duda, "Asymmetric numeral systems" (arXiv 1311.2540); interleaving: F. Giesen (arXiv 1402.3392).
"""

import numpy as np

from shrinkpoint.arrays import Float64s, Int64s, UInt8s, UInt16s, UInt32s
from shrinkpoint.entropy.lanes.tile_kernels import LANES
from shrinkpoint.entropy.lanes.walk_kernels import (
    ACTIVITIES,
    ALPHABET,
    FIRST_BIT,
    FREQUENCY_BIT,
    PHASES,
)
from shrinkpoint.runtime.jit import jit, jit_part

LOWER = 1 << 15
CONTEXTS = PHASES * ACTIVITIES
MAX_TABLES = 16
_SCALE = 1 << 12
_MAP_BITS = 4.0 * CONTEXTS
_EMPTY_BITS = 8.0  # of a table without counts, and of no other


@jit_part
def _bits(counts: Int64s) -> float:
    """Code length of symbols under their own frequencies, and of these frequencies."""
    total, inner, last = 0.0, 0.0, -1
    for symbol in range(ALPHABET):
        n = float(counts[symbol])
        if n > 0:
            total += n
            inner += n * np.log2(n)
            last = symbol
    return float(total * np.log2(max(total, 1.0)) - inner + 8.0 * (last + 2))


@jit_part
def _saving(counts: Int64s, bits: Float64s, one: int, other: int) -> float:
    """Return what two tables take less when they are joined; most tables of a small chunk are empty."""
    apart = bits[one] + bits[other]
    if bits[one] == _EMPTY_BITS or bits[other] == _EMPTY_BITS:
        return float(apart - max(bits[one], bits[other]))
    both = counts[CONTEXTS]
    for symbol in range(ALPHABET):
        both[symbol] = counts[one, symbol] + counts[other, symbol]
    return float(apart - _bits(both))


@jit_part
def _note_best(savings: Float64s, g: int) -> None:
    """Keep what joining a table with the best one before it saves where it would be joined with itself."""
    best = -np.inf
    for h in range(g):
        best = max(best, savings[h])
    savings[g] = best


@jit
def fit(
    symbols: UInt8s,
    contexts: UInt8s,
    counts: Int64s,
    bits: Float64s,
    savings: Float64s,
    tables: UInt8s,
    codes: UInt8s,
) -> int:
    """Decide which contexts share a table: neighbours are joined two by two, the best ones first, while that makes less of it all.

    Args:
        symbols: of a chunk.
        contexts: theirs.
        counts: (contexts + 1, alphabet), zeros.
        bits: (contexts,).
        savings: (contexts, contexts), filled with -inf.
        tables: (contexts,): receives the table of each context.
        codes: (contexts, alphabet): receives each table's counts, as `_weight` reads them.

    Returns:
        The number of tables.
    """
    for i in range(symbols.size):
        counts[contexts[i], symbols[i]] += 1
    room = counts[CONTEXTS]
    groups = CONTEXTS
    for g in range(CONTEXTS):
        bits[g] = _bits(counts[g])
        tables[g] = g
    for g in range(CONTEXTS):
        for h in (g + 1, g + PHASES):
            if h < CONTEXTS and (h != g + 1 or h % PHASES):
                savings[g, h] = savings[h, g] = _saving(counts, bits, g, h)
    for g in range(CONTEXTS):
        _note_best(savings[g], g)
    while groups > 1:
        best, one, other = -np.inf, 0, 0
        for g in range(CONTEXTS):
            if savings[g, g] > best:
                best, other = savings[g, g], g
        if best < 0 and groups <= MAX_TABLES:
            break
        while savings[other, one] < best:
            one += 1
        for symbol in range(ALPHABET):
            counts[one, symbol] += counts[other, symbol]
        bits[one] = _bits(counts[one])
        groups -= 1
        for g in range(CONTEXTS):
            if tables[g] == other:
                tables[g] = one
            joined = savings[one, g] > -np.inf or savings[other, g] > -np.inf
            savings[other, g] = savings[g, other] = -np.inf
            if joined and g != one and g != other:
                saving = _saving(counts, bits, one, g)
                savings[one, g] = savings[g, one] = saving
                _note_best(savings[g], g)
        _note_best(savings[one], one)
    apart, together = _MAP_BITS, 0.0
    for symbol in range(ALPHABET):
        room[symbol] = 0
    for g in range(CONTEXTS):
        if tables[g] == g:
            apart += bits[g]
            for symbol in range(ALPHABET):
                room[symbol] += counts[g, symbol]
    together = _bits(room)
    number = 0
    if together <= apart:
        for g in range(CONTEXTS):
            tables[g] = 0
        for symbol in range(ALPHABET):
            codes[0, symbol] = _code(room[symbol])
        return 1
    for g in range(CONTEXTS):
        if tables[g] == g:
            for symbol in range(ALPHABET):
                codes[number, symbol] = _code(counts[g, symbol])
            for h in range(g, CONTEXTS):
                if tables[h] == g:
                    tables[h] = number
            number += 1
    return number


@jit_part
def _code(count: int) -> int:
    """Return a count in eight bits: exact below 16, then eight values to an octave."""
    if count < 16:
        return count
    shift = 0
    while count >> shift >= 16:
        shift += 1
    mantissa = (count + (1 << (shift - 1))) >> shift
    return (((shift + 1) << 3) | (mantissa - 8)) if mantissa < 16 else ((shift + 2) << 3)


@jit_part
def _weight(code: int) -> int:
    return code if code < 16 else (8 + (code & 7)) << ((code >> 3) - 1)


@jit
def prepare(tables: UInt8s, codes: UInt8s, entries: UInt32s, lookup: UInt32s) -> bool:
    """Make probabilities of counts.

    Args:
        tables: (contexts,), the table of each.
        codes: (n, alphabet), of the tables.
        entries: (contexts, alphabet + 1): receives what `Stream` has of each symbol.
        lookup: (contexts, 256): receives the entry of the first symbol that reaches into each 16 slots; or (0, 256).

    Returns:
        Whether each table has counts.
    """
    for context in range(CONTEXTS):
        row, out = codes[tables[context]], entries[context]
        total, largest = 0, 0
        for symbol in range(ALPHABET):
            total += _weight(row[symbol])
            if row[symbol] > row[largest]:
                largest = symbol
        if total == 0:
            return False
        left = _SCALE
        for symbol in range(ALPHABET):
            weight = _weight(row[symbol])
            frequency = max(weight * _SCALE // total, 1) if weight else 0
            out[symbol] = np.uint32(frequency)
            left -= frequency
        out[largest] = np.uint32(np.int64(out[largest]) + left)
        start = 0
        for symbol in range(ALPHABET):
            frequency = int(out[symbol])
            first = min(start, _SCALE - 1)
            out[symbol] = np.uint32(
                frequency << np.int64(FREQUENCY_BIT) | first << np.int64(FIRST_BIT) | symbol
            )
            start += frequency
        out[ALPHABET] = np.uint32(0)
        if lookup.size:
            symbol, end = 0, np.int64(out[0] >> FREQUENCY_BIT)
            for bucket in range(256):
                while end <= bucket << 4:
                    symbol += 1
                    end += np.int64(out[symbol] >> FREQUENCY_BIT)
                lookup[context, bucket] = out[symbol]
    return True


@jit
def encode(
    symbols: UInt8s,
    contexts: UInt8s,
    size: int,
    columns: int,
    entries: UInt32s,
    words: UInt16s,
    states: UInt32s,
) -> int:
    """Encode a chunk's symbols in the order of its walk.

    Args:
        symbols: (size,).
        contexts: theirs.
        size: of the chunk.
        columns: of a row; the last row may be shorter.
        entries: of `prepare`.
        words: (size,), filled from its end.
        states: (16,): receives the states of the lanes.

    Returns:
        The first used index of ``words``.
    """
    for lane in range(LANES):
        states[lane] = np.uint32(LOWER)
    position, at = words.size, size
    whole = LANES * columns
    for start in range((size - 1) // whole * whole, -1, -whole):
        rows = min(LANES, (size - start + columns - 1) // columns)
        tail = min(columns, size - start - (rows - 1) * columns)
        for j in range(columns - 1, -1, -1):
            for lane in range((rows if j < tail else rows - 1) - 1, -1, -1):
                at -= 1
                entry = np.int64(entries[contexts[at], symbols[at]])
                frequency, first = entry >> np.int64(FREQUENCY_BIT), entry >> np.int64(FIRST_BIT) & 4095
                x = np.int64(states[lane])
                if x >= frequency << 19:
                    position -= 1
                    words[position] = np.uint16(x & 0xFFFF)
                    x >>= 16
                quotient = np.int64(np.float64(x) / np.float64(frequency))
                states[lane] = np.uint32(quotient * (_SCALE - frequency) + x + first)
    return position
