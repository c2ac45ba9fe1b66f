import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.payloads import check_survives

from shrinkpoint.errors import FormatError
from shrinkpoint.schemes.inshrinkerator.level_deltas import MAX_RUN, decode_runs, encode_runs


@given(st.lists(st.tuples(st.integers(0, 255), st.integers(1, 40)), max_size=40))
def test_round_trip(runs: list[tuple[int, int]]) -> None:
    values = np.array([value for value, length in runs for _ in range(length)], dtype=np.uint8)
    symbols = encode_runs(values)
    assert symbols.size <= values.size
    np.testing.assert_array_equal(decode_runs(symbols, values.size, 256), values)


@pytest.mark.parametrize(
    ("values", "symbols"),
    [
        ([], []),
        ([0], [0]),
        ([7], [-7]),
        ([0, 0], [0, 2]),
        ([3, 3, 3, 0, 1, 1], [-3, 3, 0, -1, 2]),
    ],
)
def test_symbols_are_those_of_the_paper(values: list[int], symbols: list[int]) -> None:
    np.testing.assert_array_equal(encode_runs(np.array(values, dtype=np.uint8)), symbols)


@pytest.mark.parametrize(
    ("length", "symbols"),
    [
        (MAX_RUN, [-4, MAX_RUN]),
        (MAX_RUN + 1, [-4, MAX_RUN, -4]),
        (2 * MAX_RUN + 2, [-4, MAX_RUN, -4, MAX_RUN, -4, 2]),
    ],
)
def test_long_runs_are_cut(length: int, symbols: list[int]) -> None:
    values = np.full(length, 4, dtype=np.uint8)
    np.testing.assert_array_equal(encode_runs(values), symbols)
    np.testing.assert_array_equal(decode_runs(np.array(symbols), length, 5), values)


@pytest.mark.parametrize(
    ("symbols", "message"),
    [
        ([], "nothing there"),
        ([2, 0], "first symbol is a run length"),
        ([0, 2, 2], "two run lengths follow"),
        ([0, 1, -1, 2], "not in 2"),
        ([0, MAX_RUN + 1], "not in 2"),
        ([-10, 4], "value 10 is not below 10"),
        ([0, 3], "add up to 3 values, 4 expected"),
        ([0, 5], "add up to 5 values, 4 expected"),
    ],
)
def test_malformed(symbols: list[int], message: str) -> None:
    with pytest.raises(FormatError, match=message):
        decode_runs(np.array(symbols, dtype=np.int64), 4, 10)


@given(st.lists(st.integers(-12, 12) | st.integers(-(1 << 40), 1 << 40), max_size=12), st.integers(0, 30))
def test_any_symbols(symbols: list[int], count: int) -> None:
    array = np.array(symbols, dtype=np.int64)
    check_survives(lambda _: decode_runs(array, count, 10), b"", count, 10)
