"""The compiled search for contexts that share a table, and what tables and the symbols under them take.

Importing this module imports numba, so it is only ever imported from inside a function of its callers.
"""

import math

import numpy as np
import numpy.typing as npt

from shrinkpoint.jit import jit

__all__ = ["cluster", "payload_bits"]

Float64s = npt.NDArray[np.float64]
Int64s = npt.NDArray[np.int64]
Integer = int | np.int64


@jit
def _length(n: Integer) -> float:
    return float(n * math.log2(n)) if n > 1 else 0.0


@jit
def _priced(total: Integer, inner: float, present: int, alphabet: int) -> float:
    """Bits of a table and the symbols under it, of whose lengths ``inner`` is the sum."""
    positions = 0 if present == alphabet else min(present, (alphabet + 7) // 8)
    return float(_length(total) - inner + 8.0 * (1 + positions + present))


@jit
def _take_stock(counts: Int64s, lengths: Float64s) -> tuple[Integer, float, int]:
    """Total, summed lengths and number of present symbols of a row; fills ``lengths``."""
    total, inner, present = np.int64(0), 0.0, 0
    for s in range(counts.size):
        lengths[s] = _length(counts[s])
        total += counts[s]
        inner += lengths[s]
        present += counts[s] > 0
    return total, inner, present


@jit
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


@jit
def payload_bits(counts: Int64s, labels: Int64s, merged: Int64s) -> float:
    """Size of tables and data if row i of ``counts`` (n, alphabet) uses table ``labels[i]``.

    ``merged`` (tables, alphabet), all 0, receives the counts of each table.
    """
    alphabet = counts.shape[1]
    for i in range(counts.shape[0]):
        merged[labels[i]] += counts[i]
    bits, lengths = 0.0, np.empty(alphabet)
    for i in range(merged.shape[0]):
        total, inner, present = _take_stock(merged[i], lengths)
        bits += _priced(total, inner, present, alphabet)
    return float(bits)


@jit
def cluster(groups: Int64s, labels: Int64s) -> None:
    """Merge rows two by two, best pair first, while that makes the payload smaller.

    Args:
        groups: int64 (n, alphabet), counts, none of which is negative; is overwritten.
        labels: int64 (contexts,), the row of each context; receives its table, numbered by the first context that uses it.
    """
    n, alphabet = groups.shape
    lengths = np.empty((n, alphabet))
    totals, cost = np.empty(n, dtype=np.int64), np.empty(n)
    gain = np.full((n, n), -np.inf)
    alive, parents = np.ones(n, dtype=np.bool_), np.empty(n, dtype=np.int64)
    for i in range(n):
        parents[i] = i
        totals[i], inner, present = _take_stock(groups[i], lengths[i])
        cost[i] = _priced(totals[i], inner, present, alphabet)
        for j in range(i):
            gain[i, j] = cost[i] + cost[j] - _pair(groups, lengths, totals, i, j)
    for _ in range(n - 1):
        best = np.argmax(gain)
        i, j = best // n, best % n
        if not gain[i, j] > 0:
            break
        for k in range(n):
            if parents[k] == i:
                parents[k] = j
        groups[j] += groups[i]
        totals[j], inner, present = _take_stock(groups[j], lengths[j])
        cost[j] = _priced(totals[j], inner, present, alphabet)
        alive[i] = False
        gain[i, :] = -np.inf
        gain[:, i] = -np.inf
        for k in range(n):
            if alive[k] and k != j:
                gain[max(k, j), min(k, j)] = cost[j] + cost[k] - _pair(groups, lengths, totals, k, j)
    numbers, tables = np.full(n, -1), 0
    for context in range(labels.size):
        parent = parents[labels[context]]
        if numbers[parent] < 0:
            numbers[parent] = tables
            tables += 1
        labels[context] = numbers[parent]
