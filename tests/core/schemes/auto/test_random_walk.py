import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shrinkpoint.arrays import Float64s
from shrinkpoint.entropy.lanes.trellis import NOISE
from shrinkpoint.schemes.auto.random_walk import (
    EXPONENTS,
    LAST_WALK,
    NO_WALK,
    Expectation,
    measure_walk,
    variances,
)
from shrinkpoint.schemes.auto.row_and_column_steps import MAX_EXPONENT

MIDDLE = 2 * MAX_EXPONENT
"""The exponent of the tensor's own step."""

UNIT = 80
"""The code of a walk of a whole square step: one is four more for each octave."""

NEAR = slice(MIDDLE - 24, MIDDLE + 25)
"""Exponents in which the greatest walk is far longer than a step."""

HALF_A_CODE = 2**0.125
CODES = st.integers(NO_WALK, LAST_WALK)


def only(exponent: int = MIDDLE, count: float = 1.0) -> Float64s:
    """Counts of a tensor all of whose steps are the same."""
    counts = np.zeros(EXPONENTS)
    counts[exponent] = count
    return counts


def walk_of(code: int, exponent: int = MIDDLE) -> float:
    """In square steps of an exponent, from the definition: steps are two octaves of squares per octave."""
    return 0.0 if code == NO_WALK else 2.0 ** ((code - UNIT) / 4 - (exponent - MIDDLE) / 2)


def settled(walk: float, noise: float) -> float:
    """What the variance of a filter settles at, by going on until it does."""
    left = noise
    for _ in range(20_000):
        before = left + walk
        after = before * noise / (before + noise)
        if abs(after - left) < 1e-15 * left:
            break
        left = after
    return left


def kalman(before: float, walk: float, noise: float) -> tuple[float, float]:
    """The filter's gain for the noise, and the variance of the weight then: both states, weight and noise, as matrices."""
    covariance, seen = np.diag([before + walk, noise]), np.array([[1.0, 1.0]])
    gains = covariance @ seen.T / (seen @ covariance @ seen.T)
    after = (np.eye(2) - gains @ seen) @ covariance
    return float(gains[1, 0]), float(after[0, 0])


@pytest.mark.parametrize("code", [20, 60, 76, 80, 90, 120])
def test_variances_are_what_a_filter_settles_at(code: int) -> None:
    found = variances(code)
    for exponent in (0, 10, 40, MIDDLE, 90, EXPONENTS - 1):
        walk = walk_of(code, exponent)
        if walk > 1e-6:  # others take long to settle
            assert found[exponent] == pytest.approx(settled(walk, NOISE), rel=1e-6)


def test_nothing_is_unknown_without_a_walk_and_as_much_as_noise_with_the_greatest() -> None:
    assert not variances(NO_WALK).any()
    np.testing.assert_allclose(variances(LAST_WALK)[NEAR], NOISE, rtol=1e-3)
    codes = np.array([variances(code)[NEAR] for code in range(NO_WALK, LAST_WALK + 1)])
    assert bool((np.diff(codes, axis=0) > 0).all())
    assert bool((codes[-1] < NOISE).all())
    assert bool((np.diff(codes[1:], axis=1) < 0).all())  # a walk is shorter in wider steps


@settings(max_examples=200)
@given(CODES, CODES)
def test_gains_are_those_of_a_filter_of_weight_and_noise(known: int, walk: int) -> None:
    expectation, before = Expectation(known, walk), variances(known)
    for exponent in range(EXPONENTS):
        gain, left = kalman(float(before[exponent]), walk_of(walk, exponent), NOISE)
        assert abs(int(expectation.gains[exponent]) - 256 * gain) <= 0.5001
        if exponent == MIDDLE:
            check_known(expectation.variance_code, left, NOISE)
    assert not expectation.gains[EXPONENTS:].any()


def check_known(known: int, left: float, noise: float) -> None:
    """It is told as the walk that a filter would have settled at this variance after, to half a code and within the limits."""
    walk = left**2 / max(noise - left, 1e-9)
    if known > NO_WALK:
        assert walk_of(known) <= walk * HALF_A_CODE * 1.001
    if known < LAST_WALK:
        assert 2.0 ** ((known - UNIT) / 4) >= walk / HALF_A_CODE / 1.001


def test_a_base_expects_nothing() -> None:
    expectation = Expectation(None, 100)
    assert expectation.variance_code == LAST_WALK
    assert not expectation.gains.any()
    assert expectation.gains.shape == (256,)


def test_weights_that_are_where_they_were_make_all_that_is_seen_noise() -> None:
    """And those that have gone far make it all their own."""
    assert bool((Expectation(NO_WALK, NO_WALK).gains[:EXPONENTS] == 256).all())
    assert Expectation(NO_WALK, NO_WALK).variance_code == NO_WALK
    assert not Expectation(40, LAST_WALK).gains[NEAR].any()
    assert Expectation(40, LAST_WALK).variance_code > LAST_WALK - 12


def test_a_long_walk_is_known_as_well_as_its_filter_settles() -> None:
    known: int | None = None
    for code in (60, 70, 80, 100):
        for _ in range(60):
            known = Expectation(known, code).variance_code
        assert known is not None
        assert abs(known - code) <= 2  # each save rounds it to a quarter octave


def walked(code: int, known: int, exponents: list[int], seed: int = 0) -> tuple[Float64s, Float64s]:
    """Squares and counts of weights that walked, of which was known as well as that where they had been."""
    rng = np.random.default_rng(seed)
    squares, counts = np.zeros(EXPONENTS), np.zeros(EXPONENTS)
    for exponent in exponents:
        spread = (walk_of(code, exponent) + float(variances(known)[exponent])) ** 0.5
        squares[exponent] = float(((spread * rng.standard_normal(40_000)) ** 2).sum())
        counts[exponent] = 40_000
    return squares, counts


@pytest.mark.parametrize(
    "exponents",
    [[MIDDLE], [MIDDLE - 4, MIDDLE, MIDDLE + 4], [MIDDLE - 12, MIDDLE + 12], list(range(EXPONENTS)[NEAR])],
)
@pytest.mark.parametrize("code", [64, 72, 80, 90, 120, 150])
def test_a_walk_is_found(code: int, exponents: list[int]) -> None:
    """One number tells how far weights of all steps have walked."""
    for known in (NO_WALK, 50, 64):
        squares, counts = walked(code, known, exponents)
        assert abs(measure_walk(squares, counts, known) - code) <= 1


@pytest.mark.parametrize("known", [70, 80, 100, LAST_WALK])
def test_a_walk_that_is_lost_in_what_was_not_known_is_not_none(known: int) -> None:
    """A sixteenth of what was seen, since how well places are known is an estimate too: otherwise gains would be nothing for
    ever."""
    squares, counts = only(count=1000.0 * float(variances(known)[MIDDLE])), only(count=1000.0)
    for factor in (0.5, 0.9, 1.0):
        found = measure_walk(factor * squares, counts, known)
        least = factor * float(variances(known)[MIDDLE]) / 16
        assert walk_of(found) == pytest.approx(least, rel=0.1)


def test_a_walk_has_limits() -> None:
    assert measure_walk(np.zeros(EXPONENTS), only(count=5.0), NO_WALK) == NO_WALK
    assert measure_walk(np.zeros(EXPONENTS), only(count=5.0), LAST_WALK) == NO_WALK
    assert measure_walk(np.zeros(EXPONENTS), np.zeros(EXPONENTS), NO_WALK) == NO_WALK
    assert measure_walk(only(count=1e-30), only(), NO_WALK) == NO_WALK
    assert measure_walk(only(count=1e40), only(), NO_WALK) == LAST_WALK
    assert walk_of(LAST_WALK) == 2.0**20


def test_a_walk_beyond_all_numbers_is_the_greatest() -> None:
    assert measure_walk(only(count=math.inf), only(), NO_WALK) == LAST_WALK


def test_a_filter_that_is_told_the_walk_follows_weights() -> None:
    """Weights and offsets of a simulated chain: errors are as large as the filter says, step by step."""
    rng, code, count = np.random.default_rng(1), 68, 60_000
    walk, weight = walk_of(code), np.zeros(count)
    mean: Any = weight + NOISE**0.5 * rng.standard_normal(count)
    known = LAST_WALK
    for _ in range(8):
        weight = weight + walk**0.5 * rng.standard_normal(count)
        expectation = Expectation(known, code)
        seen = weight + NOISE**0.5 * rng.standard_normal(count)
        mean = seen - int(expectation.gains[MIDDLE]) / 256 * (seen - mean)
        known = expectation.variance_code
        left = float(((mean - weight) ** 2).mean())
        assert left == pytest.approx(float(variances(known)[MIDDLE]), rel=0.1)
        assert left < NOISE
