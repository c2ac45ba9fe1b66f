"""Huffman codes of ranks whose table is kept from one array to the next: LC-Checkpoint's cached code table.

Symbols that are ranked by how often they occur have nearly the same distribution again and again, so that a table that
was built once for so many symbols serves all later arrays with as many, and only the codes are stored.

Source: LC-Checkpoint (arXiv 2009.13003), section on Huffman coding, "code table caching".
"""

import heapq
from itertools import pairwise

import numpy as np

from shrinkpoint.arrays import Int64s
from shrinkpoint.entropy.static.huffman import decode_huffman
from shrinkpoint.entropy.wire import write_uvarint
from shrinkpoint.errors import FormatError
from shrinkpoint.runtime.unlocked import to_bytes

__all__ = ["MAX_RANKS", "decode_ranks", "encode_ranks", "rank_lengths"]


MAX_RANKS = 32
"""Most symbols of one table; any code over so few fits the decoder's longest code, 40 bits."""


def rank_lengths(counts: Int64s) -> list[int]:
    """Lengths of the codes of symbols 0.. that occur so often; a complete prefix code, also for those with count 0.

    Args:
        counts: int64 (k,), 1 <= k <= `MAX_RANKS`.

    Returns:
        k lengths in bits; ``[0]`` for a single symbol.
    """
    if not 1 <= counts.size <= MAX_RANKS:
        raise ValueError(f"there must be 1..{MAX_RANKS} symbols, got {counts.size}")
    lengths = np.zeros(counts.size, dtype=np.int64)
    heap = [(int(count), symbol, np.arange(counts.size) == symbol) for symbol, count in enumerate(counts)]
    heapq.heapify(heap)
    node = counts.size  # the second key: equal weights are taken in the order of their making
    while len(heap) > 1:
        weight, _, members = heapq.heappop(heap)
        other_weight, _, others = heapq.heappop(heap)
        lengths += members | others
        heapq.heappush(heap, (weight + other_weight, node, members | others))
        node += 1
    return [int(length) for length in lengths]


def encode_ranks(ranks: Int64s, lengths: list[int]) -> bytes:
    """The codes of symbols under given code lengths, first bit highest, zero-padded; the lengths are not within."""
    from shrinkpoint.entropy.static import huffman_kernels  # numba

    sizes = np.array(lengths, dtype=np.int64)
    if sizes.size == 1:
        return b""
    # canonical codes count up over symbols by length, then by value
    order = np.argsort(sizes, kind="stable")
    codes = np.zeros_like(sizes)
    for before, symbol in pairwise(order):
        codes[symbol] = (codes[before] + 1) << (sizes[symbol] - sizes[before])
    bits = int((np.bincount(ranks, minlength=sizes.size) * sizes).sum())
    stream = np.empty(-(-bits // 8), dtype=np.uint8)
    huffman_kernels.huffman_encode(ranks, codes, sizes, stream)
    return to_bytes(stream)


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
        or any(type(length) is not int or not 0 <= length <= 40 for length in lengths)
    ):
        raise FormatError(f"code lengths must be a list of 1..{MAX_RANKS} small integers, not {lengths!r}")
    head = bytearray()
    write_uvarint(head, count)
    write_uvarint(head, len(lengths))
    head.append(0)
    head += bytes([1] * (len(lengths) - 1)) + bytes(lengths)
    return decode_huffman(bytes(head) + stream, count)
