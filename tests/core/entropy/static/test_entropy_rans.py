import sys
from subprocess import run

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.entropy import conditional_entropy_bits
from support.payloads import check_survives, check_truncations, damaged, damages, untimed
from support.teams import in_team
from xxhash import xxh3_64_hexdigest

from shrinkpoint.entropy.static.rans import decode_symbols, encode_symbols, predict_bytes
from shrinkpoint.entropy.static.tables import count_symbols
from shrinkpoint.errors import CorruptionError, FormatError

SIZES = [0, 1, 2, 3, 4, 5, 7, 255, 2000, 9001]


@st.composite
def cases(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray | None, int, int]:
    """Symbols and contexts of any skew, with contexts and symbols that never occur."""
    alphabet = draw(st.sampled_from([1, 2, 3, 10, 34, 256]))
    n_contexts = draw(st.sampled_from([1, 2, 10, 34, 256]))
    count = draw(st.sampled_from(SIZES) | st.integers(0, 600))
    stay = draw(st.sampled_from([0.0, 0.5, 0.99, 1.0]))
    rng = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    contexts = rng.integers(0, draw(st.integers(1, n_contexts)), count).astype(np.uint8)
    symbols = rng.integers(0, draw(st.integers(1, alphabet)), count).astype(np.uint8)
    symbols[rng.random(count) < stay] = draw(st.integers(0, alphabet - 1))
    return symbols, contexts if draw(st.booleans()) else None, alphabet, n_contexts


def plane(count: int, move: float, levels: int = 10, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """A level plane and its predecessor, of which a share ``move`` changes by a step that depends on the level."""
    rng = np.random.default_rng(seed)
    previous = rng.integers(0, levels, count).astype(np.uint8)
    steps = np.where(rng.random(count) < 0.5, 1, levels - 1) * (previous > 0)
    delta = np.where(rng.random(count) < move * (1 + previous) / levels, steps, 0)
    return delta.astype(np.uint8), previous


@untimed
@given(cases())
def test_round_trip(case: tuple[np.ndarray, np.ndarray | None, int, int]) -> None:
    symbols, contexts, alphabet, n_contexts = case
    payload = encode_symbols(symbols, contexts, alphabet, n_contexts)
    decoded = decode_symbols(payload, contexts, symbols.size, alphabet, n_contexts)
    np.testing.assert_array_equal(decoded, symbols)
    assert decoded.dtype == np.uint8


@pytest.mark.parametrize("move", [0.9, 0.1, 0.01, 0.0001])
@pytest.mark.parametrize("count", [20_000, (1 << 18) + 3, 1_500_001])
def test_reaches_the_conditional_entropy(count: int, move: float) -> None:
    symbols, contexts = plane(count, move)
    payload = encode_symbols(symbols, contexts, 10, 10)
    ideal = conditional_entropy_bits(symbols, contexts, 10, 10) / 8
    assert len(payload) <= 1.02 * ideal + 60
    np.testing.assert_array_equal(decode_symbols(payload, contexts, count, 10, 10), symbols)


@untimed
@given(cases())
def test_prediction(case: tuple[np.ndarray, np.ndarray | None, int, int]) -> None:
    symbols, contexts, alphabet, n_contexts = case
    size = len(encode_symbols(symbols, contexts, alphabet, n_contexts))
    predicted = predict_bytes(count_symbols(symbols, contexts, alphabet, n_contexts))
    assert abs(size - predicted) <= 0.01 * size + 30


@pytest.mark.parametrize("move", [0.9, 0.001])
def test_bytes_do_not_depend_on_threads(move: float) -> None:
    symbols, contexts = plane(1_000_003, move)
    payload = encode_symbols(symbols, contexts, 10, 10)
    assert in_team(3, lambda: encode_symbols(symbols, contexts, 10, 10)) == payload
    decoded = in_team(3, lambda: decode_symbols(payload, contexts, symbols.size, 10, 10))
    np.testing.assert_array_equal(decoded, symbols)


def test_written_bytes_do_not_change() -> None:
    """Stored checkpoints hold such payloads: one state with a context, four states, packed, constant."""
    symbols = np.array([0] * 60 + [1, 0, 2, 0] * 3, dtype=np.uint8)
    ramp = ((np.arange(100_000) ** 2 >> 9) % 251 // 26).astype(np.uint8)
    contexts = np.roll(ramp, 1)
    expected = "02120002200303e2b4f3a3880138d5"
    assert encode_symbols(symbols, None, 3, 1).hex() == expected
    np.testing.assert_array_equal(decode_symbols(bytes.fromhex(expected), None, 72, 3, 1), symbols)
    four_states = encode_symbols(ramp, contexts, 10, 10)
    assert four_states[1] == 0x92
    assert xxh3_64_hexdigest(four_states) == "0615949877267ac0"
    assert encode_symbols(np.arange(8, dtype=np.uint8), None, 16, 1).hex() == "0110325476"
    assert encode_symbols(np.full(9, 5, dtype=np.uint8), None, 16, 1).hex() == "0005"


@untimed
@given(payload=st.binary(max_size=80), count=st.integers(0, 300), conditioned=st.booleans())
def test_any_bytes(payload: bytes, count: int, conditioned: bool) -> None:
    contexts = (np.arange(count) % 7).astype(np.uint8) if conditioned else None
    for prefix in (b"", b"\x02\x12", b"\x02\x92", b"\x02\x12\x00\x01"):
        check_survives(lambda data: decode_symbols(data, contexts, count, 10, 7), prefix + payload, count, 10)


@untimed
@given(case=cases(), changes=damages())
def test_damaged_payloads(case: tuple[np.ndarray, np.ndarray | None, int, int], changes: list) -> None:
    symbols, contexts, alphabet, n_contexts = case
    payload = encode_symbols(symbols, contexts, alphabet, n_contexts)

    def decode(data: bytes) -> np.ndarray:
        return decode_symbols(data, contexts, symbols.size, alphabet, n_contexts)

    check_survives(decode, damaged(payload, changes), symbols.size, alphabet)


@untimed
@given(changes=damages(), move=st.sampled_from([0.9, 0.001]))
def test_damaged_chunks(changes: list, move: float) -> None:
    symbols, contexts = plane(300_000, move)
    payload = encode_symbols(symbols, contexts, 10, 10)

    def decode(data: bytes) -> np.ndarray:
        return decode_symbols(data, contexts, symbols.size, 10, 10)

    check_survives(decode, damaged(payload, changes), symbols.size, 10)
    check_truncations(decode, payload[:200], symbols.size)


def test_a_changed_word_is_noticed() -> None:
    symbols, contexts = plane(50_000, 0.5)
    payload = bytearray(encode_symbols(symbols, contexts, 10, 10))
    payload[-1] ^= 1
    with pytest.raises(CorruptionError, match="do not end in the state"):
        decode_symbols(payload, contexts, symbols.size, 10, 10)


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        (b"\x03", "unknown mode 3"),
        (b"\x00\x0a", "symbol 10 in an alphabet of 10"),
        (b"\x00\x01\x00", "1 bytes follow"),
        (b"\x02\x19\x00", "chunks of 2\\^25"),
        (b"\x02\x12\x01", "2 tables for 1 contexts"),
        (b"\x02\x12\x00\x0a", "a table holds 11 of 10"),
        (b"\x02\x12\x00\x01\x04\x04\x10\x10", "not ascending"),
        (b"\x02\x12\x00\x01\x04\x05\x10\x00", "frequency 0"),
        (b"\x02\x12\x00\x01\x04\x05\x10\x10\x00\x01", "not whole 16-bit words"),
        (b"\x01\xff", "bytes expected"),
    ],
)
def test_malformed(payload: bytes, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        decode_symbols(payload, None, 20, 10, 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((np.array([10], np.uint8), None, 10, 1), "below 10"),
        ((np.array([1], np.uint8), np.array([3], np.uint8), 10, 3), "below 3"),
        ((np.array([1], np.int64), None, 10, 1), "1-D uint8"),
        ((np.array([1], np.uint8), np.zeros(2, np.uint8), 10, 1), "must have 1 elements"),
        ((np.array([1], np.uint8), None, 257, 1), "alphabet"),
        ((np.array([1], np.uint8), None, 10, 0), "n_contexts"),
    ],
)
def test_arguments(arguments: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        encode_symbols(*arguments)


def test_numba_is_imported_on_first_use_only() -> None:
    code = "import sys, shrinkpoint.schemes.inshrinkerator.level_deltas, shrinkpoint.entropy.numbers; sys.exit('numba' in sys.modules)"
    assert run([sys.executable, "-c", code], check=False).returncode == 0
