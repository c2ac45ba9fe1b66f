"""Bytes that are put together while other threads run.

Most of Python's own ways to copy bytes keep the interpreter's lock for as long as they copy: slices, ``tobytes``,
``BytesIO.write``, ``+``, and ``join`` of anything but ``bytes``. That is about a millisecond for each megabyte, in which the
training's thread cannot run. numpy gives the lock back while it copies.
"""

from collections.abc import Iterable
from io import BytesIO
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["join_bytes", "to_bytes"]

_SMALL = 1 << 14  # bytes, whose copy takes a few microseconds
_SHORT = 1 << 20  # bytes that `tobytes` copies in less than a millisecond


def join_bytes(parts: Iterable[bytes | memoryview], size: int) -> bytes:
    """Return the bytes of all parts, one after the other.

    Args:
        parts: contiguous bytes; each is copied before the next one is asked for, so that its memory may be returned in between.
        size: of all together.

    Raises:
        ValueError: the parts have another size.

    Examples:
        >>> from shrinkpoint.runtime.unlocked import join_bytes
        >>> join_bytes([b"head", memoryview(b"body")], 8)
        b'headbody'
    """
    # Memory of this size is mostly new, which the system clears page by page when it is first written to. BytesIO takes it over
    # without a copy.
    file, at = BytesIO(bytes(size)), 0
    with file.getbuffer() as view:
        for part in parts:
            if at + len(part) > size:
                raise ValueError(f"the parts have more than {size} bytes")
            if len(part) < _SMALL:
                view[at : at + len(part)] = part
            else:
                np.copyto(np.frombuffer(view[at : at + len(part)], np.uint8), np.frombuffer(part, np.uint8))
            at += len(part)
            del part  # before the next one is asked for
    if at != size:
        raise ValueError(f"the parts have {at} bytes, not {size}")
    return file.getvalue()


def to_bytes(array: npt.NDArray[Any]) -> bytes:
    """Return the elements in C order, as ``array.tobytes()``.

    Examples:
        >>> import numpy as np
        >>> from shrinkpoint.runtime.unlocked import to_bytes
        >>> to_bytes(np.array([1, 2], dtype="<u2"))
        b'\\x01\\x00\\x02\\x00'
    """
    if array.nbytes < _SHORT:
        return array.tobytes()
    flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return join_bytes([flat.data], flat.size)
