"""The compiled contexts of trellis-coded planes.

Importing this module imports numba, so it is only ever imported from inside a function of its callers. All arithmetic
is on integers but the low-rank prediction's (entropy/contexts/segment_lowrank_kernels.py); every index is clamped.

What is coded are the ranks of entropy/trellis/margin_kernels.py, under tables that depend on the leads, on how far points of this row
and column have been from their places, and on side planes.
"""

from typing import Any, NamedTuple

import numpy as np

from shrinkpoint.arrays import Int8s, Int16s, Int32s, Int64s, Integer, UInt8s, UInt16s
from shrinkpoint.entropy.contexts.feature_kernels import ACTIVITIES, BLOCK_ROWS
from shrinkpoint.entropy.contexts.run_kernels import GAP_SHIFT, LEVEL_SHIFT, LONGEST, Tables
from shrinkpoint.entropy.contexts.segment_lowrank_kernels import (
    SEGMENT,
    LowRankState,
    correct_segment,
    learn,
    predict_segment,
    refresh_segments,
    start_row,
)
from shrinkpoint.entropy.rans_kernels import pop, refill
from shrinkpoint.entropy.trellis.margin_kernels import (
    FARTHEST_RANK,
    Margins,
    Scene,
    flip,
    look_ahead,
    move_places,
    place_points,
    rank_path,
)
from shrinkpoint.runtime.jit import jit, jit_inlined

__all__ = [
    "OCTAVES",
    "Row",
    "Work",
    "are_given",
    "decode_chunk",
    "find_features",
    "measure",
    "sum_energies",
]

_LARGEST = 1023  # energy of an element, in 1/256 square steps
_FLOOR = 8 * 16  # energy that noise has, in 1/2048
_PRIOR = 32  # columns of mean energy that a row starts with
OCTAVES = np.array([0] + [(k**4).bit_length() - 1 for k in range(1, 8 * _LARGEST + 9)], dtype=np.int32)
"""4 log2 of an energy, rounded down; kernels are given it, for they would be compiled with every number of it."""

_NEAR = np.int32(FARTHEST_RANK - 1)  # ranks below are the true ones
# Constants of 32 bits: others would make the loops' arithmetic one of 64, in half as many lanes.
_0, _7, _8 = np.int32(0), np.int32(7), np.int32(8)
_BLOCK = 1 << 12
_P_SHIFT, _V_SHIFT = 8, 12
_V_LIMIT = 511
_FAR = 4 * 256  # places are moved by no more


class Row(NamedTuple):
    """How far points are from their places; columns are padded to whole segments.

    Attributes:
        cells: int32 (columns,), what is known of each element but for its lead.
        busy: int32 (columns,), decayed mean energy of each column in 1/2048.
        activity: int32 (columns,), `OCTAVES` of it.
        energies: int32 (columns,), of this row's elements.
    """

    cells: Int32s
    busy: Int32s
    activity: Int32s
    energies: Int32s


class Work(NamedTuple):
    """What a chunk's kernel works on, new for each (`chunk_arrays.new_work`).

    Attributes:
        margins: of a row.
        row: how far its points are from their places.
        low_rank: of the rows so far.
        counters: int32 (2, tables), of `take_runs`; of no use to encoders.
        by_margin: int32 (256,), what a lead adds to a cell.
        path: int32 (SEGMENT,).
        ranked: int32 (SEGMENT,).
        reached: int16 (SEGMENT,).
        octaves: `OCTAVES`.
    """

    margins: Margins
    row: Row
    low_rank: LowRankState
    counters: Int32s
    by_margin: Int32s
    path: Int32s
    ranked: Int32s
    reached: Int16s
    octaves: Int32s


# What is inlined takes arrays, not what holds them: each copy of a tuple counts the references to all of its arrays.
@jit_inlined
def _start_cells(
    cells: Int32s,
    busy: Int32s,
    activity: Int32s,
    octaves: Int32s,
    sides: UInt8s,
    first: int,
    count: int,
    strides: Int64s,
    classes: Int32s,
) -> None:
    cells[:] = 0
    for s in range(classes.shape[0]):
        if strides[2 + s]:
            side, table = sides[s, first : first + count], classes[s]
            for j in range(side.size):
                cells[j] += table[side[j]]
    if strides[1]:
        for j in range(activity.size):
            activity[j] = octaves[max(busy[j] - _FLOOR, 1)]


@jit_inlined
def _row_activity(octaves: Int32s, so_far: Integer, seen: int, mean: int) -> Integer:
    """That of the row so far less twice the plane's, so that half a column's and this is a class."""
    of_row = ((so_far << 3) + _PRIOR * mean) // (seen + _PRIOR)
    return np.int64(octaves[max(of_row - _FLOOR, 1)]) - 2 * np.int64(octaves[max(mean - _FLOOR, 1)]) + 13


@jit_inlined
def _add_activity(cells: Int32s, activity: Int32s, start: int, of_row: Integer, stride: Integer) -> None:
    base, by = np.int32(of_row), np.int32(stride)
    part, known = cells[start : start + SEGMENT], activity[start : start + SEGMENT]
    for j in range(part.size):
        level = int(np.int32(known[j] + base) >> 1)
        part[j] += np.int32(min(max(level, 0), ACTIVITIES - 1) * by)


@jit_inlined
def _take_in(errors: Int32s, start: int, energies: Int32s) -> Integer:
    """Note the energies of a segment's errors, the points less their places; return their sum."""
    total = np.int64(0)
    for j in range(errors.size):
        energy = min((errors[j] * errors[j]) >> _8, np.int32(_LARGEST))
        energies[start + j] = energy
        total += energy
    return total


@jit_inlined
def _shift_places(prediction: Int32s, scale: int, shift: Int32s) -> None:
    unit = np.int32((1 << 18) // scale)
    for j in range(shift.size):
        shift[j] = min(max(np.int32(prediction[j] * unit) >> _P_SHIFT, -_FAR), _FAR)


@jit_inlined
def _read_values(errors: Int32s, scale: int, start: int, values: Int32s, block: Int32s) -> None:
    values[:] = 0
    factor = np.int32(scale)
    for j in range(errors.size):
        value = min(max(np.int32(errors[j] * factor) >> _V_SHIFT, -_V_LIMIT), _V_LIMIT)
        values[j] = value
        block[start + j] = value


@jit_inlined
def _end_row(busy: Int32s, energies: Int32s, number: int) -> None:
    rate = np.int32(1 if number < 2 else 2 if number < 6 else 3 if number < 14 else 4 if number < 30 else 5)
    for j in range(busy.size):
        busy[j] += np.int32((energies[j] << 3) - busy[j]) >> rate


@jit
def _walk(
    scene: Scene,
    work: Work,
    strides: Int64s,
    classes: Int32s,
    points: Int16s,
    ranks: Int8s,
    found: Any,
    errors: Int32s,
    radius: int,
    leaf_rows: Any,
    tables: Any,
    words: Any,
    cursor: Any,
) -> None:
    """The one loop of encoder and decoder over a chunk: predict a segment's places, rank its points or read ranks, correct.

    Of the arguments that are `Any`, a decoder gives all but ``found``, an encoder only that, and the others are None:
    numba drops the branches that a None rules out, so that each of the two is compiled without the other's.
    """
    margins, octaves, path, ranked, reached = work.margins, work.octaves, work.path, work.ranked, work.reached
    cells, busy, activity, energies = work.row
    low_rank_state, by_margin = work.low_rank, work.by_margin
    parts, block, trust = low_rank_state.parts, low_rank_state.block, low_rank_state.trust
    u, rounded = low_rank_state.u, low_rank_state.rounded
    prediction, values = low_rank_state.prediction, low_rank_state.values
    y, margins_found, shift = margins.y, margins.found, margins.shift
    states, places, sides, mean, scale = scene.states, scene.places, scene.sides, scene.mean, scene.scale
    discount, low_rank, lively = scene.discount, scene.low_rank, strides[1] != 0
    if tables is not None:
        runs, levels, gaps, zero = tables.runs, tables.levels, tables.gaps, np.int64(tables.zero)
        level_lookup, gap_lookup = tables.level_lookup, tables.gap_lookup
        left, due, mask = work.counters[0], work.counters[1], states - 1
        x0, x1, x2, x3, position = cursor[0], cursor[1], cursor[2], cursor[3], cursor[4]
    for number in range((points.size + scene.width - 1) // scene.width):
        first = number * scene.width
        count = min(scene.width, points.size - first)
        if low_rank:
            start_row(low_rank_state, number)
        look_ahead(places[first : first + count], states, discount, low_rank, margins)
        _start_cells(cells, busy, activity, octaves, sides, first, count, strides, classes)
        so_far, state = np.int64(0), 0
        for start in range(0, count, SEGMENT):
            stop = min(start + SEGMENT, count)
            if low_rank:
                predict_segment(parts, start // SEGMENT, rounded, prediction)
                _shift_places(prediction, scale, shift)
                move_places(margins, start, states)
            if lively:
                _add_activity(cells, activity, start, _row_activity(octaves, so_far, start, mean), strides[1])
            if tables is not None:
                for i in range(stop - start):
                    known = (
                        np.int64(margins_found[0, start + i] if state < 4 else margins_found[1, start + i])
                        >> (8 * (state & 3))
                    ) & 255
                    leaf = leaf_rows[cells[start + i] + by_margin[known]]
                    # `take_runs` for a single symbol: as a function of both, it would cost each of them a third of its speed
                    zeros = left[leaf]
                    symbol = zero
                    if zeros > 0:
                        left[leaf] = zeros - 1
                    else:
                        several = runs[leaf]
                        if not several or due[leaf]:
                            x, symbol = pop(x0, leaf, level_lookup, LEVEL_SHIFT, levels)
                            x, position = refill(x, words, position)
                            x0, x1, x2, x3 = x1, x2, x3, x
                        while several:
                            x, gap = pop(x0, leaf, gap_lookup, GAP_SHIFT, gaps)
                            x, position = refill(x, words, position)
                            x0, x1, x2, x3 = x1, x2, x3, x
                            if due[leaf] or gap > 0:
                                # without a symbol due, this very one is the first of the gap
                                left[leaf] = gap if due[leaf] else gap - 1
                                due[leaf] = gap < LONGEST
                                break
                            x, symbol = pop(x0, leaf, level_lookup, LEVEL_SHIFT, levels)
                            x, position = refill(x, words, position)
                            x0, x1, x2, x3 = x1, x2, x3, x
                            due[leaf] = 1
                    ranked[i] = symbol - radius
                    path[i] = state | (known & 128)
                    odd = (known >> 7) ^ ((symbol ^ radius) & 1)
                    state = ((2 * state) & mask) | (odd ^ flip(state, states))
                here = points[first + start : first + stop]
            if found is not None:
                state = rank_path(
                    y[start:stop],
                    margins_found[:, start:stop],
                    states,
                    state,
                    points[first + start : first + stop],
                    path,
                    ranked,
                )
                for j in range(start, stop):
                    found[first + j] = cells[j] + (path[j - start] >> 8)
                    path[j - start] &= 255
                here = reached[: stop - start]
            for j in range(start, stop):
                ranks[first + j] = ranked[j - start]
            part = errors[first + start : first + stop]
            place_points(y[start:stop], places[first + start : first + stop], path, ranked, here, part)
            if lively:
                so_far += _take_in(part, start, energies)
            if low_rank:
                _read_values(part, scale, start, values, block[number % BLOCK_ROWS])
                correct_segment(parts, start // SEGMENT, trust, u, rounded, values, prediction)
        _end_row(busy, energies, number)
    if tables is not None:
        cursor[0], cursor[1], cursor[2], cursor[3], cursor[4] = x0, x1, x2, x3, position


def find_features(
    scene: Scene,
    work: Work,
    strides: Int64s,
    classes: Int32s,
    points: Int16s,
    ranks: Int8s,
    found: UInt16s,
    errors: Int32s,
) -> None:
    """Say of every element of a chunk how many points it lies beyond the best one, and what is known of that.

    Args:
        scene: the chunk.
        work: for it.
        strides: (2,), 0 and `MARGINS`.
        classes: int32 (0, 256).
        points: int16 (n,), what is to be coded, in half steps; they form paths.
        ranks: int8 (n,), filled: -`FARTHEST_RANK` to `FARTHEST_RANK`.
        found: uint16 (n,), filled: the lead's class, and `MARGINS` times that of the activity.
        errors: int32 (n,), filled: points less places, in parts of a step; of what is too far, as a reader will know them.
    """
    _walk(scene, work, strides, classes, points, ranks, found, errors, 0, None, None, None, None)


def decode_chunk(
    scene: Scene,
    work: Work,
    radius: int,
    strides: Int64s,
    classes: Int32s,
    leaf_rows: UInt8s,
    tables: Tables,
    words: UInt16s,
    cursor: Int64s,
    ranks: Int8s,
    points: Int16s,
    errors: Int32s,
) -> None:
    """Inverse of `find_features` for a chunk that was coded under the leaves: fill all three.

    Symbols are ``rank + radius``. Validated by the caller: cells index ``leaf_rows``, which indexes the tables; see
    `take_runs`. The caller compares where the cursor ends.
    """
    _walk(
        scene,
        work,
        strides,
        classes,
        points,
        ranks,
        None,
        errors,
        radius,
        leaf_rows,
        tables,
        words,
        cursor,
    )


@jit
def measure(errors: Int32s, state: LowRankState, width: int, scale: int) -> tuple[Integer, Integer]:
    """Mean squares of the values of some rows, and of what low-rank prediction leaves of them, in 1/16; ``state`` is new."""
    parts, block, trust = state.parts, state.block, state.trust
    u, rounded, prediction, values = state.u, state.rounded, state.prediction, state.values
    of_values = of_errors = np.int64(0)
    rows = errors.size // width
    for number in range(rows):
        if number % BLOCK_ROWS == 0:
            learn(state, number)
            refresh_segments(state.directions, state.powers, state.precision, state.trust)
        u[:] = 0
        rounded[:] = 0
        here = errors[number * width : (number + 1) * width]
        for start in range(0, width, SEGMENT):
            stop = min(start + SEGMENT, width)
            predict_segment(parts, start // SEGMENT, rounded, prediction)
            _read_values(here[start:stop], scale, start, values, block[number % BLOCK_ROWS])
            correct_segment(parts, start // SEGMENT, trust, u, rounded, values, prediction)
            for j in range(stop - start):
                of_values += 16 * np.int64(values[j]) * np.int64(values[j])
                of_errors += np.int64(prediction[j]) * np.int64(prediction[j])
    return of_values // max(rows * width, 1), of_errors // max(rows * width, 1)


@jit
def sum_energies(points: Int16s, places: Int16s) -> "tuple[Integer, np.float64]":
    """Of all points about their places: the energies' sum, and that of the squares in parts of a step."""
    clipped, squares = np.int64(0), np.float64(0)
    for first in range(0, points.size, _BLOCK):
        some, expected = points[first : first + _BLOCK], places[first : first + _BLOCK]
        of_energies = of_squares = np.int64(0)
        for j in range(some.size):
            error = np.int64(some[j]) * 128 - np.int64(expected[j])
            of_squares += error * error
            of_energies += min(error * error >> 8, np.int64(_LARGEST))
        clipped += of_energies
        squares += of_squares
    return clipped, squares


@jit
def are_given(points: Int16s, places: Int16s, ranks: Int8s, errors: Int32s) -> bool:
    """Whether a reader will know these points; those that are too far aside."""
    missed = np.int32(0)
    for j in range(points.size):
        reached = (errors[j] + np.int32(places[j])) >> _7
        missed |= (reached ^ np.int32(points[j])) if abs(np.int32(ranks[j])) < _NEAR else _0
    return bool(missed == 0)
