"""Static rANS under a small context: the coder of all symbol planes.

The contexts are known in full to the decoder (the same plane of the previous checkpoint, or a plane decoded before), so
coding is one table lookup and one division per symbol. Small arrays matter as much as large ones: contexts share tables
where that is shorter, one-valued arrays take two bytes, and what does not compress is packed.

Payload (integers are little-endian, "varint" is 7 bits per byte)::

    nothing                                     if there are no symbols
    0x00, symbol                                all symbols are equal
    0x01, packed symbols                        1, 2, 4 or 8 bits each, first symbol in the low bits
    0x02, chunk byte, tables, lengths, chunks   rANS; the format of the tables is in tables.py

The low 5 bits of the chunk byte are log2 of the symbols per chunk, bit 7 says that chunks have four states, not one.
Lengths are one varint per chunk but the last. A one-state chunk is its state as a varint and 16-bit words; a four-state
chunk is four 6-byte states and 16-bit words. Chunks do not depend on each other nor on the number of threads.

Source: J. Duda, "Asymmetric numeral systems" (arXiv 1311.2540); interleaving: F. Giesen (arXiv 1402.3392).
"""

from dataclasses import dataclass

import numpy as np

from shrinkpoint.arrays import Int64s, UInt8s
from shrinkpoint.entropy.static.tables import (
    SCALE_BITS,
    TableSet,
    check_array,
    check_sizes,
    context_view,
    count_symbols,
    data_bits,
    frozen,
    plan_tables,
    read_tables,
    write_tables,
)
from shrinkpoint.entropy.wire import ByteReader, Payload, parts_of, write_uvarint
from shrinkpoint.errors import CorruptionError, FormatError
from shrinkpoint.runtime.memory import to_bytes
from shrinkpoint.runtime.threads import map_in_threads

_CONSTANT, _PACKED, _RANS = 0, 1, 2
_MIN_CHUNK_LOG2, _MAX_CHUNK_LOG2 = 18, 24
_ONE_STATE_BYTES = 2048  # chunks grow until they are expected to have this many bytes
_FOUR_STATES_BYTES = 8192  # below, the 24 bytes of four states would show
_FOUR_STATES_FLAG = 0x80
_HEADER_BYTES = 6  # mode, chunk byte, number of tables, and what one state adds
_STATE_BYTES = 6
_STATE_LIMIT = (1 << 8 * _STATE_BYTES) - 1


@dataclass(frozen=True, kw_only=True)
class _Chunking:
    """How an array is cut: ``1 << log2`` symbols per chunk, one or four states each."""

    count: int
    log2: int
    four_states: bool

    @staticmethod
    def plan(count: int, ideal_bits: float) -> "_Chunking":
        """Chunks large enough that what each adds is lost in its data."""
        bytes_per_symbol = ideal_bits / 8 / count
        log2 = _MIN_CHUNK_LOG2
        while log2 < _MAX_CHUNK_LOG2 and bytes_per_symbol * (1 << log2) < _ONE_STATE_BYTES:
            log2 += 1
        expected = bytes_per_symbol * min(count, 1 << log2)
        return _Chunking(count=count, log2=log2, four_states=expected >= _FOUR_STATES_BYTES)

    def spans(self) -> list[slice]:
        return parts_of(self.count, 1 << self.log2)


def predict_bytes(counts: Int64s) -> float:
    """Size that :func:`encode_symbols` will need for these counts, within a few bytes and 0.2 %, without encoding.

    Args:
        counts: int64 (n_contexts, alphabet), of :func:`~shrinkpoint.entropy.static.tables.count_symbols`.
    """
    totals = counts.sum(axis=0)
    if np.count_nonzero(totals) < 2:
        return 2.0 if totals.any() else 0.0
    return min(
        _packed_bytes(int(totals.sum()), counts.shape[1]), _HEADER_BYTES + plan_tables(counts).bits / 8
    )


def encode_symbols(symbols: UInt8s, contexts: UInt8s | None, alphabet: int, n_contexts: int) -> bytes:
    """Code symbols, each under the frequencies of its context.

    Args:
        symbols: uint8 (n,), each below ``alphabet``.
        contexts: uint8 (n,), each below ``n_contexts``, to be passed to the decoder again; None for no context.
        alphabet: how many symbols there are, 1..256.
        n_contexts: how many contexts there are, 1..256.

    Returns:
        The payload. Its length is not within it: the caller stores that, and n.

    Raises:
        ValueError: an argument is out of range or has the wrong shape or dtype.
    """
    counts = count_symbols(symbols, contexts, alphabet, n_contexts)
    if symbols.size == 0:
        return b""
    if np.count_nonzero(counts.sum(axis=0)) == 1:
        return bytes([_CONSTANT, symbols[0]])
    packed_bytes = _packed_bytes(symbols.size, alphabet)
    tables = plan_tables(counts)
    if _HEADER_BYTES + tables.bits / 8 < packed_bytes:
        payload = _encode_rans(symbols, contexts, counts, tables)
        if len(payload) < packed_bytes:
            return payload
    return _pack(symbols, _packed_width(alphabet))


def encode_given(symbols: UInt8s, previous: UInt8s | None, alphabet: int) -> tuple[bytes, bool]:
    """Code symbols under those at the same places of another plane, or alone, whichever is predicted to be smaller.

    Args:
        symbols: as of `encode_symbols`.
        previous: uint8 (n,), each below ``alphabet``, too; None without another plane.
        alphabet: as of `encode_symbols`.

    Returns:
        The payload, and whether its contexts are the other plane's symbols.
    """
    if previous is not None:
        counts = count_symbols(symbols, previous, alphabet, alphabet)
        if predict_bytes(counts) < predict_bytes(counts.sum(axis=0, keepdims=True)):
            return encode_symbols(symbols, previous, alphabet, alphabet), True
    return encode_symbols(symbols, None, alphabet, 1), False


def decode_symbols(
    payload: Payload, contexts: UInt8s | None, count: int, alphabet: int, n_contexts: int
) -> UInt8s:
    """Inverse of :func:`encode_symbols`.

    Args:
        payload: the bytes of :func:`encode_symbols`, all of them and nothing else.
        contexts: uint8 (count,), the contexts that the encoder was given.
        count: how many symbols there are; no more than that is ever allocated for them.
        alphabet: as given to the encoder.
        n_contexts: as given to the encoder.

    Returns:
        uint8 (count,), each below ``alphabet``.

    Raises:
        FormatError: the payload is malformed.
        CorruptionError: the payload is well-formed, but its states do not end where the encoder began.
        ValueError: an argument other than the payload is out of range.
    """
    check_sizes(alphabet, n_contexts)
    if contexts is not None:
        check_array(contexts, "contexts", count)
    reader = ByteReader(payload, "rANS payload")
    if count == 0:
        reader.finish()
        return np.zeros(0, dtype=np.uint8)
    mode = reader.byte()
    if mode == _CONSTANT:
        symbols = np.full(count, reader.byte(), dtype=np.uint8)
        reader.finish()
    elif mode == _PACKED:
        symbols = _unpack(reader, count, _packed_width(alphabet))
    elif mode == _RANS:
        return _decode_rans(reader, contexts, count, (alphabet, n_contexts))
    else:
        raise FormatError(f"rANS payload: unknown mode {mode}")
    if int(symbols.max()) >= alphabet:
        raise FormatError(f"rANS payload: symbol {int(symbols.max())} in an alphabet of {alphabet}")
    return symbols


def _packed_width(alphabet: int) -> int:
    """Bits per packed symbol: the smallest of 1, 2, 4, 8 that holds the alphabet."""
    return next(width for width in (1, 2, 4, 8) if alphabet <= 1 << width)


def _packed_bytes(count: int, alphabet: int) -> int:
    return 1 + -(-count * _packed_width(alphabet) // 8)


def _pack(symbols: UInt8s, width: int) -> bytes:
    per_byte = 8 // width
    padded = np.zeros(-(-symbols.size // per_byte) * per_byte, dtype=np.uint8)
    padded[: symbols.size] = symbols
    shifts = np.arange(0, 8, width, dtype=np.uint8)
    packed = np.bitwise_or.reduce(padded.reshape(-1, per_byte) << shifts, axis=1)
    return b"".join((bytes([_PACKED]), to_bytes(packed.astype(np.uint8))))


def _unpack(reader: ByteReader, count: int, width: int) -> UInt8s:
    data = np.frombuffer(reader.take(-(-count * width // 8)), dtype=np.uint8)
    reader.finish()
    shifts = np.arange(0, 8, width, dtype=np.uint8)
    symbols = (data[:, None] >> shifts).reshape(-1) & np.uint8((1 << width) - 1)
    if symbols[count:].any():
        raise FormatError("rANS payload: padding bits of packed symbols are set")
    return symbols[:count]


def _encode_rans(symbols: UInt8s, contexts: UInt8s | None, counts: Int64s, tables: TableSet) -> bytes:
    chunking = _Chunking.plan(symbols.size, float(data_bits(counts).sum()))
    entries = tables.entries()[tables.rows]

    def encode(span: slice) -> bytes:
        view, step = context_view(contexts, span)
        return _encode_chunk(frozen(symbols[span]), view, step, entries, chunking.four_states)

    chunks = map_in_threads(encode, chunking.spans())
    out = bytearray([_RANS, chunking.log2 | (_FOUR_STATES_FLAG if chunking.four_states else 0)])
    write_tables(out, tables, counts.sum(axis=1) > 0)
    for chunk in chunks[:-1]:
        write_uvarint(out, len(chunk))
    return b"".join((bytes(out), *chunks))


def _encode_chunk(symbols: UInt8s, contexts: UInt8s, step: int, entries: Int64s, four_states: bool) -> bytes:
    from shrinkpoint.entropy.static import rans_kernels  # numba

    # Filled from its end: what is not written is never touched, and takes address space only.
    words = np.empty(2 * symbols.size, dtype=np.uint16)
    states = _first_states(four_states)
    position = rans_kernels.encode(symbols, contexts, step, entries, words, states)
    head = bytearray()
    if four_states:
        for state in states:
            head += int(state).to_bytes(_STATE_BYTES, "little")
    else:
        write_uvarint(head, int(states[0]))
    return b"".join((bytes(head), to_bytes(words[position:].astype("<u2", copy=False))))


def _first_states(four: bool) -> Int64s:
    from shrinkpoint.entropy.static import rans_kernels  # numba

    return np.full(4, rans_kernels.LOWER) if four else np.zeros(1, dtype=np.int64)


@dataclass(frozen=True, kw_only=True)
class _DecoderTables:
    """What the decoding kernels read: tables as entries, and the first symbol of every bucket of slots."""

    rows: Int64s
    entries: Int64s
    lookup: UInt8s
    shift: int

    @staticmethod
    def of(tables: TableSet, alphabet: int) -> "_DecoderTables":
        entries = tables.entries()
        # 1 KiB per table keeps the tables of some tens of contexts in the first cache; rich alphabets need finer ones.
        bits = 10 if alphabet <= 32 else 12
        shift = SCALE_BITS - bits
        ends = (entries >> 32) + (entries & 0xFFFFFFFF)
        slots = np.arange(1 << bits, dtype=np.int64) << shift
        lookup = np.stack([np.searchsorted(row, slots, side="right") for row in ends]).astype(np.uint8)
        return _DecoderTables(rows=tables.rows, entries=entries, lookup=lookup, shift=shift)


def _decode_rans(reader: ByteReader, contexts: UInt8s | None, count: int, sizes: tuple[int, int]) -> UInt8s:
    alphabet, n_contexts = sizes
    if contexts is None:
        used = np.arange(n_contexts) == 0
    else:
        used = count_symbols(contexts, None, n_contexts, 1)[0] > 0
    chunk_byte = reader.byte()
    four_states = bool(chunk_byte & _FOUR_STATES_FLAG)
    chunking = _Chunking(count=count, log2=chunk_byte & ~_FOUR_STATES_FLAG, four_states=four_states)
    if not _MIN_CHUNK_LOG2 <= chunking.log2 <= _MAX_CHUNK_LOG2:
        raise FormatError(f"rANS payload: chunks of 2^{chunking.log2} symbols are not in this format")
    tables = _DecoderTables.of(read_tables(reader, used, alphabet), alphabet)
    spans = chunking.spans()
    lengths = [reader.uvarint(reader.remaining, "chunk length") for _ in spans[:-1]]
    chunks = [reader.take(length) for length in lengths] + [reader.rest()]
    out = np.empty(count, dtype=np.uint8)

    def decode(work: tuple[slice, memoryview]) -> None:
        span, chunk = work
        view, step = context_view(contexts, span)
        _decode_chunk(chunk, out[span], view, step, tables, four_states)

    map_in_threads(decode, zip(spans, chunks, strict=True))
    return out


def _decode_chunk(
    chunk: memoryview, out: UInt8s, contexts: UInt8s, step: int, tables: _DecoderTables, four_states: bool
) -> None:
    from shrinkpoint.entropy.static import rans_kernels  # numba

    reader = ByteReader(chunk, "rANS chunk")
    if four_states:
        found = [int.from_bytes(reader.take(_STATE_BYTES), "little") for _ in range(4)]
    else:
        found = [reader.uvarint(_STATE_LIMIT, "state")]
    states = np.array(found, dtype=np.int64)
    if reader.remaining % 2:
        raise FormatError(f"rANS chunk: {reader.remaining} bytes are not whole 16-bit words")
    words = np.frombuffer(bytes(reader.rest()), dtype="<u2").astype(np.uint16)
    ends = rans_kernels.decode(
        out, contexts, step, tables.rows, tables.lookup, tables.shift, tables.entries, words, states
    )
    if not ends or not np.array_equal(states, _first_states(four_states)):
        raise CorruptionError("rANS chunk: the data do not end in the state from which the encoder began")
