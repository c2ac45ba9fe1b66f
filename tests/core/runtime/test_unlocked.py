"""Bytes that are put together without the interpreter's lock."""

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shrinkpoint.runtime.memory import join_bytes, to_bytes


@given(st.lists(st.one_of(st.binary(max_size=40), st.integers(1, 40_000).map(lambda n: b"\x07" * n))))
def test_they_are_the_parts(parts: list[bytes]) -> None:
    assert join_bytes(parts, sum(map(len, parts))) == b"".join(parts)
    assert join_bytes(map(memoryview, parts), sum(map(len, parts))) == b"".join(parts)


def test_each_part_is_copied_before_the_next_one_is_asked_for() -> None:
    memory = bytearray(b"a" * 20_000)

    def parts() -> Iterator[memoryview]:
        yield memoryview(memory)
        memory[:] = b"b" * len(memory)
        yield memoryview(memory)

    assert join_bytes(parts(), 40_000) == b"a" * 20_000 + b"b" * 20_000


@pytest.mark.parametrize("size", [0, 3, 5, 20_000])
def test_another_size_is_an_error(size: int) -> None:
    with pytest.raises(ValueError, match="bytes"):
        join_bytes([b"four"], size)


def test_parts_that_are_too_large_are_not_copied_beyond_the_end() -> None:
    with pytest.raises(ValueError, match="more than 4 bytes"):
        join_bytes([b"four", b"\0" * 20_000], 4)


@pytest.mark.parametrize("size", [0, 1, 1000, 30_000])
@pytest.mark.parametrize("dtype", ["<u2", ">u4", "f4", "u1"])
def test_arrays_are_in_c_order(size: int, dtype: str) -> None:
    values = np.arange(2 * size).astype(dtype)
    for array in (values, values[::2], values.reshape(2, size).T):
        assert to_bytes(array) == array.tobytes()
