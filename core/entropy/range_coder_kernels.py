"""What the binary and the symbol-wise range coders share: four numbers that stand for an interval and a stream.

Importing this module imports numba, so it is only ever imported from inside a function of its callers.

Source: G. N. N. Martin, "Range encoding: an algorithm for removing redundancy from a digitised message" (1979).
"""

import numpy as np

from shrinkpoint.arrays import Int64s, UInt8s
from shrinkpoint.runtime.jit import jit_allocating

__all__ = ["new_coder"]


@jit_allocating
def new_coder(stream: UInt8s, decoding: bool) -> Int64s:
    """The interval's low end, its width less 1 (or its high end), the code, and the position in the stream.

    Past the end of a stream, zeros are read.
    """
    coder = np.array([0, 0xFFFFFFFF, 0, 0])
    if decoding:
        for i in range(4):
            coder[2] = coder[2] << 8 | (np.int64(stream[i]) if i < stream.size else 0)
        coder[3] = 4
    return coder
