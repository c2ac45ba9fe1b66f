"""The compiled inner loops of Huffman coding.

Importing this module imports numba, so it is only ever imported from inside a function of its callers.
"""

import numpy as np

from shrinkpoint.arrays import Int64s, Integer, UInt8s
from shrinkpoint.runtime.jit import jit


@jit
def huffman_encode(indices: Int64s, codes: Int64s, lengths: Int64s, out: UInt8s) -> None:
    """Write the code of each symbol, first bit highest, into ``out``, which has exactly the bytes needed."""
    buffer = np.int64(0)
    filled = 0
    position = 0
    for i in range(indices.size):
        length = lengths[indices[i]]
        buffer = (buffer << length) | codes[indices[i]]
        filled += length
        while filled >= 8:
            filled -= 8
            out[position] = (buffer >> filled) & 0xFF
            position += 1
        buffer &= (1 << filled) - 1
    if filled:
        out[position] = (buffer << (8 - filled)) & 0xFF


@jit
def huffman_decode(
    stream: UInt8s,
    lookup: Int64s,
    lookup_bits: int,
    first_code: Int64s,
    first_index: Int64s,
    per_length: Int64s,
    out: Int64s,
) -> Integer:
    """Fill ``out`` with ranks in canonical order from a complete code; return the bits used, or -1 past the end.

    ``lookup`` maps the next ``lookup_bits`` bits to ``rank << 8 | length``, or to 0 where the code is longer. The other
    tables are indexed by code length.
    """
    longest = per_length.size - 1
    total = stream.size * 8
    used: Integer = 0
    buffer = np.int64(0)
    filled = 0
    position = 0
    for i in range(out.size):
        while filled <= 48:
            byte = np.int64(0)
            if position < stream.size:
                byte = np.int64(stream[position])
            buffer = (buffer << 8) | byte
            position += 1
            filled += 8
        entry = lookup[(buffer >> (filled - lookup_bits)) & ((1 << lookup_bits) - 1)]
        length = entry & 0xFF
        rank = entry >> 8
        if length == 0:
            length = lookup_bits + 1
            while length <= longest:
                offset = ((buffer >> (filled - length)) & ((1 << length) - 1)) - first_code[length]
                if 0 <= offset < per_length[length]:
                    rank = first_index[length] + offset
                    break
                length += 1
            if length > longest:
                return -1
        used += length
        if used > total:
            return -1
        filled -= length
        buffer &= (1 << filled) - 1
        out[i] = rank
    return used
