"""How much of a changing curvature the steps of a chain follow."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shrinkpoint.schemes.auto.row_and_column_steps import (
    MAX_EXPONENT,
    Steps,
    curvature_exponents,
    join_exponents,
    split_exponents,
)


def steps(step, rows, columns=(0, 0)):
    return Steps(step=np.float32(step), rows=np.array(rows, np.int8), columns=np.array(columns, np.int8))


def exponents_of(found, unit):
    """Quarter octaves of every element's step above a unit."""
    total = found.rows.astype(float)[:, None] + found.columns.astype(float)
    return total + 4 * np.log2(float(found.step) / unit)


def test_steps_follow_the_curvature():
    second = torch.ones(4, 6)
    second[1] *= 16.0
    second[:, 2] *= 1 / 16.0
    rows, columns = curvature_exponents(second, (4, 6))
    assert rows[1] - rows[0] == -4  # sixteen times the second moment is half the step: four quarter octaves
    assert columns[2] - columns[0] > 0
    alike, used = curvature_exponents(torch.full((4, 6), 3e-9), (4, 6))
    assert not alike.any()
    assert not used.any()
    second[3] = 0
    assert curvature_exponents(second, (4, 6))[0][3] == 12


@pytest.mark.parametrize(
    "wanted",
    [
        steps(0.95, [0, 1, 2, 3]),  # a little narrower
        steps(1.3, [0, 1, 2, 3]),  # wider, which costs bytes alone
        steps(1.0, [0, 1, 2, 2], [0, 1]),
    ],
)
def test_what_costs_little_is_let_be(wanted):
    reference = steps(1.0, [0, 1, 2, 3])
    assert reference.followed(wanted, 0.2) is reference


def test_only_rows_and_columns_that_are_off_take_other_steps():
    reference = steps(1.0, [0, 0, 0, 0], [0, 0, 0, 0])
    followed = reference.followed(steps(1.0, [-6, 1, -1, 5], [0, 0, 0, -4]), 0.2)
    assert followed.step == 1
    assert followed.rows.tolist() == [-7, 0, -2, 4]  # the columns' mean has become one less
    assert followed.columns.tolist() == [0, 0, 0, -3]


def test_far_too_narrow_steps_are_widened():
    reference = steps(1.0, [0, 0, 0])
    assert reference.followed(steps(4.0, [0, 0, 0]), 0.2).rows.tolist() == [8, 8, 8]


def test_what_rows_cannot_follow_is_a_new_grid():
    wanted = steps(1e-3, [1, 2, 3])
    assert steps(1.0, [0, 0, 0]).followed(wanted, 0.2) is wanted


exponents = st.lists(st.integers(-12, 12), min_size=1, max_size=6)


@given(st.data(), exponents, exponents, st.floats(-3, 3), st.floats(0, 1))
def test_no_element_is_left_far_too_wide(data, rows, columns, octaves, slack):
    def like(side):
        return data.draw(st.lists(st.integers(-12, 12), min_size=len(side), max_size=len(side)))

    reference, wanted = steps(1.0, rows, columns), steps(2.0**octaves, like(rows), like(columns))
    followed = reference.followed(wanted, slack)
    off = exponents_of(wanted, 1.0) - exponents_of(followed, 1.0)
    if followed is reference:
        assert np.exp2(-off / 2).mean() <= 1 + slack + 1e-9
        assert off.mean() <= 2 + 1e-9
    else:
        assert off.min() > -4  # a row and a column, each narrower by less than half an octave
        assert off.max() < 8


SIDES = st.lists(st.integers(-MAX_EXPONENT, MAX_EXPONENT), min_size=1, max_size=9)


@given(SIDES, SIDES)
def test_exponents_of_elements_are_those_of_rows_and_columns_again(rows, columns):
    """Which of the two has how much of it is another matter, but both stay within reach."""
    joined = join_exponents(np.array(rows, np.int8), np.array(columns, np.int8))
    assert joined.dtype == np.uint8
    total = np.array(rows)[:, None] + np.array(columns)
    assert np.array_equal(joined, total.reshape(-1) + 2 * MAX_EXPONENT)
    split = split_exponents(joined, (len(rows), len(columns)))
    assert [side.dtype for side in split] == [np.int8, np.int8]
    assert max(int(np.abs(side.astype(int)).max()) for side in split) <= MAX_EXPONENT
    assert np.array_equal(join_exponents(*split), joined)
