"""Which contexts of effort ``default`` share a table: a decision tree over at most `MAX_CELLS` cells of features.

The tree starts as one leaf and is split, best gain first, at a threshold of one feature's levels, as long as that saves
more bits than the new table and the split take. Its leaves are the contexts. Decoding looks a symbol's leaf up by its
cell, the mixed-radix number of the features that are used.

Source: the greedy growth of classification trees by information gain (L. Breiman et al., 1984), with the code length
of the tables as the price of a leaf.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from shrinkpoint.arrays import Float64s, Int64s, UInt8s
from shrinkpoint.entropy.tables import data_bits
from shrinkpoint.entropy.wire import BitReader, BitWriter
from shrinkpoint.errors import FormatError

__all__ = ["Cells", "grow_cells"]

MAX_CELLS = 1 << 16
_MAX_LEAVES = 64
_SPLIT_BITS = 8.0
_MIN_MEMBERS = 64
_WORTH_PREDICTING = 0.005  # share of the bits that the first feature must save

Split = tuple[int, int, int]


@dataclass
class _Node:
    """A node of the tree: feature, threshold, lower and upper part, or a leaf."""

    split: "tuple[int, int, _Node, _Node] | None" = None


@dataclass(frozen=True)
class Cells:
    """The tree.

    Attributes:
        splits: (leaf, feature, threshold): levels from the threshold on go to a new leaf, which has the split's number,
            counted from 1. A split stands before those of its lower part, and these before those of its upper part.
        levels: levels of each feature.
    """

    splits: tuple[Split, ...]
    levels: tuple[int, ...]

    @property
    def strides(self) -> Int64s:
        """int64 (features,): what a level of each feature adds to the cell; 0 for unused ones."""
        strides = np.zeros(len(self.levels), dtype=np.int64)
        size = 1
        for feature in sorted({feature for _, feature, _ in self.splits}):
            strides[feature] = size
            size *= self.levels[feature]
        return strides

    def leaves(self) -> UInt8s:
        """uint8 (cells,): the leaf of every cell."""
        strides = self.strides
        used = np.flatnonzero(strides)
        size = int(np.prod([self.levels[feature] for feature in used], dtype=np.int64))
        cells = np.arange(size, dtype=np.int64)
        leaves = np.zeros(size, dtype=np.uint8)
        for new, (leaf, feature, threshold) in enumerate(self.splits, start=1):
            level = cells // strides[feature] % self.levels[feature]
            leaves[(leaves == leaf) & (level >= threshold)] = new
        return leaves

    def write(self, out: BitWriter) -> None:
        """Append the tree: a bit for each node, and for each that is split its feature and the threshold less one."""
        _write(out, _tree(self.splits), self.levels)

    @staticmethod
    def read(reader: BitReader, levels: tuple[int, ...]) -> "Cells":
        """Inverse of :meth:`write`; the product of the used features' levels is bounded before anything is built."""
        splits: list[Split] = []
        _read(reader, levels, 0, splits)
        if not _fits({feature for _, feature, _ in splits}, levels):
            raise FormatError("context payload: too many cells of contexts")
        return Cells(tuple(splits), levels)


def _tree(splits: Sequence[Split]) -> _Node:
    """The root; splits may stand in any order in which leaves are split after they came to be."""
    root = _Node()
    leaves = [root]
    for leaf, feature, threshold in splits:
        low, high = _Node(), _Node()
        leaves[leaf].split = feature, threshold, low, high
        leaves[leaf] = low
        leaves.append(high)
    return root


def _in_order(node: _Node, leaf: int, found: list[Split]) -> None:
    """Append the splits of a node, which is ``leaf`` until it is split, in the order of `Cells.splits`."""
    if node.split is None:
        return
    feature, threshold, low, high = node.split
    found.append((leaf, feature, threshold))
    new = len(found)
    _in_order(low, leaf, found)
    _in_order(high, new, found)


def _write(out: BitWriter, node: _Node, levels: Sequence[int]) -> None:
    out.put(int(node.split is not None), 1)
    if node.split is not None:
        feature, threshold, low, high = node.split
        out.put(feature, _feature_bits(levels))
        out.put(threshold - 1, (levels[feature] - 2).bit_length())
        _write(out, low, levels)
        _write(out, high, levels)


def _read(reader: BitReader, levels: Sequence[int], leaf: int, splits: list[Split]) -> None:
    if not reader.take(1):
        return
    feature = reader.take(_feature_bits(levels))
    if feature >= len(levels) or levels[feature] < 2 or len(splits) >= _MAX_LEAVES - 1:
        raise FormatError("context payload: a split of contexts is malformed")
    threshold = reader.take((levels[feature] - 2).bit_length()) + 1
    if threshold >= levels[feature]:
        raise FormatError("context payload: a split of contexts is malformed")
    splits.append((leaf, feature, threshold))
    new = len(splits)
    _read(reader, levels, leaf, splits)
    _read(reader, levels, new, splits)


def _feature_bits(levels: Sequence[int]) -> int:
    return (len(levels) - 1).bit_length()


def _fits(used: set[int], levels: Sequence[int]) -> bool:
    return int(np.prod([levels[feature] for feature in used], dtype=np.int64)) <= MAX_CELLS


def grow_cells(
    features: UInt8s,
    symbols: UInt8s,
    alphabet: int,
    levels: tuple[int, ...],
    weight: float,
    *,
    droppable: bool = True,
) -> Cells:
    """Grow the tree on a sample.

    Args:
        features: uint8 (features, m), each below its levels.
        symbols: uint8 (m,).
        alphabet: 1..256.
        levels: levels of each feature, at most 64.
        weight: how many symbols of the plane one of the sample stands for.
        droppable: whether the first feature takes so long to compute that it is left out where it saves next to nothing.
    """
    splits, saved = _grow(features, symbols, alphabet, levels, weight)
    if droppable and any(feature == 0 for _, feature, _ in splits):
        without, saved_without = _grow(features, symbols, alphabet, (0, *levels[1:]), weight)
        counts = np.bincount(symbols, minlength=alphabet).astype(np.int64)
        if saved - saved_without < _WORTH_PREDICTING * (weight * float(data_bits(counts)) - saved):
            splits = without
    found: list[Split] = []
    _in_order(_tree(splits), 0, found)
    return Cells(tuple(found), levels)


def _grow(
    features: UInt8s, symbols: UInt8s, alphabet: int, levels: tuple[int, ...], weight: float
) -> tuple[tuple[Split, ...], float]:
    from shrinkpoint.entropy.contexts.growth_kernels import Limits, Sample, grow  # numba

    sample = Sample(
        features=features,
        symbols=symbols,
        levels=np.array(levels, dtype=np.int64),
        alphabet=alphabet,
        weight=weight,
        lengths=_lengths(symbols.size.bit_length()),
    )
    limits = Limits(leaves=_MAX_LEAVES, cells=MAX_CELLS, members=_MIN_MEMBERS, split_bits=_SPLIT_BITS)
    splits = np.zeros((_MAX_LEAVES - 1, 3), dtype=np.int64)
    count, saved = grow(sample, limits, splits)
    return tuple((int(leaf), int(feature), int(level)) for leaf, feature, level in splits[:count]), saved


@lru_cache(maxsize=4)
def _lengths(bits: int) -> Float64s:
    """``n log2 n`` for n below ``2 ** bits``."""
    numbers = np.arange(1 << bits, dtype=np.float64)
    return np.asarray(numbers * np.log2(np.maximum(numbers, 1)), dtype=np.float64)
