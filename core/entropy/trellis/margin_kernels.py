"""The compiled look along the paths of a trellis: which point is the best one for an element, and by how much.

Importing this module imports numba, so it is only ever imported from inside a function of its callers. All arithmetic
is on integers; every index is clamped.

A reader knows where each value is expected, its *place*. In a given state it knows of each of the two nearest points, one
of either parity, how far it is, and what the state behind it allows for the places to come: the cost of the cheapest
path through them, of which each further element counts a share less. The point of the lesser cost is the *best* one, the
difference of both costs is its *lead*, and what is coded is how many points further, in the direction of the other one,
the true point lies: its *rank*.
"""

from typing import NamedTuple

import numpy as np

from shrinkpoint.arrays import Int16s, Int32s, Integer, UInt8s
from shrinkpoint.entropy.contexts.segment_lowrank_kernels import SEGMENT
from shrinkpoint.runtime.jit import jit_inlined, jit_part

__all__ = [
    "AHEAD",
    "FARTHEST_RANK",
    "MARGINS",
    "Margins",
    "Scene",
    "flip",
    "look_ahead",
    "move_places",
    "place_points",
    "rank_path",
]

MARGINS = 44
"""Classes of leads."""

AHEAD = 16
"""Columns behind a segment that its leads take into account."""

FARTHEST_RANK = 126
"""Points further from the best one are taken for the last ones of their parity; the caller knows how much further they are."""

# Constants of 32 bits: others would make the loops' arithmetic one of 64, in half as many lanes.
_0, _1, _7, _9 = np.int32(0), np.int32(1), np.int32(7), np.int32(9)
_8, _128, _256 = np.int32(8), np.int32(128), np.int32(256)
_BY_MARGIN, _BY_SQUARE, _BY_DISCOUNT = np.int32(5), np.int32(6), np.int32(4)
_LAST_MARGIN = np.int32(MARGINS - 1)


class Scene(NamedTuple):
    """What the kernels read for a chunk of n elements.

    Attributes:
        width: elements of a path; the last one may have fewer.
        states: 4 or 8.
        places: int16 (n,), -256 to 255.
        sides: uint8 (sides, n), levels of the side planes.
        discount: what a further element's cost counts, in 1/16.
        low_rank: whether values are predicted from the directions of the rows before.
        scale: units of a value that a part of a step has, in 2^-12.
        mean: mean energy in 1/2048 square steps.
    """

    width: int
    states: int
    places: Int16s
    sides: UInt8s
    discount: int
    low_rank: bool
    scale: int
    mean: int


class Margins(NamedTuple):
    """What is known of a row's paths (`chunk_arrays.new_work`); columns are padded to whole segments.

    Attributes:
        y: int32 (columns,), places.
        squares: int32 (4, 16, segments + 1): costs of the nearest point at offset 0 and 1/2, of parity 0 and 1, by column
            within the segment and by segment.
        paths: int32 (2, states, segments): costs of the cheapest paths.
        ahead: int32 (states, columns): that from the next column on.
        packed: int32 (1 or 2, segments), as ``found``.
        found: int32 (1 or 2, columns): for each of four states a byte, the lead's class, and 128 if the best point is odd.
        shift: int32 (16,), by how much predictions move the places.
    """

    y: Int32s
    squares: Int32s
    paths: Int32s
    ahead: Int32s
    packed: Int32s
    found: Int32s
    shift: Int32s


@jit_inlined
def flip(state: Integer, states: int) -> Integer:
    """What is added to an index's parity on the way to the next state."""
    return (state >> 1 & 1) if states == 4 else ((state >> 1) ^ (state >> 2)) & 1


@jit_inlined
def _next(state: Integer, odd: Integer, states: int) -> Integer:
    after: Integer = ((2 * state) & (states - 1)) | (odd ^ flip(state, states))
    return after


@jit_part
def look_ahead(places: Int16s, states: int, discount: Integer, low_rank: bool, margins: Margins) -> None:
    """Fill ``y`` and ``found`` for a row's places, and ``ahead`` for those that will be moved: backwards from `AHEAD` columns
    behind each segment on, in all segments at once."""
    count = places.size
    y, squares, paths, packed = margins.y, margins.squares, margins.paths, margins.packed
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
    by, ahead = np.int32(discount), margins.ahead
    for i in range(AHEAD - 1, -1, -1):
        before, now = paths[i & 1], paths[1 - (i & 1)]
        for state in range(states):
            offset = state & 1
            even, odd = squares[2 * offset, i, 1 : 1 + lanes], squares[2 * offset + 1, i, 1 : 1 + lanes]
            of_even, of_odd = before[_next(state, 0, states)], before[_next(state, 1, states)]
            out = now[state]
            for lane in range(lanes):
                a, b = even[lane] + of_even[lane], odd[lane] + of_odd[lane]
                out[lane] = (min(a, b) * by) >> _BY_DISCOUNT
    if low_rank:
        _keep_behind(paths[1], ahead, SEGMENT - 1)
    for i in range(SEGMENT - 1, -1, -1):
        before, now = paths[i & 1], paths[1 - (i & 1)]
        packed[:] = 0
        for state in range(states):
            offset, shift = state & 1, np.int32(8 * (state & 3))
            even, odd = squares[2 * offset, i, :lanes], squares[2 * offset + 1, i, :lanes]
            of_even, of_odd = before[_next(state, 0, states)], before[_next(state, 1, states)]
            out, classes = now[state], packed[state >> 2]
            for lane in range(lanes):
                a, b = even[lane] + of_even[lane], odd[lane] + of_odd[lane]
                out[lane] = (min(a, b) * by) >> _BY_DISCOUNT
                margin = min(abs(a - b) >> _BY_MARGIN, _LAST_MARGIN)
                classes[lane] |= (margin | (_128 if a > b else _0)) << shift
        for part in range(packed.shape[0]):
            classes, found = packed[part], margins.found[part]
            for lane in range(lanes):
                found[lane * SEGMENT + i] = classes[lane]
        if low_rank and i > 0:
            _keep_behind(now, ahead, i - 1)


@jit_inlined
def _keep_behind(paths: Int32s, ahead: Int32s, column: int) -> None:
    """Note the costs of what lies behind a column of each segment."""
    for state in range(paths.shape[0]):
        source, target = paths[state], ahead[state]
        for lane in range(source.size):
            target[lane * SEGMENT + column] = source[lane]


@jit_part
def move_places(margins: Margins, start: int, states: int) -> None:
    """Find the leads of the segment from column ``start`` on anew, its places being moved by ``shift``."""
    places, shift = margins.y[start : start + SEGMENT], margins.shift
    for j in range(places.size):
        places[j] += shift[j]
    for part in range(margins.found.shape[0]):
        margins.found[part, start : start + SEGMENT] = 0
    for state in range(states):
        of_even = margins.ahead[_next(state, 0, states), start : start + SEGMENT]
        of_odd = margins.ahead[_next(state, 1, states), start : start + SEGMENT]
        half, by = np.int32(128 * (state & 1)), np.int32(8 * (state & 3))
        found = margins.found[state >> 2, start : start + SEGMENT]
        for j in range(places.size):
            near = places[j] - half
            near -= (near + _256) >> _9 << _9
            other = _256 - abs(near)
            a = ((near * near) >> _BY_SQUARE) + of_even[j]
            b = ((other * other) >> _BY_SQUARE) + of_odd[j]
            margin = min(abs(a - b) >> _BY_MARGIN, _LAST_MARGIN)
            found[j] |= (margin | (_128 if a > b else _0)) << by


@jit_inlined
def place_points(
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


@jit_inlined
def rank_path(
    places: Int32s, found: Int32s, states: int, state: Integer, points: Int16s, path: Int32s, ranks: Int32s
) -> Integer:
    """Fill ``ranks``, and ``path`` as for `place_points`, with a lead's class in bits 8 and up; return the next state."""
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
