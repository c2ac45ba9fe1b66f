"""Garbage is searched for less often for a while, and then as before."""

import gc
from collections.abc import Iterator

import pytest

from shrinkpoint.runtime.jit import rarely_collected


@pytest.fixture(autouse=True)
def _usual() -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    yield
    gc.set_threshold(*before)


def test_less_often_and_then_as_before() -> None:
    with rarely_collected():
        assert gc.get_threshold()[0] > 700
        with rarely_collected():
            pass
        assert gc.get_threshold()[0] > 700
    assert gc.get_threshold() == (700, 10, 10)


def test_as_before_after_an_error() -> None:
    with pytest.raises(KeyError), rarely_collected():
        raise KeyError
    assert gc.get_threshold() == (700, 10, 10)


@pytest.mark.parametrize(
    "chosen", [(0, 10, 10), (1_000_000, 5, 5)], ids=["by hand only", "less often already"]
)
def test_a_program_that_takes_care_of_it_itself_is_left_alone(chosen) -> None:
    gc.set_threshold(*chosen)
    with rarely_collected():
        assert gc.get_threshold() == chosen
    assert gc.get_threshold() == chosen


def test_what_is_set_meanwhile_remains() -> None:
    with rarely_collected():
        gc.set_threshold(0)
    assert gc.get_threshold()[0] == 0
