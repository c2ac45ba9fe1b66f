"""The coder of matrices: round trips of anything, sizes of what is predictable, and payloads that are damaged."""

import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.payloads import damaged, damages, untimed
from support.teams import in_team

from shrinkpoint.arrays import Int16s
from shrinkpoint.entropy.lanes.coder import decode_matrix, encode_matrix
from shrinkpoint.errors import CorruptionError, FormatError

UNIT = 256  # parts of a step in which places are expressed

Ints = npt.NDArray[Any]


def path_of(indices: Ints, width: int) -> Int16s:
    """The points of these indices: any sequence of indices is a path. Written apart from the coder, from the definition."""
    rows = -(-indices.size // width)
    padded = np.zeros(rows * width, np.int64)
    padded[: indices.size] = indices
    matrix = padded.reshape(rows, width)
    points, state = np.empty_like(matrix), np.zeros(rows, np.int64)
    for j in range(width):
        points[:, j] = 2 * matrix[:, j] + state % 2
        state = 2 * state % 4 + (matrix[:, j] % 2 ^ state >> 1 & 1)
    return points.reshape(-1)[: indices.size].astype(np.int16)


def check_round_trip(points: Int16s, places: Int16s | None, width: int, *, predictable: bool = True) -> bytes:
    kept = points.copy()
    payload = encode_matrix(points, places, width=width, predictable=predictable)
    np.testing.assert_array_equal(points, kept)
    found = decode_matrix(memoryview(payload), points.size, places, width=width)
    assert found.dtype == np.int16
    np.testing.assert_array_equal(found, points)
    return payload


def low_rank(rows: int, columns: int, rank: int, size: float, seed: int = 0) -> npt.NDArray[np.float64]:
    """Nearly of low rank: noise of a third of a step beside it."""
    rng = np.random.default_rng(seed)
    product = rng.standard_normal((rows, rank)) @ rng.standard_normal((rank, columns)) / math.sqrt(rank)
    return np.asarray(size * product + 0.3 * rng.standard_normal((rows, columns)))


def entropy(levels: Ints) -> float:
    """Bytes under the levels' own frequencies."""
    counts = np.unique(levels, return_counts=True)[1]
    return float(-(counts * np.log2(counts / levels.size)).sum() / 8)


Case = tuple[Int16s, Int16s | None, int]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Points and levels, likely and unlikely ones, with rows that end anywhere."""
    width = draw(st.sampled_from([1, 2, 15, 16, 17, 64, 65, 100, 384]))
    size = draw(
        st.sampled_from([0, 1, 2, width - 1, width, 15 * width, 16 * width, 17 * width + 1, 600 * width + 3])
    )
    size = min(size, 40_000)
    rng = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    spread = draw(st.sampled_from([0.0, 0.4, 3.0, 50.0, 3e3, 1e9]))
    indices = np.clip(np.rint(spread * rng.standard_normal(size)), -(2**14), 2**14 - 1).astype(np.int64)
    indices[rng.random(size) < draw(st.sampled_from([0.0, 0.5, 0.99]))] = 0
    if draw(st.booleans()) and size:
        indices[rng.integers(0, size, 3)] = draw(st.sampled_from([7, 8, -8, 15, 16, -127, 16383, -16384]))
    if draw(st.booleans()):
        return (2 * indices).astype(np.int16), None, width
    low, high = draw(st.sampled_from([(-UNIT, UNIT), (0, 1), (-UNIT, 1 - UNIT), (UNIT - 1, UNIT)]))
    return path_of(indices, width), rng.integers(low, high, size).astype(np.int16), width


@untimed
@given(cases(), st.booleans())
def test_anything_is_read_as_it_was_written(case: Case, predictable: bool) -> None:
    points, places, width = case
    payload = check_round_trip(points, places, width, predictable=predictable)
    assert (payload == b"") == (points.size == 0)


@pytest.mark.parametrize("value", [-(2**15), 2**15 - 1, -(2**15) + 1])
def test_the_farthest_levels_are_exact(value: int) -> None:
    levels = np.zeros(5000, np.int16)
    levels[[0, 17, 4999]] = value
    levels[100:200] = -value - 1
    check_round_trip(levels, None, 64)


@pytest.mark.parametrize("rank", [1, 4, 12])
@pytest.mark.parametrize("on_trellis", [False, True])
def test_rows_are_predicted_from_those_before(rank: int, on_trellis: bool) -> None:
    from support.trellis import nearest_points  # numba

    values, places = low_rank(1024, 256, rank, 4.0), None
    if on_trellis:
        places = np.random.default_rng(1).integers(-UNIT, UNIT, values.size).astype(np.int16)
        points = nearest_points((values.reshape(-1) + places / UNIT).astype(np.float32), 256)
    else:
        points = np.rint(values).astype(np.int16).reshape(-1)
    payload = check_round_trip(points, places, 256)
    alone = check_round_trip(points, places, 256, predictable=False)
    assert len(payload) < 0.62 * len(alone)


def test_chunks_do_not_depend_on_threads_nor_on_each_other() -> None:
    levels = np.rint(low_rank(5000, 256, 3, 2.0)).astype(np.int16).reshape(-1)
    payload = encode_matrix(levels, None, width=256, predictable=True)
    assert in_team(3, lambda: encode_matrix(levels, None, width=256, predictable=True)) == payload
    decoded = in_team(3, lambda: decode_matrix(payload, levels.size, None, width=256))
    np.testing.assert_array_equal(decoded, levels)
    first = encode_matrix(levels[: 4096 * 256], None, width=256, predictable=True)
    assert payload[3 : 3 + len(first)] == first


def test_points_that_are_no_path() -> None:
    points = path_of(np.arange(200) % 3, 64)
    points[70] += 1
    with pytest.raises(ValueError, match="path of the trellis"):
        encode_matrix(points, np.zeros(200, np.int16), width=64, predictable=True)


def sample(on_trellis: bool) -> tuple[bytes, int, Int16s | None]:
    """A payload that has all parts: several tables, large distances, directions."""
    rng = np.random.default_rng(0)
    indices = np.rint(low_rank(80, 48, 2, 2.0)).astype(np.int64).reshape(-1)
    indices[rng.integers(0, indices.size, 60)] = rng.integers(-300, 300, 60)
    if not on_trellis:
        return encode_matrix(indices.astype(np.int16), None, width=48, predictable=True), indices.size, None
    places = rng.integers(-UNIT, UNIT, indices.size).astype(np.int16)
    return encode_matrix(path_of(indices, 48), places, width=48, predictable=True), indices.size, places


@untimed
@given(damages(), st.booleans())
def test_damaged_payloads_are_refused_or_read(damage: Any, on_trellis: bool) -> None:
    payload, size, places = sample(on_trellis)
    try:
        found = decode_matrix(damaged(payload, damage), size, places, width=48)
    except (FormatError, CorruptionError):
        return
    assert found.size == size


def test_payloads_of_other_sizes_are_refused() -> None:
    payload, size, _ = sample(False)
    for other in (size - 1, size + 48, 48, 0):
        with pytest.raises((FormatError, CorruptionError)):
            decode_matrix(payload, other, None, width=48)
    for cut in range(0, len(payload), 7):
        with pytest.raises((FormatError, CorruptionError)):
            decode_matrix(payload[:cut], size, None, width=48)
    for more in (b"\0", b"\0\0"):
        with pytest.raises((FormatError, CorruptionError)):
            decode_matrix(payload + more, size, None, width=48)


HOSTILE = """
import runpy, sys
import numpy as np
sys.path[:0] = sys.argv[3:]
sample = runpy.run_path(sys.argv[2])["sample"]
from shrinkpoint.entropy.lanes.coder import decode_matrix
from shrinkpoint.errors import ShrinkpointError

rng, read, refused = np.random.default_rng(int(sys.argv[1])), 0, 0
for payload, size, places in (sample(False), sample(True)):
    whole = np.frombuffer(payload, np.uint8)
    for trial in range(50_000):
        bad = whole.copy()
        if trial % 3:  # the model and the tables; anywhere
            at = rng.integers(0, 400 if trial % 3 == 1 else bad.size, rng.integers(1, 5))
            bad[at] = rng.integers(0, 256, at.size)
        else:  # nothing but the head is kept
            bad[rng.integers(5, 200):] = rng.integers(0, 256)
        try:
            decode_matrix(bad.tobytes(), size, places, width=48)
            read += 1
        except ShrinkpointError:
            refused += 1
print(read, refused)
"""


@pytest.mark.slow
def test_no_payload_reads_or_writes_out_of_bounds(tmp_path: Path) -> None:
    """In a process in which numba checks every index; with a cache of its own, whose kernels are others."""
    tests = [path for path in sys.path if path.endswith("tests")]
    done = subprocess.run(
        [sys.executable, "-c", HOSTILE, "0", __file__, *tests],
        capture_output=True,
        text=True,
        env={**os.environ, "NUMBA_BOUNDSCHECK": "1", "NUMBA_CACHE_DIR": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    read, refused = (int(word) for word in done.stdout.split())
    assert read + refused == 100_000
    assert read > 100
