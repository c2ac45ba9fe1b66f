"""Coding symbols under the leaves of a tree of contexts: what planes of levels and planes of points have in common.

In a payload these are the tree (entropy/contexts/cells.py), its tables (entropy/contexts/leaf_tables.py), and the chunks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from shrinkpoint.arrays import Int32s, Int64s, UInt8s
from shrinkpoint.entropy.contexts.cells import Cells, grow_cells
from shrinkpoint.entropy.contexts.run_tables import join_chunks, put_chunk, run_tables
from shrinkpoint.entropy.static.rans import map_in_threads
from shrinkpoint.entropy.symbols import count_symbols, frozen
from shrinkpoint.entropy.tables import TableSet, merge_counts, plan_tables, round_counts, weights_of
from shrinkpoint.entropy.wire import BitReader, BitWriter, ByteReader
from shrinkpoint.errors import FormatError

__all__ = [
    "Leaves",
    "Span",
    "grow_tree",
    "levelled",
    "own_cells",
    "read_leaf_tables",
    "read_leaves",
    "sample_places",
    "write_leaf_tables",
    "write_leaves",
]

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


_CODE_BITS, _LARGEST = 8, 255
_PARAMETER_BITS = 3
_COARSER = (
    24  # by how many codes, of 8 to the octave: rare symbols lose less than what finer codes would take
)
_LEAST_OF_ZERO, _MOST_OF_ZERO = 64, 160
_CODED_BITS = 34  # of a count that has a code


# ---- The tables of a tree's leaves in few bits: planes of small matrices have little more than these.
#
# Leaves name their table. The codes of a table (`shrinkpoint.entropy.tables`) are logarithms; they are written so that the
# most frequent symbol of the plane always has the same one, and for the others as differences to the table before.
#
#     most frequent symbol              as many bits as the greatest symbol has
#     its code wherever it occurs       8 bits
#     table of each leaf                as many bits as the number of tables so far has, at first none
#     Rice parameters                   3 bits each: of ranges, of the first table's codes, of the others' codes
#     tables                            range, whether the most frequent symbol occurs (1 bit), codes of the range's others
#
# A table's range is its lowest and its highest symbol. Ranges and codes are Rice codes of differences: 2 d for d >= 0 and
# -2 d - 1 for others.


def levelled(counts: Int64s, rows: Int64s, zero: int) -> TableSet:
    """Round the tables of contexts so that symbol ``zero`` has the same code wherever it occurs.

    Args:
        counts: int64 (leaves, alphabet), how often each symbol occurs in each leaf.
        rows: int64 (leaves,), the table of each leaf.
        zero: the most frequent symbol.
    """
    merged = merge_counts(counts, rows)
    of_zero = merged[:, zero, None]
    code = int(round_counts(of_zero.max())) - _COARSER
    weight = int(weights_of(min(max(code, _LEAST_OF_ZERO), _MOST_OF_ZERO)))
    scaled = np.where(of_zero > 0, merged * weight // np.maximum(of_zero, 1), merged)
    # codes end at 2^34: a table where zero is rarer than that allows has zero's code too, and all others are scaled down
    excess = (scaled.max(axis=1) >> _CODED_BITS).astype(np.float64)
    scaled >>= np.frexp(excess)[1][:, None]
    scaled = np.where(merged > 0, np.maximum(scaled, 1), 0)
    scaled[:, zero] = np.where(of_zero[:, 0] > 0, weight, 0)
    return TableSet(rows=rows, codes=round_counts(scaled))


def write_leaf_tables(out: BitWriter, tables: TableSet, zero: int) -> None:
    """Append the tables.

    Args:
        out: receives the bits.
        tables: of `levelled`; a row for every leaf, tables numbered by the first leaf that has them.
        zero: the most frequent symbol.
    """
    codes = [[int(code) for code in row] for row in tables.codes]
    out.put(zero, (len(codes[0]) - 1).bit_length())
    out.put(max(row[zero] for row in codes), _CODE_BITS)
    known = 0
    for number in map(int, tables.rows):
        out.put(number, known.bit_length())
        known = max(known, number + 1)
    ranges = [_range(row) for row in codes]
    moved = [
        _folded(end - before)
        for found, last in zip(ranges, [(0, len(codes[0]) - 1), *ranges], strict=False)
        for end, before in zip(found, last, strict=True)
    ]
    residuals = [
        [_folded(row[s] - _predicted(row, before, s)) for s in range(low, high + 1) if s != zero]
        for row, before, (low, high) in zip(codes, [None, *codes], ranges, strict=False)
    ]
    parameters = [
        _best_parameter(moved),
        _best_parameter(residuals[0]),
        _best_parameter(list(chain(*residuals[1:]))),
    ]
    for parameter in parameters:
        out.put(parameter, _PARAMETER_BITS)
    for number, (row, values) in enumerate(zip(codes, residuals, strict=True)):
        for end in moved[2 * number : 2 * number + 2]:
            out.put_rice(end, parameters[0])
        out.put(int(row[zero] > 0), 1)
        for value in values:
            out.put_rice(value, parameters[1 + (number > 0)])


def read_leaf_tables(reader: BitReader, leaves: int, alphabet: int) -> tuple[int, TableSet]:
    """Inverse of :func:`write_leaf_tables`: the most frequent symbol, and the tables.

    Raises:
        FormatError: the bits are not tables of this alphabet for so many leaves.
    """
    zero = reader.take((alphabet - 1).bit_length())
    if zero >= alphabet:
        raise FormatError(f"context payload: zero is symbol {zero} in an alphabet of {alphabet}")
    of_zero = reader.take(_CODE_BITS)
    rows = np.zeros(leaves, dtype=np.int64)
    known = 0
    for leaf in range(leaves):
        rows[leaf] = reader.take(known.bit_length())
        if rows[leaf] > known:
            raise FormatError(f"context payload: a leaf names table {rows[leaf]} of {known}")
        known = max(known, int(rows[leaf]) + 1)
    of_ranges, of_first, of_others = (reader.take(_PARAMETER_BITS) for _ in range(3))
    codes = np.zeros((known, alphabet), dtype=np.uint8)
    ends = [0, alphabet - 1]
    before: list[int] | None = None
    for table in codes:
        ends = [_read(reader, end, of_ranges, alphabet - 1) for end in ends]
        row = [0] * alphabet
        row[zero] = of_zero * reader.take(1)
        for s in range(ends[0], ends[1] + 1):
            if s != zero:
                parameter = of_first if before is None else of_others
                row[s] = _read(reader, _predicted(row, before, s), parameter, _LARGEST)
        if not any(row):
            raise FormatError("context payload: a table has no symbol")
        table[:], before = row, row
    return zero, TableSet(rows=rows, codes=codes)


def _range(row: list[int]) -> tuple[int, int]:
    present = [symbol for symbol, code in enumerate(row) if code]
    return present[0], present[-1]


def _predicted(row: list[int], before: list[int] | None, symbol: int) -> int:
    """The code of a symbol in the table before; if it has none there, that of the symbol below in its own table."""
    if before is not None and before[symbol]:
        return before[symbol]
    return row[symbol - 1] if symbol else 0


def _folded(difference: int) -> int:
    return 2 * difference if difference >= 0 else -2 * difference - 1


def _read(reader: BitReader, predicted: int, parameter: int, limit: int) -> int:
    value = reader.take_rice(parameter, 2 * _LARGEST)
    found = predicted + (-(value + 1) // 2 if value & 1 else value // 2)
    if not 0 <= found <= limit:
        raise FormatError(f"context payload: {found} where a table has numbers up to {limit}")
    return found


def _best_parameter(values: list[int]) -> int:
    def bits(parameter: int) -> int:
        return sum((value >> parameter) + 1 + parameter for value in values)

    return min(range(1 << _PARAMETER_BITS), key=bits)
