from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shrinkpoint.entropy.wire import BitReader, BitWriter, ByteReader
from shrinkpoint.errors import FormatError

fields = st.one_of(
    st.tuples(st.just("bits"), st.integers(0, 20)).flatmap(
        lambda field: st.tuples(st.just(field[0]), st.just(field[1]), st.integers(0, 2 ** field[1] - 1))
    ),
    st.tuples(st.just("rice"), st.integers(0, 7), st.integers(0, 600)),
)


def reader_of(payload: bytes) -> BitReader:
    return BitReader(ByteReader(payload, "a test"))


@given(written=st.lists(fields, max_size=30))
def test_fields_come_back(written: list[Any]) -> None:
    out = BitWriter()
    expected = 0
    for kind, width, value in written:
        if kind == "bits":
            out.put(value, width)
            expected += width
        else:
            out.put_rice(value, width)
            expected += (value >> width) + 1 + width
    assert len(out) == expected
    payload = out.to_bytes()
    assert len(payload) == -(-expected // 8)
    reader = reader_of(payload)
    for kind, width, value in written:
        assert (reader.take(width) if kind == "bits" else reader.take_rice(width, 600)) == value
    reader.finish()


def test_low_bits_come_first() -> None:
    out = BitWriter()
    out.put(0b011, 3)
    out.put_rice(0b1010, 2)  # two ones, a zero, 10
    assert out.to_bytes() == bytes([0b10011011])


def test_what_fills_the_last_byte_is_zero() -> None:
    reader = reader_of(b"\x41")
    assert reader.take(3) == 1
    with pytest.raises(FormatError, match="a test: the bits behind"):
        reader.finish()


@pytest.mark.parametrize("payload", [b"", b"\xff"])
def test_the_end_is_noticed(payload: bytes) -> None:
    with pytest.raises(FormatError, match="1 bytes expected, 0 are left"):
        reader_of(payload).take_rice(0, 100)


def test_long_rice_codes_end_where_they_end() -> None:
    reader = reader_of(b"\xfe\xff\x03\x05")
    assert reader.take(1) == 0
    assert reader.take_rice(0, 100) == 17
    assert reader.take(5) == 0
    assert reader.take_rice(1, 100) == 3


@pytest.mark.parametrize("payload", [b"\x1f", b"\xff\xff"])
def test_rice_codes_are_bounded(payload: bytes) -> None:
    with pytest.raises(FormatError, match="above 4"):
        reader_of(payload).take_rice(0, 4)
