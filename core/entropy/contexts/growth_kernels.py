"""The compiled growth of a tree of contexts on a sample, and what it makes of a plane.

Importing this module imports numba, so it is only ever imported from inside a function of its callers.
"""

from typing import NamedTuple

import numpy as np

from shrinkpoint.arrays import Bools, Float64s, Int32s, Int64s, Integer, UInt8s, UInt16s, UInt32s
from shrinkpoint.runtime.jit import jit, jit_inlined, jit_part

__all__ = ["Limits", "Sample", "grow", "name_leaves", "rename"]

_BLOCK = 1024
_SYMBOL_BITS = 6.0  # of a table, for every symbol that occurs in it: its count and its position
_TABLE_BITS = 4.0
_NOISE_BITS = 4.0  # what the best of many splits saves on a sample by chance alone


class Sample(NamedTuple):
    """What the tree is grown on.

    Attributes:
        features: uint8 (features, m), each below its levels.
        symbols: uint8 (m,), below ``alphabet``.
        levels: int64 (features,), fewer than 2 where a feature may not be used.
        alphabet: 1..256.
        weight: how many symbols of the plane one of the sample stands for.
        lengths: float64, ``n log2 n`` for n up to m.
    """

    features: UInt8s
    symbols: UInt8s
    levels: Int64s
    alphabet: int
    weight: float
    lengths: Float64s


class Limits(NamedTuple):
    """What bounds the tree: leaves, product of the used features' levels, the least sample of a leaf, price of a split."""

    leaves: int
    cells: int
    members: int
    split_bits: float


class _Growth(NamedTuple):
    """What growing works on.

    Attributes:
        members: int32 (m,), of the sample, those of a leaf side by side.
        ends: int64 (leaves, 2), where a leaf's members begin and end.
        counts: int32 (leaves, features, levels, alphabet).
        gains: float64 (leaves,), of its best split.
        choices: int64 (leaves, 2), its feature and threshold.
        used: bool (features,), which ones any split uses.
        everything: int64 (alphabet,), counts of a leaf.
        below: int64 (alphabet,), those on one side of a threshold.
        above: int64 (alphabet,), those on the other one.
    """

    members: Int32s
    ends: Int64s
    counts: Int32s
    gains: Float64s
    choices: Int64s
    used: Bools
    everything: Int64s
    below: Int64s
    above: Int64s


def grow(sample: Sample, limits: Limits, splits: Int64s) -> tuple[int, float]:
    """Split the leaf that gains most until none gains.

    Args:
        sample: what to grow on.
        limits: when to stop.
        splits: int64 (leaves - 1, 3), receives leaf, feature and threshold of each split.

    Returns:
        The number of splits, and the bits that they save.
    """
    features, m = sample.features.shape
    depth = max(int(sample.levels.max()), 1)
    growth = _Growth(
        members=np.arange(m, dtype=np.int32),
        ends=np.zeros((limits.leaves, 2), np.int64),
        counts=np.zeros((limits.leaves, features, depth, sample.alphabet), np.int32),
        gains=np.zeros(limits.leaves),
        choices=np.zeros((limits.leaves, 2), np.int64),
        used=np.zeros(features, np.bool_),
        everything=np.empty(sample.alphabet, np.int64),
        below=np.empty(sample.alphabet, np.int64),
        above=np.empty(sample.alphabet, np.int64),
    )
    count, saved = _grow(sample, limits, growth, splits)
    return int(count), float(saved)


@jit
def _grow(sample: Sample, limits: Limits, growth: _Growth, splits: Int64s) -> tuple[int, float]:
    members, ends, counts, used = growth.members, growth.ends, growth.counts, growth.used
    gains, choices = growth.gains, growth.choices
    ends[0, 1] = members.size
    _count(sample, members, counts[0])
    saved = 0.0
    n = 1
    # of leaf 0; given the constant, numba would compile a second version
    _price(sample, limits, growth, n - 1)
    while n < limits.leaves:
        best = 0
        for leaf in range(1, n):
            if gains[leaf] > gains[best]:
                best = leaf
        if gains[best] <= 0:
            break
        saved += gains[best]
        feature, threshold = choices[best, 0], choices[best, 1]
        splits[n - 1, 0], splits[n - 1, 1], splits[n - 1, 2] = best, feature, threshold
        start, stop = ends[best, 0], ends[best, 1]
        middle = start + _partition(members[start:stop], sample.features[feature], threshold)
        ends[best, 1], ends[n, 0], ends[n, 1] = middle, middle, stop
        # the smaller part is counted, the other one is what it leaves
        if middle - start < stop - middle:
            _move(counts[best], counts[n])
            _count(sample, members[start:middle], counts[best])
            _take_away(counts[best], counts[n])
        else:
            _count(sample, members[middle:stop], counts[n])
            _take_away(counts[n], counts[best])
        fresh = not used[feature]
        used[feature] = True
        n += 1
        for leaf in range(n):
            if fresh or leaf == best or leaf == n - 1:
                _price(sample, limits, growth, leaf)
    return n - 1, saved


@jit_part
def _count(sample: Sample, members: Int32s, counts: Int32s) -> None:
    """Count symbols by each feature's level."""
    for f in range(counts.shape[0]):
        if sample.levels[f] > 1 or f == 0:
            feature, table = sample.features[f], counts[f]
            for i in range(members.size):
                index = members[i]
                table[min(np.int64(feature[index]), table.shape[0] - 1), sample.symbols[index]] += 1


@jit_inlined
def _move(counts: Int32s, to: Int32s) -> None:
    """Leave zeros behind."""
    for f in range(to.shape[0]):
        for level in range(to.shape[1]):
            source, target = counts[f, level], to[f, level]
            for s in range(target.size):
                target[s] = source[s]
                source[s] = 0


@jit_inlined
def _take_away(counts: Int32s, of: Int32s) -> None:
    for f in range(of.shape[0]):
        for level in range(of.shape[1]):
            source, target = counts[f, level], of[f, level]
            for s in range(target.size):
                target[s] -= source[s]


@jit_part
def _partition(members: Int32s, feature: UInt8s, threshold: Integer) -> Integer:
    """Put those below the threshold first; return how many these are."""
    low, high = 0, members.size
    while low < high:
        if feature[members[low]] < threshold:
            low += 1
        else:
            high -= 1
            members[low], members[high] = members[high], members[low]
    return low


@jit_part
def _length(counts: Int64s, lengths: Float64s) -> float:
    """Ideal code length in bits: N log N - sum n log n."""
    total, inner = np.int64(0), 0.0
    for s in range(counts.size):
        total += counts[s]
        inner += lengths[counts[s]]
    return float(lengths[total] - inner)


@jit_part
def _price(sample: Sample, limits: Limits, growth: _Growth, leaf: int) -> None:
    """Find a leaf's best split among the features that may still be used."""
    counts, used, gains, choices = growth.counts[leaf], growth.used, growth.gains, growth.choices
    everything, below, above = growth.everything, growth.below, growth.above
    gains[leaf] = 0.0
    alphabet = sample.alphabet
    everything[:] = 0
    for level in range(counts.shape[1]):
        table = counts[0, level]
        for s in range(alphabet):
            everything[s] += table[s]
    members, present = np.int64(0), 0
    for s in range(alphabet):
        members += everything[s]
        present += everything[s] > 0
    if members < limits.members:
        return
    cells = np.int64(1)
    for f in range(used.size):
        if used[f]:
            cells *= sample.levels[f]
    whole = _length(everything, sample.lengths)
    for f in range(used.size):
        levels = sample.levels[f]
        if not used[f] and cells * levels > limits.cells:
            continue
        below[:] = 0
        for level in range(levels - 1):
            table = counts[f, level]
            occurs, tables = False, 0
            for s in range(alphabet):
                occurs |= table[s] > 0
                below[s] += table[s]
                above[s] = everything[s] - below[s]
                tables += (below[s] > 0) + (above[s] > 0)
            if not occurs:
                continue
            gain = whole - _length(below, sample.lengths) - _length(above, sample.lengths)
            price = limits.split_bits + _TABLE_BITS + _SYMBOL_BITS * (tables - present)
            gain = sample.weight * (gain - _NOISE_BITS) - price
            if gain > gains[leaf]:
                gains[leaf], choices[leaf, 0], choices[leaf, 1] = gain, f, level + 1


def name_leaves(
    leaves: UInt8s, own: Int32s, found: UInt16s, classes: Int32s, sides: UInt8s, out: UInt8s
) -> None:
    """Fill ``out`` with the leaf of every symbol.

    Args:
        leaves: uint8 (cells,).
        own: int32, what a number in ``found`` adds to the cell.
        found: uint16 (n,), of `find_features`.
        classes: int32 (s, 256), what a level of each side plane adds.
        sides: uint8 (s, n).
        out: uint8 (n,).
    """
    _name_leaves(leaves, own, found, classes, sides, np.empty(_BLOCK, dtype=np.uint32), out)


@jit
def _name_leaves(
    leaves: UInt8s,
    own: Int32s,
    found: UInt16s,
    classes: Int32s,
    sides: UInt8s,
    block: UInt32s,
    out: UInt8s,
) -> None:
    for first in range(0, out.size, _BLOCK):
        part, numbers = out[first : first + _BLOCK], found[first : first + _BLOCK]
        cells = block[: part.size]
        for i in range(part.size):
            cells[i] = own[numbers[i]]
        for s in range(sides.shape[0]):
            side, added = sides[s, first : first + _BLOCK], classes[s]
            for i in range(part.size):
                cells[i] += np.uint32(added[side[i]])
        for i in range(part.size):
            part[i] = leaves[cells[i]]


@jit
def rename(names: UInt8s, old: UInt8s, out: UInt8s) -> None:
    """``names[old]``; the caller has checked that there are so many names."""
    for i in range(out.size):
        out[i] = names[old[i]]
