"""Viterbi search of trellis-coded quantization (JPEG 2000 part 2; VVC's dependent quantization): least squared error.

Importing this module imports numba, so it is only ever imported from inside a function of its callers. Only encoders
use it.
"""

from typing import NamedTuple

import numpy as np

from shrinkpoint.arrays import Float32s, Int16s, UInt8s
from shrinkpoint.runtime.jit import jit_part

LANES = 16
_HALF, _ONE, _TWO, _ZERO, _FAR = (
    np.float32(0.5),
    np.float32(1),
    np.float32(2),
    np.float32(0),
    np.float32(1e9),
)


class Search(NamedTuple):
    """Room for a search of sixteen paths of n elements at the same time.

    Attributes:
        values: fp32 (16, n), in steps.
        near: fp32 (n, 16), the same less whole pairs of steps: all that costs depend on.
        costs: fp32 (4, 16), of the cheapest path into each state.
        choices: uint8 (n, 16), a bit for each state: from which of two it was reached.
    """

    values: Float32s
    near: Float32s
    costs: Float32s
    choices: UInt8s


def new_search(width: int) -> Search:
    """Room for paths of this many elements."""
    return Search(
        values=np.empty((LANES, width), np.float32),
        near=np.empty((width, LANES), np.float32),
        costs=np.empty((4, LANES), np.float32),
        choices=np.empty((width, LANES), np.uint8),
    )


@jit_part
def search(room: Search, paths: int, width: int, last: int, start: int, out: Int16s) -> None:
    """Fill ``out`` from ``start`` on with the points, in half steps, of the nearest paths.

    Args:
        room: with values.
        paths: how many there are.
        width: elements of a path; each begins in state 0.
        last: elements of the last path.
        start: where the first path begins.
        out: receives points.
    """
    for lane in range(LANES):
        size = 0 if lane >= paths else last if lane == paths - 1 else width
        row = room.values[lane]
        for j in range(size):
            room.near[j, lane] = row[j] - _TWO * np.floor(row[j] * _HALF + _HALF)
        for j in range(size, width):
            room.near[j, lane] = _ZERO
    c0, c1, c2, c3 = room.costs[0], room.costs[1], room.costs[2], room.costs[3]
    for lane in range(LANES):
        c0[lane], c1[lane], c2[lane], c3[lane] = _ZERO, _FAR, _FAR, _FAR
    for j in range(width):
        if j < last:
            _forward(room, j)
        else:  # behind the end of the last path
            _forward_but(room, j, paths - 1)
    for lane in range(paths):
        size = last if lane == paths - 1 else width
        state = 0
        for other in range(1, 4):
            if room.costs[other, lane] < room.costs[state, lane]:
                state = other
        first, row = start + lane * width, room.values[lane]
        for j in range(size - 1, -1, -1):
            chosen = (int(room.choices[j, lane]) >> state) & 1
            low = state >> 1
            parity = (state & 1) ^ (low >> 1 & 1) ^ chosen
            state = low + 2 * chosen
            shift = _HALF * np.float32(state & 1)
            index = _TWO * np.floor((row[j] - shift - np.float32(parity)) * _HALF + _HALF)
            out[first + j] = 2 * (np.int32(index) + parity) + (state & 1)


@jit_part
def _forward(room: Search, j: int) -> None:
    """Add, compare, select: a column's costs into each of four states, from the first one's on, so that fp32 keeps differences."""
    near, choices = room.near[j], room.choices[j]
    c0, c1, c2, c3 = room.costs[0], room.costs[1], room.costs[2], room.costs[3]
    for lane in range(LANES):
        z = near[lane]
        here = z + _TWO if z < -_ONE else z
        other = _ONE - abs(here)
        e0, o0 = here * here, other * other
        z = near[lane] - _HALF
        here = z + _TWO if z < -_ONE else z
        other = _ONE - abs(here)
        e1, o1 = here * here, other * other
        # into 0 from 0 (even) or 2 (odd), 1 from 0 (odd) or 2 (even), 2 from 1 (even) or 3 (odd), 3 from 1 (odd) or 3 (even)
        a0, b0 = c0[lane] + e0, c2[lane] + o0
        a1, b1 = c0[lane] + o0, c2[lane] + e0
        a2, b2 = c1[lane] + e1, c3[lane] + o1
        a3, b3 = c1[lane] + o1, c3[lane] + e1
        bits = np.int32(b0 < a0) | np.int32(b1 < a1) << np.int32(1)
        bits |= np.int32(b2 < a2) << np.int32(2) | np.int32(b3 < a3) << np.int32(3)
        choices[lane] = np.uint8(bits)
        least = min(a0, b0)
        c1[lane] = min(a1, b1) - least
        c2[lane] = min(a2, b2) - least
        c3[lane] = min(a3, b3) - least
        c0[lane] = _ZERO


@jit_part
def _forward_but(room: Search, j: int, lane: int) -> None:
    """As `_forward`, but for one lane, whose costs stay as they are."""
    costs = room.costs
    c0, c1, c2, c3 = costs[0, lane], costs[1, lane], costs[2, lane], costs[3, lane]
    _forward(room, j)
    costs[0, lane], costs[1, lane], costs[2, lane], costs[3, lane] = c0, c1, c2, c3
