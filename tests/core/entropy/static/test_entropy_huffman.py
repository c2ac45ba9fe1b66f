from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.payloads import damaged, damages, untimed

from shrinkpoint.entropy.static.huffman import decode_huffman, encode_huffman
from shrinkpoint.errors import CorruptionError, FormatError


def skewed(count: int, distinct: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return np.minimum(rng.geometric(0.3, count), distinct) * 37 - 255


@untimed
@given(st.lists(st.integers(-255, 65535) | st.integers(-3, 3), max_size=300))
def test_round_trip(values: list[int]) -> None:
    symbols = np.array(values, dtype=np.int64)
    np.testing.assert_array_equal(decode_huffman(encode_huffman(symbols), symbols.size), symbols)


def test_codes_longer_than_the_lookup_table() -> None:
    fibonacci = [1, 1]
    while len(fibonacci) < 25:
        fibonacci.append(fibonacci[-1] + fibonacci[-2])
    symbols = np.random.default_rng(0).permutation(np.repeat(np.arange(25), fibonacci))
    payload = encode_huffman(symbols)
    np.testing.assert_array_equal(decode_huffman(payload, symbols.size), symbols)


def test_written_bytes_do_not_change() -> None:
    symbols = np.array([0, 0, 0, 5, 0, -1, 5, 0])
    payload = bytes.fromhex("08" + "03" + "01" + "0105" + "020102" + "1ac0")
    assert encode_huffman(symbols) == payload
    np.testing.assert_array_equal(decode_huffman(payload, 8), symbols)


@untimed
@given(payload=st.binary(max_size=60), limit=st.integers(0, 100))
def test_any_bytes(payload: bytes, limit: int) -> None:
    with suppress(FormatError):
        assert decode_huffman(payload, limit).size <= limit


@untimed
@given(changes=damages(), seed=st.integers(0, 5))
def test_damaged_payloads(changes: list, seed: int) -> None:
    payload = encode_huffman(skewed(500, 20 * (seed + 1), seed))
    with suppress(FormatError):
        assert decode_huffman(damaged(payload, changes), 500).size <= 500


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        ("", "bytes expected"),
        ("0000", "1 bytes follow"),
        ("15" + "0100" + "00", "number of symbols is 21"),
        ("02" + "00", "symbols without a table"),
        ("02" + "03" + "0000", "number of distinct symbols is 3"),
        ("02" + "02" + "0000" + "0101" + "00", "not ascending"),
        ("02" + "02" + "0001" + "0001" + "00", "code lengths must be"),
        ("02" + "02" + "0001" + "0102" + "00", "complete prefix code"),
        ("02" + "02" + "0001" + "0229" + "00", "code lengths must be"),
        ("02" + "01" + "00" + "01", "the only symbol has a code of 1 bits"),
        ("09" + "02" + "0001" + "0101" + "00", "cannot hold 9 codes"),
        ("02" + "02" + "0001" + "0101" + "01", "padding"),
    ],
)
def test_malformed(payload: str, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        decode_huffman(bytes.fromhex(payload), 20)


def test_codes_must_fill_their_bytes() -> None:
    payload = encode_huffman(skewed(500, 10))
    with pytest.raises(CorruptionError, match="do not end at the end"):
        decode_huffman(payload + b"\0", 500)
    with pytest.raises(CorruptionError, match="do not end at the end"):
        decode_huffman(payload[:-1], 500)
