"""The compiled contexts of trellis-coded planes.

Importing this module imports numba, so it is only ever imported from inside a function of its callers. All arithmetic
is on integers but the low-rank prediction's (entropy/context_segments.py); every index is clamped.

A reader knows where each value is expected, its *place*. In a given state it knows of each of the two nearest points, one
of either parity, how far it is, and what the state behind it allows for the places to come: the cost of the cheapest
path through them, of which each further element counts a share less. The point of the lesser cost is the *best* one, the
difference of both costs is its *lead*, and what is coded is how many points further, in the direction of the other one,
the true point lies: under tables that depend on the lead, on how far points of this row and column have been from their
places, and on side planes.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shrinkpoint.entropy.context_kernels import ACTIVITIES, BLOCK_ROWS
from shrinkpoint.entropy.context_lowrank import advance, start_directions
from shrinkpoint.entropy.context_runs import (
    GAP_SHIFT,
    LEVEL_SHIFT,
    LONGEST,
    Tables,
    finished,
    new_counters,
)
from shrinkpoint.entropy.context_segments import (
    SEGMENT,
    SEGMENT_RANK,
    correct_segment,
    predict_segment,
    refresh_segments,
)
from shrinkpoint.entropy.kernels import pop, refill
from shrinkpoint.jit import jit, jit_inlined

__all__ = ["AHEAD", "FARTHEST_RANK", "LEADS", "Scene", "decode_chunk", "find_features", "flip", "measure"]

Float64s = npt.NDArray[np.float64]
Int8s = npt.NDArray[np.int8]
Int16s = npt.NDArray[np.int16]
Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]
UInt8s = npt.NDArray[np.uint8]
UInt16s = npt.NDArray[np.uint16]
Integer = int | np.int64

LEADS = 44
"""Classes of leads."""

AHEAD = 16
"""Columns behind a segment that its leads take into account."""

FARTHEST_RANK = 126
"""Points further from the best one are taken for the last ones of their parity; the caller knows how much further they are."""

_LARGEST = 1023  # energy of an element, in 1/256 square steps
_FLOOR = 8 * 16  # energy that noise has, in 1/2048
_PRIOR = 32  # columns of mean energy that a row starts with
_OCTAVES = np.array([0] + [(k**4).bit_length() - 1 for k in range(1, 8 * _LARGEST + 9)], dtype=np.int32)
"""4 log2 of an energy, rounded down."""

# Constants of 32 bits: others would make the loops' arithmetic one of 64, in half as many lanes.
_0, _1, _7, _8, _9 = np.int32(0), np.int32(1), np.int32(7), np.int32(8), np.int32(9)
_128, _256 = np.int32(128), np.int32(256)
_BY_LEAD, _BY_SQUARE, _BY_LEAK = np.int32(5), np.int32(6), np.int32(4)
_LAST_LEAD = np.int32(LEADS - 1)
_P_SHIFT, _V_SHIFT = 8, 12
_V_LIMIT = 511
_FAR = 4 * 256  # places are moved by no more


class Scene(NamedTuple):
    """What the kernels read for a chunk of n elements.

    Attributes:
        width: elements of a path; the last one may have fewer.
        states: 4 or 8.
        places: int16 (n,), -256 to 255.
        sides: uint8 (sides, n), levels of the side planes.
        leak: what a further element's cost counts, in 1/16.
        low_rank: whether values are predicted from the directions of the rows before.
        scale: units of a value that a part of a step has, in 2^-12.
        mean: mean energy in 1/2048 square steps.
    """

    width: int
    states: int
    places: Int16s
    sides: UInt8s
    leak: int
    low_rank: bool
    scale: int
    mean: int


class _Row(NamedTuple):
    """What is known in a row; columns are padded to whole segments.

    Attributes:
        y: int32 (columns,), places.
        squares: int32 (4, 16, segments + 1): costs of the nearest point at offset 0 and 1/2, of parity 0 and 1, by column
            within the segment and by segment.
        paths: int32 (2, states, segments): costs of the cheapest paths.
        ahead: int32 (states, columns): that from the next column on.
        packed: int32 (1 or 2, segments), as ``found``.
        found: int32 (1 or 2, columns): for each of four states a byte, the lead's class, and 128 if the best point is odd.
        cells: int32 (columns,).
        busy: int32 (columns,), decayed mean energy of each column in 1/2048.
        activity: int32 (columns,), `_OCTAVES` of it.
        energies: int32 (columns,).
        shift: int32 (16,), by how much predictions move the places.
    """

    y: Int32s
    squares: Int32s
    paths: Int32s
    ahead: Int32s
    packed: Int32s
    found: Int32s
    cells: Int32s
    busy: Int32s
    activity: Int32s
    energies: Int32s
    shift: Int32s


class _Fans(NamedTuple):
    """Low-rank prediction, as in entropy/context_segments.py; empty without."""

    directions: Int32s
    strengths: Int64s
    powers: Int64s
    block: Int32s
    trust: Float64s
    u: Float64s
    rounded: Int32s
    prediction: Int32s
    values: Int32s


@jit
def _new_row(scene: Scene) -> _Row:
    segments = (scene.width + SEGMENT - 1) // SEGMENT
    columns, states = segments * SEGMENT, scene.states
    return _Row(
        np.zeros(columns, dtype=np.int32),
        np.zeros((4, SEGMENT, segments + 1), dtype=np.int32),
        np.zeros((2, states, segments), dtype=np.int32),
        np.zeros((states, columns if scene.low_rank else 0), dtype=np.int32),
        np.zeros((states // 4, segments), dtype=np.int32),
        np.zeros((states // 4, columns), dtype=np.int32),
        np.zeros(columns, dtype=np.int32),
        np.full(columns, scene.mean, dtype=np.int32),
        np.zeros(columns, dtype=np.int32),
        np.zeros(columns, dtype=np.int32),
        np.zeros(SEGMENT, dtype=np.int32),
    )


@jit
def _new_fans(width: int, tracked: bool) -> _Fans:
    segments = (width + SEGMENT - 1) // SEGMENT if tracked else 0
    fans = _Fans(
        np.zeros((SEGMENT_RANK, segments * SEGMENT), dtype=np.int32),
        np.zeros(SEGMENT_RANK, dtype=np.int64),
        np.zeros(SEGMENT_RANK + 1, dtype=np.int64),
        np.zeros((BLOCK_ROWS, segments * SEGMENT), dtype=np.int32),
        np.zeros((segments, SEGMENT_RANK, SEGMENT_RANK)),
        np.zeros(SEGMENT_RANK),
        np.zeros(SEGMENT_RANK, dtype=np.int32),
        np.zeros(SEGMENT, dtype=np.int32),
        np.zeros(SEGMENT, dtype=np.int32),
    )
    if tracked:
        start_directions(fans.directions, fans.strengths, fans.powers)
        fans.directions[:, width:] = 0
        refresh_segments(fans.directions, fans.powers, fans.trust)
    return fans


@jit_inlined
def flip(state: Integer, states: int) -> Integer:
    """What is added to an index's parity on the way to the next state."""
    return (state >> 1 & 1) if states == 4 else ((state >> 1) ^ (state >> 2)) & 1


@jit_inlined
def _next(state: Integer, odd: Integer, states: int) -> Integer:
    after: Integer = ((2 * state) & (states - 1)) | (odd ^ flip(state, states))
    return after


@jit
def _look_ahead(places: Int16s, scene: Scene, row: _Row) -> None:
    """Fill ``y`` and ``found`` for a row's places, and ``ahead`` for those that will be moved: backwards from `AHEAD` columns
    behind each segment on, in all segments at once."""
    count, states, low_rank = places.size, scene.states, scene.low_rank
    y, squares, paths, packed = row.y, row.squares, row.paths, row.packed
    for j in range(count):
        y[j] = places[j]
    y[count:] = 0
    lanes = paths.shape[2]
    for i in range(SEGMENT):
        inside = max((count - i + SEGMENT - 1) // SEGMENT, 0)
        for offset in range(2):
            even, odd = squares[2 * offset, i], squares[2 * offset + 1, i]
            half = np.int32(128 * offset)
            for lane in range(lanes):
                near = y[lane * SEGMENT + i] - half
                near -= (near + _256) >> _9 << _9
                other = _256 - abs(near)
                even[lane] = (near * near) >> _BY_SQUARE
                odd[lane] = (other * other) >> _BY_SQUARE
            even[inside:] = 0
            odd[inside:] = 0
    paths[:] = 0
    leak, ahead = np.int32(scene.leak), row.ahead
    for i in range(AHEAD - 1, -1, -1):
        before, now = paths[i & 1], paths[1 - (i & 1)]
        for state in range(states):
            offset = state & 1
            even, odd = squares[2 * offset, i, 1 : 1 + lanes], squares[2 * offset + 1, i, 1 : 1 + lanes]
            of_even, of_odd = before[_next(state, 0, states)], before[_next(state, 1, states)]
            out = now[state]
            for lane in range(lanes):
                a, b = even[lane] + of_even[lane], odd[lane] + of_odd[lane]
                out[lane] = (min(a, b) * leak) >> _BY_LEAK
    if low_rank:
        _keep_behind(paths[1], ahead, SEGMENT - 1)
    for i in range(SEGMENT - 1, -1, -1):
        before, now = paths[i & 1], paths[1 - (i & 1)]
        packed[:] = 0
        for state in range(states):
            offset, shift = state & 1, np.int32(8 * (state & 3))
            even, odd = squares[2 * offset, i, :lanes], squares[2 * offset + 1, i, :lanes]
            of_even, of_odd = before[_next(state, 0, states)], before[_next(state, 1, states)]
            out, leads = now[state], packed[state >> 2]
            for lane in range(lanes):
                a, b = even[lane] + of_even[lane], odd[lane] + of_odd[lane]
                out[lane] = (min(a, b) * leak) >> _BY_LEAK
                lead = min(abs(a - b) >> _BY_LEAD, _LAST_LEAD)
                leads[lane] |= (lead | (_128 if a > b else _0)) << shift
        for part in range(packed.shape[0]):
            leads, found = packed[part], row.found[part]
            for lane in range(lanes):
                found[lane * SEGMENT + i] = leads[lane]
        if low_rank and i > 0:
            _keep_behind(now, ahead, i - 1)


@jit
def _keep_behind(paths: Int32s, ahead: Int32s, column: int) -> None:
    """Note the costs of what lies behind a column of each segment."""
    for state in range(paths.shape[0]):
        source, target = paths[state], ahead[state]
        for lane in range(source.size):
            target[lane * SEGMENT + column] = source[lane]


@jit
def _move_places(row: _Row, start: int, states: int) -> None:
    """Find the leads of the segment from column ``start`` on anew, its places being moved by ``shift``."""
    places, shift = row.y[start : start + SEGMENT], row.shift
    for j in range(places.size):
        places[j] += shift[j]
    for part in range(row.found.shape[0]):
        row.found[part, start : start + SEGMENT] = 0
    for state in range(states):
        of_even = row.ahead[_next(state, 0, states), start : start + SEGMENT]
        of_odd = row.ahead[_next(state, 1, states), start : start + SEGMENT]
        half, by = np.int32(128 * (state & 1)), np.int32(8 * (state & 3))
        found = row.found[state >> 2, start : start + SEGMENT]
        for j in range(places.size):
            near = places[j] - half
            near -= (near + _256) >> _9 << _9
            other = _256 - abs(near)
            a = ((near * near) >> _BY_SQUARE) + of_even[j]
            b = ((other * other) >> _BY_SQUARE) + of_odd[j]
            lead = min(abs(a - b) >> _BY_LEAD, _LAST_LEAD)
            found[j] |= (lead | (_128 if a > b else _0)) << by


@jit_inlined
def _place_points(
    places: Int32s, unmoved: Int16s, path: Int32s, ranks: Int32s, points: Int16s, errors: Int32s
) -> None:
    """The points that lie ``ranks`` beyond the best ones, and how far from the places they are.

    ``path`` has each element's state, and 128 where its best point is odd.
    """
    for j in range(points.size):
        known = path[j]
        half, odd = (known & _1) << _7, known >> _7
        place = places[j] - half
        even = (place + _256) >> _9 << _9
        up = _1 if place >= even else -_1  # where the nearest odd point lies
        point = even + half + ((odd + ranks[j] * (_1 - odd - odd)) * up << _8)
        points[j] = point >> _7
        errors[j] = point - np.int32(unmoved[j])


@jit
def _start_row(scene: Scene, row: _Row, first: int, count: int, strides: Int64s, classes: Int32s) -> None:
    row.cells[:] = 0
    for s in range(classes.shape[0]):
        if strides[2 + s]:
            side, cells, table = scene.sides[s, first : first + count], row.cells, classes[s]
            for j in range(side.size):
                cells[j] += table[side[j]]
    if strides[1]:
        activity, busy = row.activity, row.busy
        for j in range(activity.size):
            activity[j] = _OCTAVES[max(busy[j] - _FLOOR, 1)]


@jit_inlined
def _row_activity(so_far: Integer, seen: int, mean: int) -> Integer:
    """That of the row so far less twice the plane's, so that half a column's and this is a class."""
    of_row = ((so_far << 3) + _PRIOR * mean) // (seen + _PRIOR)
    return np.int64(_OCTAVES[max(of_row - _FLOOR, 1)]) - 2 * np.int64(_OCTAVES[max(mean - _FLOOR, 1)]) + 13


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


@jit
def _shift_places(prediction: Int32s, scale: int, shift: Int32s) -> None:
    unit = np.int32((1 << 18) // scale)
    for j in range(shift.size):
        shift[j] = min(max(np.int32(prediction[j] * unit) >> _P_SHIFT, -_FAR), _FAR)


@jit
def _read_values(errors: Int32s, scale: int, start: int, values: Int32s, block: Int32s) -> None:
    values[:] = 0
    factor = np.int32(scale)
    for j in range(errors.size):
        value = min(max(np.int32(errors[j] * factor) >> _V_SHIFT, -_V_LIMIT), _V_LIMIT)
        values[j] = value
        block[start + j] = value


@jit
def _end_row(row: _Row, fans: _Fans, number: int) -> None:
    busy, energies = row.busy, row.energies
    rate = np.int32(1 if number < 2 else 2 if number < 6 else 3 if number < 14 else 4 if number < 30 else 5)
    for j in range(busy.size):
        busy[j] += np.int32((energies[j] << 3) - busy[j]) >> rate
    if fans.trust.shape[0] and number % BLOCK_ROWS == BLOCK_ROWS - 1:
        advance(fans.block, fans.directions, fans.strengths, fans.powers)
        if number < 64 or number // BLOCK_ROWS % 2 == 0:
            refresh_segments(fans.directions, fans.powers, fans.trust)


@jit_inlined
def _rank_path(
    places: Int32s, found: Int32s, states: int, state: Integer, points: Int16s, path: Int32s, ranks: Int32s
) -> Integer:
    """Fill ``ranks``, and ``path`` as for `_place_points`, with a lead's class in bits 8 and up; return the next state."""
    for j in range(places.size):
        known = (found[state >> 2, j] >> (8 * (state & 3))) & 255
        place = np.int64(places[j]) - 128 * (state & 1)
        even = (place + 256) >> 9 << 1
        up = 1 if place >= even << 8 else -1
        odd = known >> 7
        index = (np.int64(points[j]) - (state & 1)) >> 1
        rank = (index - even) * up if not odd else (even + up - index) * up
        if abs(rank) > FARTHEST_RANK:  # the last one of the same parity
            last = FARTHEST_RANK - ((abs(rank) ^ FARTHEST_RANK) & 1)
            rank = last if rank > 0 else -last
        ranks[j] = rank
        path[j] = state | (known & 128) | (known & 127) << 8
        state = _next(state, index & 1, states)
    return state


@jit
def find_features(scene: Scene, points: Int16s, ranks: Int8s, found: UInt16s, errors: Int32s) -> None:
    """Say of every element of a chunk how many points it lies beyond the best one, and what is known of that.

    Args:
        scene: the chunk.
        points: int16 (n,), what is to be coded, in half steps; they form paths.
        ranks: int8 (n,), filled: -`FARTHEST_RANK` to `FARTHEST_RANK`.
        found: uint16 (n,), filled: the lead's class, and `LEADS` times that of the activity.
        errors: int32 (n,), filled: points less places, in parts of a step; of what is too far, as a reader will know them.
    """
    row, fans = _new_row(scene), _new_fans(scene.width, scene.low_rank)
    parts = fans.directions.reshape(SEGMENT_RANK, fans.trust.shape[0], SEGMENT)
    strides = np.zeros(2, dtype=np.int64)
    strides[1] = LEADS
    classes = np.zeros((0, 256), dtype=np.int32)
    path, ranked = np.zeros(SEGMENT, dtype=np.int32), np.zeros(SEGMENT, dtype=np.int32)
    reached = np.empty(SEGMENT, dtype=np.int16)
    states = scene.states
    for number in range((points.size + scene.width - 1) // scene.width):
        first = number * scene.width
        count = min(scene.width, points.size - first)
        _look_ahead(scene.places[first : first + count], scene, row)
        _start_row(scene, row, first, count, strides, classes)
        fans.u[:] = 0
        fans.rounded[:] = 0
        so_far, state = np.int64(0), 0
        for start in range(0, count, SEGMENT):
            stop = min(start + SEGMENT, count)
            if scene.low_rank:
                predict_segment(parts, start // SEGMENT, fans.rounded, fans.prediction)
                _shift_places(fans.prediction, scene.scale, row.shift)
                _move_places(row, start, states)
            _add_activity(
                row.cells, row.activity, start, _row_activity(so_far, start, scene.mean), strides[1]
            )
            state = _rank_path(
                row.y[start:stop],
                row.found[:, start:stop],
                states,
                state,
                points[first + start : first + stop],
                path,
                ranked,
            )
            for j in range(start, stop):
                ranks[first + j] = ranked[j - start]
                found[first + j] = row.cells[j] + (path[j - start] >> 8)
                path[j - start] &= 255
            part = errors[first + start : first + stop]
            _place_points(
                row.y[start:stop],
                scene.places[first + start : first + stop],
                path,
                ranked,
                reached[: stop - start],
                part,
            )
            so_far += _take_in(part, start, row.energies)
            if scene.low_rank:
                _read_values(part, scene.scale, start, fans.values, fans.block[number % BLOCK_ROWS])
                correct_segment(
                    parts, start // SEGMENT, fans.trust, fans.u, fans.rounded, fans.values, fans.prediction
                )
        _end_row(row, fans, number)


@jit
def decode_chunk(
    scene: Scene,
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
) -> bool:
    """Inverse of `find_features` for a chunk that was coded under the leaves: fill all three; False if the words do not end
    where they must.

    Symbols are ``rank + radius``. Validated by the caller: cells index ``leaf_rows``, which indexes the tables; see `take_one`.
    """
    row, fans = _new_row(scene), _new_fans(scene.width, scene.low_rank)
    parts = fans.directions.reshape(SEGMENT_RANK, fans.trust.shape[0], SEGMENT)
    states, low_rank, lively = scene.states, fans.trust.shape[0] > 0, strides[1] != 0
    counters = new_counters(tables)
    runs, levels, gaps = tables.runs, tables.levels, tables.gaps
    level_lookup, gap_lookup = tables.level_lookup, tables.gap_lookup
    left, due = counters[0], counters[1]
    zero, mask = np.int64(tables.zero), states - 1
    cells, found = row.cells, row.found
    x0, x1, x2, x3, position = cursor[0], cursor[1], cursor[2], cursor[3], cursor[4]
    by_lead = np.empty(256, dtype=np.int32)
    for k in range(256):
        by_lead[k] = min(k & 127, LEADS - 1) * strides[0]
    path, ranked = np.zeros(SEGMENT, dtype=np.int32), np.zeros(SEGMENT, dtype=np.int32)
    for number in range((points.size + scene.width - 1) // scene.width):
        first = number * scene.width
        count = min(scene.width, points.size - first)
        _look_ahead(scene.places[first : first + count], scene, row)
        _start_row(scene, row, first, count, strides, classes)
        fans.u[:] = 0
        fans.rounded[:] = 0
        so_far, state = np.int64(0), 0
        for start in range(0, count, SEGMENT):
            stop = min(start + SEGMENT, count)
            if low_rank:
                predict_segment(parts, start // SEGMENT, fans.rounded, fans.prediction)
                _shift_places(fans.prediction, scene.scale, row.shift)
                _move_places(row, start, states)
            if lively:
                _add_activity(
                    row.cells, row.activity, start, _row_activity(so_far, start, scene.mean), strides[1]
                )
            for i in range(stop - start):
                known = (
                    np.int64(found[0, start + i] if state < 4 else found[1, start + i]) >> (8 * (state & 3))
                ) & 255
                leaf = leaf_rows[cells[start + i] + by_lead[known]]
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
            for j in range(start, stop):
                ranks[first + j] = ranked[j - start]
            _place_points(
                row.y[start:stop],
                scene.places[first + start : first + stop],
                path,
                ranked,
                points[first + start : first + stop],
                errors[first + start : first + stop],
            )
            part = errors[first + start : first + stop]
            if lively:
                so_far += _take_in(part, start, row.energies)
            if low_rank:
                _read_values(part, scene.scale, start, fans.values, fans.block[number % BLOCK_ROWS])
                correct_segment(
                    parts, start // SEGMENT, fans.trust, fans.u, fans.rounded, fans.values, fans.prediction
                )
        _end_row(row, fans, number)
    cursor[0], cursor[1], cursor[2], cursor[3], cursor[4] = x0, x1, x2, x3, position
    return bool(finished(words, cursor))


@jit
def measure(errors: Int32s, width: int, scale: int) -> tuple[Integer, Integer]:
    """Mean squares of the values of some rows, and of what low-rank prediction leaves of them, in 1/16."""
    fans = _new_fans(width, width > 0)
    parts = fans.directions.reshape(SEGMENT_RANK, fans.trust.shape[0], SEGMENT)
    of_values = of_errors = np.int64(0)
    rows = errors.size // width
    for number in range(rows):
        fans.u[:] = 0
        fans.rounded[:] = 0
        here = errors[number * width : (number + 1) * width]
        for start in range(0, width, SEGMENT):
            stop = min(start + SEGMENT, width)
            predict_segment(parts, start // SEGMENT, fans.rounded, fans.prediction)
            _read_values(here[start:stop], scale, start, fans.values, fans.block[number % BLOCK_ROWS])
            correct_segment(
                parts, start // SEGMENT, fans.trust, fans.u, fans.rounded, fans.values, fans.prediction
            )
            for j in range(stop - start):
                of_values += 16 * np.int64(fans.values[j]) * np.int64(fans.values[j])
                of_errors += np.int64(fans.prediction[j]) * np.int64(fans.prediction[j])
        if number % BLOCK_ROWS == BLOCK_ROWS - 1:
            advance(fans.block, fans.directions, fans.strengths, fans.powers)
            refresh_segments(fans.directions, fans.powers, fans.trust)
    return of_values // max(rows * width, 1), of_errors // max(rows * width, 1)
