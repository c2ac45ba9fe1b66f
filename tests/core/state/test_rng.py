import random

import numpy as np
import pytest
import torch
from support.containers import identical

from shrinkpoint.errors import FormatError
from shrinkpoint.state.rng import capture_rng, restore_rng
from shrinkpoint.state.training import TrainingState


def draw():
    return [torch.randn(3).tolist(), random.random(), random.gauss(0, 1), np.random.randn(3).tolist()]


def test_generators_continue_as_if_nothing_had_been_drawn():
    draw()  # an odd number of gauss values leaves one cached
    state = capture_rng()
    expected = draw(), draw()
    for _ in range(2):
        restore_rng(state)
        assert (draw(), draw()) == expected


def test_the_state_survives_a_checkpoint():
    draw()
    state = capture_rng()
    expected = draw()
    back = TrainingState.capture(state).to_object()
    assert identical(back, state)
    restore_rng(back)
    assert draw() == expected


@pytest.mark.parametrize("kind", ["PCG64", "PCG64DXSM", "Philox", "SFC64"])
def test_numpys_global_generator_may_draw_from_another_source(kind):
    before = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(getattr(np.random, kind)(3))
        draw()
        state = TrainingState.capture(capture_rng()).to_object()
        expected = draw()
        np.random.set_bit_generator(np.random.MT19937(4))
        of_ordinary, others = capture_rng(), draw()
        restore_rng(state)
        assert draw() == expected
        restore_rng(of_ordinary)
        assert draw() == others
    finally:
        np.random.set_bit_generator(before)


def test_only_numpys_own_sources_are_taken_from_a_checkpoint():
    before = capture_rng()
    with pytest.raises(FormatError, match="'seed'"):
        restore_rng(before | {"numpy": {"bit_generator": "seed", "state": {}}})
    assert identical(capture_rng()["numpy"], before["numpy"])


def test_capturing_draws_nothing():
    before = capture_rng()
    capture_rng()
    assert identical(capture_rng(), before)


def test_a_gpus_generator_is_left_out_where_there_is_none():
    state = capture_rng() | {"cuda": torch.get_rng_state()}
    restore_rng(state)


def test_the_default_device_is_not_asked():
    with torch.device("meta"):
        state = capture_rng()
        expected = [random.random(), np.random.rand()]
        restore_rng(TrainingState.capture(state).to_object())
        assert [random.random(), np.random.rand()] == expected
