"""Numbers that are coded by their bit patterns, and their differences."""

import random
import resource
import tracemalloc
from unittest import mock

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from pcodec import ChunkConfig, DeltaSpec, ModeSpec, standalone
from support.mutations import mutate
from support.payloads import damaged, damages, limited_memory, untimed
from support.teams import in_team

from shrinkpoint.entropy import numbers
from shrinkpoint.entropy.numbers import decode_numbers, delta_bits, encode_numbers, undelta_bits
from shrinkpoint.errors import CorruptionError, FormatError

DTYPES = ["u1", "u2", "u4", "u8"]
RAW, ZSTD, PCODEC = 0, 1, 2
ADDRESSES = 512 << 20
"""What a damaged pcodec file may reserve, of which it fills nothing: tables of up to 2^25 numbers."""


def patterns(kind: str, dtype: str, count: int = 3000) -> np.ndarray:
    """Numbers of several sorts, each of which some method codes."""
    rng, item = np.random.default_rng(count), np.dtype(dtype).itemsize
    if kind == "noise":
        return rng.integers(0, 256, count * item, np.uint8).view(dtype)
    if kind == "floats":
        wide = rng.normal(0, 0.02, count).view(np.uint64) >> np.uint64(64 - 8 * item)
        return wide.astype(dtype)
    if kind == "sparse":
        return np.where(rng.random(count) < 0.01, rng.integers(0, 256, count), 0).astype(dtype)
    return np.resize(rng.integers(0, 256, 97), count).astype(dtype)


KINDS = ["noise", "floats", "sparse", "repeated"]


def with_head(method: int, chunk: bytes) -> bytes:
    """A payload of one chunk."""
    head, length = bytearray([method]), len(chunk)
    while length > 127:
        head.append(length & 127 | 128)
        length >>= 7
    return bytes(head) + bytes([length]) + chunk


def survives(payload: bytes, size: int, dtype: str) -> bool:
    """Whether it decodes, to as many numbers of the dtype; nothing but FormatError may be raised."""
    try:
        out = decode_numbers(payload, size, dtype)
    except FormatError:
        return False
    assert out.dtype == np.dtype(dtype)
    assert out.shape == (size,)
    return True


@untimed
@given(
    st.data(),
    st.sampled_from(DTYPES),
    st.integers(1, 20),
    st.sampled_from([1, 64, 1000, 1 << 20]),
    st.integers(1, 3),
)
def test_round_trip(data: st.DataObject, dtype: str, repeat: int, chunk: int, threads: int) -> None:
    array = np.tile(data.draw(npst.arrays(dtype, st.integers(0, 200))), repeat)
    with mock.patch.object(numbers, "_CHUNK", chunk):
        payload = in_team(threads, lambda: encode_numbers(array))
        assert encode_numbers(array) == payload
        decoded = in_team(threads, lambda: decode_numbers(payload, array.size, dtype))
        np.testing.assert_array_equal(decoded, array)
    assert len(payload) <= array.nbytes + 5 * -(-array.size // chunk)


@untimed
@given(
    st.sampled_from(DTYPES), st.sampled_from(KINDS), st.integers(0, 5000), st.sampled_from([1000, 1024, 4999])
)
def test_every_sort_of_numbers_in_several_chunks(dtype: str, kind: str, count: int, chunk: int) -> None:
    array = patterns(kind, dtype, count)
    with mock.patch.object(numbers, "_CHUNK", chunk):
        payload = encode_numbers(array)
        assert in_team(3, lambda: encode_numbers(array)) == payload
        decoded = in_team(3, lambda: decode_numbers(payload, count, dtype))
        np.testing.assert_array_equal(decoded, array)


@pytest.mark.parametrize("count", [3000, 1 << 19])
def test_the_methods(count: int) -> None:
    """Each of them is the shortest for something."""
    found = {kind: encode_numbers(patterns(kind, "u4", count))[0] for kind in KINDS}
    assert found == {"noise": RAW, "floats": PCODEC, "sparse": PCODEC, "repeated": ZSTD}


def test_any_shape_and_order() -> None:
    array = np.asfortranarray(np.arange(12, dtype=np.uint32).reshape(3, 4))
    assert encode_numbers(array) == encode_numbers(np.arange(12, dtype=np.uint32))
    assert decode_numbers(encode_numbers(np.uint32([7])[0:1].reshape(())), 1, np.uint32).tolist() == [7]


@untimed
@given(st.binary(max_size=120), st.integers(0, 40), st.sampled_from(DTYPES))
def test_any_bytes(payload: bytes, count: int, dtype: str) -> None:
    survives(payload, count, dtype)


@untimed
@given(damages(), st.sampled_from(KINDS), st.sampled_from(DTYPES), st.sampled_from([1000, 1 << 20]))
def test_damaged_payloads(changes: list, kind: str, dtype: str, chunk: int) -> None:
    array = patterns(kind, dtype)
    with mock.patch.object(numbers, "_CHUNK", chunk):
        survives(damaged(encode_numbers(array), changes), array.size, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_truncated_and_continued_payloads_are_refused(kind: str, dtype: str) -> None:
    payload = encode_numbers(patterns(kind, dtype))
    for length in range(0, len(payload), max(1, len(payload) // 100)):
        assert not survives(payload[:length], 3000, dtype)
    assert not survives(payload + b"\0", 3000, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_payloads_of_more_or_fewer_numbers_or_others_are_refused(kind: str, dtype: str) -> None:
    payload = encode_numbers(patterns(kind, dtype))
    for size in (0, 1, 2999, 3001, 6000, (1 << 20) + 3000):
        assert not survives(payload, size, dtype)
    for other in DTYPES:
        assert survives(payload, 3000, other) == (other == dtype)


@pytest.mark.parametrize("kind", [np.uint16, np.uint64, np.int32, np.float32])
def test_a_pcodec_file_of_another_dtype_is_refused(kind: type) -> None:
    file = standalone.simple_compress(np.arange(500).astype(kind), ChunkConfig())
    with pytest.raises(CorruptionError, match="a pcodec file does not decode"):
        decode_numbers(with_head(PCODEC, file), 500, np.uint32)


@pytest.mark.parametrize("count", [0, 1, 255, 256, 499, 501, 70_000])
def test_a_pcodec_file_of_more_or_fewer_numbers_is_refused(count: int) -> None:
    file = standalone.simple_compress(np.arange(count, dtype=np.uint32), ChunkConfig())
    with pytest.raises(CorruptionError, match="other than 500 numbers"):
        decode_numbers(with_head(PCODEC, file), 500, np.uint32)


def test_a_bomb_is_refused_before_it_is_unpacked() -> None:
    bombs = [
        with_head(ZSTD, zstandard.compress(bytes(64 << 20))),
        with_head(
            PCODEC, standalone.simple_compress(np.zeros(1 << 24, np.uint8), ChunkConfig(enable_8_bit=True))
        ),
    ]
    tracemalloc.start()
    for bomb, message in zip(
        bombs, ("a frame states 67108864 bytes, 100 expected", "other than 100"), strict=True
    ):
        with limited_memory(8 << 20), pytest.raises(FormatError, match=message):
            decode_numbers(bomb, 100, np.uint8)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def frame(
    *, descriptor: int, window: bytes = b"", dictionary: bytes = b"", content: bytes = bytes(100)
) -> bytes:
    """A zstd frame with one raw block, which states a content of 100 bytes."""
    head = (0xFD2FB528).to_bytes(4, "little") + bytes([descriptor]) + window + dictionary
    return head + (100).to_bytes(4, "little") + (len(content) << 3 | 1).to_bytes(3, "little") + content


FOUR_BYTES, SINGLE, DICTIONARY = 2 << 6, 1 << 5, 1


def test_frames_that_say_other_things_than_their_content() -> None:
    sound = frame(descriptor=FOUR_BYTES | SINGLE)
    assert decode_numbers(with_head(ZSTD, sound), 25, np.uint32).tolist() == [0] * 25
    hostile = [
        (frame(descriptor=FOUR_BYTES, window=bytes([15 << 3])), "too large a window"),
        (frame(descriptor=FOUR_BYTES | SINGLE | DICTIONARY, dictionary=b"\7"), "needs a dictionary"),
        (
            frame(descriptor=FOUR_BYTES | SINGLE, content=bytes(99)),
            "zstd frame does not decode|gave 99 bytes",
        ),
        (frame(descriptor=FOUR_BYTES | SINGLE, content=bytes(101)), "zstd frame does not decode"),
        (sound + b"\0", "zstd frame does not decode"),
        (zstandard.ZstdCompressor(write_content_size=False).compress(bytes(100)), "100 expected"),
        (b"abcd", "zstd frame does not decode"),
    ]
    for data, message in hostile:
        with pytest.raises(FormatError, match=message):
            decode_numbers(with_head(ZSTD, data), 100, np.uint8)


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        (b"", "cannot hold 1"),
        (b"\x03\x04abcd", "unknown method 3"),
        (b"\x00\x02ab", "a raw chunk has 2 bytes, 4 expected"),
        (b"\x00\x04abcde", "1 bytes follow"),
        (b"\x00\x05abc", "chunk length is 5"),
        (b"\x02\x04abcd", "a pcodec file does not decode"),
        (b"\x02\x00", "a pcodec file does not decode"),
    ],
)
def test_malformed(payload: bytes, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        decode_numbers(payload, 1, np.uint32)


def test_a_huge_size_is_refused_before_any_memory_is_taken() -> None:
    with pytest.raises(FormatError, match="cannot hold"):
        decode_numbers(bytes(1000), 2**60, np.uint64)


def foreign(dtype: str) -> list[bytes]:
    """Payloads of pcodec files with what our encoder does not use: other modes and differences."""
    array = np.cumsum(patterns("noise", "u1")).astype(dtype) // np.array(7, dtype) * np.array(7, dtype)
    deltas = [DeltaSpec.no_op(), DeltaSpec.try_consecutive(7), DeltaSpec.try_lookback()]
    configs = [
        ChunkConfig(mode_spec=mode, delta_spec=delta, enable_8_bit=True)
        for mode in (ModeSpec.classic(), ModeSpec.auto())
        for delta in deltas
    ]
    return [with_head(PCODEC, standalone.simple_compress(array, config)) for config in configs]


@pytest.mark.slow
def test_a_hundred_thousand_damaged_payloads() -> None:
    rng, decoded = random.Random(0), 0
    payloads = [(dtype, encode_numbers(patterns(kind, dtype))) for kind in KINDS for dtype in DTYPES]
    payloads += [(dtype, payload) for dtype in DTYPES for payload in foreign(dtype)]
    for dtype, payload in payloads:
        assert survives(payload, 3000, dtype)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with limited_memory(ADDRESSES):
        for _ in range(100_000):
            dtype, payload = rng.choice(payloads)
            method, chunk = payload[0], payload[2 if payload[1] < 128 else 3 if payload[2] < 128 else 4 :]
            hostile = mutate(payload, rng) if rng.random() < 0.3 else with_head(method, mutate(chunk, rng))
            decoded += survives(hostile, rng.choice([3000, 3000, 3000, 2999, 300]), dtype)
    assert 100 < decoded < 50_000
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 32 << 10


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
