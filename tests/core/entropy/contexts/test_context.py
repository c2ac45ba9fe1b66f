import dataclasses
import hashlib
import json
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.context_planes import (
    dithered_planes,
    golden_dithered_plane,
    golden_planes,
    low_rank_planes,
    sparse,
)
from support.entropy import conditional_entropy_bits
from support.payloads import check_survives, check_truncations, damaged, damages, untimed

from shrinkpoint.entropy.contexts.coder import Effort, Side, decode_plane, encode_plane
from shrinkpoint.entropy.static.rans import encode_symbols
from shrinkpoint.entropy.wire import BitWriter
from shrinkpoint.errors import CorruptionError, FormatError

EFFORTS: tuple[Effort, ...] = ("fast", "default", "max")
MODES = {"fast": 0, "runs": 3, "default": 1, "max": 2, "dithered": 1}
HEAD = b"\1\0\0\5\0\1\0\1\0\1\x12"
"""Of a plane without sides and predictions, up to the tree."""

SPLIT = [(1, 1), (0, 3), (20, 6)]
"""Fields of a node of the tree that is split by its prediction."""

GOLDEN = Path(__file__).parents[3] / "golden" / "context"


def bits(*fields: tuple[int, int]) -> bytes:
    """The bytes of (value, width)."""
    out = BitWriter()
    for value, width in fields:
        out.put(value, width)
    return out.to_bytes()


DEEP_TREE = b"\x12" + bits(*SPLIT, *SPLIT, (0, 3), (5, 4), (90, 8))
"""Chunk byte, two splits and the head of the tables, of an alphabet of 10."""

Case = tuple[np.ndarray, int, int, list[Side]]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Planes of any shape, skew and structure, with sides that tell much, little or nothing."""
    alphabet = draw(st.sampled_from([1, 2, 3, 16, 63, 256]))
    columns = draw(st.sampled_from([1, 3, 7, 8, 24, 50, 131]))
    rows = draw(st.sampled_from([0, 1, 2, 5, 24, 33, 60]))
    rng = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    size = rows * columns
    top = draw(st.integers(1, alphabet))
    symbols = rng.integers(0, top, size)
    if draw(st.booleans()):
        wave = np.outer(rng.standard_normal(rows), rng.standard_normal(columns)).reshape(-1)
        symbols = np.clip(top // 2 + wave * top / 4, 0, top - 1)
    symbols[rng.random(size) < draw(st.sampled_from([0.0, 0.6, 0.99, 1.0]))] = draw(st.integers(0, top - 1))
    plane = symbols.astype(np.uint8)
    sides = []
    for _ in range(draw(st.integers(0, 5))):
        other = draw(st.sampled_from([1, 2, 3, alphabet, 255, 256]))
        noise = rng.integers(0, other, size)
        told = np.where(
            rng.random(size) < draw(st.sampled_from([0.0, 0.1, 1.0])), noise, plane.astype(np.int64) % other
        )
        places = tuple(map(int, rng.integers(-128, 129, other))) if draw(st.booleans()) else None
        sides.append(Side(told.astype(np.uint8), other, places, two_sided=draw(st.booleans())))
    return plane, alphabet, columns, sides


@untimed
@given(case=cases(), effort=st.sampled_from(EFFORTS))
def test_round_trip(case: Case, effort: Effort) -> None:
    symbols, alphabet, columns, sides = case
    payload = encode_plane(symbols, alphabet, columns=columns, sides=sides, effort=effort)
    decoded = decode_plane(payload, symbols.size, alphabet, columns=columns, sides=sides)
    np.testing.assert_array_equal(decoded, symbols)
    assert decoded.dtype == np.uint8
    assert len(payload) <= len(encode_plane(symbols, alphabet, columns=columns, sides=sides, effort="fast"))


@pytest.mark.parametrize("effort", EFFORTS)
@pytest.mark.parametrize("columns", [1, 100, 2000, 40_000, 600_000])
def test_chunks_do_not_depend_on_threads(effort: Effort, columns: int) -> None:
    rng = np.random.default_rng(0)
    symbols = rng.binomial(4, 0.2, 600_000).astype(np.uint8)
    side = Side(np.minimum(symbols, 2), 3)
    payload = encode_plane(symbols, 5, columns=columns, sides=[side], effort=effort)
    assert encode_plane(symbols, 5, columns=columns, sides=[side], effort=effort, threads=2) == payload
    for threads in (1, 2):
        decoded = decode_plane(payload, symbols.size, 5, columns=columns, sides=[side], threads=threads)
        np.testing.assert_array_equal(decoded, symbols)


@pytest.mark.parametrize("effort", ["fast", "default"])
@pytest.mark.parametrize("share", [1e-5, 0.001, 0.06, 0.3])
def test_runs_cost_what_the_symbols_hold(effort: Effort, share: float) -> None:
    """Zeros in runs, each context's apart: within a percent of the conditional entropy and what the payload adds."""
    rng = np.random.default_rng(4)
    side = rng.integers(0, 8, 400_000).astype(np.uint8)
    busy = rng.random(side.size) < share * side / 4
    symbols = np.where(busy, rng.choice([8, 9, 11, 12], side.size), 10).astype(np.uint8)
    payload = encode_plane(symbols, 21, columns=1000, sides=[Side(side, 8)], effort=effort)
    decoded = decode_plane(payload, symbols.size, 21, columns=1000, sides=[Side(side, 8)])
    np.testing.assert_array_equal(decoded, symbols)
    assert 8 * len(payload) < 1.01 * conditional_entropy_bits(symbols, side, 21, 8) + 2000


def test_a_context_that_is_only_zeros() -> None:
    """And one whose last gap is longer than any that is written."""
    side = np.repeat(np.array([0, 1, 2], np.uint8), 100_000)
    symbols = np.zeros(side.size, np.uint8)
    symbols[100_000::7] = 3
    symbols[200_010:] = 0
    payload = encode_plane(symbols, 4, columns=100, sides=[Side(side, 3)], effort="fast")
    assert payload[0] == 3
    decoded = decode_plane(payload, symbols.size, 4, columns=100, sides=[Side(side, 3)])
    np.testing.assert_array_equal(decoded, symbols)


def test_what_a_plane_knows_of_itself() -> None:
    """Directions shared by rows are learned from the rows before, without any side plane."""
    plane, _ = low_rank_planes(300, 200, rank=3)
    sizes = {effort: len(encode_plane(plane.ravel(), 63, columns=200, effort=effort)) for effort in EFFORTS}
    assert sizes["default"] < 0.75 * sizes["fast"]
    assert sizes["max"] < 0.7 * sizes["fast"]


def test_what_the_previous_plane_knows() -> None:
    """Directions last: they are learned from the previous plane, though its levels say nothing of this one's."""
    plane, previous = low_rank_planes(60, 200, rank=3)
    alone = len(encode_plane(plane.ravel(), 63, columns=200))
    given_it = len(encode_plane(plane.ravel(), 63, columns=200, sides=[Side(previous.ravel(), 63)]))
    assert given_it < 0.95 * alone


@pytest.mark.parametrize("effort", EFFORTS)
def test_sides_explain_each_other(effort: Effort) -> None:
    rng = np.random.default_rng(3)
    first, second = rng.integers(0, 4, (2, 40_000)).astype(np.uint8)
    sides = [Side(np.zeros_like(first), 1), Side(first, 4), Side(second, 4)]
    mask = (rng.random(40_000) < (first + second) / 6).astype(np.uint8)
    alone = len(encode_plane(mask, 2, columns=200, effort=effort))
    one = len(encode_plane(mask, 2, columns=200, sides=sides[:2], effort=effort))
    both = len(encode_plane(mask, 2, columns=200, sides=sides, effort=effort))
    assert both < 0.93 * one < 0.93 * alone


def test_places_are_added_to_predictions() -> None:
    """A side that says where in its cell a value lies is worth more if the coder knows what it says."""
    plane, told, plain = dithered_planes(400, 200)
    placed = dataclasses.replace(told, two_sided=False)
    with_places = len(encode_plane(plane, 7, columns=200, sides=[placed]))
    assert with_places < 0.97 * len(encode_plane(plane, 7, columns=200, sides=[plain]))


def test_a_small_plane_shares_tables_between_values_and_their_negatives() -> None:
    plane, told, _ = dithered_planes(80, 60)
    plain = dataclasses.replace(told, two_sided=False)
    both = len(encode_plane(plane, 7, columns=60, sides=[told]))
    assert both < 0.98 * len(encode_plane(plane, 7, columns=60, sides=[plain]))


@pytest.mark.parametrize("effort", EFFORTS)
def test_noise_costs_what_it_costs_without_contexts(effort: Effort) -> None:
    rng = np.random.default_rng(1)
    symbols, other = rng.integers(0, 16, (2, 30_000)).astype(np.uint8)
    payload = encode_plane(symbols, 16, columns=100, sides=[Side(other, 16)], effort=effort)
    assert len(payload) <= len(encode_symbols(symbols, None, 16, 1)) + 4


@pytest.mark.parametrize("effort", EFFORTS)
def test_trivial_planes(effort: Effort) -> None:
    assert encode_plane(np.zeros(0, np.uint8), 5, columns=3, effort=effort) == b""
    assert len(encode_plane(np.full(10**6, 4, np.uint8), 5, columns=1000, effort=effort)) == 4


def test_strided_and_read_only_input() -> None:
    plane, previous = low_rank_planes(64, 100, rank=2)
    symbols, side = np.repeat(plane.ravel(), 2)[::2], Side(np.frombuffer(previous.tobytes(), np.uint8), 63)
    for effort in EFFORTS:
        payload = encode_plane(symbols, 63, columns=100, sides=[side], effort=effort)
        decoded = decode_plane(memoryview(payload), symbols.size, 63, columns=100, sides=[side])
        np.testing.assert_array_equal(decoded, plane.ravel())


def golden(kind: str) -> tuple[np.ndarray, int, list[Side]]:
    """A plane, its alphabet and what is beside it."""
    if kind == "dithered":
        plane, told = golden_dithered_plane()
        return plane, 5, [told]
    plane, sides = golden_planes()
    return (sparse(plane) if kind == "runs" else plane), 31, sides


@pytest.mark.parametrize("effort", MODES)
def test_golden_payloads(effort: str) -> None:
    """Stored checkpoints hold such payloads: the bytes decode to the same plane for ever."""
    plane, alphabet, sides = golden(effort)
    expected = json.loads((GOLDEN / "v1.json").read_text())[effort]
    payload = (GOLDEN / f"v1_{effort}.bin").read_bytes()
    decoded = decode_plane(payload, plane.size, alphabet, columns=120, sides=sides)
    assert hashlib.sha256(decoded.tobytes()).hexdigest() == expected
    assert payload[0] == MODES[effort]


@untimed
@given(payload=st.binary(max_size=120), n_sides=st.integers(0, 2))
def test_any_bytes(payload: bytes, n_sides: int) -> None:
    sides = [Side((np.arange(2000) % 7).astype(np.uint8), 7, (0,) * 7, two_sided=True)] * n_sides

    def decode(data: bytes) -> np.ndarray:
        return decode_plane(data, 2000, 10, columns=50, sides=sides)

    model = bytes([4, 0, 5, 0, 1, 9, 9, 0, 1])
    turned = bytes([53, 0, 5, 0, 1, 0, 0, 3, 0, 1, 9, 9, 0, 1])
    for prefix in (
        b"",
        b"\0\1",
        b"\3\0\x12\0\x80",
        b"\1" + model,
        b"\1" + model + b"\x12\0\0",
        b"\1" + turned + b"\x12",
        b"\1" + turned + DEEP_TREE,
        b"\2" + model + b"\x12\0\2",
    ):
        check_survives(decode, prefix + payload, 2000, 10)


@untimed
@given(changes=damages(), effort=st.sampled_from(EFFORTS), n_sides=st.integers(0, 2))
def test_damaged_payloads(changes: list[tuple[int, int]], effort: Effort, n_sides: int) -> None:
    plane, sides = golden_planes()
    if effort != "max" and n_sides:
        plane = sparse(plane)
    check_damaged(plane, 31, sides[:n_sides], effort, changes)


@untimed
@given(changes=damages())
def test_damaged_payloads_of_a_dithered_plane(changes: list[tuple[int, int]]) -> None:
    check_damaged(*golden("dithered"), "default", changes)


def check_damaged(
    plane: np.ndarray, alphabet: int, sides: list[Side], effort: Effort, changes: list[tuple[int, int]]
) -> None:
    payload = encode_plane(plane, alphabet, columns=120, sides=sides, effort=effort)

    def decode(data: bytes) -> np.ndarray:
        return decode_plane(data, plane.size, alphabet, columns=120, sides=sides)

    # most damage goes to the model: the chunks are hardly ever hit there
    near = [(position % 100, change) for position, change in changes]
    check_survives(decode, damaged(payload, changes), plane.size, alphabet)
    check_survives(decode, damaged(payload, near), plane.size, alphabet)


@pytest.mark.parametrize("effort", EFFORTS)
@pytest.mark.parametrize("kind", ["full", "runs", "dithered"])
def test_truncated_payloads(effort: Effort, kind: str) -> None:
    plane, alphabet, sides = golden(kind)
    payload = encode_plane(plane, alphabet, columns=120, sides=sides, effort=effort)
    check_truncations(
        lambda data: decode_plane(data, plane.size, alphabet, columns=120, sides=sides), payload, plane.size
    )


def test_a_tree_of_too_many_cells() -> None:
    """Three sides of 48 classes and the prediction's levels would be five million."""
    plane = (np.arange(2000) % 48).astype(np.uint8)
    sides = [Side(plane, 48)] * 3
    model = bytes([3, 0, 5, 0, 1]) + 3 * bytes([0, 0, 5, 0, 1]) + bytes([1, 0, 1, 0, 0x12])
    splits = [field for feature in (2, 3, 4) for field in ((1, 1), (feature, 3), (20, 6))]
    with pytest.raises(FormatError, match="too many cells of contexts"):
        decode_plane(b"\1" + model + bits(*splits, (0, 40)), 2000, 10, columns=50, sides=sides)


def test_a_changed_word_is_noticed() -> None:
    plane, sides = golden_planes()
    payload = bytearray(encode_plane(plane, 31, columns=120, sides=sides))
    payload[-1] ^= 1
    with pytest.raises(CorruptionError, match="do not end in the state"):
        decode_plane(payload, plane.size, 31, columns=120, sides=sides)


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        (b"", "1 bytes expected"),
        (b"\4", "unknown mode 4"),
        (b"\0\1\0", r"needs side planes \[0\], 0 are given"),
        (b"\0\3\0\0\0", "needs side planes"),
        (b"\1\x08\0\5\0\1", "unknown flags"),
        (b"\1\4\2\5\0\1", "meaning of the levels"),
        (b"\1\4\0\5\0\0", "meaning of the levels"),
        (b"\1\1\0\5\0\1\0\0\5\0\1\0\1\0\1", "needs side plane 0, 0 are given"),
        (b"\1\0\0\5\0\1\0\1\0\0", "mean magnitude of 0"),
        (b"\1\0\0\5\0\1\0\1\1\3", "mean magnitude of 769"),
        (b"\1\0\0\5\0\1\0\1\0\1\x11", r"chunks of 2\^17"),
        (HEAD + b"\x05", "split of contexts is malformed"),  # of a side that there is not
        (HEAD + b"\x0f", "split of contexts is malformed"),  # of a sixth feature
        (HEAD + b"\xf1\x03", "split of contexts is malformed"),  # at the 64th of 44 levels
        (HEAD + bits(*63 * SPLIT, (1, 1), (0, 63)), "split of contexts is malformed"),  # a 65th leaf
        (HEAD + b"\x14", "zero is symbol 10"),
        (HEAD + b"\0\0\0\0\0", "a table has no symbol"),
        (HEAD + b"\0\0\xc0" + 70 * b"\xff", "Rice code is above"),
        (b"\1\x10\0\5\0\1\0\1\0\1", "unknown flags"),
        (b"\1\x20\0\5\0\1\0\1\0\1", "not two-sided"),
        (b"\1\x14\0\5\0\1\0\1\0\1", "knows no places"),
        (b"\1\x40", "unknown flags"),
        (b"\2\0\0\5\0\1\0\1\0\1\x12\0\0\1\1", "fewer than two symbols"),
        (b"\3\1\0", r"needs side planes \[0\], 0 are given"),
        (b"\3\0\x18", r"chunks of 2\^24"),
        (b"\3\0\x12\x0a", "zero is symbol 10"),
        (b"\3\0\x12\0\0", "no context has a table"),
    ],
)
def test_malformed_payloads(payload: bytes, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        decode_plane(payload, 2000, 10, columns=50)


@pytest.mark.parametrize("flag", [16, 32])
def test_mixed_contexts_are_neither_placed_nor_mirrored(flag: int) -> None:
    plane, told, _ = dithered_planes(40, 50)
    payload = bytearray(encode_plane(plane, 7, columns=50, sides=[told], effort="max"))
    assert payload[0] == MODES["max"]
    assert payload[1] & 5 == 5
    payload[1] |= flag
    with pytest.raises(FormatError, match="neither placed nor mirrored"):
        decode_plane(payload, plane.size, 7, columns=50, sides=[told])


def test_low_rank_prediction_is_bounded() -> None:
    payload = b"\1\4\0\5\0\1\0\1\0\1\x17"
    with pytest.raises(FormatError, match="low-rank prediction of 1000000 columns"):
        decode_plane(payload, 10**6, 10, columns=10**6)


@pytest.mark.parametrize("effort", EFFORTS)
@pytest.mark.parametrize("n_sides", [0, 2])
def test_memory_is_a_small_multiple_of_the_plane(effort: Effort, n_sides: int) -> None:
    rng = np.random.default_rng(0)
    plane = rng.binomial(6, 0.3, 1 << 20).astype(np.uint8)
    told = np.minimum(plane + rng.integers(0, 2, plane.size), 6).astype(np.uint8)
    sides = n_sides * [Side(told, 7, tuple(range(-3, 4)), two_sided=True)]
    payload = encode_plane(plane, 7, columns=1024, sides=sides, effort=effort)
    decode_plane(payload, plane.size, 7, columns=1024, sides=sides)
    tracemalloc.start()
    decode_plane(payload, plane.size, 7, columns=1024, sides=sides)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 6 * plane.size


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"columns": 3}, "columns must divide"),
        ({"columns": 0}, "columns must divide"),
        ({"columns": 5, "effort": "best"}, "effort must be"),
        (
            {"columns": 5, "sides": [Side(np.zeros(9, np.uint8), 2)]},
            r"sides\[0\].plane must have 10 elements",
        ),
        ({"columns": 5, "sides": [Side(np.full(10, 2, np.uint8), 2)]}, "level 2 in an alphabet of 2"),
        ({"columns": 5, "sides": [Side(np.zeros(10, np.uint8), 2)] * 256}, "at most 255 sides"),
        ({"columns": 5, "sides": [Side(np.zeros(10, np.uint8), 2, (0,))]}, "places must be 2 integers"),
        ({"columns": 5, "sides": [Side(np.zeros(10, np.uint8), 2, (0, 129))]}, "from -128 to 128"),
    ],
)
def test_wrong_arguments(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        encode_plane(np.zeros(10, np.uint8), 4, **options)


def test_symbols_beyond_the_alphabet() -> None:
    with pytest.raises(ValueError, match="below 4"):
        encode_plane(np.full(10, 4, np.uint8), 4, columns=5)
