import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.payloads import damaged, damages, untimed

from shrinkpoint.arrays import Float64s, Int16s
from shrinkpoint.entropy.contexts.sample import Side
from shrinkpoint.entropy.trellis.coder import FAR_RADIUS, CodedPoints, Path, decode_points, encode_points
from shrinkpoint.entropy.trellis.states import MAX_WIDTH, NOISE, UNIT, States, path_width
from shrinkpoint.errors import CorruptionError, FormatError

Ints = npt.NDArray[Any]

STATES: tuple[States, ...] = (4, 8)
HEAD = 7
"""Bytes of a model's fields before the indices of the sides."""


def path_of(indices: Ints, columns: int, states: States) -> Int16s:
    """The points of these indices: any sequence of indices is a path. Written apart from the coder, from the definition."""
    width = path_width(columns)
    paths = -(-indices.size // width)
    padded = np.zeros(paths * width, np.int64)
    padded[: indices.size] = indices
    rows = padded.reshape(paths, width)
    points, state = np.empty_like(rows), np.zeros(paths, np.int64)
    for j in range(width):
        points[:, j] = 2 * rows[:, j] + state % 2
        flipped = state >> 1 & 1 if states == 4 else (state >> 1 ^ state >> 2) & 1
        state = 2 * state % states + (rows[:, j] % 2 ^ flipped)
    return points.reshape(-1)[: indices.size].astype(np.int16)


def nearest(values: Float64s, places: Ints, columns: int, states: States) -> Path:
    """What a coder has of values in steps that are expected at places."""
    from shrinkpoint.schemes.auto.trellis_points import nearest_points  # numba

    measured = (values + places / UNIT).astype(np.float32).reshape(-1)
    return nearest_points(measured, columns, states)


def dithered(size: int, seed: int = 0) -> Int16s:
    """Places anywhere between two even points."""
    return np.random.default_rng(seed).integers(-UNIT, UNIT, size).astype(np.int16)


def check_round_trip(points: Int16s, path: Path, threads: int = 1) -> CodedPoints:
    """Code and decode; what a reader has must be what the encoder says, and the points themselves wherever they can be told."""
    kept = points.copy()
    coded = encode_points(points, path, threads)
    decoded = decode_points(memoryview(coded.payload), path, threads)
    for name in ("points", "errors", "ranks"):
        there, here = getattr(decoded, name), getattr(coded, name)
        assert there.dtype == here.dtype
        np.testing.assert_array_equal(there, here)
    assert decoded.payload == coded.payload
    np.testing.assert_array_equal(points, kept)
    np.testing.assert_array_equal(coded.errors, 128 * coded.points.astype(np.int32) - path.places)
    np.testing.assert_array_equal(coded.points[~coded.far], points[~coded.far])
    missing = points[coded.far].astype(np.int32) - coded.points[coded.far]
    # the parity of the index is kept, for the next state depends on it, and nothing is told to be farther than it is
    assert not (missing % 4).any()
    true = 128 * points[coded.far].astype(np.int32) - path.places[coded.far]
    assert bool((np.abs(coded.errors[coded.far]) <= np.abs(true)).all())
    return coded


@pytest.mark.parametrize(
    ("columns", "width"),
    [
        (1, 4096),
        (7, 4096),
        (8, 64),
        (9, 72),
        (10, 70),
        (63, 126),
        (64, 64),
        (65, 65),
        (384, 384),
        (MAX_WIDTH, MAX_WIDTH),
        (MAX_WIDTH + 1, 4096),
    ],
)
def test_paths_are_whole_rows_of_at_least_64_elements(columns: int, width: int) -> None:
    assert path_width(columns) == width


Case = tuple[Int16s, Path]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Any paths at any places, likely and unlikely ones, with sides that tell much, little or nothing."""
    columns = draw(st.sampled_from([1, 2, 5, 8, 10, 24, 63, 64, 65, 384]))
    states = draw(st.sampled_from(STATES))
    size = draw(st.sampled_from([0, 1, 2, 3, 7, 60, 500, 3000, 9000])) // columns * columns
    size = draw(st.sampled_from([size, columns]))
    rng = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    spread = draw(st.sampled_from([0.0, 0.4, 3.0, 50.0, 70.0, 1e4, 1e9]))
    indices = np.clip(np.rint(spread * rng.standard_normal(size)), -(2**14), 2**14 - 1).astype(np.int64)
    indices[rng.random(size) < draw(st.sampled_from([0.0, 0.5, 0.99]))] = 0
    if draw(st.booleans()) and size:
        indices[rng.integers(0, size, 3)] = draw(st.sampled_from([124, 125, 126, 127, -127, 16383, -16384]))
    low, high = draw(st.sampled_from([(-UNIT, UNIT), (0, 1), (-UNIT, 1 - UNIT), (UNIT - 1, UNIT)]))
    places = rng.integers(low, high, size).astype(np.int16)
    points, sides = path_of(indices, columns, states), []
    for _ in range(draw(st.sampled_from([0, 1, 3, 5]))):
        alphabet = draw(st.sampled_from([1, 2, 16, 255, 256]))
        noise = rng.random(size) < draw(st.sampled_from([0.0, 0.1, 1.0]))
        told = np.where(noise, rng.integers(0, alphabet, size), np.abs(indices) % alphabet)
        sides.append(Side(told.astype(np.uint8), alphabet))
    return points, Path(places, columns, states, tuple(sides))


@untimed
@given(case=cases())
def test_round_trip(case: Case) -> None:
    points, path = case
    coded = check_round_trip(points, path)
    assert (coded.payload == b"") == (points.size == 0)


@pytest.mark.parametrize("states", STATES)
def test_a_ragged_last_path_is_read_as_written(states: States) -> None:
    """Seven rows of ten columns are a path: 16 rows are two paths and a part of one."""
    indices = np.random.default_rng(0).integers(-2, 3, 160)
    check_round_trip(path_of(indices, 10, states), Path(dithered(160), 10, states))


@pytest.mark.parametrize(("columns", "states"), [(500, 4), (10, 8), (1, 4), (40_000, 8)])
def test_chunks_do_not_depend_on_threads(columns: int, states: States) -> None:
    """And paths are never cut between two chunks."""
    size = 600_000
    rng = np.random.default_rng(0)
    places = dithered(size)
    points = nearest(0.2 * rng.standard_normal(size), places, columns, states)
    side = Side(np.minimum(np.abs(points), 3).astype(np.uint8), 4)
    path = Path(places, columns, states, (side,))
    one = check_round_trip(points, path)
    two = check_round_trip(points, path, threads=2)
    assert one.payload == two.payload


@pytest.mark.parametrize(("columns", "states"), [(64, 4), (66, 8)])
@pytest.mark.parametrize("place", [-256, -100, 0, 255])
def test_ranks_beyond_125_keep_their_parity(columns: int, states: States, place: int) -> None:
    """The last element's index grows by one at a time: so does its rank, up to where only parities are told.

    Any other one's best point depends on what follows, which a model of other energies looks at in another way.
    """
    where = columns - 1

    def rank_at(index: int) -> int:
        indices = np.zeros(columns, np.int64)
        indices[where] = index
        coded = check_round_trip(
            path_of(indices, columns, states), Path(np.full(columns, place, np.int16), columns, states)
        )
        assert bool(coded.far[where]) == (abs(int(coded.ranks[where])) >= FAR_RADIUS - 1)
        return int(coded.ranks[where])

    first, by = rank_at(0), rank_at(1) - rank_at(0)
    assert abs(by) == 1
    for index in (*range(-128, -122), *range(122, 129), -3000, 3001, -16384, 16383):
        rank = first + index * by
        last = FAR_RADIUS - (abs(rank) % 2)
        assert rank_at(index) == (rank if abs(rank) < FAR_RADIUS - 1 else int(math.copysign(last, rank)))


def test_only_far_points_are_told_to_be_far() -> None:
    indices = np.zeros(640, np.int64)
    indices[[3, 300]] = 110, -110
    path = Path(np.zeros(640, np.int16), 64, 4)
    assert not encode_points(path_of(indices, 64, 4), path).far.any()
    indices[[3, 300]] = 10_000, -10_000
    assert np.flatnonzero(encode_points(path_of(indices, 64, 4), path).far).tolist() == [3, 300]


@pytest.mark.parametrize("states", STATES)
@pytest.mark.parametrize("where", [0, 100, 639])
def test_points_that_are_no_path_are_refused(states: States, where: int) -> None:
    indices = np.random.default_rng(0).integers(-3, 4, 640)
    points, path = path_of(indices, 64, states), Path(dithered(640), 64, states)
    points[where] += 1
    with pytest.raises(ValueError, match="must be a path"):
        encode_points(points, path)


def ideal_bits(sigma: float, states: States) -> float:
    """What a Gaussian of so many steps costs through noise of the trellis: that of Gaussian noise, and what this one is less
    spread than that."""
    noise = NOISE[states]
    return 0.5 * math.log2(1 + sigma**2 / noise) + 0.5 * math.log2(2 * math.pi * math.e * noise)


@pytest.mark.parametrize("states", STATES)
@pytest.mark.parametrize("sigma", [0.1, 0.3, 1.0, 4.0])
def test_gaussian_values_cost_what_their_trellis_allows(sigma: float, states: States) -> None:
    size, places = 384 * 700, dithered(384 * 700)
    values = sigma * np.random.default_rng(1).standard_normal(size)
    coded = encode_points(nearest(values, places, 384, states), Path(places, 384, states))
    assert 8 * len(coded.payload) / size < 1.03 * ideal_bits(sigma, states)


def test_more_states_cost_less_for_less_noise() -> None:
    size, places = 384 * 500, dithered(384 * 500)
    values = 0.1 * np.random.default_rng(1).standard_normal(size)
    four, eight = (
        len(encode_points(nearest(values, places, 384, states), Path(places, 384, states)).payload)
        for states in STATES
    )
    assert eight < 0.98 * four


def test_points_that_are_where_they_are_expected_cost_next_to_nothing() -> None:
    size = 256 * 400
    coded = check_round_trip(np.zeros(size, np.int16), Path(np.zeros(size, np.int16), 256, 4))
    assert len(coded.payload) < 64


@pytest.mark.parametrize("states", STATES)
def test_directions_that_rows_share_are_not_paid_for_again(states: States) -> None:
    rng, places = np.random.default_rng(2), dithered(300 * 200)
    values = 0.5 * np.outer(rng.standard_normal(300), rng.standard_normal(200))
    apart = rng.permutation(values.reshape(-1)).reshape(values.shape)
    shared, alone = (
        check_round_trip(nearest(each.reshape(-1), places, 200, states), Path(places, 200, states)).payload
        for each in (values, apart)
    )
    assert (shared[0] & 4, alone[0] & 4) == (4, 0)
    assert len(shared) < 0.75 * len(alone)


def test_rows_and_columns_that_are_more_active_than_others_are_noticed() -> None:
    rng, places = np.random.default_rng(3), dithered(400 * 200)
    sizes = np.outer(4.0 ** rng.standard_normal(400), 4.0 ** rng.standard_normal(200))
    values = 0.1 * sizes * rng.standard_normal(sizes.shape)
    apart = rng.permutation(values.reshape(-1))
    known, unknown = (
        len(encode_points(nearest(each.reshape(-1), places, 200, 4), Path(places, 200, 4)).payload)
        for each in (values, apart)
    )
    assert known < 0.85 * unknown


def test_sides_that_tell_something_are_used_and_others_are_not() -> None:
    rng, places = np.random.default_rng(4), dithered(300 * 200)
    class_of = rng.integers(0, 3, places.size)
    points = nearest(np.array([0.0, 0.2, 1.5])[class_of] * rng.standard_normal(places.size), places, 200, 4)
    useless = Side(rng.integers(0, 200, places.size).astype(np.uint8), 200)
    useful = Side(class_of.astype(np.uint8), 3)
    alone = check_round_trip(points, Path(places, 200, 4)).payload
    told = check_round_trip(points, Path(places, 200, 4, (useless, useful))).payload
    assert (told[0] & 3, told[HEAD]) == (1, 1)
    assert len(told) < 0.9 * len(alone)


def small_case(low_rank: bool = False) -> Case:
    """One of a few hundred bytes, with two sides of which one is needed."""
    rng, places = np.random.default_rng(5), dithered(96 * 64)
    class_of = rng.integers(0, 3, places.size)
    values = np.array([0.0, 0.1, 0.5])[class_of] * rng.standard_normal(places.size)
    if low_rank:
        values = 0.6 * np.outer(rng.standard_normal(96), rng.standard_normal(64)).reshape(-1)
    sides = Side(np.zeros(places.size, np.uint8), 1), Side(class_of.astype(np.uint8), 3)
    points = nearest(values, places, 64, 4)
    if low_rank:
        points[:64] = path_of(np.where(np.arange(64) == 7, 500, 0), 64, 4)
    return points, Path(places, 64, 4, sides)


def check_survives(payload: bytes, path: Path) -> None:
    """Nothing but FormatError and CorruptionError may be raised, and a result must hold together."""
    try:
        decoded = decode_points(payload, path)
    except (FormatError, CorruptionError):
        return
    assert decoded.points.shape == decoded.errors.shape == decoded.ranks.shape == path.places.shape
    assert (decoded.points.dtype, decoded.ranks.dtype) == (np.int16, np.int8)
    assert int(np.abs(decoded.ranks.astype(int)).max(initial=0)) <= FAR_RADIUS
    np.testing.assert_array_equal(decoded.errors, 128 * decoded.points.astype(np.int32) - path.places)


@pytest.mark.parametrize("low_rank", [False, True])
def test_every_prefix_is_refused(low_rank: bool) -> None:
    points, path = small_case(low_rank)
    payload = check_round_trip(points, path).payload
    assert bool(payload[0] & 4) == low_rank
    # near the end one word may be missing without the model noticing: the chunk's states do
    for length in (*range(min(120, len(payload))), *range(120, len(payload), 7), len(payload) - 1):
        with pytest.raises((FormatError, CorruptionError)):
            decode_points(payload[:length], path)


@untimed
@given(changes=damages(), low_rank=st.booleans())
def test_damaged_payloads_never_crash(changes: list[tuple[int, int]], low_rank: bool) -> None:
    points, path = small_case(low_rank)
    payload = encode_points(points, path).payload
    # most damage goes to the model: the chunks are hardly ever hit there
    near = [(position % 80, change) for position, change in changes]
    fields = [(position % (HEAD + 2), change) for position, change in changes]
    for where in (changes, near, fields):
        check_survives(damaged(payload, where), path)


@untimed
@given(
    payload=st.binary(max_size=150), columns=st.sampled_from([1, 8, 64, 1000]), states=st.sampled_from(STATES)
)
def test_any_bytes(payload: bytes, columns: int, states: States) -> None:
    size = 4000 // columns * columns
    path = Path(dithered(size), columns, states, (Side((np.arange(size) % 7).astype(np.uint8), 7),))
    for head in (
        b"",
        b"\0\x0b\x05\0\4\x90\0\x12",
        b"\5\x10\x7e\xff\xff\x90\0\0\x12",
        b"\4\0\x01\x80\0\1\0\x17",
    ):
        check_survives(head + payload, path)


def test_a_changed_word_is_noticed() -> None:
    points, path = small_case()
    payload = bytearray(encode_points(points, path).payload)
    payload[-1] ^= 1
    with pytest.raises(CorruptionError, match="do not end in the state"):
        decode_points(bytes(payload), path)


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (0, 1 | 8, "model is malformed"),
        (0, 1 | 128, "model is malformed"),
        (1, 17, "model is malformed"),
        (2, FAR_RADIUS + 1, "model is malformed"),
        (2, 255, "model is malformed"),
        (4, 0, "model is malformed"),  # a scale of less than 128
        (6, 255, "model is malformed"),  # a mean of more than any
        (HEAD, 2, "side planes that are not given"),
        (HEAD + 1, 17, "model is malformed"),
        (HEAD + 1, 24, "model is malformed"),
        (HEAD + 1, 255, "model is malformed"),
    ],
)
def test_fields_of_the_model_out_of_range_are_refused(place: int, value: int, message: str) -> None:
    points, path = small_case()
    payload = bytearray(encode_points(points, path).payload)
    assert payload[0] == 1  # one side and no prediction
    payload[3] = min(payload[3], 127)
    payload[place] = value
    with pytest.raises(FormatError, match=message):
        decode_points(bytes(payload), path)


def test_a_mean_of_nothing_is_refused() -> None:
    points, path = small_case()
    payload = bytearray(encode_points(points, path).payload)
    payload[5:7] = 0, 0
    with pytest.raises(FormatError, match="model is malformed"):
        decode_points(bytes(payload), path)


def test_data_for_no_elements_are_refused() -> None:
    empty = Path(np.zeros(0, np.int16), 3, 4)
    assert encode_points(np.zeros(0, np.int16), empty).payload == b""
    assert decode_points(b"", empty).points.size == 0
    with pytest.raises(FormatError, match="follow the end"):
        decode_points(b"\0", empty)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"columns": 3}, "columns must divide"),
        ({"columns": 0}, "columns must divide"),
        ({"columns": -5}, "columns must divide"),
        ({"places": np.zeros(10, np.int32)}, "places must be a 1-D int16"),
        ({"places": np.zeros((2, 5), np.int16)}, "places must be a 1-D int16"),
        ({"places": np.full(10, UNIT, np.int16)}, "places must be from -256 to 255"),
        ({"places": np.full(10, -UNIT - 1, np.int16)}, "places must be from -256 to 255"),
        ({"sides": (Side(np.zeros(9, np.uint8), 2),)}, r"sides\[0\].plane must have 10"),
        ({"sides": (Side(np.zeros(10, np.int8), 2),)}, r"sides\[0\].plane"),
    ],
)
def test_paths_whose_parts_do_not_fit_are_refused(wrong: dict[str, Any], message: str) -> None:
    path = Path(**{"places": np.zeros(10, np.int16), "columns": 5, "states": 4, **wrong})
    points = np.zeros(path.places.shape, np.int16)
    with pytest.raises(ValueError, match=message):
        encode_points(points, path)
    with pytest.raises(ValueError, match=message):
        decode_points(b"", path)


@pytest.mark.parametrize(
    "points", [np.zeros(10, np.int32), np.zeros(9, np.int16), np.zeros((2, 5), np.int16), np.zeros(10)]
)
def test_points_must_be_one_for_each_place(points: Ints) -> None:
    with pytest.raises(ValueError, match="one for each place"):
        encode_points(points, Path(np.zeros(10, np.int16), 5, 4))


@pytest.mark.parametrize("states", [2, 16])
def test_there_is_no_other_trellis(states: Any) -> None:
    with pytest.raises(ValueError, match="states"):
        encode_points(np.zeros(10, np.int16), Path(np.zeros(10, np.int16), 5, states))


def test_strided_and_read_only_input() -> None:
    points, path = small_case()
    places, strided = np.repeat(path.places, 2)[::2], np.repeat(points, 2)[::2]
    side = Side(np.frombuffer(path.sides[1].plane.tobytes(), np.uint8), 3)
    for each in (strided, np.frombuffer(points.tobytes(), np.int16)):
        coded = check_round_trip(each, Path(places, path.columns, 4, (path.sides[0], side)))
        assert coded.payload == encode_points(points, path).payload
