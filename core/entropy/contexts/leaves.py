"""Coding symbols under the leaves of a tree of contexts: what planes of levels and planes of points have in common.

In a payload these are the tree (entropy/contexts/cells.py), its tables (entropy/contexts/leaf_tables.py), and the chunks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shrinkpoint.arrays import Int32s, Int64s, UInt8s
from shrinkpoint.entropy.contexts.cells import Cells, grow_cells
from shrinkpoint.entropy.contexts.leaf_tables import levelled, read_leaf_tables, write_leaf_tables
from shrinkpoint.entropy.contexts.run_tables import join_chunks, put_chunk, run_tables
from shrinkpoint.entropy.static.rans import map_in_threads
from shrinkpoint.entropy.symbols import count_symbols, frozen
from shrinkpoint.entropy.tables import plan_tables
from shrinkpoint.entropy.wire import BitReader, BitWriter, ByteReader

__all__ = ["Leaves", "Span", "grow_tree", "own_cells", "read_leaves", "sample_places", "write_leaves"]

Span = tuple[int, int]
"""Where a chunk's elements begin and end."""

_MIN_SAMPLE, _MAX_SAMPLE = 1 << 13, 1 << 15


def sample_places(size: int) -> Int64s:
    """int64: elements from all over a plane, on which a tree is grown."""
    count = min(max(size // 4, _MIN_SAMPLE), _MAX_SAMPLE, size)
    return np.arange(count) * size // count


def grow_tree(
    features: UInt8s, symbols: UInt8s, levels: tuple[int, ...], size: int, *, droppable: bool = True
) -> Cells:
    """Grow the tree on a sample.

    Args:
        features: uint8 (features, m).
        symbols: uint8 (m,).
        levels: of each feature.
        size: of the whole plane.
        droppable: as in `grow_cells`.
    """
    present, ranks = np.unique(symbols, return_inverse=True)
    weight = size / symbols.size
    return grow_cells(features, ranks.astype(np.uint8), present.size, levels, weight, droppable=droppable)


def own_cells(cells: Cells) -> Int32s:
    """int32: what a number adds to the cell that stands for the levels of the first two features."""
    first, second = cells.levels[:2]
    numbers = np.arange(first * second)
    added: Int64s = numbers % first * cells.strides[0] + numbers // first * cells.strides[1]
    return added.astype(np.int32)


def write_leaves(
    out: bytearray,
    cells: Cells,
    contexts: UInt8s,
    symbols: UInt8s,
    alphabet: int,
    spans: Sequence[Span],
    threads: int,
) -> bytes:
    """Complete a payload by the tree, its tables and all chunks.

    Args:
        out: what stands before.
        cells: the tree.
        contexts: uint8 (n,), the leaf of each symbol; overwritten.
        symbols: uint8 (n,), below ``alphabet``.
        alphabet: 1..256.
        spans: of the chunks.
        threads: how many threads share the chunks.
    """
    from shrinkpoint.entropy.contexts import growth_kernels  # numba

    counts = count_symbols(symbols, contexts, alphabet, len(cells.splits) + 1)
    zero = int(np.argmax(counts.sum(axis=0)))
    tables = levelled(counts, plan_tables(counts).rows, zero)
    coder = run_tables(tables.entries(), zero)
    rows = tables.rows.astype(np.uint8)

    def encode(span: Span) -> bytes:
        part = contexts[slice(*span)]
        growth_kernels.rename(rows, frozen(part), part)
        return put_chunk(coder, part, symbols[slice(*span)])

    bits = BitWriter()
    cells.write(bits)
    write_leaf_tables(bits, tables, zero)
    out += bits.to_bytes()
    return join_chunks(out, map_in_threads(encode, spans, threads))


@dataclass(frozen=True)
class Leaves:
    """What decodes chunks.

    Attributes:
        strides: int64 (features,), what a level of each feature adds to the cell.
        rows: uint8 (cells,), the table of each.
        coder: the tables, for the kernels.
    """

    strides: Int64s
    rows: UInt8s
    coder: Any


def read_leaves(reader: ByteReader, levels: tuple[int, ...], alphabet: int) -> Leaves:
    """Read the tree and its tables; the chunks follow.

    Raises:
        FormatError: they are malformed.
    """
    bits = BitReader(reader)
    cells = Cells.read(bits, levels)
    zero, tables = read_leaf_tables(bits, len(cells.splits) + 1, alphabet)
    bits.finish()
    rows = tables.rows[cells.leaves()].astype(np.uint8)
    return Leaves(cells.strides, rows, run_tables(tables.entries(), zero))
