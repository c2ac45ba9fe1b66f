import math

import pytest

from shrinkpoint.errors import ConfigError
from shrinkpoint.search.scale import ScaleSearch


class Model:
    """A loss that rises with the square of the scale."""

    def __init__(self, slope, baseline=2.0):
        self.slope, self.baseline, self.asked = slope, baseline, []

    def __call__(self, scale):
        self.asked.append(scale)
        return self.baseline * (1 + (0 if scale is None else self.slope * scale**2))


@pytest.mark.parametrize("slope", [1e-5, 1e-3, 2e-2, 0.3])
@pytest.mark.parametrize("allowed", [1e-3, 1e-2])
def test_what_is_chosen_holds_and_is_found_in_few_evaluations(slope, allowed):
    search, model = ScaleSearch(), Model(slope)
    for save in range(12):
        choice = search.choose(model, allowed, base=save % 4 == 0)
        assert choice.degradation == pytest.approx(slope * choice.scale**2)
        assert choice.degradation <= allowed
        assert choice.evaluations <= (4 if save == 0 else 2)
    assert choice.scale == 4.0 or choice.degradation > allowed / 3
    assert len(model.asked) < 12 * 2 + 8


def test_the_mildest_steps_that_still_break_the_bound_are_not_taken():
    choice = ScaleSearch().choose(Model(100.0), 1e-3, base=True)
    assert choice.scale is None
    assert choice.degradation is None
    assert "stored exactly" in choice.reason


def test_nothing_left_asks_for_nothing_but_the_baseline():
    model = Model(0.0)
    assert ScaleSearch().choose(model, 0.0, base=True).scale is None
    assert model.asked == [None]


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_not_finite(loss):
    choice = ScaleSearch().choose(lambda scale: loss, 0.01, base=True)
    assert choice.scale is None
    assert "not finite" in choice.reason


def test_a_loss_that_only_the_restored_weights_make_infinite():
    def loss(scale):
        return math.inf if scale is not None and scale > 0.1 else 1.0

    choice = ScaleSearch().choose(loss, 0.01, base=True)
    assert choice.scale is not None
    assert choice.scale <= 0.1


def test_within_a_chain_steps_only_become_narrower():
    search = ScaleSearch()
    first = search.choose(Model(1e-2), 1e-3, base=True).scale
    assert search.choose(Model(1e-6), 1e-3, base=False).scale == first
    assert search.choose(Model(1e-1), 1e-3, base=False).scale < first
    later = [search.choose(Model(1e-6), 1e-3, base=True).scale for _ in range(9)]
    assert later[-1] > first


def test_a_fixed_scale_is_the_only_one_considered():
    model = Model(1e-2)
    assert ScaleSearch().choose(model, 1e-3, base=True, fixed=0.7).scale is None
    assert set(model.asked) == {None, 0.7}
    assert ScaleSearch().choose(model, 1e-2, base=True, fixed=0.7).scale == 0.7


def test_the_state_moves_to_another_search():
    first, second = ScaleSearch(), ScaleSearch()
    scale = first.choose(Model(5e-3), 1e-3, base=True).scale
    second.load_state_dict(first.state_dict())
    model = Model(5e-3)
    assert second.choose(model, 1e-3, base=False).scale == scale
    assert len(model.asked) == 2


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"version": 2, "rung": 0, "seen": []},
        {"version": 1, "rung": 99, "seen": []},
        {"version": 1, "rung": 0.0, "seen": []},
        {"version": 1, "rung": 0, "seen": [math.nan]},
        {"version": 1, "rung": 0, "seen": None},
    ],
)
def test_another_state_is_refused(state):
    with pytest.raises(ConfigError, match="start a new search"):
        ScaleSearch().load_state_dict(state)


def test_a_bound_out_of_reach_costs_two_evaluations_a_save():
    search, steep, mild = ScaleSearch(), Model(100.0), Model(1e-3)
    search.choose(steep, 1e-3, base=True)
    for _ in range(5):
        steep.asked.clear()
        choice = search.choose(steep, 1e-3, base=False)
        assert choice.scale is None
        assert choice.evaluations == 1
        assert len(steep.asked) == 2
    assert search.choose(mild, 1e-3, base=False).scale > 0.3
    assert search.choose(mild, 1e-3, base=False).evaluations == 1


def test_in_a_chain_steps_become_narrower_by_enough_to_be_exchanged():
    search = ScaleSearch()
    before = search.choose(Model(1e-3), 1e-3, base=True).scale
    after = search.choose(Model(1.001e-3 / before**2), 1e-3, base=False)
    assert after.scale <= before * 2**-0.75
    assert after.evaluations == 2


def test_where_small_steps_cost_much_they_become_smaller_before_all_is_exact():
    """Right after the start, with embeddings far larger than the other weights."""
    search, model = ScaleSearch(), Model(3.0)
    choice = search.choose(model, 1e-3, base=True)
    assert choice.scale is not None
    assert choice.degradation <= 1e-3
