from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.trellis import nearest_points

from shrinkpoint.arrays import Float32s
from shrinkpoint.entropy.lanes.trellis import row_width
from shrinkpoint.schemes.auto import trellis
from shrinkpoint.schemes.auto.row_and_column_steps import MAX_EXPONENT
from shrinkpoint.schemes.auto.trellis import Grid

Ints = npt.NDArray[Any]

STATES = 4
EVEN_STEPS = np.uint8(2 * MAX_EXPONENT)
"""The exponent of an element whose step is the tensor's own."""


def step_on(state: int, index: int) -> int:
    """The next state, from the definition."""
    return 2 * state % STATES + (index % 2 ^ state >> 1)


def check_paths(points: Ints, width: int) -> None:
    """Whether an element lies on whole or on half steps is what its state says."""
    for start in range(0, points.size, width):
        state = 0
        for point in points[start : start + width].tolist():
            assert point % 2 == state % 2
            state = step_on(state, (point - state % 2) // 2)


def least_cost(values: Float32s) -> float:
    """Of all paths: of either parity the nearest point is all that can be worth taking."""
    best = np.inf
    for parities in product((0, 1), repeat=values.size):
        state, cost = 0, 0.0
        for value, parity in zip(values.astype(np.float64).tolist(), parities, strict=True):
            beside = 0.5 * (state % 2)
            index = 2 * round((value - beside - parity) / 2) + parity
            cost += (value - index - beside) ** 2
            state = step_on(state, index)
        best = min(best, cost)
    return best


@settings(max_examples=60)
@given(
    st.integers(1, 9),
    st.sampled_from([0.2, 1.0, 7.0, 3000.0]),
    st.integers(0, 999),
    st.booleans(),
)
def test_no_path_is_nearer(width: int, scale: float, seed: int, on_grid: bool) -> None:
    values = (scale * np.random.default_rng(seed).standard_normal(3 * width)).astype(np.float32)
    if on_grid:  # where many paths are equally near
        values = (np.rint(4 * values) / 4).astype(np.float32)
    points = nearest_points(values, width)
    check_paths(points, width)
    for start in range(0, values.size, width):
        part = values[start : start + width]
        cost = float(((part.astype(np.float64) - points[start : start + width] / 2) ** 2).sum())
        assert cost == pytest.approx(least_cost(part), rel=1e-3, abs=1e-3)


@pytest.mark.parametrize("columns", [1, 3, 10, 64, 100])
def test_a_ragged_last_path_leaves_the_others_as_they_are(columns: int) -> None:
    width = row_width(16 * 64, columns)
    values = (3 * np.random.default_rng(columns).standard_normal(2 * width + 5)).astype(np.float32)
    points = nearest_points(values, width)
    check_paths(points, width)
    np.testing.assert_array_equal(points[: 2 * width], nearest_points(values[: 2 * width], width))
    assert float(np.abs(points / 2 - values).max()) <= 1.0001


@pytest.mark.parametrize("size", [1, 5, 9])
def test_no_path_is_nearer_to_a_ragged_row(size: int) -> None:
    """What would lie behind the end costs nothing, so that small tensors have no more noise than rounding leaves."""
    rng, squares = np.random.default_rng(6), []
    for _ in range(20):
        values = (3 * rng.standard_normal(size)).astype(np.float32)
        points = nearest_points(values, row_width(1, size))
        check_paths(points, row_width(1, size))
        squares.append(float(((values.astype(np.float64) - points / 2) ** 2).sum()) - least_cost(values))
    assert max(squares) < 1e-5


def grid_of(step: float, count: int) -> Grid:
    return Grid(step=np.float32(step), exponents=np.full(count, EVEN_STEPS), seed=11)


def test_values_too_many_steps_from_zero_are_refused() -> None:
    grid = grid_of(1.0, 384)
    for value, reached in ((13_900, True), (-13_900, True), (14_100, False), (-14_100, False), (1e30, False)):
        values = np.zeros(384, np.float32)
        values[1] = value
        assert (trellis.nearest_points(values, grid, None, None, 384) is not None) == reached
