"""Rises with intervals: luck cancels in a pair, and the interval covers the truth."""

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shrinkpoint.quality.measurement import (
    ABSOLUTE,
    CONFIDENCE,
    EXACT,
    History,
    Rise,
    absolute_error,
    measured_rise,
    pooled,
    relative_rise,
)


@pytest.mark.parametrize(
    ("loss", "baseline", "rise"),
    [
        (2.02, 2.0, 0.01),
        (-1.98, -2.0, 0.01),  # a metric to be lowered
        (-2.02, -2.0, -0.01),
        (0.0, 0.0, 0.0),
        (1e-9, 0.0, 0.1),  # of the floor, 1e-8
        (2e-10, 1e-10, 0.01),
        (math.nan, 1.0, math.inf),
        (1.0, math.nan, math.inf),
        (-math.inf, 1.0, math.inf),
        (1e305, 5e-324, math.inf),
    ],
)
def test_a_rise_is_relative_to_the_size_of_the_loss(loss, baseline, rise):
    assert relative_rise(loss, baseline) == pytest.approx(rise)


def test_an_improvement_has_a_size_for_manifests_hold_no_infinity():
    assert -math.inf < relative_rise(-1e305, 5e-324) < -1e300


finite = st.floats(-1, 1)


@given(st.lists(st.tuples(finite, st.floats(0, 1), st.floats(0.5, 2)), min_size=1, max_size=8))
def test_in_a_pair_the_luck_of_a_quadratic_loss_cancels(batches):
    """Each batch has a gradient and a curvature of its own along the error."""
    plus = [base + gradient + curvature for gradient, curvature, base in batches]
    minus = [base - gradient + curvature for gradient, curvature, base in batches]
    baseline = [base for _, _, base in batches]
    rise = measured_rise(baseline, plus, minus)
    mean = sum(baseline) / len(batches)
    assert rise.mean == pytest.approx(sum(c for _, c, _ in batches) / len(batches) / mean, abs=1e-9)
    assert rise.first_order == pytest.approx(sum(g for g, _, _ in batches) / len(batches) / mean, abs=1e-9)
    without = measured_rise(baseline, [b + c for _, c, b in batches], [b + c for _, c, b in batches])
    assert (rise.low, rise.high) == pytest.approx((without.low, without.high), abs=1e-9)


@settings(max_examples=20, deadline=None)
@given(
    st.integers(0, 2**32),
    st.sampled_from([(2, 0.42), (4, 0.42), (8, 0.42), (8, 0.7), (40, 0.7), (40, 2.0)]),
    st.sampled_from([1e-4, 1e-3, 1e-2]),
)
def test_the_upper_end_of_normal_batches_covers_the_truth(seed, batches_and_spread, truth):
    """With few batches where each one's harm varies by 42 % (the mean of two by 30 %), with many where it varies by more."""
    (batches, spread), rng, above = batches_and_spread, random.Random(seed), 0
    runs = 3000  # the least of all is 92 %, of which 600 runs would show less than 90 % in one case out of twenty
    for _ in range(runs):
        deviation = math.hypot(spread * truth, ABSOLUTE)
        losses = [1 + rng.gauss(truth, deviation) for _ in range(batches)]
        above += truth <= measured_rise([1.0] * batches, losses).high
    assert above >= 0.9 * runs


def test_more_batches_narrow_the_interval_and_their_spread_widens_it():
    alike = [measured_rise([1.0] * n, [1.001] * n).error for n in (1, 2, 4, 8)]
    assert alike == sorted(alike, reverse=True)
    assert alike[0] == pytest.approx(0.5 * 0.001 + ABSOLUTE)
    unlike = measured_rise([1.0, 1.0], [1.0, 1.002])
    assert unlike.mean == pytest.approx(0.001)
    assert unlike.error > alike[1]


def test_batches_are_paired():
    """Losses that differ by batch a hundred times as much as they rise."""
    rise = measured_rise([1.0, 3.0, 0.5], [1.001, 3.003, 0.5005])
    assert rise.mean == pytest.approx(0.001)
    assert rise.error < 0.0006


def test_where_the_numbers_of_batches_differ_only_means_are_compared():
    assert measured_rise([1.0], [1.0, 3.0]).mean == pytest.approx(1.0)
    assert measured_rise([1.0], [1.0, 3.0]).batches == 1
    assert measured_rise([2.0], [1.0, 3.0], [1.0]).first_order == pytest.approx(0.25)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_pair_of_which_one_loss_is_not_finite_is_not_finite(bad):
    for rise in (
        measured_rise([1, 1], [bad, 1], [1, 1]),
        measured_rise([1, 1], [1, 1], [1, bad]),
        measured_rise([1, bad], [1, 1]),
    ):
        assert rise.mean == rise.high == math.inf
        assert not rise.within(1e9)


def test_numbers_that_overflow_are_never_within_a_bound():
    assert not measured_rise([1e-300, 1e-300], [1e308, -1e308]).within(1e9)
    assert not measured_rise([0.0], [1e308], [1e308]).within(1e9)


def test_the_absolute_part_is_a_fifth_of_small_shares():
    assert absolute_error(0.01) == absolute_error(0.001) == ABSOLUTE
    assert absolute_error(0.0001) == pytest.approx(0.00002)
    assert absolute_error(0.0) > 0


def test_exactness_needs_no_interval():
    assert EXACT.low == EXACT.mean == EXACT.high == 0.0
    assert pooled(EXACT, Rise(0.01, 0.001)) == EXACT


def test_earlier_measurements_narrow_the_interval():
    own = measured_rise([1.0], [1.001])
    both = pooled(own, Rise(0.0008, 0.0004))
    assert 0.0008 < both.mean < 0.001
    assert both.error < min(own.error, 0.0004)
    assert pooled(own, None) == own


def test_a_fall_is_pooled_as_no_rise():
    fall = pooled(measured_rise([1.0], [0.9]), Rise(0.0008, 0.0004))
    assert 0.0 <= fall.mean <= 0.0008
    assert fall.high > 0.0008


def test_what_cannot_be_explained_stands_alone():
    own = measured_rise([1.0, 1.0], [1.01, 1.01])
    assert pooled(own, Rise(0.0005, 0.0002)) == own
    assert pooled(Rise(math.inf, batches=2), Rise(0.0005, 0.0002)).mean == math.inf


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([1, 2, 4]), st.floats(1e-4, 1e-2))
def test_pooled_intervals_cover_the_truth_that_drifts(seed, batches, truth):
    """Ten saves whose harm varies by 15 % each, measured with an error of 30 % on two batches."""
    rng, covered, made = random.Random(seed), 0, 0
    for _ in range(40):
        history = None
        for _ in range(10):
            here = truth * math.exp(0.15 * rng.gauss(0, 1))
            spread = math.hypot(0.3 * here, ABSOLUTE) * math.sqrt(2 if batches > 1 else 1)
            losses = [1 + rng.gauss(here, spread) for _ in range(batches)]
            rise = pooled(
                measured_rise([1.0] * batches, losses), history.aged().predicted(1.0) if history else None
            )
            history = History.of(1.0, rise, history)
            covered += here <= rise.high
            made += 1
    assert covered >= 0.93 * made


def test_a_history_goes_with_the_square_of_the_scale_and_trusts_it_less_far_away():
    history = History(0.5, 0.0004, 0.0001)
    same, twice, half = (history.predicted(scale) for scale in (0.5, 1.0, 0.25))
    assert (same.mean, same.error) == (0.0004, 0.0001)
    assert twice.mean == pytest.approx(0.0016)
    assert half.mean == pytest.approx(0.0001)
    assert twice.error / twice.mean == pytest.approx(half.error / half.mean)
    assert twice.error / twice.mean > same.error / same.mean
    assert history.aged().error > history.error
    assert History.of(1.0, Rise(math.inf, batches=2), history) is history
    assert History.of(1.0, EXACT, None) is None


def test_the_ends_of_the_interval():
    rise = Rise(0.002, 0.001)
    assert (rise.low, rise.high) == pytest.approx((0.002 - CONFIDENCE * 0.001, 0.002 + CONFIDENCE * 0.001))
    assert rise.times(0.5).high == pytest.approx(rise.high / 2)
    assert rise.within(0.004)
    assert not rise.within(0.0036)
