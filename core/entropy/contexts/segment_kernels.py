"""The compiled contexts of effort ``default``: computed for a segment of a row at a time, in loops over columns.

Importing this module imports numba, so it is only ever imported from inside a function of its callers.

A cell (entropy/contexts/cells.py) is made of the prediction, of how busy row and column are, and of the side planes'
levels. A row's own coefficients and activity are computed once per segment: the price is a few
thousandths of the size, and what it buys is that nothing within a segment waits for the symbol before it.

Where a side plane knows the place of each value in its cell, prediction and place are one feature, their sum: it is what
decides which border is crossed. Where it knows whether a value rather goes up or down, the latter are mirrored: both then
share all tables, of which small planes have too many.

The prediction is that of entropy/contexts/segment_lowrank_kernels.py.
"""

from typing import Any, NamedTuple

import numpy as np

from shrinkpoint.arrays import Int32s, Int64s, Integer, UInt8s, UInt16s
from shrinkpoint.entropy.contexts.feature_kernels import ACTIVITIES, BLOCK_ROWS, FINE, Scene, turn_symbols
from shrinkpoint.entropy.contexts.run_kernels import Tables, take_runs
from shrinkpoint.entropy.contexts.segment_lowrank_kernels import (
    SEGMENT,
    LowRankState,
    correct_segment,
    predict_segment,
    start_row,
)
from shrinkpoint.runtime.jit import jit, jit_inlined

__all__ = [
    "FEATURES",
    "LEVELS",
    "OCTAVES",
    "PLACES",
    "Rows",
    "decode_chunk",
    "find_features",
    "measure",
]

LEVELS = (44, ACTIVITIES)
"""Levels of the features that every plane has: prediction, activity. Predictions without a place take 2 * FINE + 1."""

FEATURES = len(LEVELS) + 3
"""Then come the fine classes of up to three sides."""

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
    """The moving part of a chunk's contexts (`chunk_arrays.new_rows`). Columns are padded with zeros to whole segments.

    Attributes:
        low_rank: of the rows so far.
        cells: int32 (columns,), those of the row.
        busy: int32 (columns,), decayed mean magnitude in 1/1024.
        activity: int32 (columns,), its `OCTAVES`.
        magnitudes: int32 (columns,), those of the row in 1/1024.
        places: int32 (columns,), those of the row by the first side.
        signs: int32 (columns,), -1 for symbols that are coded mirrored, else 1.
        octaves: `OCTAVES`; given, for a kernel would be compiled with every number of it.
        kinds: `PLACES`, in the same way.
    """

    low_rank: LowRankState
    cells: Int32s
    busy: Int32s
    activity: Int32s
    magnitudes: Int32s
    places: Int32s
    signs: Int32s
    octaves: Int32s
    kinds: Int32s


# What is inlined takes arrays, not what holds them: each copy of a tuple counts the references to all of its arrays.
@jit_inlined
def _add_sides(cells: Int32s, sides: UInt8s, row: int, strides: Int64s, classes: Int32s) -> None:
    """Set the cells to the side planes' share."""
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
def _walk(
    scene: Scene,
    rows: Rows,
    strides: Int64s,
    classes: Int32s,
    plane: UInt8s,
    out: Any,
    last: int,
    leaf_rows: Any,
    tables: Any,
    counters: Any,
    contexts: Any,
    words: Any,
    cursor: Any,
) -> None:
    """The one loop of encoder and decoder over a chunk: predict a segment, name or use its cells, correct the prediction.

    Of the arguments that are `Any`, a decoder gives all but ``out``, an encoder only that, and the others are None:
    numba drops the branches that a None rules out, so that each of the two is compiled without the other's.
    """
    height, columns = plane.shape
    low_rank, lively = bool(scene.low_rank and strides[0] != 0), strides[1] != 0
    mirrored = scene.turned.shape[0] > 0
    state, row_cells, busy, activity, magnitudes, places, signs, octaves, kinds = rows
    parts, block, trust = state.parts, state.block, state.trust
    u, rounded, prediction, values = state.u, state.rounded, state.prediction, state.values
    sides, turned = scene.sides, scene.turned
    known, unit, mean, scale = scene.places, scene.unit, scene.mean, scene.scale
    magnitudes_of, values_of = scene.magnitudes, scene.values
    for i in range(height):
        if low_rank:
            start_row(state, i)
        _add_sides(row_cells, sides, i, strides, classes)
        _find_places(turned, sides, known, unit, i, signs, places)
        if lively:
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
                    _add_place(cells, prediction, signs[start:], places[start:], kinds, unit, strides[0])
                else:
                    _add_prediction(cells, prediction, signs[start:], scale, strides[0])
            if lively:
                _add_activity(
                    cells, activity[start:], _row_activity(octaves, so_far, start, mean), strides[1]
                )
            if tables is not None:
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
        if out is not None:
            found = out[i]
            for j in range(columns):
                found[j] = row_cells[j]
        _end_row(busy, magnitudes, i)


def find_features(
    scene: Scene, rows: Rows, strides: Int64s, classes: Int32s, plane: UInt8s, out: UInt16s
) -> None:
    """Fill ``out`` (rows, columns) with the features of every symbol that the side planes do not have, as one number.

    It is ``prediction + LEVELS[0] * activity``: ``strides`` (FEATURES,) are 1 and `LEVELS[0]` for these two, else 0, and
    ``classes`` (sides, 256) are 0. ``rows`` are new and of the plane's columns.
    """
    _walk(scene, rows, strides, classes, plane, out, 0, None, None, None, None, None, None)


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
    _walk(
        scene,
        rows,
        strides,
        classes,
        plane,
        None,
        last,
        leaf_rows,
        tables,
        counters,
        contexts,
        words,
        cursor,
    )


@jit
def measure(scene: Scene, state: LowRankState, plane: UInt8s) -> tuple[Integer, Integer]:
    """Mean squares of predictions and of their errors over a plane (rows, columns), in 1/16; ``state`` is new."""
    height, columns = plane.shape
    parts, block, trust = state.parts, state.block, state.trust
    u, rounded, prediction, values = state.u, state.rounded, state.prediction, state.values
    values_of = scene.values
    of_predictions = of_errors = np.int64(0)
    for i in range(height):
        start_row(state, i)
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
