"""The compiled low-rank prediction of the context coder.

Importing this module imports numba, so it is only ever imported from inside a function of its callers. All arithmetic
is on integers; where a hostile payload makes it overflow, it wraps, and predictions are clamped after that.

Updates and moments of a weight matrix are sums of few outer products (activations times
gradients), so that a row is close to a combination of few directions, which it shares with the rows before it. The
directions ``v`` are tracked by block power iteration (streaming PCA) over the rows coded so far, and before them over
a side plane; a row's coefficients ``u`` are estimated while it is coded, by a Kalman filter with a diagonal covariance:

    predict   p_j = u . v_j          observe  e = x_j - p_j          correct  u += k_j e

That is what effort ``max`` does; ``default`` does it for a segment at a time (entropy/contexts/segment_lowrank_kernels.py).
The gains ``k_j`` depend on the directions, not on the data, and are computed once per block of rows. That leaves two
products of length `RANK` per symbol.

Sources: I. Mitliagkas et al., "Memory limited, streaming PCA" (arXiv 1307.0032), algorithm 1; R. Kalman (1960).
"""

from typing import NamedTuple

import numpy as np

from shrinkpoint.arrays import Int32s, Int64s, Integer
from shrinkpoint.runtime.jit import jit, jit_inlined, jit_part

__all__ = ["RANK", "Room", "advance", "clamp", "correct", "predict", "refresh", "start_directions"]

RANK = 16
"""Directions that effort ``max`` follows."""

_V_LIMIT = 2047  # of a direction's entries, in 1/256
_GAIN_LIMIT = 1 << 16  # in 2^-14
_POWER_LIMIT = 1 << 26
_P_LIMIT = 1023 << 2


class Room(NamedTuple):
    """What `advance` works on, of no use afterwards.

    Attributes:
        grown: int32 (rank, columns).
        coefficients: int32, one for each row of a block.
        shifts: int64 (rank,).
        total: int32 (columns,).
        sums: int64 (columns,).
    """

    grown: Int32s
    coefficients: Int32s
    shifts: Int64s
    total: Int32s
    sums: Int64s


@jit_part
def clamp(value: Integer, low: int, high: int) -> Integer:
    """The nearest number between two others."""
    return np.int64(low) if value < low else np.int64(high) if value > high else np.int64(value)


@jit_part
def _root(square: Integer) -> Integer:
    """Integer square root of a number below 2^62, by Newton's iteration from above."""
    if square < 2:
        return max(square, 0)
    x = np.int64(1)
    while x * x <= square and x < 1 << 31:
        x <<= 1
    while True:
        y = (x + square // x) >> 1
        if y >= x:
            return x
        x = y


@jit_part
def _dot(a: Int32s, b: Int32s) -> Integer:
    """Inner product of vectors whose products are below 2^24: in 32 bits for 128 of them, which vectorises well."""
    total = np.int64(0)
    for start in range(0, a.size, 128):
        # slices, because the compiler does not know that an index that starts elsewhere than at 0 is not negative
        left, right = a[start : start + 128], b[start : start + 128]
        part = np.int32(0)
        for j in range(left.size):
            part = np.int32(part + left[j] * right[j])
        total += part
    return total


@jit_part
def _subtract(z: Int32s, v: Int32s, share: Integer) -> None:
    factor = np.int32(share)
    for j in range(z.size):
        z[j] = np.int32(z[j] - (np.int32(factor * v[j]) >> 14))


@jit_part
def _scale(z: Int32s, factor: Integer, out: Int32s) -> None:
    by = np.int32(factor)
    for j in range(z.size):
        out[j] = min(max(np.int32(z[j] * by) >> 12, -_V_LIMIT), _V_LIMIT)


@jit_inlined
def _orthonormalise(grown: Int32s, directions: Int32s, strengths: Int64s, shifts: Int64s) -> None:
    """Gram-Schmidt over the rows of ``grown`` (rank, columns), below 2^11: directions, and what they measured."""
    rank, columns = grown.shape
    for a in range(rank):
        z = grown[a]
        for b in range(a):
            v = directions[b]
            _subtract(z, v, (_dot(z, v) >> 2) // columns)
        size = _root((_dot(z, z) << 4) // columns)
        strengths[a] = size << shifts[a] >> 14
        if size < 16:  # nothing left but rounding: keep the old direction, without a weight
            strengths[a] = 0
        else:
            _scale(z, (1 << 22) // size, directions[a])


@jit_part
def _grow(
    rows: Int32s,
    coefficients: Int32s,
    direction: Int32s,
    strength: Integer,
    total: Int32s,
    sums: Int64s,
    out: Int32s,
) -> Integer:
    """15/16 of a direction by its strength and 1/16 of the rows by their coefficients, in 2^-12 shifted below 2^11."""
    total[:] = 0
    for i in range(coefficients.size):
        row, coefficient = rows[i], np.int32(coefficients[i])
        for j in range(total.size):
            total[j] = np.int32(total[j] + coefficient * row[j])
    kept, fresh = np.int64(strength) * 15, np.int64(64 // coefficients.size)
    largest = np.int64(0)
    for j in range(total.size):
        sums[j] = np.int64(direction[j]) * kept + np.int64(total[j]) * fresh
        largest = max(largest, abs(sums[j]))
    shift = np.int64(0)
    while largest >> shift >= 1 << 11:
        shift += 1
    for j in range(total.size):
        out[j] = sums[j] >> shift
    return shift


@jit
def start_directions(directions: Int32s, strengths: Int64s, powers: Int64s) -> None:
    """Fixed signs, of next to no strength: the first rows replace them."""
    seed = np.int64(12345)
    for a in range(directions.shape[0]):
        for j in range(directions.shape[1]):
            seed = (seed * 1103515245 + 12345) & 0x7FFFFFFF
            directions[a, j] = 256 if seed >> 20 & 1 else -256
        strengths[a] = 16
        powers[a] = 0
    powers[directions.shape[0]] = 1 << 18


@jit_part
def advance(rows: Int32s, directions: Int32s, strengths: Int64s, powers: Int64s, room: Room) -> None:
    """Learn from a block of rows.

    Args:
        rows: (at most 8, columns), values of a root mean square near 32, below 512.
        directions: (rank, columns), in 1/256; changed.
        strengths: (rank,), their eigenvalues in 1/16; changed.
        powers: (rank + 1,), mean squares of the coefficients and of what they leave, in 1/256; changed.
        room: of as many directions and columns; overwritten.
    """
    n, columns = rows.shape
    rank = directions.shape[0]
    grown, shifts = room.grown, room.shifts
    coefficients = room.coefficients[:n]
    noise = np.int64(0)
    for i in range(n):
        noise += _dot(rows[i], rows[i])
    noise = (noise << 8) // (n * columns)
    floor = noise >> 4
    for a in range(rank):
        power = np.int64(0)
        for i in range(n):
            coefficients[i] = (_dot(rows[i], directions[a]) >> 2) // columns  # in 1/64
            power += np.int64(coefficients[i]) * np.int64(coefficients[i])
        power = clamp((power // n) >> 4, 0, _POWER_LIMIT)
        noise -= power
        powers[a] += (power - powers[a]) >> 3
        shifts[a] = _grow(rows, coefficients, directions[a], strengths[a], room.total, room.sums, grown[a])
    powers[rank] += (clamp(max(noise, floor), 0, _POWER_LIMIT) - powers[rank]) >> 3
    _orthonormalise(grown, directions, strengths, shifts)


@jit_part
def refresh(directions: Int32s, powers: Int64s, by_column: Int32s, gains: Int32s) -> None:
    """Fill the directions by column, and the Kalman gains in 2^-14, both (columns, RANK), for the rows to come."""
    columns, rank = by_column.shape
    for j in range(columns):
        for a in range(rank):
            by_column[j, a] = directions[a, j]
    variance = powers[:rank].copy()
    noise = max(powers[rank], 64)
    for j in range(columns):
        total = noise
        for a in range(rank):
            v = np.int64(by_column[j, a])
            total += (variance[a] * v >> 8) * v >> 8
        reciprocal = (np.int64(1) << 40) // total
        for a in range(rank):
            v = np.int64(by_column[j, a])
            gain = (variance[a] * v >> 8) * reciprocal >> 26
            gain = min(max(gain, -_GAIN_LIMIT), _GAIN_LIMIT)
            variance[a] = max(variance[a] - ((gain * v >> 8) * variance[a] >> 14), 0)
            gains[j, a] = gain


@jit_part
def predict(u: Int32s, by_column: Int32s, j: int) -> Integer:
    """The next value of the row in 1/4."""
    v = by_column[j]
    total = np.int32(0)
    for a in range(v.size):  # not RANK: unrolled before it is vectorised, it would stay scalar
        total = np.int32(total + u[a] * v[a])
    prediction: Integer = clamp(total >> 16, -_P_LIMIT, _P_LIMIT)
    return prediction


@jit_part
def correct(u: Int32s, gains: Int32s, j: int, error: Integer) -> None:
    """Move the row's coefficients by the error (1/4) of the prediction."""
    e, gain = np.int32(error), gains[j]
    for a in range(gain.size):
        u[a] = np.int32(u[a] + (np.int32(gain[a] * e) >> 6))
