"""Run lengths as Inshrinkerator codes them: a value v as the symbol -v, a run of r > 1 as +r after it.

Source: Inshrinkerator (arXiv 2306.11800), Algorithm 5 (encoding) and 6 (decoding). Runs are cut at 2^16 - 1, which the
paper does not do: it bounds the number of distinct symbols, hence the Huffman table. Values are non-negative residues:
a signed difference -3 would be emitted as +3 and read as a run length.
"""

import numpy as np

from shrinkpoint.arrays import Int64s, UInt8s
from shrinkpoint.errors import FormatError

__all__ = ["MAX_RUN", "decode_runs", "encode_runs"]

MAX_RUN = (1 << 16) - 1
"""Longest run that one run-length symbol states."""


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
    """Inverse of :func:`encode_runs`.

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
