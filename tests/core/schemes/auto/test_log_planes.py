"""What is kept of log levels takes a byte for each element where it can, and gives the very plane."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shrinkpoint.schemes.auto.log_planes import LogPlanes
from shrinkpoint.schemes.auto.log_residuals import CHUNK, HIGH, LOW, NONE, offsets_in, offsets_of

STEPS = st.integers(1, 32)
SEEDS = st.integers(0, 2**32 - 1)


def exponents_of(levels, step, seed):
    """Those that levels stand for; zeros at every seventh."""
    found = (levels * step + offsets_of(seed, levels.size, step)).astype(np.int16)
    found[::7] = NONE
    return found


@settings(max_examples=50)
@given(STEPS, SEEDS, st.integers(0, 254), st.integers(0, 99))
def test_levels_within_a_byte_take_one_byte(step, seed, span, drawn):
    rng = np.random.default_rng(drawn)
    span = min(span, (HIGH - LOW) // step - 1)
    lowest = int(rng.integers(-(-LOW // step), (HIGH - step) // step - span + 1))
    exponents = exponents_of(rng.integers(lowest, lowest + span + 1, 500), step, seed)
    planes = LogPlanes(exponents, step, seed)
    assert planes.nbytes == planes.size == 500
    assert list(planes) == ["exponent"]
    assert planes["exponent"].tobytes() == exponents.tobytes()


@settings(max_examples=50)
@given(STEPS, SEEDS, st.integers(0, 99))
def test_other_exponents_are_kept_as_they_are(step, seed, drawn):
    rng = np.random.default_rng(drawn)
    exponents = rng.integers(LOW, HIGH + 1, 500).astype(np.int16)
    exponents[rng.random(500) < 0.1] = NONE
    assert LogPlanes(exponents, step, seed)["exponent"].tobytes() == exponents.tobytes()


@pytest.mark.parametrize(("span", "each"), [(254, 1), (255, 2)])
def test_a_byte_holds_255_levels(span, each):
    exponents = np.full(10, 0, np.int16)
    exponents[3], exponents[5] = span, NONE
    planes = LogPlanes(exponents, 1, 0)
    assert planes.nbytes == each * 10
    assert planes["exponent"].tobytes() == exponents.tobytes()


@pytest.mark.parametrize("size", [0, 1, CHUNK + 3])
def test_zeros_alone(size):
    exponents = np.full(size, NONE)
    planes = LogPlanes(exponents, 8, 3)
    assert planes.nbytes == size
    assert planes["exponent"].tobytes() == exponents.tobytes()


def test_there_is_no_other_plane():
    with pytest.raises(KeyError):
        LogPlanes(np.zeros(3, np.int16), 8, 0)["value"]


def test_dither_does_not_depend_on_the_part_it_is_asked_for():
    whole = offsets_of(5, 1000, 24)
    assert np.array_equal(whole[300:700], offsets_in(5, slice(300, 700), 24))
    assert whole.max() < 24
