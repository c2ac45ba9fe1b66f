"""Canonical Huffman coding of integers from a large, sparse alphabet: the second half of Inshrinkerator's delta coder.

Payload: number of symbols (varint); number of distinct symbols (varint); the distinct symbols ascending, the first one
zigzagged and then the distances (varints); one byte of code length each; the codes, first bit highest, zero-padded.
No symbols: a single 0. One distinct symbol has a code of length 0, hence no codes follow.

*Ranks* are symbols from 0 on whose table is kept elsewhere, as in LC-Checkpoint's cached code table: symbols that are ranked by how
often they occur have nearly the same distribution again and again, and a table that was built once serves all later arrays with
as many, so that only the codes are stored.

Sources: D. Huffman (1952); Inshrinkerator (arXiv 2306.11800), Algorithm 5, last step; LC-Checkpoint (arXiv 2009.13003), section on
Huffman coding, "code table caching".
"""

import heapq

import numpy as np

from shrinkpoint.arrays import Int64s, UInt8s
from shrinkpoint.entropy.wire import ByteReader, Payload, write_uvarint
from shrinkpoint.errors import CorruptionError, FormatError
from shrinkpoint.runtime.memory import to_bytes

MAX_RANKS = 32
"""Most symbols of a table that is kept; any code over so few fits the decoder's longest code, 40 bits."""

_MAX_LENGTH = 40  # a kernel's 64-bit buffer holds a code and 7 bits before it
_LOOKUP_BITS = 12
_MAX_COUNTED_RANGE = 1 << 17  # run symbols lie in -255..65535; counting them is far faster than sorting
_MAX_MAGNITUDE = 1 << 31  # symbols are small; this only keeps the arithmetic of a hostile table in bounds


def encode_huffman(symbols: Int64s) -> bytes:
    """Code integers by their own frequencies, table included.

    Args:
        symbols: int64 (n,), magnitudes below 2^31.

    Returns:
        The payload.
    """
    out = bytearray()
    write_uvarint(out, symbols.size)
    if symbols.size == 0:
        return bytes(out)
    distinct, indices, counts = _distinct(symbols)
    lengths = _code_lengths(counts)
    write_uvarint(out, distinct.size)
    first = int(distinct[0])
    write_uvarint(out, first << 1 if first >= 0 else (-first << 1) - 1)
    for distance in np.diff(distinct):
        write_uvarint(out, int(distance))
    out += lengths.astype(np.uint8).tobytes()
    return b"".join((bytes(out), to_bytes(_encode_stream(indices, counts, lengths))))


def decode_huffman(payload: Payload, max_symbols: int) -> Int64s:
    """Inverse of :func:`encode_huffman`.

    Args:
        payload: the bytes, all of them and nothing else.
        max_symbols: more symbols than this are refused before anything is allocated for them.

    Returns:
        int64 (n,), n <= ``max_symbols``.

    Raises:
        FormatError: the payload is malformed or states more symbols.
        CorruptionError: the payload is well-formed, but its codes end too early or too late.
    """
    reader = ByteReader(payload, "Huffman payload")
    count = reader.uvarint(max_symbols, "number of symbols")
    if count == 0:
        reader.finish()
        return np.zeros(0, dtype=np.int64)
    distinct, lengths = _read_table(reader, count)
    if distinct.size == 1:
        reader.finish()
        return np.full(count, distinct[0], dtype=np.int64)
    ranks = _decode_stream(reader.rest(), count, lengths)
    return np.asarray(distinct[_canonical_order(lengths)][ranks], dtype=np.int64)


def rank_lengths(counts: Int64s) -> list[int]:
    """Lengths of the codes of symbols 0.. that occur so often; a complete prefix code, also for those with count 0.

    Args:
        counts: int64 (k,), 1 <= k <= `MAX_RANKS`.

    Returns:
        k lengths in bits; ``[0]`` for a single symbol.
    """
    lengths: list[int] = _tree_depths(counts).tolist()
    return lengths


def encode_ranks(ranks: Int64s, lengths: list[int]) -> bytes:
    """The codes of symbols under given code lengths, first bit highest, zero-padded; the lengths are not within."""
    sizes = np.array(lengths, dtype=np.int64)
    return to_bytes(_encode_stream(ranks, np.bincount(ranks, minlength=sizes.size), sizes))


def decode_ranks(stream: bytes, count: int, lengths: object) -> Int64s:
    """Inverse of :func:`encode_ranks`.

    Args:
        stream: the codes, all of them and nothing else.
        count: how many symbols there are, no fewer than the table has.
        lengths: what was read as the list of code lengths; checked here.

    Returns:
        int64 (count,), each below ``len(lengths)``.

    Raises:
        FormatError: the lengths are not those of a complete prefix code, or the stream is malformed.
        CorruptionError: the codes end too early or too late.
    """
    if (
        not isinstance(lengths, list)
        or not 1 <= len(lengths) <= MAX_RANKS
        or any(type(length) is not int or not 0 <= length <= _MAX_LENGTH for length in lengths)
    ):
        raise FormatError(f"code lengths must be a list of 1..{MAX_RANKS} small integers, not {lengths!r}")
    head = bytearray()
    write_uvarint(head, count)
    write_uvarint(head, len(lengths))
    head.append(0)
    head += bytes([1] * (len(lengths) - 1)) + bytes(lengths)
    return decode_huffman(bytes(head) + stream, count)


def _encode_stream(indices: Int64s, counts: Int64s, lengths: Int64s) -> UInt8s:
    from shrinkpoint.entropy.static import huffman_kernels  # numba

    stream = np.empty(-(-int((counts * lengths).sum()) // 8), dtype=np.uint8)
    huffman_kernels.huffman_encode(indices, _canonical_codes(lengths), lengths, stream)
    return stream


def _distinct(symbols: Int64s) -> tuple[Int64s, Int64s, Int64s]:
    """The distinct symbols ascending, the index of each symbol among them, and how often each occurs."""
    lowest = int(symbols.min())
    if int(symbols.max()) - lowest >= _MAX_COUNTED_RANGE:
        distinct, indices, counts = np.unique(symbols, return_inverse=True, return_counts=True)
        return distinct, indices.reshape(-1), counts
    histogram = np.bincount(symbols - lowest)
    present = np.flatnonzero(histogram)
    index_of = np.zeros(histogram.size, dtype=np.int64)
    index_of[present] = np.arange(present.size)
    return present + lowest, index_of[symbols - lowest], histogram[present]


def _code_lengths(counts: Int64s) -> Int64s:
    """Length of each symbol's code, at most 40 bits; 0 if there is only one symbol."""
    lengths = _tree_depths(counts)
    while lengths.max() > _MAX_LENGTH:  # takes Fibonacci-like counts that sum to more than 2^27
        counts = (counts + 1) // 2
        lengths = _tree_depths(counts)
    return lengths


def _tree_depths(counts: Int64s) -> Int64s:
    """Depth of each leaf of the Huffman tree; among equal weights leaves come first, then nodes by creation."""
    n = counts.size
    parent = np.zeros(2 * n - 1, dtype=np.int64)
    heap = [(int(count), leaf) for leaf, count in enumerate(counts)]
    heapq.heapify(heap)
    for node in range(n, 2 * n - 1):
        weight, child = heapq.heappop(heap)
        parent[child] = node
        _, child = heapq.heapreplace(heap, (weight + heap[0][0], node))
        parent[child] = node
    depths = np.zeros(2 * n - 1, dtype=np.int64)
    for node in range(2 * n - 3, -1, -1):  # parents have higher numbers
        depths[node] = depths[parent[node]] + 1
    return depths[:n]


def _canonical_order(lengths: Int64s) -> Int64s:
    """Symbols by code length, then by value: the order in which canonical codes count up."""
    return np.argsort(lengths, kind="stable")


def _per_length(lengths: Int64s) -> tuple[Int64s, Int64s, Int64s]:
    """By code length: how many codes there are, the first code, and its rank in canonical order."""
    per_length = np.bincount(lengths).astype(np.int64)
    first_code = np.zeros_like(per_length)
    for length in range(2, per_length.size):
        first_code[length] = (first_code[length - 1] + per_length[length - 1]) << 1
    return per_length, first_code, np.cumsum(per_length) - per_length


def _canonical_codes(lengths: Int64s) -> Int64s:
    _, first_code, first_rank = _per_length(lengths)
    order = _canonical_order(lengths)
    codes = np.empty_like(lengths)
    codes[order] = first_code[lengths[order]] + np.arange(lengths.size) - first_rank[lengths[order]]
    return codes


def _read_table(reader: ByteReader, count: int) -> tuple[Int64s, Int64s]:
    """Read distinct symbols and code lengths; the lengths make a complete prefix code."""
    # Every distinct symbol takes two bytes or more in the table, and occurs.
    n_distinct = reader.uvarint(min(count, reader.remaining), "number of distinct symbols")
    if n_distinct == 0:
        raise FormatError("Huffman payload: symbols without a table")
    zigzag = reader.uvarint(2 * _MAX_MAGNITUDE, "first symbol")
    value = zigzag >> 1 if zigzag & 1 == 0 else -((zigzag + 1) >> 1)
    values = [value]
    for _ in range(n_distinct - 1):
        distance = reader.uvarint(2 * _MAX_MAGNITUDE, "distance of symbols")
        value += distance
        if distance == 0 or value > _MAX_MAGNITUDE:
            raise FormatError("Huffman payload: the symbols of the table are not ascending, or too large")
        values.append(value)
    lengths = np.frombuffer(reader.take(n_distinct), dtype=np.uint8).astype(np.int64)
    if n_distinct == 1:
        if lengths[0]:
            raise FormatError(f"Huffman payload: the only symbol has a code of {lengths[0]} bits")
    elif lengths.min() < 1 or lengths.max() > _MAX_LENGTH:
        raise FormatError(f"Huffman payload: code lengths must be 1..{_MAX_LENGTH}")
    elif int((np.int64(1) << (_MAX_LENGTH - lengths)).sum()) != 1 << _MAX_LENGTH:
        raise FormatError("Huffman payload: the code lengths do not make a complete prefix code")
    return np.array(values, dtype=np.int64), lengths


def _decode_stream(stream: memoryview, count: int, lengths: Int64s) -> Int64s:
    """Decode ``count`` codes to ranks in canonical order; they must fill the stream to the last byte."""
    from shrinkpoint.entropy.static import huffman_kernels  # numba

    if count > 8 * len(stream):
        raise FormatError(f"Huffman payload: {len(stream)} bytes cannot hold {count} codes")
    per_length, first_code, first_rank = _per_length(lengths)
    ordered = np.sort(lengths)
    short = int(np.searchsorted(ordered, _LOOKUP_BITS, side="right"))
    entries = (np.arange(short, dtype=np.int64) << 8) | ordered[:short]
    lookup = np.zeros(1 << _LOOKUP_BITS, dtype=np.int64)
    filled = np.repeat(entries, np.int64(1) << (_LOOKUP_BITS - ordered[:short]))
    lookup[: filled.size] = filled  # canonical codes count up, so buckets of short codes lie side by side
    data = np.frombuffer(bytes(stream), dtype=np.uint8)
    ranks = np.empty(count, dtype=np.int64)
    used = huffman_kernels.huffman_decode(
        data, lookup, _LOOKUP_BITS, first_code, first_rank, per_length, ranks
    )
    if used < 0 or -(-used // 8) != data.size:
        raise CorruptionError(f"Huffman payload: the codes do not end at the end of their {data.size} bytes")
    if used % 8 and int(data[-1]) & ((1 << (8 - used % 8)) - 1):
        raise FormatError("Huffman payload: padding bits are set")
    return ranks
