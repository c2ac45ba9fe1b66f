"""Sparse coding of dense gradients that are mostly zeros (from gradient compression): nonzero values and gaps.

LowDiff (arXiv 2509.04084, section III) stores such gradients as indices and values. Zero means all bits zero: minus
zero is stored, since the replay must be exact.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from shrinkpoint.arrays import UInt8s
from shrinkpoint.errors import FormatError

__all__ = ["drop_zeros", "put_zeros_back"]

_SAMPLE = 4096
_WORDS: Mapping[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_WORTH = 0.75  # of the dense bytes: above, the gaps' bytes are not worth their time


def drop_zeros(data: UInt8s, itemsize: int) -> tuple[npt.NDArray[Any], UInt8s] | None:
    """The elements that are not zero.

    Args:
        data: the elements' bytes.
        itemsize: bytes of one: 1, 2, 4 or 8.

    Returns:
        For each such element the number of zeros before it, in the smallest sufficient integer type, and the elements'
        bytes; None where that takes about as much as `data`.
    """
    words = data.view(_WORDS[itemsize])
    sample = words[:: max(1, words.size // _SAMPLE)]
    if not words.size or np.count_nonzero(sample) > _WORTH * sample.size:
        return None
    places = np.flatnonzero(words)
    gaps = np.diff(places, prepend=-1) - 1
    widest = int(gaps.max(initial=0))
    gap_type = next(kind for kind in _WORDS.values() if widest <= np.iinfo(kind).max)
    if places.size * (np.dtype(gap_type).itemsize + itemsize) > _WORTH * data.size:
        return None
    return gaps.astype(gap_type), words[places].view(np.uint8)


def put_zeros_back(gaps: npt.NDArray[Any], values: UInt8s, itemsize: int, elements: int) -> UInt8s:
    """The inverse of `drop_zeros`.

    Args:
        gaps: zeros before each element.
        values: the elements' bytes.
        itemsize: bytes of one.
        elements: how many there are with the zeros; the caller has checked that so much memory may be taken.

    Raises:
        FormatError: the parts do not fit together.
    """
    if gaps.dtype.kind != "u" or gaps.size * itemsize != values.size or gaps.size > elements:
        raise FormatError(
            f"a gradient of {elements} elements has {gaps.size} gaps and {values.size} bytes of values"
        )
    if gaps.size and int(gaps.max()) > elements:
        raise FormatError(f"a gradient of {elements} elements has a gap of {int(gaps.max())}")
    words = np.zeros(elements, dtype=_WORDS[itemsize])
    places = np.cumsum(gaps.astype(np.int64) + 1) - 1
    if places.size and not 0 <= int(places[-1]) < elements:
        raise FormatError(f"a gradient of {elements} elements has a value at place {int(places[-1])}")
    words[places] = np.ascontiguousarray(values).view(_WORDS[itemsize])
    return words.view(np.uint8)
