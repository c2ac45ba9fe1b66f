"""The compiled low-rank prediction of a segment of a row at a time, which effort ``default`` and the trellis coder share.

Importing this module imports numba, so it is only ever imported from inside a function of its callers.

It is that of entropy/contexts/lowrank_kernels.py with half the directions, but with all covariances: a segment's
errors ``e`` move the row's coefficients by ``C V e``, C being the inverse of ``noise / power + sum of V V'`` over the
columns so far. It is computed in double precision by single IEEE operations in fixed order, and rounded to integers.
"""

from typing import NamedTuple

import numpy as np

from shrinkpoint.arrays import Float64s, Int32s, Int64s, UInt8s
from shrinkpoint.entropy.contexts.feature_kernels import BLOCK_ROWS
from shrinkpoint.entropy.contexts.lowrank_kernels import Room, advance
from shrinkpoint.runtime.jit import jit_inlined, jit_part

__all__ = [
    "SEGMENT",
    "SEGMENT_RANK",
    "LowRankState",
    "correct_segment",
    "learn",
    "predict_segment",
    "refresh_segments",
    "start_row",
]

SEGMENT = 16
"""Columns of a segment."""

SEGMENT_RANK = 8
"""Directions that are followed."""

_P_LIMIT = 1023 << 2
_U_LIMIT = float(1 << 19)
_WARM_ROWS = 128
_EARLY_ROWS = 64  # after which trust changes slowly


class LowRankState(NamedTuple):
    """What is known of the rows so far (`chunk_arrays.new_low_rank_state`); empty without prediction. Columns are padded with
    zeros to whole segments.

    Attributes:
        directions: int32 (rank, columns), in 1/256.
        parts: int32 (rank, segments, SEGMENT), the same memory.
        strengths: int64 (rank,), see `advance`.
        powers: int64 (rank + 1,), see `advance`.
        block: int32 (BLOCK_ROWS, columns), values of the last rows.
        trust: float64 (segments, rank, rank), how errors in a segment move the coefficients.
        precision: float64 (rank, rank), what `refresh_segments` works on.
        room: what `advance` works on.
        u: float64 (rank,), the row's coefficients in 2^-10.
        rounded: int32 (rank,), the same within `_U_LIMIT`.
        prediction: int32 (SEGMENT,), in 1/4.
        values: int32 (SEGMENT,).
        warm: uint8 (rows or 0, columns), levels of the plane from which directions are learned first.
        warm_values: int32 (256 or 0,), what its levels stand for.
    """

    directions: Int32s
    parts: Int32s
    strengths: Int64s
    powers: Int64s
    block: Int32s
    trust: Float64s
    precision: Float64s
    room: Room
    u: Float64s
    rounded: Int32s
    prediction: Int32s
    values: Int32s
    warm: UInt8s
    warm_values: Int32s


@jit_part
def learn(state: LowRankState, row: int) -> None:
    """Learn directions before every `BLOCK_ROWS` rows from those before, before the first one from the plane that is named."""
    block, warm, warm_values = state.block, state.warm, state.warm_values
    rows = min(warm.shape[0], _WARM_ROWS) if row == 0 else BLOCK_ROWS
    for first in range(0, rows, BLOCK_ROWS):
        n = min(BLOCK_ROWS, rows - first)
        if row == 0:
            for i in range(n):
                for j in range(warm.shape[1]):
                    block[i, j] = warm_values[warm[first + i, j]]
        advance(block[:n], state.directions, state.strengths, state.powers, state.room)


@jit_inlined
def _is_due(row: int) -> bool:
    """Whether trust changes before a block of rows."""
    return row <= _EARLY_ROWS or (row - 1) // BLOCK_ROWS % 2 == 0


@jit_part
def start_row(state: LowRankState, row: int) -> None:
    """Forget the coefficients of the row before, having learned from the last `BLOCK_ROWS` rows where a block of them is full."""
    if row % BLOCK_ROWS == 0:
        learn(state, row)
        if _is_due(row):
            refresh_segments(state.directions, state.powers, state.precision, state.trust)
    state.u[:] = 0
    state.rounded[:] = 0


@jit_part
def refresh_segments(directions: Int32s, powers: Int64s, precision: Float64s, trust: Float64s) -> None:
    """Fill ``trust`` for the rows to come; ``precision`` (rank, rank) is overwritten."""
    precision[:] = 0
    noise = np.float64(max(powers[SEGMENT_RANK], 64))
    for a in range(SEGMENT_RANK):
        precision[a, a] = noise / np.float64(max(powers[a], 1))
    for s in range(trust.shape[0]):
        first = s * SEGMENT
        for a in range(SEGMENT_RANK):
            left = directions[a, first : first + SEGMENT]
            for b in range(a + 1):
                right, total = directions[b, first : first + SEGMENT], np.int32(0)
                for j in range(left.size):
                    total = np.int32(total + left[j] * right[j])
                precision[a, b] += np.float64(total) / 65536.0
                precision[b, a] = precision[a, b]
        inverse = trust[s]
        for a in range(SEGMENT_RANK):
            for b in range(SEGMENT_RANK):
                inverse[a, b] = precision[a, b]
        _invert(inverse)


@jit_inlined
def _invert(matrix: Float64s) -> None:
    """Gauss-Jordan in place; a positive definite matrix needs no pivots."""
    for k in range(SEGMENT_RANK):
        pivot = 1.0 / matrix[k, k]
        row = matrix[k]
        row[k] = 1.0
        for j in range(SEGMENT_RANK):
            row[j] = row[j] * pivot
        for i in range(SEGMENT_RANK):
            if i != k:
                other = matrix[i]
                factor = other[k]
                other[k] = 0.0
                for j in range(SEGMENT_RANK):
                    other[j] = other[j] - factor * row[j]


# Loops over a segment are written without its constant size: unrolled before they are vectorised, they would stay scalar.
@jit_part
def predict_segment(parts: Int32s, part: int, u: Int32s, out: Int32s) -> None:
    """Predict a segment in 1/4."""
    for j in range(out.size):
        total = np.int32(0)
        for a in range(u.size):
            total = np.int32(total + u[a] * parts[a, part, j])
        out[j] = min(max(total >> 16, -_P_LIMIT), _P_LIMIT)


@jit_part
def correct_segment(
    parts: Int32s,
    part: int,
    trust: Float64s,
    u: Float64s,
    rounded: Int32s,
    values: Int32s,
    prediction: Int32s,
) -> None:
    """Move the coefficients by a segment's errors, which replace the prediction."""
    for j in range(prediction.size):
        prediction[j] = np.int32((values[j] << 2) - prediction[j])
    for b in range(u.size):
        projection = np.int32(0)
        for j in range(prediction.size):
            projection = np.int32(projection + parts[b, part, j] * prediction[j])
        for a in range(u.size):
            u[a] += trust[part, b, a] * np.float64(projection)
    for a in range(rounded.size):
        rounded[a] = np.int32(min(max(u[a], -_U_LIMIT), _U_LIMIT))
