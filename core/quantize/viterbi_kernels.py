"""Viterbi search of trellis-coded quantization (JPEG 2000 part 2; VVC's dependent quantization): least squared error.

Importing this module imports numba, so it is only ever imported from inside a function of its callers. Only encoders
use it.
"""

from typing import NamedTuple

import numpy as np

from shrinkpoint.arrays import Float32s, Int16s, UInt8s
from shrinkpoint.runtime.jit import jit

__all__ = ["nearest_path"]


_LANES, _STATES = 16, 4
_EVERY = 64  # columns after which path costs are rebased


class _Search(NamedTuple):
    """Work arrays of a search; lanes are paths that are searched at the same time.

    Attributes:
        y: fp32 (width, lanes), the values.
        squares: fp32 (4, lanes).
        costs: fp32 (2, 4, lanes).
        base: fp32 (lanes,).
        choices: uint8 (width, 4, lanes).
    """

    y: Float32s
    squares: Float32s
    costs: Float32s
    base: Float32s
    choices: UInt8s


def nearest_path(values: Float32s, width: int, out: Int16s) -> None:
    """Fill ``out`` with the points, in half steps, of the trellis path with the least squared error.

    Args:
        values: fp32 (n,), in steps, within `trellis_dither_kernels.LIMIT`.
        width: elements of a path; each begins in state 0.
        out: int16 (n,).
    """
    search = _Search(
        y=np.zeros((width, _LANES), np.float32),
        squares=np.zeros((4, _LANES), np.float32),
        costs=np.zeros((2, _STATES, _LANES), np.float32),
        base=np.zeros(_LANES, np.float32),
        choices=np.zeros((width, _STATES, _LANES), np.uint8),
    )
    _search(values, width, search, out)


@jit
def _search(values: Float32s, width: int, search: _Search, out: Int16s) -> None:
    lanes = _LANES
    y, squares, costs, base, choices = search
    half, one, two = np.float32(0.5), np.float32(1), np.float32(2)
    paths = (values.size + width - 1) // width
    for first in range(0, paths, lanes):
        some = min(lanes, paths - first)
        # 1. Values of the lanes' paths, side by side, less whole pairs of steps: all that costs depend on.
        for lane in range(some):
            start = (first + lane) * width
            row = values[start : min(start + width, values.size)]
            for j in range(row.size):
                y[j, lane] = row[j] - two * np.floor(row[j] * half + half)
            for j in range(row.size, width):
                y[j, lane] = 0
        # 2. Forwards, column by column: the cost of the cheapest path into each state, and which one it comes from.
        costs[0] = np.float32(1e9)
        costs[0, 0] = 0
        # the last path may end before the others: columns beyond its end cost nothing
        ends = min(width, values.size - (first + some - 1) * width)
        for j in range(width):
            before, now = costs[j & 1], costs[1 - (j & 1)]
            here = y[j]
            # 2a. Branch costs: squares of the distances to the nearest even and odd point, at either offset.
            for offset in range(2):
                even, odd = squares[2 * offset], squares[2 * offset + 1]
                moved = half * np.float32(offset)
                for lane in range(lanes):
                    z = here[lane] - moved
                    near = z + two if z < -one else z
                    other = one - abs(near)
                    even[lane] = near * near
                    odd[lane] = other * other
            if j >= ends:
                for k in range(4):
                    squares[k, some - 1] = 0
            # 2b. Add, compare, select: two states lead to each.
            for state in range(_STATES):
                low = state >> 1
                high = low + _STATES // 2
                parity = (state & 1) ^ ((low >> 1) & 1)
                offset = low & 1
                of_low, of_high = squares[2 * offset + parity], squares[2 * offset + 1 - parity]
                from_low, from_high = before[low], before[high]
                cost, choice = now[state], choices[j, state]
                for lane in range(lanes):
                    a, b = from_low[lane] + of_low[lane], from_high[lane] + of_high[lane]
                    choice[lane] = b < a
                    cost[lane] = min(a, b)
            # 2c. Costs from the first state's on, so that fp32 keeps their differences.
            if j % _EVERY == _EVERY - 1:
                for lane in range(lanes):
                    base[lane] = now[0, lane]
                for state in range(_STATES):
                    cost = now[state]
                    for lane in range(lanes):
                        cost[lane] -= base[lane]
        # 3. Backwards from the cheapest end: the states of its path, and the points nearest to the values in them.
        last = costs[width & 1]
        for lane in range(some):
            start = (first + lane) * width
            row = values[start : min(start + width, values.size)]
            state = 0
            for other_state in range(1, _STATES):
                if last[other_state, lane] < last[state, lane]:
                    state = other_state
            for j in range(width - 1, -1, -1):
                chosen = choices[j, state, lane]
                low = state >> 1
                parity = (state & 1) ^ ((low >> 1) & 1) ^ chosen
                state = low + (_STATES // 2) * chosen
                if j < row.size:
                    shift = half * np.float32(state & 1)
                    index = two * np.floor((row[j] - shift - np.float32(parity)) * half + half)
                    out[start + j] = 2 * (np.int32(index) + parity) + (state & 1)
