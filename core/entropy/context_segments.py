"""The compiled contexts of effort ``default``: computed for a segment of a row at a time, in loops over columns.

Importing this module imports numba, so it is only ever imported from inside a function of its callers.

A cell (entropy/context_cells.py) is made of the prediction, of how busy row and column are, and of the side planes'
levels. What a row tells of itself, its coefficients and its activity, is looked at once per segment: the price is a few
thousandths of the size, and what it buys is that nothing within a segment waits for the symbol before it.

Where a side plane knows the place of each value in its cell, prediction and place are one feature, their sum: it is what
decides which border is crossed. Where it knows whether a value rather goes up or down, the latter are mirrored: both then
share all tables, of which small planes have too many.

The prediction is that of entropy/context_lowrank.py with half the directions, but with all covariances: a segment's
errors ``e`` move the row's coefficients by ``C V e``, C being the inverse of ``noise / power + sum of V V'`` over the
columns so far. It is computed in double precision by single IEEE operations in fixed order, and rounded to integers.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shrinkpoint.entropy.context_kernels import ACTIVITIES, BLOCK_ROWS, FINE, Scene, turn_symbols
from shrinkpoint.entropy.context_lowrank import advance, start_directions
from shrinkpoint.entropy.context_runs import Tables, finished, new_counters, take_runs
from shrinkpoint.jit import jit

__all__ = [
    "FEATURES",
    "LEVELS",
    "SEGMENT",
    "SEGMENT_RANK",
    "correct_segment",
    "decode_chunk",
    "find_features",
    "measure",
    "predict_segment",
    "refresh_segments",
    "side_cells",
]

Float64s = npt.NDArray[np.float64]
Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]
UInt8s = npt.NDArray[np.uint8]
UInt16s = npt.NDArray[np.uint16]
Integer = int | np.int64

SEGMENT = 16
"""Columns of a segment."""

SEGMENT_RANK = 8
"""Directions that are followed."""

LEVELS = (44, ACTIVITIES)
"""Levels of the features that every plane has: prediction, activity. Predictions without a place take 2 * FINE + 1."""

FEATURES = len(LEVELS) + 3
"""Then come the fine classes of up to three sides."""

_P_LIMIT = 1023 << 2
_U_LIMIT = float(1 << 19)
_WARM_ROWS = 128
_EARLY_ROWS = 64  # after which trust changes slowly
_PRIOR = 8  # columns of mean activity that a row starts with
_OCTAVES = np.array([0] + [(k**4).bit_length() - 1 for k in range(1, 3 * 1024 + 2)], dtype=np.int32)
"""4 log2 of an activity in 1/1024, rounded down."""

_FAR = 256
_STEPS = np.array((2, 4, 6, 8, 12, 16, 23, 32, 45, 64), dtype=np.int32)


def _place_classes() -> Int32s:
    """int32 (2 * _FAR,), class of a place from -_FAR on, in 1/256 of a level: by the distance to the nearer border."""
    places = np.arange(-_FAR, _FAR)
    beyond = np.where(places < 0, -1 - places, places) - 128
    steps = np.searchsorted(_STEPS, np.where(beyond < 0, -1 - beyond, beyond), side="right")
    outwards = np.where(beyond < 0, _STEPS.size - steps, _STEPS.size + 1 + steps)
    half = LEVELS[0] // 2
    return np.where(places < 0, half - 1 - outwards, half + outwards).astype(np.int32)


_PLACES = _place_classes()


class Rows(NamedTuple):
    """The moving part of a chunk's contexts. Columns are padded with zeros to whole segments.

    Attributes:
        directions: int32 (rank, columns), in 1/256.
        strengths: int64 (rank,), see `advance`.
        powers: int64 (rank + 1,), see `advance`.
        block: int32 (BLOCK_ROWS, columns), values of the last rows.
        trust: float64 (segments, rank, rank), how errors in a segment move the coefficients.
        u: float64 (rank,), the row's coefficients in 2^-10.
        rounded: int32 (rank,), the same within `_U_LIMIT`.
        prediction: int32 (SEGMENT,), in 1/4.
        cells: int32 (columns,), those of the row.
        busy: int32 (columns,), decayed mean magnitude in 1/1024.
        activity: int32 (columns,), its `_OCTAVES`.
        magnitudes: int32 (columns,), those of the row in 1/1024.
        places: int32 (columns,), those of the row by the first side.
        signs: int32 (columns,), -1 for symbols that are coded mirrored, else 1.
    """

    directions: Int32s
    strengths: Int64s
    powers: Int64s
    block: Int32s
    trust: Float64s
    u: Float64s
    rounded: Int32s
    prediction: Int32s
    cells: Int32s
    busy: Int32s
    activity: Int32s
    magnitudes: Int32s
    places: Int32s
    signs: Int32s


@jit
def _new_rows(scene: Scene, columns: int, low_rank: bool) -> Rows:
    segments = (columns + SEGMENT - 1) // SEGMENT
    padded, tracked = segments * SEGMENT, segments if low_rank else 0
    rows = Rows(
        np.zeros((SEGMENT_RANK, tracked * SEGMENT), dtype=np.int32),
        np.zeros(SEGMENT_RANK, dtype=np.int64),
        np.zeros(SEGMENT_RANK + 1, dtype=np.int64),
        np.zeros((BLOCK_ROWS, tracked * SEGMENT), dtype=np.int32),
        np.zeros((tracked, SEGMENT_RANK, SEGMENT_RANK)),
        np.zeros(SEGMENT_RANK),
        np.zeros(SEGMENT_RANK, dtype=np.int32),
        np.zeros(SEGMENT, dtype=np.int32),
        np.zeros(padded, dtype=np.int32),
        np.full(padded, 4 * scene.mean, dtype=np.int32),
        np.zeros(padded, dtype=np.int32),
        np.zeros(padded, dtype=np.int32),
        np.zeros(padded, dtype=np.int32),
        np.ones(padded, dtype=np.int32),
    )
    if low_rank:
        start_directions(rows.directions, rows.strengths, rows.powers)
        rows.directions[:, columns:] = 0
        for first in range(0, min(scene.warm.shape[0], _WARM_ROWS), BLOCK_ROWS):
            n = min(BLOCK_ROWS, scene.warm.shape[0] - first)
            for i in range(n):
                for j in range(columns):
                    rows.block[i, j] = scene.warm_values[scene.warm[first + i, j]]
            advance(rows.block[:n], rows.directions, rows.strengths, rows.powers)
        refresh_segments(rows.directions, rows.powers, rows.trust)
    return rows


@jit
def refresh_segments(directions: Int32s, powers: Int64s, trust: Float64s) -> None:
    """Fill ``trust`` for the rows to come."""
    fans = directions.reshape(SEGMENT_RANK, trust.shape[0], SEGMENT)
    precision = np.zeros((SEGMENT_RANK, SEGMENT_RANK))
    noise = np.float64(max(powers[SEGMENT_RANK], 64))
    for a in range(SEGMENT_RANK):
        precision[a, a] = noise / np.float64(max(powers[a], 1))
    for s in range(trust.shape[0]):
        for a in range(SEGMENT_RANK):
            for b in range(a + 1):
                left, right, total = fans[a, s], fans[b, s], np.int32(0)
                for j in range(left.size):
                    total = np.int32(total + left[j] * right[j])
                precision[a, b] += np.float64(total) / 65536.0
                precision[b, a] = precision[a, b]
        trust[s] = precision
        _invert(trust[s])


@jit
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
@jit
def predict_segment(fans: Int32s, part: int, u: Int32s, out: Int32s) -> None:
    """Predict a segment in 1/4."""
    for j in range(out.size):
        total = np.int32(0)
        for a in range(SEGMENT_RANK):
            total = np.int32(total + u[a] * fans[a, part, j])
        out[j] = min(max(total >> 16, -_P_LIMIT), _P_LIMIT)


@jit
def correct_segment(
    fans: Int32s,
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
    for b in range(SEGMENT_RANK):
        told = np.int32(0)
        for j in range(prediction.size):
            told = np.int32(told + fans[b, part, j] * prediction[j])
        for a in range(u.size):
            u[a] += trust[part, b, a] * np.float64(told)
    for a in range(SEGMENT_RANK):
        rounded[a] = np.int32(min(max(u[a], -_U_LIMIT), _U_LIMIT))


@jit
def side_cells(scene: Scene, strides: Int64s) -> Int32s:
    """int32 (sides, 256): what a level of each side plane adds to a cell."""
    cells = np.zeros((scene.sides.shape[0], 256), dtype=np.int32)
    for s in range(cells.shape[0]):
        for level in range(256):
            cells[s, level] = scene.fine[s, level] * strides[len(LEVELS) + s]
    return cells


@jit
def _start_row(scene: Scene, rows: Rows, row: int, strides: Int64s, classes: Int32s) -> None:
    """What the planes beside and above tell about a row."""
    rows.u[:] = 0
    rows.rounded[:] = 0
    rows.cells[:] = 0
    for s in range(classes.shape[0]):
        if strides[len(LEVELS) + s]:
            side, cells, table = scene.sides[s, row], rows.cells, classes[s]
            for j in range(side.size):
                cells[j] += table[side[j]]
    if scene.turned.shape[0]:
        turned, signs = scene.turned[row], rows.signs
        for j in range(turned.size):
            signs[j] = 1 - 2 * np.int32(turned[j])
    if scene.unit:
        side, places, known = scene.sides[0, row], rows.places, scene.places
        for j in range(side.size):
            places[j] = known[side[j]]
    if strides[1]:
        activity, busy = rows.activity, rows.busy
        for j in range(activity.size):
            activity[j] = _OCTAVES[busy[j]]


@jit
def _row_activity(so_far: Integer, seen: int, mean: int) -> Integer:
    """That of the row so far less twice the plane's, so that half a column's and this is a class."""
    row = ((so_far << 10) + 4 * _PRIOR * mean) // (seen + _PRIOR)
    return np.int64(_OCTAVES[row]) - 2 * np.int64(_OCTAVES[4 * mean]) + 13


@jit
def _add_prediction(
    cells: Int32s, part: int, prediction: Int32s, signs: Int32s, scale: int, stride: Integer
) -> None:
    factor, by = np.int32(2 * scale), np.int32(stride)
    for j in range(prediction.size):
        level = int(np.int32(prediction[j] * signs[part, j] * factor + 32768) >> 16)
        cells[part, j] += np.int32((min(max(level, -FINE), FINE) + FINE) * by)


@jit
def _add_place(
    cells: Int32s, part: int, prediction: Int32s, signs: Int32s, places: Int32s, unit: int, stride: Integer
) -> None:
    """As `_add_prediction`, where it is known from which place the values are moved."""
    factor, by = np.int32(unit), np.int32(stride)
    for j in range(prediction.size):
        place = np.int32((prediction[j] * signs[part, j] * factor) >> 8) + places[part, j]
        cells[part, j] += np.int32(_PLACES[min(max(place, -_FAR), _FAR - 1) + _FAR] * by)


@jit
def _add_activity(cells: Int32s, part: int, activity: Int32s, of_row: Integer, stride: Integer) -> None:
    base, by = np.int32(of_row), np.int32(stride)
    for j in range(cells.shape[1]):
        level = int(np.int32(activity[part, j] + base) >> 1)
        cells[part, j] += np.int32(min(max(level, 0), ACTIVITIES - 1) * by)


@jit
def _take_in(symbols: UInt8s, start: int, stop: int, magnitudes_of: UInt8s, magnitudes: Int32s) -> Integer:
    """Note the magnitudes of the symbols from column ``start`` on; return their sum."""
    total = np.int64(0)
    for j in range(start, stop):
        magnitude = np.int32(magnitudes_of[symbols[j]])
        magnitudes[j] = magnitude << 10
        total += magnitude
    return total


@jit
def _read_values(
    symbols: UInt8s, start: int, stop: int, values_of: Int32s, values: Int32s, block: Int32s
) -> None:
    for j in range(start, stop):
        value = values_of[symbols[j]]
        values[j - start] = value
        block[j] = value
    values[stop - start :] = 0


@jit
def _end_row(scene: Scene, rows: Rows, row: int, low_rank: bool) -> None:
    busy, magnitudes = rows.busy, rows.magnitudes
    rate = np.int32(1 if row < 2 else 2 if row < 6 else 3 if row < 14 else 4)
    for j in range(busy.size):
        busy[j] += np.int32(magnitudes[j] - busy[j]) >> rate
    if low_rank and row % BLOCK_ROWS == BLOCK_ROWS - 1:
        advance(rows.block, rows.directions, rows.strengths, rows.powers)
        if row < _EARLY_ROWS or row // BLOCK_ROWS % 2 == 0:
            refresh_segments(rows.directions, rows.powers, rows.trust)


@jit
def find_features(scene: Scene, plane: UInt8s, out: UInt16s) -> None:
    """Fill ``out`` (rows, columns) with the features of every symbol that the side planes do not have, as one number.

    It is ``prediction + LEVELS[0] * activity``.
    """
    height, columns = plane.shape
    low_rank = scene.low_rank
    strides = np.zeros(FEATURES, dtype=np.int64)
    strides[1] = LEVELS[0]
    rows = _new_rows(scene, columns, low_rank)
    u, rounded, prediction, trust = rows.u, rows.rounded, rows.prediction, rows.trust
    fans = rows.directions.reshape(SEGMENT_RANK, trust.shape[0], SEGMENT)
    cells, activity = rows.cells.reshape(-1, SEGMENT), rows.activity.reshape(-1, SEGMENT)
    places, signs = rows.places.reshape(-1, SEGMENT), rows.signs.reshape(-1, SEGMENT)
    values, classes = np.zeros(SEGMENT, dtype=np.int32), side_cells(scene, strides)
    for i in range(height):
        _start_row(scene, rows, i, strides, classes)
        so_far = np.int64(0)
        symbols, found, current = plane[i], out[i], rows.block[i % BLOCK_ROWS]
        for part in range(cells.shape[0]):
            start = part * SEGMENT
            stop = min(start + SEGMENT, columns)
            if low_rank:
                predict_segment(fans, part, rounded, prediction)
                if scene.unit:
                    _add_place(cells, part, prediction, signs, places, scene.unit, 1)
                else:
                    _add_prediction(cells, part, prediction, signs, scene.scale, 1)
            _add_activity(cells, part, activity, _row_activity(so_far, start, scene.mean), strides[1])
            so_far += _take_in(symbols, start, stop, scene.magnitudes, rows.magnitudes)
            if low_rank:
                _read_values(symbols, start, stop, scene.values, values, current)
                correct_segment(fans, part, trust, u, rounded, values, prediction)
        row_cells = rows.cells
        for j in range(columns):
            found[j] = row_cells[j]
        _end_row(scene, rows, i, low_rank)


@jit
def decode_chunk(
    scene: Scene,
    plane: UInt8s,
    last: int,
    strides: Int64s,
    leaf_rows: UInt8s,
    tables: Tables,
    words: UInt16s,
    cursor: Int64s,
) -> bool:
    """Fill ``plane`` (rows, columns), which is all zero's symbol; False if the words do not end where they must.

    Symbols 0 to ``last`` are mirrored among themselves. Validated by the caller: cells index ``leaf_rows``, which indexes the tables; see `take_runs`.
    """
    height, columns = plane.shape
    low_rank, lively = bool(scene.low_rank and strides[0] != 0), strides[1] != 0
    mirrored = scene.turned.shape[0] > 0
    rows = _new_rows(scene, columns, low_rank)
    u, rounded, prediction, trust = rows.u, rows.rounded, rows.prediction, rows.trust
    fans = rows.directions.reshape(SEGMENT_RANK, trust.shape[0], SEGMENT)
    cells, activity = rows.cells.reshape(-1, SEGMENT), rows.activity.reshape(-1, SEGMENT)
    places, signs = rows.places.reshape(-1, SEGMENT), rows.signs.reshape(-1, SEGMENT)
    values, classes = np.zeros(SEGMENT, dtype=np.int32), side_cells(scene, strides)
    counters = new_counters(tables)
    contexts = np.empty(SEGMENT, dtype=np.uint8)
    for i in range(height):
        _start_row(scene, rows, i, strides, classes)
        so_far = np.int64(0)
        symbols, current = plane[i], rows.block[i % BLOCK_ROWS]
        for part in range(cells.shape[0]):
            start = part * SEGMENT
            stop = min(start + SEGMENT, columns)
            if low_rank:
                predict_segment(fans, part, rounded, prediction)
                if scene.unit:
                    _add_place(cells, part, prediction, signs, places, scene.unit, strides[0])
                else:
                    _add_prediction(cells, part, prediction, signs, scene.scale, strides[0])
            if lively:
                _add_activity(cells, part, activity, _row_activity(so_far, start, scene.mean), strides[1])
            for j in range(stop - start):
                contexts[j] = leaf_rows[cells[part, j]]
            take_runs(tables, counters, contexts, symbols, start, stop, words, cursor)
            if mirrored:
                turn_symbols(symbols, scene.turned[i], start, stop, last)
            if lively:
                so_far += _take_in(symbols, start, stop, scene.magnitudes, rows.magnitudes)
            if low_rank:
                _read_values(symbols, start, stop, scene.values, values, current)
                correct_segment(fans, part, trust, u, rounded, values, prediction)
        _end_row(scene, rows, i, low_rank)
    return bool(finished(words, cursor))


@jit
def measure(scene: Scene, plane: UInt8s) -> tuple[Integer, Integer]:
    """Mean squares of predictions and of their errors over a plane (rows, columns), in 1/16."""
    height, columns = plane.shape
    low_rank = columns > 0  # always; numba compiles a second version of what gets a constant
    rows = _new_rows(scene, columns, low_rank)
    u, rounded, prediction, trust = rows.u, rows.rounded, rows.prediction, rows.trust
    fans = rows.directions.reshape(SEGMENT_RANK, trust.shape[0], SEGMENT)
    values = np.zeros(SEGMENT, dtype=np.int32)
    of_predictions = of_errors = np.int64(0)
    for i in range(height):
        u[:] = 0
        rounded[:] = 0
        symbols, current = plane[i], rows.block[i % BLOCK_ROWS]
        for part in range(trust.shape[0]):
            start = part * SEGMENT
            stop = min(start + SEGMENT, columns)
            predict_segment(fans, part, rounded, prediction)
            _read_values(symbols, start, stop, scene.values, values, current)
            for j in range(stop - start):
                of_predictions += np.int64(prediction[j]) * np.int64(prediction[j])
            correct_segment(fans, part, trust, u, rounded, values, prediction)
            for j in range(stop - start):
                of_errors += np.int64(prediction[j]) * np.int64(prediction[j])
        _end_row(scene, rows, i, low_rank)
    count = max(height * columns, 1)
    return of_predictions // count, of_errors // count
