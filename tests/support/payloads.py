"""What every decoder of untrusted bytes owes: the right size, or FormatError, whatever the bytes are."""

import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st

from shrinkpoint.errors import FormatError

untimed = settings(deadline=None, max_examples=60)  # the first example compiles the kernels
Decoder = Callable[[bytes], np.ndarray]


def damages() -> st.SearchStrategy[list[tuple[int, int]]]:
    """Byte changes, as (position modulo the length, what to xor)."""
    return st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(1, 255)), min_size=1, max_size=4)


def damaged(payload: bytes, changes: list[tuple[int, int]]) -> bytes:
    out = bytearray(payload)
    for position, change in changes if out else []:
        out[position % len(out)] ^= change
    return bytes(out)


def check_survives(decode: Decoder, payload: bytes, count: int, below: int = 256) -> None:
    """Decode; nothing but FormatError may be raised, and a result must have the right size and range."""
    try:
        out = decode(payload)
    except FormatError:
        return
    assert out.dtype == np.uint8
    assert out.size == count
    assert count == 0 or int(out.max()) < below


def check_truncations(decode: Decoder, payload: bytes, count: int) -> None:
    """Every proper prefix, and the payload with a byte too many."""
    step = max(1, len(payload) // 40)
    for length in range(0, len(payload), step):
        check_survives(decode, payload[:length], count)
    check_survives(decode, payload + b"\0", count)


@contextmanager
def limited_memory(more: int) -> Iterator[None]:
    """Limit this process to so many bytes beyond what it has. A decoder that believes what a file declares gets a MemoryError, which no test
    expects."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + more, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
