import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shrinkpoint.errors import CorruptionError, FormatError
from shrinkpoint.schemes.symbol_coders import decode_plane, deflate, encode_plane, inflate, uses_previous

CODERS = ["packed", "lzma", "huffman", "cyclic", "rans"]


@given(st.data(), st.sampled_from(CODERS), st.integers(1, 256), st.integers(0, 3000), st.booleans())
def test_planes_round_trip(data, coder, alphabet, count, given_previous):
    generator = np.random.default_rng(data.draw(st.integers(0, 99)))
    plane = generator.integers(0, alphabet, count).astype(np.uint8)
    changed = generator.random(count) < 0.02
    previous = np.where(changed, generator.integers(0, alphabet, count), plane).astype(np.uint8)
    reference = previous if given_previous else None
    columns = data.draw(st.sampled_from([None, *(c for c in range(1, 40) if count % c == 0)]))
    payload = encode_plane(plane, alphabet, coder, reference, columns=columns)
    given_it = previous if uses_previous(payload) else None
    assert np.array_equal(decode_plane(payload, count, alphabet, given_it, columns=columns), plane)
    if uses_previous(payload):
        assert given_previous
        if count:
            with pytest.raises(FormatError):
                decode_plane(payload, count, alphabet, None)


@pytest.mark.parametrize("alphabet", [16, 9])
def test_large_planes_are_packed_in_chunks(alphabet):
    count = (1 << 20) * 2 + 13
    plane = np.random.default_rng(0).integers(0, alphabet, count).astype(np.uint8)
    payload = encode_plane(plane, alphabet, "packed")
    assert len(payload) == 1 + -(-count // 2)
    assert np.array_equal(decode_plane(payload, count, alphabet), plane)


@given(st.binary(max_size=40), st.integers(0, 30), st.integers(1, 20))
def test_any_bytes_are_a_plane_or_an_error(payload, count, alphabet):
    previous = np.zeros(count, np.uint8)
    try:
        plane = decode_plane(payload, count, alphabet, previous)
    except FormatError:
        return
    assert plane.size == count
    assert not count or plane.max() < alphabet


def test_lzma_never_makes_more_than_was_promised():
    bomb = deflate(bytes(10_000_000))
    assert len(bomb) < 10_000
    assert inflate(bomb, 10_000_000) == bytes(10_000_000)
    for size in (0, 100, 9_999_999, 10_000_001):
        with pytest.raises(CorruptionError):
            inflate(bomb, size)
    assert inflate(deflate(b""), 0) == b""
    with pytest.raises(CorruptionError):
        inflate(bomb + b"x", 10_000_000)
