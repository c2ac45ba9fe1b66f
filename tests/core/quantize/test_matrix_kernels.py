"""Sums that encoders choose by, against numpy's."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shrinkpoint.quantize import matrix_kernels
from shrinkpoint.schemes.auto.factors import Factors


@given(st.integers(0, 2**32 - 1), st.integers(1, 40), st.integers(1, 1500))
def test_sums_of_a_matrix(seed, height, width):
    generator = np.random.default_rng(seed)
    values = (generator.standard_normal((height, width)) ** 3).astype(np.float32)
    rows, columns = np.empty(height), np.ones(width)
    matrix_kernels.add_up(values, rows, columns)
    wide = values.astype(np.float64)
    assert rows == pytest.approx(wide.sum(axis=1), rel=1e-9, abs=1e-9)
    assert columns == pytest.approx(wide.sum(axis=0) + 1, rel=1e-9, abs=1e-9)
    assert matrix_kernels.square_sum(values.reshape(-1)) == pytest.approx(float(np.square(wide).sum()))


@given(st.integers(0, 2**32 - 1), st.integers(0, 3000))
def test_logarithms_of_what_is_positive(seed, count):
    generator = np.random.default_rng(seed)
    values = (10.0 ** generator.uniform(-44, 38, count)).astype(np.float32)
    values[generator.random(count) < 0.2] = 0
    total, used, subnormal = matrix_kernels.log_sum(values.view(np.int32))
    normal = values[values >= np.finfo(np.float32).tiny].astype(np.float64)
    assert (used, used + subnormal) == (normal.size, np.count_nonzero(values.view(np.int32)))
    assert total == pytest.approx(float(np.log2(normal).sum()), rel=1e-9, abs=1e-6)


def test_subnormal_second_moments_keep_the_mean_logarithm():
    values = np.full((4, 8), 2.0**-140, np.float32)
    values[:2] = 2.0**-100
    factors = Factors.of_second_moment(values)
    assert factors.product().reshape(4, 8)[0, 0] == np.float32(2.0**-100)


@given(st.integers(0, 2**32 - 1), st.integers(1, 40), st.integers(1, 1500))
def test_quotients_of_what_is_positive(seed, height, width):
    generator = np.random.default_rng(seed)
    values = (10.0 ** generator.uniform(-30, 5, (height, width))).astype(np.float32)
    sides = [(10.0 ** generator.uniform(-18, 3, size)).astype(np.float32) for size in (height, width)]
    values[generator.random((height, width)) < 0.2] = 0
    for side in sides:
        side[generator.random(side.size) < 0.2] = 0
    rows, columns = np.zeros((2, height)), np.zeros((2, width))
    matrix_kernels.quotients(values, *sides, rows, columns)
    products = np.multiply.outer(*sides)
    used = (values > 0) & (products > 0)
    wide = np.divide(values, products, where=used, out=np.zeros((height, width)), dtype=np.float64)
    assert rows[0] == pytest.approx(wide.sum(axis=1), rel=1e-6)
    assert columns[0] == pytest.approx(wide.sum(axis=0), rel=1e-6)
    assert np.array_equal(rows[1], used.sum(axis=1))
    assert np.array_equal(columns[1], used.sum(axis=0))
