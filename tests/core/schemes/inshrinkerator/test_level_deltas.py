import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.entropy import conditional_entropy_bits
from support.payloads import check_survives, check_truncations, damaged, damages, untimed
from support.teams import in_team

from shrinkpoint.errors import FormatError
from shrinkpoint.schemes.inshrinkerator.level_deltas import (
    LevelCoder,
    decode_levels,
    encode_levels,
)

CODERS = ["rans", "rle-huffman"]
Planes = tuple[np.ndarray, int, np.ndarray | None, int | None]


def drift(count: int, n_levels: int, previous_n_levels: int, move: float, seed: int = 0) -> Planes:
    """A plane whose levels mostly stay; where the bins become fewer, the upper ones move down."""
    rng = np.random.default_rng(seed)
    previous = rng.integers(0, previous_n_levels, count)
    moved = previous + np.where(rng.random(count) < move, rng.integers(-1, 2, count), 0)
    return (
        np.clip(moved, 0, n_levels - 1).astype(np.uint8),
        n_levels,
        previous.astype(np.uint8),
        previous_n_levels,
    )


@st.composite
def planes(draw: st.DrawFn) -> Planes:
    n_levels, before = (draw(st.sampled_from([1, 2, 6, 10, 34, 255, 256])) for _ in range(2))
    count = draw(st.sampled_from([0, 1, 2, 300]) | st.integers(0, 500))
    levels, _, previous, _ = drift(
        count, n_levels, before, draw(st.floats(0, 1)), draw(st.integers(0, 1 << 32))
    )
    if draw(st.booleans()):
        levels[:] = draw(st.integers(0, n_levels - 1))
    if draw(st.booleans()):
        return levels, n_levels, None, None
    return levels, n_levels, previous, before


def decode_like(payload: bytes, case: Planes) -> np.ndarray:
    levels, n_levels, previous, before = case
    return decode_levels(payload, levels.size, n_levels, previous, before)


@untimed
@given(case=planes(), coder=st.sampled_from(CODERS))
def test_round_trip(case: Planes, coder: LevelCoder) -> None:
    np.testing.assert_array_equal(decode_like(encode_levels(*case, coder=coder), case), case[0])


def test_rans_reaches_the_conditional_entropy_and_beats_run_lengths() -> None:
    case = drift(2_000_000, 10, 10, 0.01)
    payload = encode_levels(*case)
    ideal = conditional_entropy_bits(case[0], case[2], 10, 10) / 8
    assert len(payload) <= 1.02 * ideal + 60
    assert len(payload) < len(encode_levels(*case, coder="rle-huffman")) / 1.4


@pytest.mark.parametrize("coder", CODERS)
def test_an_unrelated_reference_is_ignored(coder: LevelCoder) -> None:
    rng = np.random.default_rng(0)
    levels = (rng.random(5000) < 0.05).astype(np.uint8)
    previous = rng.integers(0, 34, 5000).astype(np.uint8)
    payload = encode_levels(levels, 34, previous, 34, coder)
    assert not payload[0] & 1
    assert payload == encode_levels(levels, 34, None, None, coder)
    np.testing.assert_array_equal(decode_levels(payload, 5000, 34, previous, 34), levels)


def test_bytes_do_not_depend_on_threads() -> None:
    case = drift(1_000_003, 10, 10, 0.2)
    payload = encode_levels(*case)
    assert in_team(3, lambda: encode_levels(*case)) == payload
    np.testing.assert_array_equal(in_team(3, lambda: decode_like(payload, case)), case[0])


@untimed
@given(case=planes(), payload=st.binary(max_size=60), flags=st.integers(0, 3))
def test_any_bytes(case: Planes, payload: bytes, flags: int) -> None:
    for data in (payload, bytes([flags]) + payload):
        check_survives(lambda data: decode_like(data, case), data, case[0].size, case[1])


@untimed
@given(case=planes(), coder=st.sampled_from(CODERS), changes=damages())
def test_damaged_payloads(case: Planes, coder: LevelCoder, changes: list) -> None:
    payload = encode_levels(*case, coder=coder)
    check_survives(lambda data: decode_like(data, case), damaged(payload, changes), case[0].size, case[1])


@pytest.mark.parametrize("coder", CODERS)
def test_truncated_payloads(coder: LevelCoder) -> None:
    case = drift(5000, 10, 12, 0.1)
    check_truncations(lambda data: decode_like(data, case), encode_levels(*case, coder=coder), 5000)


def test_a_difference_needs_its_reference() -> None:
    case = drift(5000, 10, 10, 0.01)
    payload = encode_levels(*case)
    with pytest.raises(FormatError, match="there is no previous plane"):
        decode_levels(payload, 5000, 10, None, None)


def test_decoded_levels_are_checked() -> None:
    payload = encode_levels(*drift(5000, 10, 10, 0.3))
    previous = drift(5000, 10, 10, 0.3)[2]
    with pytest.raises(FormatError, match="level 9 of 6"):
        decode_levels(payload, 5000, 6, previous, 10)
