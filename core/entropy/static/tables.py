"""Counts of symbols, and the frequency tables of the range coder: which contexts share one, how it is written, how it becomes
probabilities.

A table is written as one byte per present symbol: a count in a floating format of 5 exponent and 3 mantissa bits, exact
below 16. Both sides normalise these rounded counts to 2^20 with the same integer arithmetic. The rounding (6 % at most)
costs about 0.001 bit per symbol coded at one bit or more, and proportionally less in a skewed table.
"""

from dataclasses import dataclass

import numpy as np

from shrinkpoint.arrays import Bools, Float64s, Int64s, UInt8s
from shrinkpoint.entropy.wire import ByteReader
from shrinkpoint.errors import FormatError

SCALE_BITS = 20
"""Probabilities are multiples of 2^-SCALE_BITS."""

_TOTAL = 1 << SCALE_BITS
_FEW_CELLS = 1 << 11  # four tables of more do not stay in the cache, and are hardly hit twice in a row
_NO_CONTEXT = np.zeros(1, dtype=np.uint8)
_MAX_CLUSTERED = 64  # contexts compared pairwise
_TABLES_NEGLIGIBLE = 0.005  # share of the data's bits below which sharing tables is not worth a look

_CODES = np.arange(256, dtype=np.int64)
_VALUES = np.where(_CODES < 8, _CODES, (8 + (_CODES & 7)) << np.maximum((_CODES >> 3) - 1, 0))
_MIDPOINTS = (_VALUES[1:] + _VALUES[:-1] + 1) // 2


def frozen(array: UInt8s) -> UInt8s:
    """A contiguous read-only view: one array type for the kernels, hence one compilation for all callers."""
    view = np.ascontiguousarray(array).view()
    view.flags.writeable = False
    return view


def context_view(contexts: UInt8s | None, part: slice) -> tuple[UInt8s, int]:
    """What kernels read as contexts of a part of the symbols: their slice and step 1, or one zero and step 0."""
    if contexts is None:
        return frozen(_NO_CONTEXT), 0
    return frozen(contexts[part]), 1


def check_array(array: UInt8s, name: str, count: int | None = None) -> None:
    """Raise ValueError unless ``array`` is uint8 and 1-D, with ``count`` elements where that is given."""
    if array.dtype != np.uint8 or array.ndim != 1:
        raise ValueError(
            f"{name} must be a 1-D uint8 array, got {array.ndim}-D {array.dtype}: flatten and cast it"
        )
    if count is not None and array.size != count:
        raise ValueError(f"{name} must have {count} elements, one per symbol, got {array.size}")


def check_sizes(alphabet: int, n_contexts: int) -> None:
    """Raise ValueError unless both fit a byte."""
    if not 1 <= alphabet <= 256:
        raise ValueError(f"alphabet must be 1..256, got {alphabet}")
    if not 1 <= n_contexts <= 256:
        raise ValueError(f"n_contexts must be 1..256, got {n_contexts}")


def count_symbols(symbols: UInt8s, contexts: UInt8s | None, alphabet: int, n_contexts: int) -> Int64s:
    """Count each symbol in each context.

    Args:
        symbols: uint8 (n,), each below ``alphabet``.
        contexts: uint8 (n,), each below ``n_contexts``; None puts all symbols into context 0.
        alphabet: 1..256.
        n_contexts: 1..256.

    Returns:
        int64 (n_contexts, alphabet).

    Raises:
        ValueError: a symbol or context is out of range, or an array has the wrong shape or dtype.
    """
    from shrinkpoint.entropy.static import table_kernels  # numba

    check_sizes(alphabet, n_contexts)
    check_array(symbols, "symbols")
    if contexts is not None:
        check_array(contexts, "contexts", symbols.size)
    cells = n_contexts * alphabet
    lanes = 1 if cells > min(_FEW_CELLS, symbols.size // 4) else 4
    counts = np.zeros((lanes, cells), dtype=np.int64)
    view, step = context_view(contexts, slice(None))
    if not table_kernels.count_pairs(frozen(symbols), view, step, alphabet, counts):
        raise ValueError(f"every symbol must be below {alphabet} and every context below {n_contexts}")
    return np.asarray(counts.sum(axis=0).reshape(n_contexts, alphabet), dtype=np.int64)


@dataclass(frozen=True, kw_only=True)
class TableSet:
    """The tables of one payload.

    Attributes:
        rows: int64 (n_contexts,), the table of each context; 0 for contexts that do not occur.
        codes: uint8 (n_tables, alphabet), the rounded counts as written; 0 where a symbol is absent.
        bits: ideal size of the data under the unrounded tables, plus the tables; 0 for tables that were read.
    """

    rows: Int64s
    codes: UInt8s
    bits: float = 0.0

    def entries(self) -> Int64s:
        """Normalise: int64 (n_tables, alphabet), ``frequency << 32 | first slot``; frequencies of a row sum to 2^20."""
        frequencies = np.stack([_normalise(_VALUES[row]) for row in self.codes])
        starts = np.cumsum(frequencies, axis=1) - frequencies
        return np.asarray((frequencies << 32) | starts, dtype=np.int64)


def _normalise(weights: Int64s) -> Int64s:
    """Scale weights (at least one positive) to frequencies that sum to 2^20, each present one at least 1.

    Largest remainder; equal remainders go to the lower symbol first.
    """
    total = int(weights.sum())
    scaled = weights * _TOTAL
    frequencies = np.where(weights > 0, np.maximum(scaled // total, 1), 0)
    missing = _TOTAL - int(frequencies.sum())
    if missing > 0:
        order = np.argsort(-(scaled % total), kind="stable")
        frequencies[order[:missing]] += 1
    elif missing < 0:
        frequencies[np.argmax(frequencies)] += missing  # at most 255, and the largest is at least 2^20 / 256
    return frequencies


def _rounded(counts: Int64s) -> UInt8s:
    """Nearest 8-bit code of each count; a present symbol keeps a code above 0."""
    excess = int(counts.max(initial=0)) >> 34
    if excess:
        counts = np.where(counts > 0, np.maximum(counts >> excess.bit_length(), 1), 0)
    return np.searchsorted(_MIDPOINTS, counts, side="right").astype(np.uint8)


def _position_bytes(present: int, alphabet: int) -> int:
    """Bytes that say which symbols are present: none if all are, else a list or a bitmap, the shorter one."""
    return 0 if present == alphabet else min(present, (alphabet + 7) // 8)


def _row_bits(counts: Int64s) -> Float64s:
    """Written size in bits of the table of each row (..., alphabet)."""
    alphabet = counts.shape[-1]
    present = np.count_nonzero(counts, axis=-1)
    positions = np.where(present == alphabet, 0, np.minimum(present, (alphabet + 7) // 8))
    return np.asarray(8.0 * (1 + positions + present), dtype=np.float64)


def data_bits(counts: Int64s) -> Float64s:
    """Ideal code length in bits of the symbols counted in each row (..., alphabet): N log N - sum n log n."""
    weights = counts.astype(np.float64)
    totals = weights.sum(axis=-1)
    inner = (weights * np.log2(np.maximum(weights, 1.0))).sum(axis=-1)
    return np.asarray(totals * np.log2(np.maximum(totals, 1.0)) - inner, dtype=np.float64)


def plan_tables(counts: Int64s) -> TableSet:
    """Decide which contexts share a table, and round the tables.

    Args:
        counts: int64 (n_contexts, alphabet), how often each symbol occurs in each context; not all zero.

    Returns:
        The tables; ``bits`` predicts the size of data and tables.
    """
    used = np.flatnonzero(counts.any(axis=1))
    occurring = counts[used]
    labels = np.arange(used.size, dtype=np.int64)
    bits = _payload_bits(occurring, labels)
    if used.size > 1 and _row_bits(occurring).sum() > _TABLES_NEGLIGIBLE * data_bits(occurring).sum():
        for shared in (_cluster(occurring), np.zeros_like(labels)):
            shared_bits = _payload_bits(occurring, shared)
            if shared_bits < bits:
                labels, bits = shared, shared_bits
    rows = np.zeros(counts.shape[0], dtype=np.int64)
    rows[used] = labels
    return TableSet(rows=rows, codes=_rounded(_merged(occurring, labels)), bits=bits)


def _payload_bits(counts: Int64s, labels: Int64s) -> float:
    """Size of data, tables and map if context i of those that occur uses table ``labels[i]``."""
    from shrinkpoint.entropy.static import table_kernels  # numba

    merged = np.zeros((int(labels.max()) + 1, counts.shape[1]), dtype=np.int64)
    bits = float(table_kernels.payload_bits(counts, labels, merged))
    return bits + (8 * labels.size if 1 < merged.shape[0] < labels.size else 0)


def _merged(counts: Int64s, labels: Int64s) -> Int64s:
    """int64 (tables, alphabet): how often each symbol occurs under each table, that of context i being ``labels[i]``."""
    merged = np.zeros((int(labels.max()) + 1, counts.shape[1]), dtype=np.int64)
    np.add.at(merged, labels, counts)
    return merged


def _cluster(counts: Int64s) -> Int64s:
    """Merge contexts two by two, best pair first, while that makes the payload smaller; return a label per context."""
    from shrinkpoint.entropy.static import table_kernels  # numba

    labels = np.arange(counts.shape[0], dtype=np.int64)
    if counts.shape[0] > _MAX_CLUSTERED:
        order = np.argsort(-counts.sum(axis=1), kind="stable")
        labels[order] = np.minimum(np.arange(counts.shape[0]), _MAX_CLUSTERED - 1)
    groups = _merged(counts, labels)
    table_kernels.cluster(groups, labels)  # numbered so that the map is the identity when nothing was merged
    return labels


def write_tables(out: bytearray, tables: TableSet, used: Bools) -> None:
    """Append tables to ``out``: number of tables, table of each used context unless that is obvious, each table.

    Args:
        out: receives the bytes.
        tables: what to write.
        used: bool (n_contexts,), the contexts that occur; the decoder knows them too, and they are not written.
    """
    n_tables, alphabet = tables.codes.shape
    out.append(n_tables - 1)
    if 1 < n_tables < np.count_nonzero(used):
        out += tables.rows[used].astype(np.uint8).tobytes()
    for row in tables.codes:
        symbols = np.flatnonzero(row)
        out.append(symbols.size - 1)
        if symbols.size < alphabet:
            as_list = symbols.size <= (alphabet + 7) // 8
            out += symbols.astype(np.uint8).tobytes() if as_list else np.packbits(row > 0).tobytes()
        out += row[symbols].tobytes()


def read_tables(reader: ByteReader, used: Bools, alphabet: int) -> TableSet:
    """Inverse of :func:`write_tables`.

    Raises:
        FormatError: the bytes are not tables of this alphabet for these contexts.
    """
    n_used = int(np.count_nonzero(used))
    n_tables = reader.byte() + 1
    if n_tables > n_used:
        raise FormatError(f"rANS payload: {n_tables} tables for {n_used} contexts")
    rows = np.zeros(used.size, dtype=np.int64)
    if n_tables == n_used:
        rows[used] = np.arange(n_used)
    elif n_tables > 1:
        rows[used] = np.frombuffer(reader.take(n_used), dtype=np.uint8)
        if rows.max() >= n_tables:
            raise FormatError(f"rANS payload: a context names table {rows.max()} of {n_tables}")
    codes = np.zeros((n_tables, alphabet), dtype=np.uint8)
    for row in codes:
        symbols = _read_positions(reader, alphabet)
        values = np.frombuffer(reader.take(symbols.size), dtype=np.uint8)
        if not values.all():
            raise FormatError("rANS payload: a symbol listed as present has frequency 0")
        row[symbols] = values
    return TableSet(rows=rows, codes=codes)


def _read_positions(reader: ByteReader, alphabet: int) -> Int64s:
    """Read which symbols of the alphabet a table holds, ascending."""
    present = reader.byte() + 1
    if present > alphabet:
        raise FormatError(f"rANS payload: a table holds {present} of {alphabet} symbols")
    data = np.frombuffer(reader.take(_position_bytes(present, alphabet)), dtype=np.uint8)
    if present == alphabet:
        return np.arange(alphabet, dtype=np.int64)
    if present <= (alphabet + 7) // 8:
        symbols = data.astype(np.int64)
        if symbols[-1] >= alphabet or np.any(np.diff(symbols) <= 0):
            raise FormatError(f"rANS payload: symbols of a table are not ascending below {alphabet}")
        return symbols
    symbols = np.flatnonzero(np.unpackbits(data)).astype(np.int64)
    if symbols.size != present or symbols[-1] >= alphabet:
        raise FormatError(
            f"rANS payload: the bitmap of a table does not hold {present} symbols below {alphabet}"
        )
    return symbols
