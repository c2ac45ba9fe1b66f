"""Coding a plane of levels against the same plane of the previous checkpoint.

Level ids are 0 = pruned, 1 = protected, 2.. = ascending centroids, so that the special levels keep their ids when the
number of bins changes. Between two checkpoints most levels stay: the difference modulo the larger number of levels is
mostly 0, and how it is distributed depends on the level it starts from.

Sources: Inshrinkerator (arXiv 2306.11800), section on delta encoding and Algorithms 5 and 6 for ``rle-huffman``; coding
the same differences by rANS conditioned on the previous level reaches their conditional entropy, which run lengths
miss by a factor of 1.6 to 2.9 where 0.06 to 6 % of the levels move.

A run is a value v as the symbol -v, and its length r > 1 as +r after it. Runs are cut at 2^16 - 1, which the paper does not do: it
bounds the number of distinct symbols, hence the Huffman table. Values are non-negative residues: a signed difference -3 would be
emitted as +3 and read as a run length.

Payload: one byte, bit 0 = the plane is a difference, bit 1 = rle-huffman; then for rANS the payload of
:mod:`shrinkpoint.entropy.static.rans`, for rle-huffman one group per previous level, each but the last after its length
(varint).
"""

from typing import Literal

import numpy as np

from shrinkpoint.arrays import Int64s, UInt8s
from shrinkpoint.entropy.static.huffman import decode_huffman, encode_huffman
from shrinkpoint.entropy.static.rans import decode_symbols, encode_symbols, predict_bytes
from shrinkpoint.entropy.static.tables import count_symbols
from shrinkpoint.entropy.wire import ByteReader, Payload, write_uvarint
from shrinkpoint.errors import FormatError

LevelCoder = Literal["rans", "rle-huffman"]
"""``rans`` is the smaller one; ``rle-huffman`` is what Inshrinkerator published."""

MAX_RUN = (1 << 16) - 1
"""Longest run that one run-length symbol states."""

_DELTA_FLAG = 1
_RLE_HUFFMAN_FLAG = 2


def encode_levels(
    levels: UInt8s,
    n_levels: int,
    previous: UInt8s | None,
    previous_n_levels: int | None,
    coder: LevelCoder = "rans",
) -> bytes:
    """Code a plane of levels, as a difference to the previous plane or alone, whichever is smaller.

    Args:
        levels: uint8 (n,), flat in C order, each below ``n_levels``.
        n_levels: number of levels, pruned and protected included, 1..256.
        previous: uint8 (n,), the same plane of the previous checkpoint; None for a base.
        previous_n_levels: its number of levels; None exactly if ``previous`` is.
        coder: how to code.

    Returns:
        The payload. The caller stores its length and n.
    """
    encode = _encode_rans if coder == "rans" else _encode_rle_huffman
    return encode(levels, n_levels, previous, previous_n_levels)


def decode_levels(
    payload: Payload, count: int, n_levels: int, previous: UInt8s | None, previous_n_levels: int | None
) -> UInt8s:
    """Invert :func:`encode_levels`; the payload says how it was coded.

    Args:
        payload: the bytes of :func:`encode_levels`, all of them and nothing else.
        count: number of elements of the plane.
        n_levels: as given to the encoder.
        previous: as given to the encoder.
        previous_n_levels: as given to the encoder.

    Returns:
        uint8 (count,), each below ``n_levels``.

    Raises:
        FormatError: the payload is malformed, or is a difference and ``previous`` is None.
        CorruptionError: the payload is well-formed, but does not end where it must.
    """
    reader = ByteReader(payload, "level plane")
    flags = reader.byte()
    if flags & ~(_DELTA_FLAG | _RLE_HUFFMAN_FLAG):
        raise FormatError(f"level plane: unknown flags {flags:#04x}")
    if not flags & _DELTA_FLAG:
        previous = None
        previous_n_levels = None
    elif previous is None:
        raise FormatError("level plane: it is a difference, and there is no previous plane")
    modulus = max(n_levels, previous_n_levels or 0)
    if flags & _RLE_HUFFMAN_FLAG:
        decoded = _decode_groups(reader, count, previous, previous_n_levels, modulus)
    else:
        decoded = decode_symbols(reader.rest(), previous, count, modulus, previous_n_levels or 1)
    if previous is not None:
        decoded = _add(previous, decoded, modulus)
    if count and int(decoded.max()) >= n_levels:
        raise FormatError(f"level plane: level {int(decoded.max())} of {n_levels}")
    return decoded


def _subtract(levels: UInt8s, previous: UInt8s, modulus: int) -> UInt8s:
    """``(levels - previous) mod modulus``; bytes wrap at 256, so adding the modulus where it borrowed is exact."""
    borrowed = (levels < previous).view(np.uint8)
    return np.asarray(levels - previous + borrowed * np.uint8(modulus & 0xFF), dtype=np.uint8)


def _add(previous: UInt8s, delta: UInt8s, modulus: int) -> UInt8s:
    """``(previous + delta) mod modulus``, for both below the modulus."""
    carried = (delta > np.uint8(modulus - 1) - previous).view(np.uint8)
    return np.asarray(previous + delta - carried * np.uint8(modulus & 0xFF), dtype=np.uint8)


def _delta_counts(counts: Int64s) -> Int64s:
    """Return counts of (previous level, difference) from counts of (previous level, level)."""
    n_previous, n_levels = counts.shape
    modulus = max(n_previous, n_levels)
    delta_counts = np.zeros((n_previous, modulus), dtype=np.int64)
    source = np.arange(n_previous)[:, None]
    delta_counts[source, (np.arange(n_levels)[None, :] - source) % modulus] = counts
    return delta_counts


def _encode_rans(
    levels: UInt8s, n_levels: int, previous: UInt8s | None, previous_n_levels: int | None
) -> bytes:
    if previous is not None and previous_n_levels is not None:
        counts = count_symbols(levels, previous, n_levels, previous_n_levels)
        if predict_bytes(_delta_counts(counts)) < predict_bytes(counts.sum(axis=0, keepdims=True)):
            modulus = max(n_levels, previous_n_levels)
            delta = _subtract(levels, previous, modulus)
            return bytes([_DELTA_FLAG]) + encode_symbols(delta, previous, modulus, previous_n_levels)
    return bytes([0]) + encode_symbols(levels, None, n_levels, 1)


def _encode_rle_huffman(
    levels: UInt8s, n_levels: int, previous: UInt8s | None, previous_n_levels: int | None
) -> bytes:
    fresh = bytes([_RLE_HUFFMAN_FLAG]) + _encode_groups(levels, None, None)
    if previous is None or previous_n_levels is None:
        return fresh
    delta = _subtract(levels, previous, max(n_levels, previous_n_levels))
    grouped = bytes([_RLE_HUFFMAN_FLAG | _DELTA_FLAG]) + _encode_groups(delta, previous, previous_n_levels)
    return min(grouped, fresh, key=len)


def _encode_groups(values: UInt8s, previous: UInt8s | None, n_groups: int | None) -> bytes:
    """Algorithm 5: the values of each previous level, in order, as run lengths, Huffman-coded; no index is stored."""
    if previous is None or n_groups is None:
        return encode_huffman(encode_runs(values))
    groups = [encode_huffman(encode_runs(values[previous == level])) for level in range(n_groups)]
    out = bytearray()
    for group in groups[:-1]:
        write_uvarint(out, len(group))
        out += group
    return bytes(out + groups[-1])


def _decode_groups(
    reader: ByteReader, count: int, previous: UInt8s | None, n_groups: int | None, modulus: int
) -> UInt8s:
    """Algorithm 6: scatter each group back to the positions of its previous level."""
    if previous is None or n_groups is None:
        return decode_runs(decode_huffman(reader.rest(), count), count, modulus)
    values = np.empty(count, dtype=np.uint8)
    for level in range(n_groups):
        members = previous == level
        size = int(np.count_nonzero(members))
        last = level == n_groups - 1
        group = reader.rest() if last else reader.take(reader.uvarint(reader.remaining, "group length"))
        values[members] = decode_runs(decode_huffman(group, size), size, modulus)
    return values


def encode_runs(values: UInt8s) -> Int64s:
    """Turn values into run symbols.

    Args:
        values: uint8 (n,).

    Returns:
        int64 (m,), m <= n: ``-value``, followed by ``+length`` if the run is longer than 1.
    """
    if values.size == 0:
        return np.zeros(0, dtype=np.int64)
    starts = np.concatenate(([0], np.flatnonzero(values[1:] != values[:-1]) + 1))
    lengths = np.diff(starts, append=values.size)
    pieces = -(-lengths // MAX_RUN)
    run_values = np.repeat(values[starts], pieces).astype(np.int64)
    run_lengths = np.full(run_values.size, MAX_RUN, dtype=np.int64)
    run_lengths[np.cumsum(pieces) - 1] = lengths - (pieces - 1) * MAX_RUN
    is_long = run_lengths > 1
    positions = np.cumsum(1 + is_long) - 1 - is_long
    symbols = np.empty(run_values.size + int(is_long.sum()), dtype=np.int64)
    symbols[positions] = -run_values
    symbols[positions[is_long] + 1] = run_lengths[is_long]
    return symbols


def decode_runs(symbols: Int64s, count: int, alphabet: int) -> UInt8s:
    """Invert :func:`encode_runs`.

    Args:
        symbols: int64 (m,), from an untrusted payload.
        count: how many values there must be.
        alphabet: values must be below this, 1..256.

    Returns:
        uint8 (count,).

    Raises:
        FormatError: a run length without a value before it, or out of 2..65535; a value out of range; or lengths that
            do not add up to ``count``.
    """
    if symbols.size == 0:
        if count:
            raise FormatError(f"run lengths: nothing there, {count} values expected")
        return np.zeros(0, dtype=np.uint8)
    is_length = symbols > 0
    if is_length[0]:
        raise FormatError("run lengths: the first symbol is a run length")
    if np.any(is_length[1:] & is_length[:-1]):
        raise FormatError("run lengths: two run lengths follow each other")
    if int(symbols.max()) > MAX_RUN or np.any(symbols == 1):
        raise FormatError(f"run lengths: a run length is not in 2..{MAX_RUN}")
    if int(symbols.min()) <= -alphabet:
        raise FormatError(f"run lengths: value {-int(symbols.min())} is not below {alphabet}")
    positions = np.flatnonzero(~is_length)
    lengths = np.ones(positions.size, dtype=np.int64)
    followed = np.flatnonzero(is_length[np.minimum(positions + 1, symbols.size - 1)])
    lengths[followed] = symbols[positions[followed] + 1]
    if int(lengths.sum()) != count:
        raise FormatError(f"run lengths: they add up to {int(lengths.sum())} values, {count} expected")
    return np.repeat((-symbols[positions]).astype(np.uint8), lengths)
