"""What restores may cost a run, what is left of it some steps later, and who pays for measuring that."""

import json
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shrinkpoint.errors import ConfigError
from shrinkpoint.quality.budget import RecoveryEstimate, RestoreBudget
from shrinkpoint.quality.measurement import CONFIDENCE, Rise, lasting_rises, measured_rise


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=40), st.integers(1, 12))
def test_restores_whose_upper_ends_keep_their_share_never_exceed_the_bound(parts, planned):
    budget = RestoreBudget(0.01, planned)
    for part in parts:
        before = budget.share
        budget.restored(part * before, before)
        assert 0 <= budget.spent <= budget.spent_high <= 0.01 + 1e-12


def test_the_accounted_upper_end_is_above_the_truth():
    """Each restore's true cost is normal around the measured one."""
    rng, kept = random.Random(0), 0
    for _ in range(500):
        budget, truth = RestoreBudget(0.01, 10), 0.0
        for _ in range(10):
            cost = rng.uniform(0, 0.0008)
            error = 0.5 * cost + 0.0001
            budget.restored(cost, cost + CONFIDENCE * error)
            truth += max(0.0, rng.gauss(cost, error))
        kept += truth <= budget.spent_high
    assert kept >= 0.93 * 500


def test_a_restore_that_improved_the_loss_pays_for_no_other():
    budget = RestoreBudget(0.01, 10)
    budget.restored(-0.5, -0.4)
    budget.restored(math.nan, math.inf)
    assert (budget.spent, budget.spent_high, budget.made) == (0.0, 0.0, 2)


@pytest.mark.parametrize(
    "state",
    [{}, {"spent": 0.1}, {"spent": -1.0, "spent_high": 0.0, "restores": 1}, {"spent": math.inf, "spent_high": math.inf, "restores": 1},
     {"spent": 0.0, "spent_high": 0.0, "restores": True}, {"spent": "0", "spent_high": 0.0, "restores": 1},
     {"spent": 0.2, "spent_high": 0.1, "restores": 1}],
)  # fmt: skip
def test_another_budgets_state_is_refused(state):
    with pytest.raises(ConfigError, match="malformed"):
        RestoreBudget(0.01, 10).load_state_dict(state)


def estimate(steps, overhead):
    return RecoveryEstimate(steps, overhead, lambda: 0.0, lambda: 0.0)


class Training:
    """A second a step on a fake clock; what is spent on measuring is added to it."""

    def __init__(self, steps=20, overhead=0.01, recovery=None, step=0):
        self.now, self.spent, self.step, self.overhead, self.steps = 0.0, 0.0, step, overhead, steps
        self.recovery = recovery or self.fresh()
        self.probes = []

    def fresh(self):
        return RecoveryEstimate(self.steps, self.overhead, lambda: self.spent, lambda: self.now)

    def restart(self):
        state = json.loads(json.dumps(self.recovery.state_dict(), allow_nan=False))
        self.now += 1000.0  # the process that starts has nothing to do with the time in between
        self.recovery = self.fresh()
        self.recovery.load_state_dict(state)

    def pay(self, seconds):
        self.spent += seconds
        self.now += seconds

    def save(self, every, *, options="auto", scale=1.0, evaluations=0.0):
        self.now += every
        self.step += every
        self.recovery.saw(self.step)
        self.pay(evaluations)
        marks = self.recovery.marks(options, scale)
        if marks:
            self.probes.append((self.step, marks[-1]))
            self.pay(2 * marks[-1] * 1.0)
            self.recovery.measured(
                Rise(0.001, 0.0003), {mark: Rise(0.0005, 0.0003) for mark in marks}, options, scale
            )
        return marks


def test_the_first_probe_is_short_and_paid_on_credit_and_later_ones_wait_for_the_long_one():
    training = Training()
    for _ in range(100):
        training.save(100)
    assert training.probes[0] == (100, 5)
    assert {length for _, length in training.probes[1:]} == {20}
    assert len(training.probes) > 1
    # the long one costs 2 * 20 steps and the margin, out of a hundredth of the time
    first, second = training.probes[0][0], training.probes[1][0]
    assert second - first > 4800
    assert training.spent <= 0.01 * training.now


def test_new_settings_are_probed_soon_and_the_same_ones_are_not():
    training = Training()
    training.save(1000)
    assert not training.save(300)
    assert not training.save(300, scale=2.0)
    assert training.save(300, scale=2.1) == (2, 5)
    assert training.save(2000, options="other") == (2, 5)
    assert not training.save(200, options="other")


def test_the_debt_has_a_limit():
    training = Training()
    lowest = 0.0
    for save in range(50):
        training.save(20, options=f"settings {save}")
        lowest = min(lowest, 0.01 * training.now - training.spent)
    assert len(training.probes) >= 1
    assert lowest >= -2 * 2 * 5 * 1.2 - 1
    slow = Training()
    slow.now = 400.0 * 20  # 20 seconds a step: a probe costs more than half an hour's share
    slow.recovery.saw(400)
    assert slow.recovery.marks("auto", 1.0) == (2, 5) or slow.recovery._budget_s < 2 * 5 * 1.2 * 20 - 18
    slow.recovery._budget_s = 0.0
    assert slow.recovery.marks("auto", 1.0) == ()


def test_evaluations_are_paid_from_the_same_purse():
    training = Training()
    for _ in range(200):
        training.save(100, evaluations=1.0)  # all that there is
    assert [length for _, length in training.probes] == [5]


def test_the_purse_and_its_debt_survive_restarts():
    training = Training()
    training.save(100)
    before = training.recovery.state_dict()
    assert before["budget_s"] < 0
    for _ in range(10):
        training.restart()
        training.step = 100
        after = training.recovery.state_dict()
        assert after.pop("budget_s") == pytest.approx(before["budget_s"])
        assert after == {name: value for name, value in before.items() if name != "budget_s"}
        assert not training.save(0)  # neither a new credit nor a new probe
    rich = Training()
    rich.save(100)
    for _ in range(12):  # none of these processes lives long enough to pay for a probe by itself
        rich.save(500)
        rich.restart()
    assert 20 in [length for _, length in rich.probes]


@pytest.mark.parametrize(
    ("at_restore", "left", "least", "most"),
    [(0.002, 0.001, 0.45, 0.6), (0.002, -0.001, 0.25, 0.25), (0.001, 0.004, 3.5, 4.5), (0.001, math.inf, 1.0, 1.0)],
)  # fmt: skip
def test_what_remains_follows_what_probes_find(at_restore, left, least, most):
    recovery = estimate(4, 0.01)
    for _ in range(12):
        recovery.measured(Rise(at_restore, 0.1 * at_restore), {2: Rise(0.0), 4: Rise(left, 0.0002)}, "", 1.0)
    assert least <= recovery.remains <= most


def test_a_precise_probe_is_believed_more_than_a_noisy_one():
    shares = []
    for error in (0.0001, 0.001, 0.01):
        recovery = estimate(4, 0.01)
        recovery.measured(Rise(0.002, 0.0002), {4: Rise(0.0006, error)}, "", 1.0)
        shares.append(recovery.remains)
    assert shares == sorted(shares)
    assert shares[0] < 0.45
    assert shares[-1] > 0.95


def test_what_a_short_probe_shows_to_grow_goes_on_growing():
    recovery = estimate(20, 0.01)
    at = Rise(0.0001, 0.0001)
    cost = recovery.measured(at, {2: Rise(0.001, 0.0002), 5: Rise(0.003, 0.0002)}, "", 1.0)
    assert cost.mean == pytest.approx(0.003 + 3 * 0.0029)


def test_what_long_probes_find_to_heal_later_counts_for_short_ones():
    recovery = estimate(20, 0.01)
    at, short = Rise(0.001, 0.0001), {2: Rise(0.0008, 0.0001), 5: Rise(0.0008, 0.0001)}
    before = recovery.measured(at, short, "", 1.0).mean
    for _ in range(8):
        recovery.measured(at, {5: Rise(0.0008, 0.0001), 20: Rise(0.0004, 0.0001)}, "", 1.0)
    assert recovery.measured(at, short, "", 1.0).mean < 0.7 * before


AT = Rise(0.001)


def test_half_the_fall_times_the_error_of_updates_is_a_doubt():
    measured = {5: measured_rise([1.0, 1.0], [1.004, 1.004])}
    doubted = lasting_rises(measured, AT, fall=0.01, update_error=0.2)[5]
    assert doubted.mean == measured[5].mean
    assert doubted.error == pytest.approx(math.hypot(measured[5].error, 0.005))
    assert lasting_rises(measured, AT, update_error=0.2) == lasting_rises(measured, AT, fall=0.01) == measured
    both = lasting_rises(measured, AT, fall=0.01, lost_steps=0.2, update_error=0.2)[5]
    assert both.mean == pytest.approx(0.002)
    assert both.doubt == pytest.approx(math.hypot(0.001, 0.005))
    assert lasting_rises({5: Rise(math.inf)}, AT, fall=0.01, update_error=0.2)[5].mean == math.inf
    assert lasting_rises(measured, AT, fall=math.inf, lost_steps=1.0, update_error=0.2) == measured


@pytest.mark.parametrize("sign", [1, -1])
def test_a_short_probe_from_a_steep_start_says_little(sign):
    """What the updates' noise could have done is neither taken for harm nor for recovery."""
    at = Rise(0.0002, 0.0001, batches=1)
    certain, doubted = estimate(20, 0.01), estimate(20, 0.01)
    rise = measured_rise([1.0], [1 + sign * 0.006], absolute=1e-4)
    plain = certain.measured(at, {5: rise}, "", 0.5)
    cost = doubted.measured(at, lasting_rises({5: rise}, at, fall=0.03, update_error=0.25), "", 0.5)
    assert abs(cost.mean - 0.0002) < 0.0001
    assert abs(doubted.remains - 1) < 0.05
    if sign > 0:
        assert plain.mean > 0.005
        assert certain.remains == 16


def test_harm_beyond_the_noise_of_updates_is_seen_however_steep_the_start():
    at = Rise(0.0002, 0.0001, batches=1)
    recovery = estimate(20, 0.01)
    rise = measured_rise([1.0], [1.06], absolute=1e-4)
    rises = lasting_rises({5: rise}, at, fall=0.03, update_error=0.25)
    assert recovery.measured(at, rises, "", 0.5).mean > 0.05
    assert recovery.remains == 16


def test_marks():
    assert estimate(0, math.inf).marks("", 1.0) == ()
    assert estimate(1, math.inf).marks("", 1.0) == (1,)
    assert estimate(3, math.inf).marks("", 1.0) == (2, 3)
    assert estimate(20, math.inf).marks("", 1.0) == (5, 20)
    assert estimate(20, math.inf).state_dict()["budget_s"] == 0.0
    assert estimate(20, 0.01).marks("", 1.0) == ()  # nobody knows yet how long a step takes


@pytest.mark.parametrize(
    "change",
    [{"remains": None}, {"remains": 0.1}, {"remains": 99.0}, {"remains": "1"}, {"error": math.inf}, {"onward": 0.0},
     {"probed": "auto"}, {"probed": ["auto", 0.0]}, {"budget_s": math.nan}, {"budget_s": None}, {"step": 1.5}, {"step": -1}],
)  # fmt: skip
def test_another_state_of_healing_is_refused(change):
    recovery = estimate(4, 0.01)
    with pytest.raises(ConfigError, match="malformed"):
        recovery.load_state_dict({**recovery.state_dict(), **change})
