"""The compiled counting of symbols, the search for contexts that share a table, and what tables and their symbols take.

Importing this module imports numba, so it is only ever imported from inside a function of its callers.
"""

import math
from typing import NamedTuple

import numpy as np

from shrinkpoint.arrays import Bools, Float64s, Int64s, Integer, UInt8s
from shrinkpoint.runtime.jit import jit, jit_inlined, jit_part


@jit
def count_pairs(symbols: UInt8s, contexts: UInt8s, step: int, alphabet: int, counts: Int64s) -> bool:
    """Add the (context, symbol) pairs to ``counts`` of shape (4 or 1, n_contexts * alphabet); False if one is out of range.

    Four tables are filled in turn: with one, a skewed plane would wait for its own last increment each time. ``step`` is
    1, or 0 where ``contexts`` is one zero.
    """
    highest, widest = np.uint8(0), np.uint8(0)
    for i in range(symbols.size):
        highest = max(highest, symbols[i])
    for i in range(contexts.size):
        widest = max(widest, contexts[i])
    lanes, width = counts.shape[0], np.uint64(alphabet)
    if symbols.size and (highest >= alphabet or widest >= counts.shape[1] // alphabet):
        return False
    first, second, third, fourth = counts[0], counts[1 % lanes], counts[2 % lanes], counts[3 % lanes]
    whole = symbols.size // 4 * 4
    for i in range(0, whole, 4):
        first[contexts[i * step] * width + symbols[i]] += 1
        second[contexts[(i + 1) * step] * width + symbols[i + 1]] += 1
        third[contexts[(i + 2) * step] * width + symbols[i + 2]] += 1
        fourth[contexts[(i + 3) * step] * width + symbols[i + 3]] += 1
    for i in range(whole, symbols.size):
        first[contexts[i * step] * width + symbols[i]] += 1
    return True


@jit_part
def _length(n: Integer) -> float:
    return float(n * math.log2(n)) if n > 1 else 0.0


@jit_part
def _priced(total: Integer, inner: float, present: int, alphabet: int) -> float:
    """Bits of a table and the symbols under it, of whose lengths ``inner`` is the sum."""
    positions = 0 if present == alphabet else min(present, (alphabet + 7) // 8)
    return float(_length(total) - inner + 8.0 * (1 + positions + present))


@jit_part
def _take_stock(counts: Int64s, lengths: Float64s) -> tuple[Integer, float, int]:
    """Total, summed lengths and number of present symbols of a row; fills ``lengths``."""
    total, inner, present = np.int64(0), 0.0, 0
    for s in range(counts.size):
        lengths[s] = _length(counts[s])
        total += counts[s]
        inner += lengths[s]
        present += counts[s] > 0
    return total, inner, present


@jit_part
def _pair(groups: Int64s, lengths: Float64s, totals: Int64s, i: Integer, j: Integer) -> float:
    """Bits of two groups as one; a symbol that only one of them has costs no logarithm."""
    alphabet = groups.shape[1]
    inner, present = 0.0, 0
    for s in range(alphabet):
        first, second = groups[i, s], groups[j, s]
        if first and second:
            inner += _length(first + second)
        else:
            inner += lengths[i, s] + lengths[j, s]
        present += (first | second) > 0
    return float(_priced(totals[i] + totals[j], inner, present, alphabet))


@jit_inlined
def _add(counts: Int64s, to: Int64s) -> None:
    for s in range(to.size):
        to[s] += counts[s]


@jit
def payload_bits(counts: Int64s, labels: Int64s, merged: Int64s) -> float:
    """Size of tables and data if row i of ``counts`` (n, alphabet) uses table ``labels[i]``.

    ``merged`` (tables, alphabet), all 0, receives the counts of each table.
    """
    for i in range(counts.shape[0]):
        _add(counts[i], merged[labels[i]])
    bits = 0.0
    for i in range(merged.shape[0]):
        row = merged[i]
        total, inner, present = np.int64(0), 0.0, 0
        for s in range(row.size):
            total += row[s]
            inner += _length(row[s])
            present += row[s] > 0
        bits += _priced(total, inner, present, row.size)
    return float(bits)


class _Merging(NamedTuple):
    """What clustering works on: of each of n groups, or pair of them.

    Attributes:
        lengths: float64 (n, alphabet).
        totals: int64 (n,).
        costs: float64 (n,).
        gain: float64 (n, n), negative infinity.
        alive: bool (n,), true.
        parents: int64 (n,), 0 to n - 1.
        numbers: int64 (n,), -1.
    """

    lengths: Float64s
    totals: Int64s
    costs: Float64s
    gain: Float64s
    alive: Bools
    parents: Int64s
    numbers: Int64s


def cluster(groups: Int64s, labels: Int64s) -> None:
    """Merge rows two by two, best pair first, while that makes the payload smaller.

    Args:
        groups: int64 (n, alphabet), counts, none of which is negative; is overwritten.
        labels: int64 (contexts,), the row of each context; receives its table, numbered by the first context that uses it.
    """
    n = groups.shape[0]
    merging = _Merging(
        lengths=np.empty(groups.shape),
        totals=np.empty(n, np.int64),
        costs=np.empty(n),
        gain=np.full((n, n), -np.inf),
        alive=np.ones(n, np.bool_),
        parents=np.arange(n),
        numbers=np.full(n, -1),
    )
    _merge(groups, labels, merging)


@jit
def _merge(groups: Int64s, labels: Int64s, merging: _Merging) -> None:
    lengths, totals, cost, gain, alive, parents, numbers = merging
    n, alphabet = groups.shape
    for i in range(n):
        totals[i], inner, present = _take_stock(groups[i], lengths[i])
        cost[i] = _priced(totals[i], inner, present, alphabet)
        for j in range(i):
            gain[i, j] = cost[i] + cost[j] - _pair(groups, lengths, totals, i, j)
    for _ in range(n - 1):
        i, j, most = 0, 0, 0.0
        for a in range(n):
            of_a = gain[a]
            for b in range(a):
                if of_a[b] > most:
                    i, j, most = a, b, of_a[b]
        if i == 0:
            break
        for k in range(n):
            if parents[k] == i:
                parents[k] = j
        _add(groups[i], groups[j])
        totals[j], inner, present = _take_stock(groups[j], lengths[j])
        cost[j] = _priced(totals[j], inner, present, alphabet)
        alive[i] = False
        for k in range(n):
            gain[i, k] = gain[k, i] = -np.inf
        for k in range(n):
            if alive[k] and k != j:
                gain[max(k, j), min(k, j)] = cost[j] + cost[k] - _pair(groups, lengths, totals, k, j)
    tables = 0
    for context in range(labels.size):
        parent = parents[labels[context]]
        if numbers[parent] < 0:
            numbers[parent] = tables
            tables += 1
        labels[context] = numbers[parent]
