"""The nearest paths of a trellis through given numbers, without dither and predictions, by the product's search."""

import numpy as np

from shrinkpoint.arrays import Float32s, Int16s
from shrinkpoint.quantize.viterbi_kernels import LANES, Search, new_search, search
from shrinkpoint.runtime.jit import jit


def nearest_points(values: Float32s, width: int) -> Int16s:
    """The points of the trellis paths with the least squared error, in half steps.

    Args:
        values: fp32 (n,), in steps.
        width: elements of a path; the last one may have fewer.
    """
    points = np.full(values.size, 12_345, np.int16)
    _nearest(values, width, new_search(width), points)
    return points


@jit
def _nearest(values: Float32s, width: int, room: Search, out: Int16s) -> None:
    for start in range(0, values.size, LANES * width):
        paths = min(LANES, (values.size - start + width - 1) // width)
        last = min(width, values.size - start - (paths - 1) * width)
        for lane in range(paths):
            first = start + lane * width
            for j in range(last if lane == paths - 1 else width):
                room.values[lane, j] = values[first + j]
        search(room, paths, width, last, start, out)
