import math

import pytest

from shrinkpoint.search.measure import relative_rise


@pytest.mark.parametrize(
    ("loss", "baseline", "rise"),
    [
        (2.02, 2.0, 0.01),
        (-1.98, -2.0, 0.01),  # a metric to be lowered
        (-2.02, -2.0, -0.01),
        (0.0, 0.0, 0.0),
        (-1.0, 0.0, 0.0),
        (1e-9, 0.0, math.inf),
        (math.nan, 1.0, math.inf),
        (1.0, math.nan, math.inf),
        (-math.inf, 1.0, math.inf),
        (1.0, 5e-324, math.inf),
    ],
)
def test_a_rise_is_relative_to_the_size_of_the_loss(loss, baseline, rise):
    assert relative_rise(loss, baseline) == pytest.approx(rise)


def test_an_improvement_has_a_size_for_manifests_hold_no_infinity():
    assert -math.inf < relative_rise(-1.0, 5e-324) < -1e300
