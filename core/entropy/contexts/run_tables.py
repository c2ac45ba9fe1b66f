"""The run coder's payloads: tables derived from the frequencies of all symbols, zero among them, and chunks."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from shrinkpoint.arrays import Int32s, Int64s, UInt8s, UInt16s
from shrinkpoint.entropy.symbols import frozen
from shrinkpoint.entropy.tables import SCALE_BITS, TableSet, read_tables
from shrinkpoint.entropy.wire import ByteReader, Payload, write_uvarint
from shrinkpoint.errors import CorruptionError, FormatError
from shrinkpoint.runtime.unlocked import to_bytes

__all__ = [
    "check_end",
    "join_chunks",
    "new_counters",
    "open_chunk",
    "put_chunk",
    "read_run_tables",
    "run_tables",
    "split_chunks",
]


_STATE_BYTES = 6
_TOTAL = 1 << SCALE_BITS
_MIN_SHARE = 5 * _TOTAL // 8  # of zeros, from which on gaps are shorter to code than every symbol


def run_tables(entries: Int64s, zero: int) -> Any:
    """Decide which tables code gaps, and make their frequencies.

    Args:
        entries: int64 (tables, alphabet) of ``TableSet.entries``.
        zero: the symbol that gaps consist of, below the alphabet.

    Returns:
        The ``Tables`` that the kernels read.
    """
    from shrinkpoint.entropy.contexts.run_kernels import (  # numba
        GAP_SHIFT,
        LEVEL_SHIFT,
        LONGEST,
        Tables,
        set_gaps,
    )

    frequencies = entries >> 32
    runs = frequencies[:, zero] >= _MIN_SHARE
    levels = np.array(
        [_others(row, zero) if run else row for row, run in zip(frequencies, runs, strict=True)]
    )
    gaps = np.zeros((runs.size, LONGEST + 1), dtype=np.int64)
    set_gaps(frequencies[:, zero].copy(), gaps)
    return Tables(
        zero=zero,
        runs=runs,
        levels=_entries(levels),
        gaps=_entries(gaps),
        level_lookup=_lookup(levels, LEVEL_SHIFT),
        gap_lookup=_lookup(gaps, GAP_SHIFT),
    )


def read_run_tables(reader: ByteReader, contexts: int, alphabet: int) -> tuple[TableSet, Any]:
    """Read zero, which contexts occur, and their tables; return these, and what the kernels read."""
    zero = reader.byte()
    if zero >= alphabet:
        raise FormatError(f"context payload: zero is symbol {zero} in an alphabet of {alphabet}")
    used = np.unpackbits(np.frombuffer(reader.take((contexts + 7) // 8), dtype=np.uint8))[:contexts] > 0
    if not used.any():
        raise FormatError("context payload: no context has a table")
    tables = read_tables(reader, used, alphabet)
    return tables, run_tables(tables.entries(), zero)


def new_counters(tables: Any) -> Int32s:
    """The decoder's counters before a chunk, int32 (2, tables)."""
    return np.zeros((2, tables.runs.size), dtype=np.int32)


def check_end(words: UInt16s, cursor: Int64s) -> None:
    """Raise unless a chunk has ended where the encoder began."""
    from shrinkpoint.entropy.rans_kernels import LOWER  # numba

    if cursor[4] != words.size or not bool((cursor[:4] == LOWER).all()):
        raise CorruptionError("context chunk: the data do not end in the state from which the encoder began")


def join_chunks(out: bytearray, chunks: Sequence[bytes]) -> bytes:
    """Append the length of every chunk but the last, and all chunks."""
    for chunk in chunks[:-1]:
        write_uvarint(out, len(chunk))
    return b"".join((bytes(out), *chunks))


def split_chunks(reader: ByteReader, count: int) -> list[memoryview]:
    """Inverse of :func:`join_chunks`."""
    lengths = [reader.uvarint(reader.remaining, "chunk length") for _ in range(count - 1)]
    return [reader.take(length) for length in lengths] + [reader.rest()]


def put_chunk(tables: Any, rows: UInt8s, symbols: UInt8s) -> bytes:
    """Code symbols, each under the table of its row: four 6-byte states and 16-bit words."""
    from shrinkpoint.entropy.contexts import run_kernels  # numba

    # Address space for the worst case: what is not written is never touched.
    events = np.empty(2 * symbols.size + 2 * tables.runs.size, dtype=np.int64)
    words, states = np.empty(2 * events.size, dtype=np.uint16), np.empty(4, dtype=np.int64)
    position = run_kernels.put_runs(tables, frozen(rows), frozen(symbols), events, words, states)
    head = b"".join(int(state).to_bytes(_STATE_BYTES, "little") for state in states)
    return b"".join((head, to_bytes(words[position:].astype("<u2", copy=False))))


def open_chunk(chunk: Payload) -> tuple[UInt16s, Int64s]:
    """The words of a chunk and the cursor from which the kernels read it."""
    reader = ByteReader(chunk, "context chunk")
    states = [int.from_bytes(reader.take(_STATE_BYTES), "little") for _ in range(4)]
    if reader.remaining % 2:
        raise FormatError(f"context chunk: {reader.remaining} bytes are not whole 16-bit words")
    words = np.frombuffer(bytes(reader.rest()), dtype="<u2").astype(np.uint16)
    return words, np.array([*states, 0], dtype=np.int64)


def _others(frequencies: Int64s, zero: int) -> Int64s:
    """Those of the other symbols, scaled to the same total; what rounding leaves goes to the most frequent one."""
    others = frequencies.copy()
    others[zero] = 0
    total = int(others.sum())
    if total == 0:  # no other symbol ever follows
        return frequencies
    others = others * _TOTAL // total
    others[np.argmax(others)] += _TOTAL - others.sum()
    return others


def _entries(frequencies: Int64s) -> Int64s:
    starts = np.cumsum(frequencies, axis=1) - frequencies
    return np.asarray((frequencies << 32) | starts, dtype=np.int64)


def _lookup(frequencies: Int64s, shift: int) -> UInt8s:
    slots = np.arange(_TOTAL >> shift, dtype=np.int64) << shift
    ends = np.cumsum(frequencies, axis=1)
    return np.stack([np.searchsorted(row, slots, side="right") for row in ends]).astype(np.uint8)
