"""Memory that is given back to the system, and bytes that are put together while other threads run.

glibc keeps freed memory below blocks that are still in use, in one arena for each allocating thread: after the save of
a state of many tensors that is about the state's size.

Most of Python's own ways to copy bytes keep the interpreter's lock for as long as they copy: slices, ``tobytes``,
``BytesIO.write``, ``+``, and ``join`` of anything but ``bytes``. That is about a millisecond for each megabyte, in which the
training's thread cannot run. numpy gives the lock back while it copies.
"""

import ctypes
from collections.abc import Callable, Iterable
from functools import cache
from io import BytesIO
from typing import Any

import numpy as np
import numpy.typing as npt

LARGE = 1 << 27
"""Size of a state in bytes from which on memory is returned after a save; less is kept for the next save."""
_TIMES = 16
"""How often memory is given back while all tensors of a state are worked on."""


def give_back() -> None:
    """Return freed memory, if the C library can; it takes milliseconds, and pages are allocated again when needed."""
    trim = _trim()
    if trim is not None:
        trim(0)


class Returns:
    """Gives memory back now and then while a large state is worked on: what one tensor took, the next may not fit into.

    Args:
        nbytes: of the state.
    """

    def __init__(self, nbytes: int) -> None:
        self._every = nbytes // _TIMES if nbytes >= LARGE else None
        self._done = 0

    def after(self, nbytes: int) -> None:
        """Count what has been worked on, in bytes; threads may call it at the same time."""
        if self._every is None:
            return
        self._done += nbytes
        if self._done >= self._every:
            self._done = 0
            give_back()


@cache
def _trim() -> Callable[[int], int] | None:
    try:
        found: Callable[[int], int] = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):  # another C library, or one that cannot be loaded
        return None
    return found


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
        >>> from shrinkpoint.runtime.memory import join_bytes
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
        >>> from shrinkpoint.runtime.memory import to_bytes
        >>> to_bytes(np.array([1, 2], dtype="<u2"))
        b'\\x01\\x00\\x02\\x00'
    """
    if array.nbytes < _SHORT:
        return array.tobytes()
    flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return join_bytes([flat.data], flat.size)
