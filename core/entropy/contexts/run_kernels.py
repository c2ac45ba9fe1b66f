"""The compiled run coder of efforts ``fast`` and ``default``: static rANS that pays for what is not zero.

Importing this module imports numba, so it is only ever imported from inside a function of its callers.

In a delta most symbols are zero, and a coder that takes each off a state spends its time on saying nothing. Here a
context in which zero is frequent codes how many zeros come before its next other symbol, and that symbol without the
zero: the same information, since runs of independent zeros are geometric. Every context counts its own zeros, so that
what the contexts know is kept. Other contexts code every symbol.

Source: S. Golomb, "Run-length encodings" (1966), with rANS instead of his code; J. Duda (arXiv 1311.2540).
"""

from typing import NamedTuple

import numpy as np

from shrinkpoint.arrays import Bools, Int32s, Int64s, UInt8s, UInt16s
from shrinkpoint.entropy.rans_kernels import LOWER, pop, push, refill
from shrinkpoint.entropy.tables import SCALE_BITS
from shrinkpoint.runtime.jit import jit, jit_inlined

__all__ = [
    "GAP_SHIFT",
    "LEVEL_SHIFT",
    "LONGEST",
    "Tables",
    "pair_classes",
    "put_runs",
    "set_gaps",
    "take_runs",
]

LONGEST = 63
"""A gap of so many zeros says nothing of the symbol behind it."""

LEVEL_SHIFT, GAP_SHIFT = 10, 12
"""log2 of the slots that share a place in the lookups."""

_EVERY = 1 << 16  # of the encoder's counters: the context codes every symbol


class Tables(NamedTuple):
    """What contexts code with; row i of each is that of table i.

    Attributes:
        zero: the symbol that gaps consist of.
        runs: bool (tables,), whether gaps are coded.
        levels: int64 (tables, alphabet), entries of the symbols; without zero where gaps are coded.
        gaps: int64 (tables, LONGEST + 1), entries of the gaps.
        level_lookup: uint8 (tables, 2^20 >> LEVEL_SHIFT), the first symbol that reaches into a bucket of slots.
        gap_lookup: uint8 (tables, 2^20 >> GAP_SHIFT), the same for gaps.
    """

    zero: int
    runs: Bools
    levels: Int64s
    gaps: Int64s
    level_lookup: UInt8s
    gap_lookup: UInt8s


@jit
def set_gaps(zeros: Int64s, gaps: Int64s) -> None:
    """Fill ``gaps`` (tables, LONGEST + 1) with geometric frequencies, the last for all gaps from there on.

    Args:
        zeros: int64 (tables,), the frequency of zero in 2^-20.
        gaps: all 0.
    """
    total = np.int64(1) << SCALE_BITS
    for row in range(zeros.size):
        left = total
        if zeros[row] < total:  # otherwise no other symbol ever follows
            for gap in range(LONGEST):
                share = left * (total - zeros[row]) >> SCALE_BITS
                gaps[row, gap] = min(max(share, 1), left - (LONGEST - gap))  # every gap is possible
                left -= gaps[row, gap]
        gaps[row, LONGEST] = left


def put_runs(
    tables: Tables, rows: UInt8s, symbols: UInt8s, events: Int64s, words: UInt16s, states: Int64s
) -> int:
    """Encode a chunk.

    Validated by the caller: rows are below the number of tables, which give every symbol that occurs under them a
    frequency; ``events`` holds two entries per symbol and two per table, ``words`` twice as many.

    Returns:
        The first used index of ``words``, which is filled from its end; ``states`` takes the four final states.
    """
    counts, places = np.empty(tables.runs.size, np.int32), np.zeros(tables.runs.size, np.int64)
    return int(_put_runs(tables, rows, symbols, counts, places, events, words, states))


@jit
def _put_runs(
    tables: Tables,
    rows: UInt8s,
    symbols: UInt8s,
    counts: Int32s,
    places: Int64s,
    events: Int64s,
    words: UInt16s,
    states: Int64s,
) -> int:
    n = _list_events(tables, rows, symbols, counts, places, events)
    x0 = x1 = x2 = x3 = np.int64(LOWER)
    position = words.size
    for i in range(n - 1, -1, -1):
        x, position = push(x3, events[i], words, position)
        x0, x1, x2, x3 = x, x0, x1, x2
    states[0], states[1], states[2], states[3] = x0, x1, x2, x3
    return position


@jit_inlined
def _list_events(
    tables: Tables, rows: UInt8s, symbols: UInt8s, counts: Int32s, places: Int64s, events: Int64s
) -> int:
    """What the decoder takes, in its order: a gap stands where its context's zeros begin."""
    levels, gaps, runs, zero = tables.levels, tables.gaps, tables.runs, tables.zero
    # zeros since the open gap began; LONGEST where none is open
    for table in range(runs.size):
        counts[table] = LONGEST if runs[table] else _EVERY
    n = 0
    for i in range(rows.size):
        row, symbol = rows[i], symbols[i]
        count = counts[row]
        if symbol == zero and count < LONGEST - 1:
            counts[row] = count + 1
            continue
        if count == _EVERY:
            events[n] = levels[row, symbol]
            n += 1
            continue
        if count == LONGEST:
            places[row] = n
            n += 1
            count = 0
        if symbol == zero:
            count += 1
            if count == LONGEST:
                events[places[row]] = gaps[row, LONGEST]
        else:
            events[places[row]] = gaps[row, count]
            events[n] = levels[row, symbol]
            places[row] = n + 1
            n += 2
            count = 0
        counts[row] = count
    for table in range(runs.size):
        if counts[table] < LONGEST:
            events[places[table]] = gaps[table, LONGEST]
    return n


@jit
def take_runs(
    tables: Tables,
    counters: Int32s,
    rows: UInt8s,
    out: UInt8s,
    start: int,
    stop: int,
    words: UInt16s,
    cursor: Int64s,
) -> None:
    """Fill ``out[start:stop]``, which is all zero's symbol, with the symbols of contexts ``rows``.

    ``counters`` (`run_tables.new_counters`) are int32 (2, tables): zeros left, and whether another symbol follows them. The
    next call goes on behind them.

    Validated by the caller: rows are below the number of tables, which cover all slots and hold only symbols of the
    alphabet; ``cursor`` holds four states below 2^48 and the position in ``words``.
    """
    runs, levels, gaps = tables.runs, tables.levels, tables.gaps
    level_lookup, gap_lookup = tables.level_lookup, tables.gap_lookup
    left, due = counters[0], counters[1]
    x0, x1, x2, x3, position = cursor[0], cursor[1], cursor[2], cursor[3], cursor[4]
    for i in range(start, stop):
        row = rows[i - start]
        zeros = left[row]
        if zeros > 0:
            left[row] = zeros - 1
            continue
        if not runs[row]:
            x, symbol = pop(x0, row, level_lookup, LEVEL_SHIFT, levels)
            x, position = refill(x, words, position)
            x0, x1, x2, x3 = x1, x2, x3, x
            out[i] = symbol
            continue
        if due[row]:
            x, symbol = pop(x0, row, level_lookup, LEVEL_SHIFT, levels)
            x, position = refill(x, words, position)
            x0, x1, x2, x3 = x1, x2, x3, x
            out[i] = symbol
        while True:
            x, gap = pop(x0, row, gap_lookup, GAP_SHIFT, gaps)
            x, position = refill(x, words, position)
            x0, x1, x2, x3 = x1, x2, x3, x
            if due[row] or gap > 0:
                break
            x, symbol = pop(x0, row, level_lookup, LEVEL_SHIFT, levels)
            x, position = refill(x, words, position)
            x0, x1, x2, x3 = x1, x2, x3, x
            out[i] = symbol
            due[row] = 1
        # without a symbol due, this very one is the first of the gap
        left[row] = gap if due[row] else gap - 1
        due[row] = gap < LONGEST
    cursor[0], cursor[1], cursor[2], cursor[3], cursor[4] = x0, x1, x2, x3, position


@jit
def pair_classes(first: UInt8s, second: UInt8s, high: UInt8s, low: UInt8s, out: UInt8s) -> None:
    """``high[first] + low[second]`` for planes of levels, of which the tables have all 256."""
    for i in range(out.size):
        out[i] = high[first[i]] + low[second[i]]
