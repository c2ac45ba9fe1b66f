"""The compiled contexts of effort ``default``: computed for a segment of a row at a time, in loops over columns.

Importing this module imports numba, so it is only ever imported from inside a function of its callers.

A cell (entropy/contexts/cells.py) is made of the prediction, of how busy row and column are, and of the side planes'
levels. What a row tells of itself, its coefficients and its activity, is looked at once per segment: the price is a few
thousandths of the size, and what it buys is that nothing within a segment waits for the symbol before it.

Where a side plane knows the place of each value in its cell, prediction and place are one feature, their sum: it is what
decides which border is crossed. Where it knows whether a value rather goes up or down, the latter are mirrored: both then
share all tables, of which small planes have too many.

The prediction is that of entropy/contexts/lowrank_kernels.py with half the directions, but with all covariances: a segment's
errors ``e`` move the row's coefficients by ``C V e``, C being the inverse of ``noise / power + sum of V V'`` over the
columns so far. It is computed in double precision by single IEEE operations in fixed order, and rounded to integers.
"""

from typing import NamedTuple

import numpy as np

from shrinkpoint.arrays import Float64s, Int32s, Int64s, UInt8s, UInt16s
from shrinkpoint.entropy.contexts.feature_kernels import ACTIVITIES, BLOCK_ROWS, FINE, Scene, turn_symbols
from shrinkpoint.entropy.contexts.lowrank_kernels import Room, advance
from shrinkpoint.entropy.contexts.run_kernels import Tables, take_runs
from shrinkpoint.runtime.jit import jit, jit_inlined, jit_part

__all__ = [
    "FEATURES",
    "LEVELS",
    "OCTAVES",
    "PLACES",
    "SEGMENT",
    "SEGMENT_RANK",
    "Rows",
    "correct_segment",
    "decode_chunk",
    "find_features",
    "measure",
    "predict_segment",
    "refresh_segments",
]

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
OCTAVES = np.array([0] + [(k**4).bit_length() - 1 for k in range(1, 3 * 1024 + 2)], dtype=np.int32)
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


PLACES = _place_classes()


class Rows(NamedTuple):
    """The moving part of a chunk's contexts (`context_rows.new_rows`). Columns are padded with zeros to whole segments.

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
        cells: int32 (columns,), those of the row.
        busy: int32 (columns,), decayed mean magnitude in 1/1024.
        activity: int32 (columns,), its `OCTAVES`.
        magnitudes: int32 (columns,), those of the row in 1/1024.
        places: int32 (columns,), those of the row by the first side.
        signs: int32 (columns,), -1 for symbols that are coded mirrored, else 1.
        octaves: `OCTAVES`; given, for a kernel would be compiled with every number of it.
        kinds: `PLACES`, in the same way.
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
    cells: Int32s
    busy: Int32s
    activity: Int32s
    magnitudes: Int32s
    places: Int32s
    signs: Int32s
    octaves: Int32s
    kinds: Int32s


@jit_part
def _learn(
    block: Int32s,
    directions: Int32s,
    strengths: Int64s,
    powers: Int64s,
    room: Room,
    warm: UInt8s,
    warm_values: Int32s,
    row: int,
) -> None:
    """Learn directions before every `BLOCK_ROWS` rows from those before, before the first one from the plane that is named."""
    rows = min(warm.shape[0], _WARM_ROWS) if row == 0 else BLOCK_ROWS
    for first in range(0, rows, BLOCK_ROWS):
        n = min(BLOCK_ROWS, rows - first)
        if row == 0:
            for i in range(n):
                for j in range(warm.shape[1]):
                    block[i, j] = warm_values[warm[first + i, j]]
        advance(block[:n], directions, strengths, powers, room)


@jit_inlined
def _is_due(row: int) -> bool:
    """Whether trust changes before a block of rows."""
    return row <= _EARLY_ROWS or (row - 1) // BLOCK_ROWS % 2 == 0


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
        for a in range(SEGMENT_RANK):
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
    for b in range(SEGMENT_RANK):
        projection = np.int32(0)
        for j in range(prediction.size):
            projection = np.int32(projection + parts[b, part, j] * prediction[j])
        for a in range(u.size):
            u[a] += trust[part, b, a] * np.float64(projection)
    for a in range(SEGMENT_RANK):
        rounded[a] = np.int32(min(max(u[a], -_U_LIMIT), _U_LIMIT))


# What is inlined takes arrays, not what holds them: each copy of a tuple counts the references to all of its arrays.
@jit_inlined
def _add_sides(cells: Int32s, sides: UInt8s, row: int, strides: Int64s, classes: Int32s) -> None:
    """Set the cells to what the side planes tell."""
    cells[:] = 0
    for s in range(classes.shape[0]):
        if strides[len(LEVELS) + s]:
            side, table = sides[s, row], classes[s]
            for j in range(side.size):
                cells[j] += table[side[j]]


@jit_inlined
def _find_places(
    turned: UInt8s, sides: UInt8s, known: Int32s, unit: int, row: int, signs: Int32s, places: Int32s
) -> None:
    """Which symbols are coded mirrored, and where values are in their cells."""
    if turned.shape[0]:
        of_row = turned[row]
        for j in range(of_row.size):
            signs[j] = 1 - 2 * np.int32(of_row[j])
    if unit:
        side = sides[0, row]
        for j in range(side.size):
            places[j] = known[side[j]]


@jit_inlined
def _look_up(activity: Int32s, busy: Int32s, octaves: Int32s) -> None:
    for j in range(activity.size):
        activity[j] = octaves[busy[j]]


@jit_inlined
def _row_activity(octaves: Int32s, so_far: Integer, seen: int, mean: int) -> Integer:
    """That of the row so far less twice the plane's, so that half a column's and this is a class."""
    row = ((so_far << 10) + 4 * _PRIOR * mean) // (seen + _PRIOR)
    return np.int64(octaves[row]) - 2 * np.int64(octaves[4 * mean]) + 13


# The segment's cells; what else there is of columns begins with it.
@jit_inlined
def _add_prediction(cells: Int32s, prediction: Int32s, signs: Int32s, scale: int, stride: Integer) -> None:
    factor, by = np.int32(2 * scale), np.int32(stride)
    for j in range(cells.size):
        level = int(np.int32(prediction[j] * signs[j] * factor + 32768) >> 16)
        cells[j] += np.int32((min(max(level, -FINE), FINE) + FINE) * by)


@jit_inlined
def _add_place(
    cells: Int32s,
    prediction: Int32s,
    signs: Int32s,
    places: Int32s,
    kinds: Int32s,
    unit: int,
    stride: Integer,
) -> None:
    """As `_add_prediction`, where it is known from which place the values are moved."""
    factor, by = np.int32(unit), np.int32(stride)
    for j in range(cells.size):
        place = np.int32((prediction[j] * signs[j] * factor) >> 8) + places[j]
        cells[j] += np.int32(kinds[min(max(place, -_FAR), _FAR - 1) + _FAR] * by)


@jit_inlined
def _add_activity(cells: Int32s, activity: Int32s, of_row: Integer, stride: Integer) -> None:
    base, by = np.int32(of_row), np.int32(stride)
    for j in range(cells.size):
        level = int(np.int32(activity[j] + base) >> 1)
        cells[j] += np.int32(min(max(level, 0), ACTIVITIES - 1) * by)


@jit_inlined
def _take_in(symbols: UInt8s, start: int, stop: int, magnitudes_of: UInt8s, magnitudes: Int32s) -> Integer:
    """Note the magnitudes of the symbols from column ``start`` on; return their sum."""
    total = np.int64(0)
    for j in range(start, stop):
        magnitude = np.int32(magnitudes_of[symbols[j]])
        magnitudes[j] = magnitude << 10
        total += magnitude
    return total


@jit_inlined
def _read_values(
    symbols: UInt8s, start: int, stop: int, values_of: Int32s, values: Int32s, block: Int32s
) -> None:
    for j in range(start, stop):
        value = values_of[symbols[j]]
        values[j - start] = value
        block[j] = value
    values[stop - start :] = 0


@jit_inlined
def _end_row(busy: Int32s, magnitudes: Int32s, row: int) -> None:
    rate = np.int32(1 if row < 2 else 2 if row < 6 else 3 if row < 14 else 4)
    for j in range(busy.size):
        busy[j] += np.int32(magnitudes[j] - busy[j]) >> rate


@jit
def find_features(
    scene: Scene, rows: Rows, strides: Int64s, classes: Int32s, plane: UInt8s, out: UInt16s
) -> None:
    """Fill ``out`` (rows, columns) with the features of every symbol that the side planes do not have, as one number.

    It is ``prediction + LEVELS[0] * activity``: ``strides`` (FEATURES,) are 0 but for that, and ``classes`` (sides, 256) are 0.
    ``rows`` are new and of the plane's columns.
    """
    height, columns = plane.shape
    low_rank = scene.low_rank
    directions, parts, strengths, powers, block, trust, precision, room, u, rounded, prediction, values = (
        rows[:12]
    )
    row_cells, busy, activity, magnitudes, places, signs, octaves, kinds = rows[12:]
    sides, turned, warm, warm_values = scene.sides, scene.turned, scene.warm, scene.warm_values
    known, unit, mean, scale = scene.places, scene.unit, scene.mean, scene.scale
    magnitudes_of, values_of = scene.magnitudes, scene.values
    for i in range(height):
        if low_rank and i % BLOCK_ROWS == 0:
            _learn(block, directions, strengths, powers, room, warm, warm_values, i)
            if _is_due(i):
                refresh_segments(directions, powers, precision, trust)
        u[:] = 0
        rounded[:] = 0
        _add_sides(row_cells, sides, i, strides, classes)
        _find_places(turned, sides, known, unit, i, signs, places)
        if strides[1]:
            _look_up(activity, busy, octaves)
        so_far = np.int64(0)
        symbols, found, current = plane[i], out[i], block[i % BLOCK_ROWS]
        for part in range((columns + SEGMENT - 1) // SEGMENT):
            start = part * SEGMENT
            cells = row_cells[start : start + SEGMENT]
            stop = min(start + SEGMENT, columns)
            if low_rank:
                predict_segment(parts, part, rounded, prediction)
                if unit:
                    _add_place(cells, prediction, signs[start:], places[start:], kinds, unit, 1)
                else:
                    _add_prediction(cells, prediction, signs[start:], scale, 1)
            _add_activity(
                cells,
                activity[start:],
                _row_activity(octaves, so_far, start, mean),
                strides[1],
            )
            so_far += _take_in(symbols, start, stop, magnitudes_of, magnitudes)
            if low_rank:
                _read_values(symbols, start, stop, values_of, values, current)
                correct_segment(parts, part, trust, u, rounded, values, prediction)
        for j in range(columns):
            found[j] = row_cells[j]
        _end_row(busy, magnitudes, i)


@jit
def decode_chunk(
    scene: Scene,
    rows: Rows,
    plane: UInt8s,
    last: int,
    strides: Int64s,
    classes: Int32s,
    leaf_rows: UInt8s,
    tables: Tables,
    counters: Int32s,
    contexts: UInt8s,
    words: UInt16s,
    cursor: Int64s,
) -> None:
    """Fill ``plane`` (rows, columns), which is all zero's symbol.

    Symbols 0 to ``last`` are mirrored among themselves. ``rows`` are new, of the plane's columns, and followed by low-rank
    prediction if the first stride is not 0; ``classes`` are int32 (sides, 256), what a level of each side plane adds to a cell;
    ``contexts`` (SEGMENT,) is overwritten. Validated by the caller: cells index ``leaf_rows``, which indexes the tables; see
    `take_runs`. The caller compares where the cursor ends.
    """
    height, columns = plane.shape
    low_rank, lively = bool(scene.low_rank and strides[0] != 0), strides[1] != 0
    mirrored = scene.turned.shape[0] > 0
    directions, parts, strengths, powers, block, trust, precision, room, u, rounded, prediction, values = (
        rows[:12]
    )
    row_cells, busy, activity, magnitudes, places, signs, octaves, kinds = rows[12:]
    sides, turned, warm, warm_values = scene.sides, scene.turned, scene.warm, scene.warm_values
    known, unit, mean, scale = scene.places, scene.unit, scene.mean, scene.scale
    magnitudes_of, values_of = scene.magnitudes, scene.values
    for i in range(height):
        if low_rank and i % BLOCK_ROWS == 0:
            _learn(block, directions, strengths, powers, room, warm, warm_values, i)
            if _is_due(i):
                refresh_segments(directions, powers, precision, trust)
        u[:] = 0
        rounded[:] = 0
        _add_sides(row_cells, sides, i, strides, classes)
        _find_places(turned, sides, known, unit, i, signs, places)
        if strides[1]:
            _look_up(activity, busy, octaves)
        so_far = np.int64(0)
        symbols, current = plane[i], block[i % BLOCK_ROWS]
        for part in range((columns + SEGMENT - 1) // SEGMENT):
            start = part * SEGMENT
            cells = row_cells[start : start + SEGMENT]
            stop = min(start + SEGMENT, columns)
            if low_rank:
                predict_segment(parts, part, rounded, prediction)
                if unit:
                    _add_place(
                        cells,
                        prediction,
                        signs[start:],
                        places[start:],
                        kinds,
                        unit,
                        strides[0],
                    )
                else:
                    _add_prediction(cells, prediction, signs[start:], scale, strides[0])
            if lively:
                _add_activity(
                    cells,
                    activity[start:],
                    _row_activity(octaves, so_far, start, mean),
                    strides[1],
                )
            for j in range(stop - start):
                contexts[j] = leaf_rows[cells[j]]
            take_runs(tables, counters, contexts, symbols, start, stop, words, cursor)
            if mirrored:
                turn_symbols(symbols, turned[i], start, stop, last)
            if lively:
                so_far += _take_in(symbols, start, stop, magnitudes_of, magnitudes)
            if low_rank:
                _read_values(symbols, start, stop, values_of, values, current)
                correct_segment(parts, part, trust, u, rounded, values, prediction)
        _end_row(busy, magnitudes, i)


@jit
def measure(scene: Scene, rows: Rows, plane: UInt8s) -> tuple[Integer, Integer]:
    """Mean squares of predictions and of their errors over a plane (rows, columns), in 1/16; ``rows`` are new."""
    height, columns = plane.shape
    directions, parts, strengths, powers, block, trust, precision, room, u, rounded, prediction, values = (
        rows[:12]
    )
    warm, warm_values, values_of = scene.warm, scene.warm_values, scene.values
    of_predictions = of_errors = np.int64(0)
    for i in range(height):
        if i % BLOCK_ROWS == 0:
            _learn(block, directions, strengths, powers, room, warm, warm_values, i)
            if _is_due(i):
                refresh_segments(directions, powers, precision, trust)
        u[:] = 0
        rounded[:] = 0
        symbols, current = plane[i], block[i % BLOCK_ROWS]
        for part in range(trust.shape[0]):
            start = part * SEGMENT
            stop = min(start + SEGMENT, columns)
            predict_segment(parts, part, rounded, prediction)
            _read_values(symbols, start, stop, values_of, values, current)
            for j in range(stop - start):
                of_predictions += np.int64(prediction[j]) * np.int64(prediction[j])
            correct_segment(parts, part, trust, u, rounded, values, prediction)
            for j in range(stop - start):
                of_errors += np.int64(prediction[j]) * np.int64(prediction[j])
    count = max(height * columns, 1)
    return of_predictions // count, of_errors // count
