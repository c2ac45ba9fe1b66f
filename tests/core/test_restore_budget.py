import math

import pytest

from shrinkpoint.errors import ConfigError
from shrinkpoint.search.healing import Healing
from shrinkpoint.search.restores import RestoreBudget


def test_each_restore_has_an_equal_share_of_what_is_left():
    budget = RestoreBudget(0.01, 4)
    assert budget.share == pytest.approx(0.0025)
    budget.restored(0.001)
    assert budget.left == pytest.approx(0.009)
    assert budget.share == pytest.approx(0.003)


def test_as_many_restores_as_planned_at_their_full_share_cost_what_is_allowed():
    budget = RestoreBudget(0.01, 10)
    for _ in range(10):
        budget.restored(budget.share)
    assert budget.spent == pytest.approx(0.01)
    assert budget.left == pytest.approx(0.0)


def test_more_restores_than_planned_never_exceed_the_bound():
    budget = RestoreBudget(0.01, 2)
    for _ in range(50):
        budget.restored(budget.share)
    assert budget.spent <= 0.01 + 1e-12


def test_a_restore_that_improved_the_loss_pays_for_no_other():
    budget = RestoreBudget(0.01, 10)
    budget.restored(-0.5)
    budget.restored(math.nan)
    assert (budget.spent, budget.made) == (0.0, 2)


def test_the_budgets_state_moves():
    budget, again = RestoreBudget(0.01, 10), RestoreBudget(0.01, 10)
    budget.restored(0.002)
    again.load_state_dict(budget.state_dict())
    assert (again.spent, again.made) == (0.002, 1)


@pytest.mark.parametrize(
    "state",
    [{}, {"spent": 0.1}, {"spent": -1.0, "restores": 1}, {"spent": math.inf, "restores": 1}, {"spent": 0.0, "restores": True},
     {"spent": "0", "restores": 1}],
)  # fmt: skip
def test_another_budgets_state_is_refused(state):
    with pytest.raises(ConfigError, match="malformed"):
        RestoreBudget(0.01, 10).load_state_dict(state)


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def test_measuring_waits_until_training_has_paid_for_it():
    clock = Clock()
    healing = Healing(20, 0.01, clock)
    due = []
    for step in range(0, 20_001, 1000):
        healing.saw(step)
        due.append(healing.due)
        if healing.due:
            healing.measured(0.001, {5: 0.001, 20: 0.0005}, seconds=60.0)
        clock.now += 1000.0  # a second a step
    # 2 * 20 steps and their margin cost 60 s, which are there after 6000 s, and again 6000 s later
    assert [index for index, ready in enumerate(due) if ready] == [6, 12, 18]


@pytest.mark.parametrize(
    ("at_restore", "left", "remains"),
    [(0.002, 0.001, 0.5), (0.002, -0.001, 0.25), (0.001, 0.004, 1.0), (0.001, math.inf, 1.0), (0.00001, 0.00001, 1.0)],
)  # fmt: skip
def test_what_remains_is_between_a_quarter_and_all(at_restore, left, remains):
    healing = Healing(4, 0.01)
    for _ in range(12):
        healing.measured(at_restore, {1: 0.0, 4: left}, 1.0)
    assert healing.remains == pytest.approx(remains, rel=1e-3)


def test_a_better_measurement_is_believed_half_and_a_worse_one_at_once():
    healing = Healing(4, 0.01)
    healing.measured(0.002, {1: 0.0, 4: -0.001}, 1.0)
    assert healing.remains == pytest.approx(0.625)
    healing.measured(0.002, {1: 0.0, 4: 0.0016}, 1.0)
    assert healing.remains == pytest.approx(0.8)


def test_no_steps_measure_nothing():
    healing = Healing(0, math.inf)
    healing.saw(1)
    assert not healing.due
    assert Healing(1, math.inf).marks == (1,)
    assert Healing(20, math.inf).marks == (5, 20)


@pytest.mark.parametrize("remains", [None, 0.1, 1.5, "1", True])
def test_another_state_of_healing_is_refused(remains):
    with pytest.raises(ConfigError, match="malformed"):
        Healing(4, 0.01).load_state_dict({"remains": remains})
