"""FastCheck's lossless form of float32 numbers, made after its slides: it has published no code.

Weights are differences to those of the checkpoint before; moments are a table of the prefixes that occur, their indices, and
the bits behind them. What its slides leave open is chosen as well as can be: of the prefixes' widths from 9 to 16 bits the one that
takes the fewest bytes; differences in the order of the floats, zigzag, in planes of bytes, by zstd.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import zstandard

from shrinkpoint.arrays import UInt8s, UInt16s, UInt32s

__all__ = ["differences", "from_differences", "from_index", "indexed", "ordered"]

_SIGN = np.uint32(1 << 31)


def ordered(bits: UInt32s) -> UInt32s:
    """Whole numbers in the order of the floats."""
    return np.where(bits >= _SIGN, ~bits, bits | _SIGN)


def differences(bits: UInt32s, old: UInt32s) -> list[bytes]:
    """Of numbers to what `ordered` made of those before."""
    delta = (ordered(bits) - old).view(np.int32)
    planes = ((delta << 1) ^ (delta >> 31)).view(np.uint8).reshape(-1, 4)
    return [zstandard.ZstdCompressor(level=3).compress(planes[:, i].tobytes()) for i in range(4)]


def from_differences(parts: list[bytes], old: UInt32s) -> UInt32s:
    planes = [np.frombuffer(zstandard.ZstdDecompressor().decompress(part), np.uint8) for part in parts]
    zigzag = np.ascontiguousarray(np.stack(planes, axis=1)).view(np.uint32).reshape(-1)
    found = ((zigzag >> np.uint32(1)) ^ (np.uint32(0) - (zigzag & np.uint32(1)))) + old
    return np.where(found >= _SIGN, found ^ _SIGN, ~found)


def indexed(bits: UInt32s) -> list[bytes]:
    """The width of the prefixes, those that occur, their indices, and what is behind them."""
    occurs = np.zeros(1 << 16, np.bool_)
    occurs[bits >> np.uint32(16)] = True
    best = (32 * len(bits), 16)
    for width in range(9, 17):
        there = int(occurs.reshape(1 << width, -1).any(axis=1).sum())
        best = min(best, (there * width + len(bits) * (_index_width(there) + 32 - width), width))
    width = best[1]
    occurring = occurs.reshape(1 << width, -1).any(axis=1)
    prefixes = np.flatnonzero(occurring).astype(np.uint16)
    place = (np.cumsum(occurring) - 1).astype(np.uint32)
    places, suffixes = _index_width(len(prefixes)), 32 - width
    packed = [np.zeros(_packed_bytes(len(bits), each), np.uint8) for each in (places, suffixes)]
    _pack(bits, place, suffixes, places, *packed)
    return [bytes([width]), prefixes.tobytes(), *(each.tobytes() for each in packed)]


def from_index(parts: list[bytes], count: int) -> UInt32s:
    """What `indexed` coded, so many numbers."""
    prefixes = np.frombuffer(parts[1], np.uint16)
    indices, suffixes = (np.frombuffer(part, np.uint8) for part in parts[2:])
    bits = np.empty(count, np.uint32)
    _unpack(indices, suffixes, prefixes, 32 - parts[0][0], _index_width(len(prefixes)), bits)
    return bits


def _index_width(prefixes: int) -> int:
    return max(1, (prefixes - 1).bit_length())


def _packed_bytes(count: int, width: int) -> int:
    """Whole words of 32 bits, and one more, so that a reader may look ahead."""
    return 4 * (count * width // 32 + 2)


def _compiled(function: Any) -> Any:
    return numba.njit(cache=True, nogil=True, boundscheck=False)(function)


@_compiled
def _pack(bits: UInt32s, place: UInt32s, suffixes: int, places: int, indices: UInt8s, rest: UInt8s) -> None:
    """Write of every number the index of its prefix, and the bits behind that."""
    low = np.uint64((1 << suffixes) - 1)
    to_indices, to_rest = indices.view(np.uint32), rest.view(np.uint32)
    held = np.zeros(2, np.uint64)
    have = np.zeros(2, np.int64)
    at = np.zeros(2, np.int64)
    for number in bits:
        held[0] |= np.uint64(place[number >> np.uint32(suffixes)]) << np.uint64(have[0])
        held[1] |= (np.uint64(number) & low) << np.uint64(have[1])
        have[0] += places
        have[1] += suffixes
        if have[0] >= 32:
            to_indices[at[0]] = np.uint32(held[0] & np.uint64(0xFFFFFFFF))
            held[0] >>= np.uint64(32)
            have[0] -= 32
            at[0] += 1
        if have[1] >= 32:
            to_rest[at[1]] = np.uint32(held[1] & np.uint64(0xFFFFFFFF))
            held[1] >>= np.uint64(32)
            have[1] -= 32
            at[1] += 1
    to_indices[at[0]] = np.uint32(held[0])
    to_rest[at[1]] = np.uint32(held[1])


@_compiled
def _unpack(
    indices: UInt8s, rest: UInt8s, prefixes: UInt16s, suffixes: int, places: int, bits: UInt32s
) -> None:
    low, mask = np.uint64((1 << suffixes) - 1), np.uint64((1 << places) - 1)
    from_indices, from_rest = indices.view(np.uint32), rest.view(np.uint32)
    for i in range(len(bits)):
        at, shift = divmod(i * places, 32)
        word = np.uint64(from_indices[at]) | np.uint64(from_indices[at + 1]) << np.uint64(32)
        prefix = np.uint64(prefixes[(word >> np.uint64(shift)) & mask])
        at, shift = divmod(i * suffixes, 32)
        word = np.uint64(from_rest[at]) | np.uint64(from_rest[at + 1]) << np.uint64(32)
        bits[i] = np.uint32(prefix << np.uint64(suffixes) | (word >> np.uint64(shift)) & low)
