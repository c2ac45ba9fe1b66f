import tracemalloc

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from support.payloads import check_survives, damaged, damages, untimed

from shrinkpoint.entropy.static.bytes import decode_bytes, delta_bits, encode_bytes, undelta_bits
from shrinkpoint.errors import CorruptionError, FormatError

ITEM_SIZES = [1, 2, 4, 8, 16]


def weights(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 0.02, count).astype(np.float32)


def as_bytes(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


@untimed
@given(data=st.binary(max_size=4000), repeat=st.integers(1, 20), item_size=st.sampled_from(ITEM_SIZES))
def test_round_trip(data: bytes, repeat: int, item_size: int) -> None:
    raw = np.frombuffer((data * repeat)[: len(data) * repeat // item_size * item_size], dtype=np.uint8)
    payload = encode_bytes(raw, item_size)
    np.testing.assert_array_equal(decode_bytes(payload, raw.size, item_size), raw)
    assert len(payload) <= raw.size + 5 * item_size


@pytest.mark.parametrize("count", [0, 1, (1 << 20) - 1, 1 << 20, (1 << 20) + 1, 2_500_000])
def test_chunks_and_threads(count: int) -> None:
    raw = as_bytes(weights(count).astype(np.float16))
    payload = encode_bytes(raw, 2)
    assert encode_bytes(raw, 2, threads=3) == payload
    np.testing.assert_array_equal(decode_bytes(payload, raw.size, 2, threads=3), raw)


def test_planes_beat_plain_zstd() -> None:
    raw = as_bytes(weights(200_000))
    assert len(encode_bytes(raw, 4)) < 0.93 * len(zstandard.compress(raw.tobytes(), 3))


def test_repetitions_and_constants_are_found() -> None:
    assert len(encode_bytes(np.zeros(10**6, dtype=np.uint8), 4)) < 40
    assert len(encode_bytes(as_bytes(np.arange(100_000, dtype=np.int64) % 97), 8)) < 1000


@untimed
@given(payload=st.binary(max_size=120), count=st.integers(0, 40), item_size=st.sampled_from(ITEM_SIZES))
def test_any_bytes(payload: bytes, count: int, item_size: int) -> None:
    size = count * item_size
    check_survives(lambda data: decode_bytes(data, size, item_size), payload, size)


@untimed
@given(changes=damages(), kind=st.sampled_from(["weights", "text", "steps"]))
def test_damaged_payloads(changes: list, kind: str) -> None:
    arrays = {
        "weights": weights(3000),
        "text": np.frombuffer(b"abcd efgh" * 800, np.uint8),
        "steps": np.arange(3000),
    }
    array = arrays[kind]
    payload = encode_bytes(as_bytes(array), array.itemsize)
    check_survives(
        lambda data: decode_bytes(data, array.nbytes, array.itemsize), damaged(payload, changes), array.nbytes
    )


def frame_of(data: bytes, method: int = 1) -> bytes:
    frame = zstandard.compress(data)
    return bytes([method, len(frame) & 0x7F | 0x80, len(frame) >> 7]) + frame


def test_a_bomb_is_refused_before_it_is_unpacked() -> None:
    bomb = frame_of(bytes(64 << 20))
    tracemalloc.start()
    with pytest.raises(FormatError, match="a frame states 67108864 bytes, 100 expected"):
        decode_bytes(bomb, 100, 1)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_a_frame_without_a_stated_size_is_refused() -> None:
    frame = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(100))
    with pytest.raises(FormatError, match="100 expected"):
        decode_bytes(bytes([1, len(frame)]) + frame, 100, 1)


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        (b"", "cannot hold 1 chunks"),
        (b"\x03\x01a", "unknown method 3"),
        (b"\x00\x02ab", "a raw chunk has 2 bytes, 4 expected"),
        (b"\x00\x04abcde", "1 bytes follow"),
        (b"\x00\x05abc", "chunk length is 5"),
        (b"\x01\x04abcd", "zstd frame does not decode"),
    ],
)
def test_malformed(payload: bytes, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        decode_bytes(payload, 4, 1)


def test_a_damaged_frame_is_corruption() -> None:
    payload = bytearray(encode_bytes(np.frombuffer(b"to be or not to be " * 50, np.uint8), 1))
    assert payload[0] == 1
    payload[9:] = b"\xff" * (len(payload) - 9)  # behind the frame header
    with pytest.raises(CorruptionError, match="zstd frame does not decode"):
        decode_bytes(payload, 950, 1)


@pytest.mark.parametrize("item_size", [0, 3, 32])
def test_item_size(item_size: int) -> None:
    with pytest.raises(ValueError, match="item_size"):
        encode_bytes(np.zeros(96, dtype=np.uint8), item_size)


def test_whole_elements() -> None:
    with pytest.raises(ValueError, match="not whole elements"):
        encode_bytes(np.zeros(5, dtype=np.uint8), 4)
    with pytest.raises(ValueError, match="not whole elements"):
        decode_bytes(b"", 5, 4)
    with pytest.raises(ValueError, match="level"):
        encode_bytes(np.zeros(4, dtype=np.uint8), 4, level=0)


@untimed
@given(
    st.data(),
    st.sampled_from([np.float16, np.float32, np.float64, np.uint16, np.int64, np.int8]),
    st.booleans(),
)
def test_delta_round_trip(data: st.DataObject, dtype: type, floating: bool) -> None:
    shapes = st.sampled_from([(), (0,), (1,), (7,), (3, 5)])
    current = data.draw(npst.arrays(dtype, data.draw(shapes)))
    reference = data.draw(npst.arrays(dtype, current.shape))
    delta = delta_bits(current, reference, floating)
    assert delta.dtype == np.dtype(f"u{current.itemsize}")
    assert delta.shape == current.shape
    back = undelta_bits(delta, reference, floating).view(dtype)
    assert back.shape == current.shape
    assert back.tobytes() == current.tobytes()


def test_delta_of_neighbours_is_small() -> None:
    values = np.array([1.0, -1.0, 2.0, -2.0, 0.0, 1e-45, 3e38], dtype=np.float32)
    up = np.nextafter(values, np.float32(np.inf))
    np.testing.assert_array_equal(delta_bits(up, values), [2, 2, 2, 2, 2, 2, 2])
    np.testing.assert_array_equal(delta_bits(values, up), [1, 1, 1, 1, 1, 1, 1])
    np.testing.assert_array_equal(delta_bits(values, values), np.zeros(7))
    steps = np.array([-3, 5], dtype=np.int64)
    np.testing.assert_array_equal(delta_bits(steps + 4, steps, floating=False), [8, 8])


def test_delta_needs_alike_arrays() -> None:
    with pytest.raises(ValueError, match="same shape and item size"):
        delta_bits(np.zeros(3, np.float32), np.zeros(3, np.float64))
    with pytest.raises(ValueError, match="1, 2, 4 or 8 bytes"):
        delta_bits(np.zeros(3, np.complex128), np.zeros(3, np.complex128))
