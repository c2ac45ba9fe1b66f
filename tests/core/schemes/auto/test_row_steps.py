"""No row makes more noise than it may."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shrinkpoint.schemes.auto.row_and_column_steps import MAX_EXPONENT
from shrinkpoint.schemes.auto.weight_steps import narrowed

UNIFORM = (1 / 12) ** 0.5  # noise of a uniform quantizer, in its step sizes
FINEST = 2.0 ** (-MAX_EXPONENT / 4)
"""The step size of a row that has the finest one, over that of the row that has the widest one."""


def steps_of(step, exponents):
    """Every element's step size."""
    rows, columns = (side.astype(np.float64) for side in exponents)
    return step * np.exp2((rows[:, None] + columns) / 4)


def noise_of(step, exponents):
    """Of each row, root mean square."""
    return UNIFORM * np.sqrt(np.square(steps_of(step, exponents)).mean(axis=1))


def int8(*values):
    return np.array(values, np.int8)


exponents_of_a_side = st.lists(st.integers(-12, 12), min_size=1, max_size=40).map(lambda side: int8(*side))
LIMITS = st.one_of(st.floats(2.0**-30, 2.0**10), st.sampled_from([0.0, np.inf, 1e-300, 1e300, 1.0]))


@settings(max_examples=400)
@given(st.data(), exponents_of_a_side, exponents_of_a_side, st.sampled_from([1e-10, 0.01, 1.0, 1e6]))
def test_no_row_makes_more_noise_than_it_may_or_it_has_the_finest_step_sizes(data, rows, columns, step):
    limits = data.draw(st.lists(LIMITS, min_size=rows.size, max_size=rows.size))
    noise = step * UNIFORM * np.array(limits)
    found, sides = narrowed(step, (rows, columns), noise)
    assert [side.dtype for side in sides] == [np.int8, np.int8]
    assert [side.shape for side in sides] == [rows.shape, columns.shape]
    assert max(int(np.abs(side).max()) for side in sides) <= MAX_EXPONENT
    assert 0 < found < np.inf
    made = noise_of(found, sides)
    if not ((noise > 0) & np.isfinite(noise)).any():
        return  # nothing is asked of any row that could be
    finest = sides[0] == -MAX_EXPONENT
    assert bool((made[~finest] <= noise[~finest] * (1 + 1e-9)).all())
    # what may make no noise makes 2 ** -8 of the others', but for the columns
    assert bool((made[finest] <= made.max() * FINEST * (1 + 1e-9)).all())


@settings(max_examples=200)
@given(st.data(), exponents_of_a_side, exponents_of_a_side)
def test_no_step_is_wider_than_the_curvature_allows_but_for_the_columns(data, rows, columns):
    """The mean of a row's exponents does not grow."""
    limits = data.draw(st.lists(st.floats(2.0**-6, 2.0**10), min_size=rows.size, max_size=rows.size))
    found, sides = narrowed(1.0, (rows, columns), UNIFORM * np.array(limits))
    before = rows + columns.mean()
    after = 4 * np.log2(found) + sides[0] + np.minimum(sides[1].mean(), 0)
    assert bool((after <= before + 0.51)[sides[0] > -MAX_EXPONENT].all())


def test_what_makes_little_noise_anyway_stays_as_it_is():
    exponents = int8(-3, 0, 2), int8(1, -1)
    step, sides = narrowed(0.5, exponents, np.array([1.0, 2.0, np.inf]))
    assert step == 0.5
    assert sides[0] is exponents[0]
    assert sides[1] is exponents[1]


@pytest.mark.parametrize("limits", [[0.0, 0.0], [np.inf, np.inf], [0.0, np.inf]])
def test_rows_of_which_nothing_can_be_said_stay_as_they_are(limits):
    exponents = int8(-3, 2), int8(1, -1)
    assert narrowed(0.5, exponents, np.array(limits)) == (0.5, exponents)


def test_step_sizes_follow_what_rows_have_moved():
    moved = np.array([1.0, 0.5, 0.25, 4.0])
    step, (rows, columns) = narrowed(1e3, (int8(0, 0, 0, 0), int8(0, 0, 0)), moved)
    assert not columns.any()
    assert rows.tolist() == [-8, -12, -16, 0]
    made = noise_of(step, (rows, columns))
    assert made / moved == pytest.approx(np.full(4, made[0]), rel=1e-6)
    assert 2**-0.25 < made[0] <= 1


def test_where_the_movement_decides_all_elements_of_a_row_have_equal_steps():
    """And where the curvature does, they follow it."""
    rows, columns = int8(0, 0), int8(-8, 0, 8)
    _, sides = narrowed(1.0, (rows, columns), UNIFORM * np.array([2.0**-8, 2.0**-8]))
    assert not sides[1].any()
    _, sides = narrowed(1.0, (rows, columns), UNIFORM * np.array([3.9, 1e9]))
    assert sides[1].tolist() == pytest.approx([-8, 0, 8], abs=1)


def test_rows_beyond_reach_have_the_finest_step_sizes():
    moved = np.array([1.0, 2.0**-7.9, 2.0**-8.1, 2.0**-30, 0.0])
    step, (rows, columns) = narrowed(1e3, (int8(0, 0, 0, 0, 0), int8(0, 0)), moved)
    assert rows.tolist() == [0, -32, -32, -32, -32]
    made = noise_of(step, (rows, columns))
    assert bool((made[:2] <= moved[:2]).all())
    assert made[2:] == pytest.approx(np.full(3, made[0] / 256))


def test_rows_that_may_be_of_any_noise_keep_what_the_curvature_says():
    step, (rows, _) = narrowed(1.0, (int8(0, 4, -4), int8(0)), UNIFORM * np.array([0.25, np.inf, np.inf]))
    assert step * 2.0 ** (rows / 4) == pytest.approx([0.25, 2.0, 0.5])


def test_of_many_rows_some_decide_how_columns_differ():
    rows, columns = np.zeros(5000, np.int8), int8(-6, 6)
    noise = np.full(5000, UNIFORM * 2.0**-9)
    found, sides = narrowed(1.0, (rows, columns), noise)
    assert not sides[1].any()
    assert bool((noise_of(found, sides) <= noise * (1 + 1e-9)).all())
