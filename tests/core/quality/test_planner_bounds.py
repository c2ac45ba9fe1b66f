"""The bound over many restores, and the probe of resumed steps, with losses that are made up."""

import json
import math
import warnings
from dataclasses import replace

import pytest
import torch
from support.baseline_schemes import GoboOptions
from support.training import OPTIMIZERS, TinyMLP, capture, train

from shrinkpoint.coding.encode import encode_state
from shrinkpoint.config import SaverConfig
from shrinkpoint.errors import ConfigError, ShrinkpointWarning
from shrinkpoint.optimizers.updates import Updates
from shrinkpoint.quality.budget import NO_COST, RestoreCost, reserve_of
from shrinkpoint.quality.comparison import (
    BlindEvaluationError,
    Comparison,
    restored_model,
    restored_state,
    true_model,
)
from shrinkpoint.quality.evaluation import EvaluationUnavailableError
from shrinkpoint.quality.guards import Verdict
from shrinkpoint.quality.planner import Planner
from shrinkpoint.schemes.auto.options import AutoOptions
from shrinkpoint.schemes.auto.scheme import Auto
from shrinkpoint.schemes.base import SaveContext
from shrinkpoint.state.training import Role, Tag, TrainingState


@pytest.fixture(scope="module")
def states():
    torch.manual_seed(0)
    model = TinyMLP()
    optimizer = OPTIMIZERS["AdamW"](model)
    saved = []
    for start in range(4):
        train(model, optimizer, range(start, start + 2))
        saved.append(capture(model, optimizer))
    return saved


class Run:
    """A loss that rises with the weights' squared distance from the true ones, part of which remains after some steps.

    `luck` adds a part that changes its sign with the error: so much of the loss for each unit of the weights' error in a
    fixed direction; after a restore the loss `falls` by such a share of it in each step. The movement of the weights limits nothing.
    """

    def __init__(self, states, slope=1e-2, remains=0.5, luck=0.0, falls=0.0, **config):
        self.states, self.slope, self.remains, self.luck, self.falls = states, slope, remains, luck, falls
        if config.get("scheme", "auto") == "auto":
            config.setdefault("options", AutoOptions(movement_share=1000))
        self.config = SaverConfig(**{"search_overhead": math.inf, "probe_steps": 8, **config})
        self.planner = Planner(self.config, lambda: 0.0)
        self.reference, self.index, self.asked, self.resumes = None, -1, [], []
        self.guard = None

    @property
    def true(self):
        return {n.removeprefix("model/"): t for n, t in self.state.tensors.items() if n.startswith("model/")}

    def distance(self, weights):
        return sum(float((self.true[n] - w).double().square().sum()) for n, w in weights.items())

    def direction(self, weights):
        generator = torch.Generator().manual_seed(3)
        return sum(
            float(((w - self.true[n]).double() * torch.randn(w.shape, generator=generator)).sum())
            for n, w in sorted(weights.items())
        )

    def measure(self, weights):
        self.asked.append(self.distance(weights))
        harm = self.slope * self.asked[-1]
        luck = self.luck * self.direction(weights) if self.luck else 0.0
        return [2.0 * (1 + harm + luck), 4.0 * (1 + harm + 2 * luck)]

    def resume(self, state, marks):
        self.resumes.append((self.distance(state["model"]), tuple(marks)))
        after = 1 + self.slope * self.remains * self.resumes[-1][0]
        return [[each * after * (1 - mark * self.falls) for each in (2.0, 4.0)] for mark in marks]

    @property
    def state(self):
        return self.states[self.index]

    def save(self, *, resume=True, restored=False, measure=True, exact=False):
        self.index += 1
        step = 10 * (self.index + 1)
        save_context = SaveContext(state=self.state, step=step, reference=self.reference, restored=restored)
        plan = self.planner.plan(
            save_context,
            self.measure if measure else None,
            self.resume if resume else None,
            exact=exact,
            guard=self.guard,
        )
        parent = None if self.reference is None else "0" * 32
        self.reference = dict(
            encode_state(
                self.state, plan.scheme, step=step, reference=self.reference, parent=parent
            ).reference
        )
        return plan


def test_without_a_probe_a_restore_gets_its_share(states):
    run = Run(states)
    for _ in states:
        plan = run.save(resume=False)
        assert plan.scheme.name == "auto"
        assert 0 < plan.rise.mean < plan.rise.high <= 0.0005
        assert plan.rise.low < plan.rise.mean
        assert plan.measured == "measured"
        assert plan.allowed == 0.0005  # half of 1 %, and ten restores
        assert plan.resumed == {}
        assert plan.baseline == 3.0
    assert run.resumes == []


def test_what_was_measured_is_what_a_reader_gets(states):
    run = Run(states)
    plan = run.save()
    weights = restored_model(run.state, plan.scheme, None)
    assert run.measure(weights)[0] / 2.0 - 1 == pytest.approx(plan.rise.mean, rel=0.02)


def test_luck_is_told_apart_from_harm(states):
    """A first-order part far larger than the harm, in either direction, changes neither the choice nor what is told."""
    plain = Run(states).save(resume=False)
    for luck in (0.02, -0.02):
        plan = Run(states, luck=luck).save(resume=False)
        assert plan.configuration == plain.configuration
        assert plan.rise.mean == pytest.approx(plain.rise.mean, rel=1e-3)
        assert abs(plan.rise.first_order) > 3 * plan.rise.mean


def test_the_probe_compares_the_restored_state_with_the_true_one(states):
    run = Run(states)
    plan = run.save()
    (true, marks), (restored, again) = run.resumes
    assert marks == again == (5, 8)
    assert true == 0.0
    assert restored == pytest.approx(plan.rise.mean / run.slope, rel=0.02)
    for mark in (5, 8):
        assert plan.resumed[mark].mean == pytest.approx(plan.rise.mean / 2, rel=0.02)
        assert plan.resumed[mark].low < plan.resumed[mark].mean < plan.resumed[mark].high


def test_a_restore_may_cost_more_at_once_when_training_makes_it_good(states):
    costs = {}
    for remains in (0.25, 1.0):
        run = Run(states, remains=remains)
        for _ in states[1:]:
            run.save()
            run.reference = None
        costs[remains] = run.save().rise.high
    assert costs[1.0] <= 0.001 < costs[0.25] <= 0.004


def test_what_shows_only_after_some_steps_is_bounded_too(states):
    run = Run(states, remains=20.0)
    plan = run.save()
    assert plan.scheme.name == "auto"
    assert plan.resumed[8].mean <= 0.001
    assert plan.rise.mean <= 0.001 / 20
    assert "after 8 resumed steps the loss was" in plan.reason


def test_what_no_settings_keep_after_some_steps_is_stored_exactly(states):
    run = Run(states)
    run.resume = lambda state, marks: [[2.0 + (run.distance(state["model"]) > 0)]] * len(marks)
    plan = run.save()
    assert (plan.scheme.name, plan.rise.mean) == ("lossless", 0.0)
    assert "stored exactly" in plan.reason


def test_restores_spend_the_bound(states):
    run = Run(states, restore_budget=2, remains=1.0)
    first = run.save()
    again = Run(states, restore_budget=2)
    again.planner.load_state_dict(run.planner.state_dict())
    told = again.planner.state_dict()["restores"]
    assert told["restores"] == 1
    assert told["spent"] == pytest.approx(first.cost.mean)
    assert told["spent_high"] == pytest.approx(first.cost.high)
    assert first.cost.mean < first.cost.high <= 0.005
    assert again.save(resume=False).rise.high <= 0.01 - first.cost.high


def test_when_nothing_is_left_everything_is_stored_exactly(states):
    run = Run(states)
    told = {
        **run.planner.state_dict(),
        "restores": {"spent": 0.008, "spent_high": 0.02, "restores": 3, "cost": 0.0},
    }
    run.planner.load_state_dict(told)
    plan = run.save()
    assert plan.scheme.name == "lossless"
    assert "no part of max_degradation is left" in plan.reason


def test_a_probe_that_nobody_serves_stores_exactly(states):
    run = Run(states)

    def gone(state, marks):
        raise EvaluationUnavailableError("closed")

    run.resume = gone
    plan = run.save()
    assert plan.scheme.name == "lossless"
    assert "could not be measured (closed)" in plan.reason


def test_the_probe_waits_for_its_share_of_the_training(states):
    run = Run(states, search_overhead=0.0)
    for _ in states:
        assert run.save().resumed == {}
    assert Run(states, probe_steps=0).save().resumed == {}


@pytest.mark.parametrize("slope", [1e-3, 1e4])
def test_a_published_scheme_is_taken_as_given_or_not_at_all(states, slope):
    run = Run(states, slope=slope, scheme="gobo", options=GoboOptions(bits=3), restore_budget=1)
    plan = run.save()
    assert plan.scheme.name == ("gobo" if slope < 1 else "lossless")
    assert plan.evaluations == 4  # the true weights, a look at whether they are seen, and the pair
    assert run.save().evaluations == 3
    assert "the settings given" in plan.reason


def test_a_fixed_scale_is_taken_or_not_at_all(states):
    mild, harsh = (
        Run(states, options=AutoOptions(weight_scale=scale, movement_share=1000)).save(resume=False)
        for scale in (0.001, 60.0)
    )
    assert "scale=0.001" in mild.configuration
    assert harsh.scheme.name == "lossless"


def test_one_warning_when_nothing_can_be_measured(states):
    run = Run(states)
    with pytest.warns(ShrinkpointWarning, match="Give evaluate="):
        plan = run.save(measure=False)
    assert plan.scheme.name == "auto"
    assert plan.rise is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run.save(measure=False)
    assert run.asked == []


def test_a_bound_of_nothing_is_kept_without_a_way_to_measure_too(states):
    for measure in (True, False):
        run = Run(states, max_degradation=0)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            plan = run.save(measure=measure)
        assert plan.scheme.name == "lossless"
        assert "no part of max_degradation is left" in plan.reason
        assert run.asked == []


@pytest.mark.parametrize("scheme", ["auto", "gobo", "inshrinkerator"])
def test_a_fall_pays_for_nothing(states, scheme):
    run = Run(states, scheme=scheme, slope=-1e-6)
    plan = run.save(resume=False)
    assert plan.rise.mean <= 0 < plan.rise.high
    restores = run.planner.state_dict()["restores"]
    assert restores["cost"] == 0.0
    assert restores["cost_high"] == plan.rise.high


def test_a_checkpoint_restored_twice_counts_once(states):
    run = Run(states)
    run.save()
    told, again = run.planner.state_dict(), Run(states)
    again.planner.load_state_dict(told)
    again.planner.load_state_dict(told)
    assert again.planner.state_dict()["restores"]["restores"] == 1


def test_what_training_makes_good_of_another_schemes_cost_says_nothing(states):
    run = Run(states, remains=0.25)
    run.save()
    told = run.planner.state_dict()
    assert told["recovery"]["remains"] < 0.9
    same, other = Run(states), Run(states, scheme="gobo", options=GoboOptions(bits=3))
    same.planner.load_state_dict(told)
    other.planner.load_state_dict(told)
    recoveries = [run.planner.state_dict()["recovery"] for run in (same, other)]
    assert [recovery["remains"] for recovery in recoveries] == [told["recovery"]["remains"], 1.0]
    assert [recovery["probed"] for recovery in recoveries] == [told["recovery"]["probed"], None]
    assert other.planner.state_dict()["restores"]["restores"] == 1


def test_a_malformed_state_counts_the_restore_all_the_same(states):
    run = Run(states)
    with pytest.raises(ConfigError, match="malformed"):
        run.planner.load_state_dict(
            {"restores": {"spent": "much", "spent_high": 1.0, "restores": 1, "cost": 0.0}}
        )
    assert run.planner.state_dict()["restores"]["restores"] == 1


def test_a_probe_that_finds_too_much_tells_all_evaluations(states):
    run = Run(states, remains=20.0)
    plan = run.save()
    assert plan.evaluations > 6
    assert plan.evaluations == len(run.asked)
    assert sum(distance == 0 for distance in run.asked) == 1  # the true weights once


# ---- evaluations that do not see the weights


@pytest.mark.parametrize("scheme", ["auto", "gobo", "inshrinkerator"])
def test_a_blind_evaluation_is_found_at_the_first_save(states, scheme):
    run = Run(states, scheme=scheme)
    run.measure = lambda weights: [0.7, 0.9]  # as one of a copy of the model
    with pytest.warns(
        ShrinkpointWarning, match=r"does not see the weights.*0\.8, exactly as it is"
    ) as caught:
        plan = run.save()
    assert len(caught) == 1
    assert (plan.rise, plan.measured) == (None, "blind")
    assert plan.reason.startswith("unmeasured: noise of 10% in all weights")
    assert plan.evaluations == 2
    assert plan.baseline == pytest.approx(0.8)
    assert plan.resumed == {}
    assert run.resumes == []
    assert "scale=0.0625" in plan.configuration or scheme != "auto"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert run.save().measured == "blind"
    assert run.planner.state_dict()["restores"]["cost"] == 0.0


def test_an_evaluation_that_becomes_blind_is_found(states):
    run = Run(states)
    run.save(resume=False)
    run.measure = lambda weights: 1.0
    with pytest.warns(ShrinkpointWarning, match="does not see"):
        assert run.save(resume=False).measured == "blind"


def test_an_evaluation_that_small_errors_do_not_move_is_not_blind(states):
    """Accuracy, or a loss in half precision: a rise of exactly 0, which widens steps by an octave at most."""
    run = Run(states, options=AutoOptions(weight_scale=0.1, movement_share=1000))
    run.measure = lambda weights: 1.0 + (run.distance(weights) > 0.3)
    # The first save looks at all weights before it measures; all look at those that they change where a pair is exactly 0.
    for looks in [2] + [1] * (len(states) - 1):
        plan = run.save(resume=False)
        assert (plan.rise.mean, plan.measured) == (0.0, "measured")
        assert plan.rise.high > 0
        assert plan.evaluations == 3 + looks


def test_an_evaluation_of_weights_that_are_stored_exactly_is_blind(states):
    """A frozen copy within the model: noise in all weights changes the loss, noise in those that are trained does not."""
    true = true_model(states[0])
    copied, trained = list(true)[:2]
    comparison = Comparison(states[0], lambda weights: float(weights[copied].double().sum()), share=1e-3)
    comparison.require_effect()
    with pytest.raises(BlindEvaluationError, match="all weights that this checkpoint changes"):
        comparison.rise("changed", lambda: {**true, trained: true[trained] * 1.01})
    assert comparison.rise("both", lambda: {**true, copied: true[copied] * 1.01}).error > 0


def test_a_loss_near_zero_is_bounded_relative_to_the_floor(states):
    """Of a loss of 0 a rise of 1e-8 is one of 100 %, and one of 1e-16 is nothing."""
    measured = {}
    for unit in (1e-8, 1e-16):
        run = Run(states)
        run.measure = lambda weights, run=run, unit=unit: unit * run.distance(weights)
        plan = run.save(resume=False)
        assert (plan.baseline, plan.measured) == (0.0, "measured")
        measured[unit] = plan.scale
    assert measured[1e-8] < measured[1e-16] / 10


# ---- the reported cost of a restore


@pytest.mark.parametrize("restores", [1, 10])
def test_the_cost_of_all_restores_is_bounded_by_what_the_user_allows(restores):
    """With nothing lost, ten upper ends are ten shares and the reserve, `max_degradation` together; one has the whole reserve too."""
    config = SaverConfig()
    share = 0.5 * config.max_degradation / config.restore_budget
    cost = RestoreCost(0.5 * share, share, delay=0.0, reserve=reserve_of(config))
    together = sum([cost] * restores, NO_COST)
    assert together.high == pytest.approx(restores * share + 0.5 * config.max_degradation)
    assert together.mean == pytest.approx(restores * 0.5 * share)


def test_of_adopted_checkpoints_the_reserve_is_larger():
    assert reserve_of(SaverConfig(adopt=True, max_degradation=0.02)) == pytest.approx(0.015)


@pytest.mark.parametrize(("delay", "high"), [(0.0, 0.0013), (0.0003, 0.0013), (0.002, 0.0028)])
def test_a_delay_is_within_the_reserve_or_replaces_it(delay, high):
    cost = RestoreCost(0.0004, 0.0008, delay=delay, reserve=0.0005)
    assert (cost.mean, cost.high) == (pytest.approx(0.0004 + delay / 2), pytest.approx(high))


def test_delays_add_up_before_they_replace_the_reserve():
    cost = RestoreCost(0.0, 0.0, delay=0.0003, reserve=0.0005)
    assert [sum([cost] * restores, NO_COST).high for restores in (1, 2)] == pytest.approx([0.0005, 0.0006])
    assert sum([cost, NO_COST], NO_COST) == cost


def test_lost_progress_counts_at_the_first_save_by_what_its_probe_shows(states):
    """There is no earlier save that tells how fast the loss falls; the probe takes it out of its rise, so it must come back here."""
    run = Run(states, falls=0.01)
    run.guard = Refusing(lambda scheme: None)
    run.guard.verdict = Verdict(lost_steps=0.5)
    plan = run.save()
    assert plan.scheme.name == "auto"
    assert plan.resumed
    assert plan.whole.delay == pytest.approx(0.005)
    assert (
        plan.whole.high == plan.whole.measured_high + reserve_of(run.config) == pytest.approx(0.005, abs=6e-4)
    )
    later = run.save()
    assert later.baseline == plan.baseline
    assert later.whole.delay == 0, "the loss has not fallen between the two saves"


@pytest.mark.parametrize(("update_error", "kept"), [(0.0, False), (0.3, True), (None, True)])
def test_a_rise_that_updates_luck_explains_refuses_nothing(states, update_error, kept):
    """After eight steps from a steep start: the loss has fallen by a fifth, and from the restore by half a per cent less."""
    run = Run(states)
    run.guard = Refusing(lambda scheme: None)
    if update_error is None:
        run.guard.verdict = Verdict()
    else:
        run.guard.verdict = Verdict(updates=Updates(error=update_error, length=1.0, lost_steps=0.0))
    usual = Run(states).save(resume=False).scale
    fallen = iter([0.8] + [0.805] * 9)
    run.resume = lambda state, marks: [[2.0 * after, 4.0 * after] for after in [next(fallen)] for _ in marks]
    plan = run.save()
    assert (plan.scale == usual) is kept
    assert ("resumed steps" in plan.reason) is not kept


def test_the_last_loss_outlives_a_restart_and_exact_checkpoints_cost_nothing(states):
    run = Run(states)
    run.save(resume=False)
    again = Run(states)
    again.planner.load_state_dict(json.loads(json.dumps(run.planner.state_dict())))
    assert again.planner._baseline == run.planner._baseline is not None
    exact = run.save(exact=True)
    assert (exact.whole.mean, exact.whole.high) == (0.0, 0.0)
    with pytest.warns(ShrinkpointWarning, match="Give evaluate="):
        assert run.save(measure=False).whole is None


# ---- guards


class Refusing:
    """A guard that refuses schemes by a function of them, and blames weights or moments."""

    kinds = ()
    verdict = Verdict(updates=Updates(error=0.0, length=1.0, lost_steps=0.0))

    def __init__(self, reason, *, moments=False):
        self.reason, self.moments, self.asked = reason, moments, []

    def __call__(self, save_context, scheme):
        self.asked.append(scheme)
        return replace(self.verdict, reason=self.reason(scheme), moments=self.moments)


def test_a_guard_makes_auto_milder(states):
    run = Run(states)
    guard = Refusing(lambda scheme: "too far from the truth" if scheme.scale > 0.02 else None)
    run.guard = guard
    plan = run.save(resume=False)
    assert plan.scale <= 0.02
    assert plan.scheme.scale == plan.scale == guard.asked[-1].scale
    assert plan.measured == "measured"
    assert plan.reason.endswith("; with wider steps too far from the truth")
    assert len(guard.asked) > 1
    assert run.save(resume=False).scale <= plan.scale


@pytest.mark.parametrize("measure", [True, False])
@pytest.mark.filterwarnings("ignore::shrinkpoint.errors.ShrinkpointWarning")
def test_where_a_guard_moments_they_become_finer_and_the_weights_stay(states, measure):
    run = Run(states)
    guard = Refusing(lambda scheme: None if scheme.finer_moments else "too much lost", moments=True)
    scale = run.save(resume=False, measure=measure).scale
    run.guard = guard
    for _ in range(2):  # each save tries the usual moments first
        plan = run.save(resume=False, measure=measure)
        assert plan.scheme.finer_moments
        assert plan.scale >= scale
        assert "finer moments" in plan.configuration
        assert plan.reason.endswith("; with wider steps too much lost")
    assert [scheme.finer_moments for scheme in guard.asked] == [False, True, False, True]


def test_moments_whose_step_size_is_given_are_not_made_finer_but_exact(states):
    run = Run(states, options=AutoOptions(first_moment_step=8.0))
    run.guard = Refusing(lambda scheme: "too much lost", moments=True)
    plan = run.save(resume=False)
    assert (plan.scheme.name, plan.reason) == ("lossless", "too much lost: stored exactly")
    assert len(run.guard.asked) == 1


def test_once_the_loss_bore_hardly_any_noise_moments_stay_finer(states):
    narrow = Run(states, slope=0.2)
    assert narrow.save(resume=False).scale < 1 / 32
    told = json.loads(json.dumps(narrow.planner.state_dict()))
    assert told["strategy"]["sensitive"] is True
    for sensitive in (True, False):
        strategy = {**told["strategy"], "rung": 0, "history": None, "sensitive": sensitive}
        again = Run(states, slope=1e-4)
        again.planner.load_state_dict({**told, "strategy": strategy})
        for _ in states:
            plan = again.save(resume=False)
            assert plan.scale >= 1 / 32
            assert plan.scheme.finer_moments == sensitive


def test_what_a_guard_refuses_at_any_scale_is_stored_exactly(states):
    for config in ({}, {"scheme": "gobo", "slope": 1e-4}):
        run = Run(states, **config)
        run.guard = Refusing(lambda scheme: "nothing pleases it")
        plan = run.save(resume=False)
        assert (plan.scheme.name, plan.reason) == ("lossless", "nothing pleases it: stored exactly")


def test_a_guard_sees_unmeasured_plans_too_and_no_exact_ones(states):
    run = Run(states)
    run.guard = Refusing(lambda scheme: None)
    run.save(exact=True)
    assert run.guard.asked == []
    with pytest.warns(ShrinkpointWarning, match="Give evaluate="):
        run.save(measure=False)
    assert [scheme.scale for scheme in run.guard.asked] == [0.0625]


# ---- what measuring costs


class Clock:
    def __init__(self):
        self.now = self.spent = 0.0


def test_the_overhead_is_reported_and_the_time_budget_goes_with_the_checkpoint(states):
    clock = Clock()
    run = Run(states, search_overhead=0.01, probe_steps=20)
    make = lambda: Planner(run.config, lambda: clock.spent, clock=lambda: clock.now)  # noqa: E731
    run.planner, measure, resume = make(), run.measure, run.resume

    def paid(seconds, function):
        def call(*args):
            clock.now, clock.spent = clock.now + seconds, clock.spent + seconds
            return function(*args)

        return call

    run.measure, run.resume = paid(0.1, measure), paid(5.0, resume)
    clock.now += 10.0
    plan = run.save()
    assert set(plan.resumed) == {2, 5}  # on credit
    assert plan.overhead == pytest.approx(clock.spent / clock.now)
    assert clock.spent == pytest.approx(0.1 * plan.evaluations + 10.0)
    state, run.planner = run.planner.state_dict(), make()
    assert state["recovery"]["budget_s"] == pytest.approx(0.01 * clock.now - clock.spent, abs=1e-6)
    run.planner.load_state_dict(state)
    clock.now += 100.0
    assert run.save().resumed == {}


def test_a_master_that_is_coded_is_measured_where_its_weight_is_kept():
    """A weight that is not its master rounded is kept exactly; training would go on from the master."""
    master = torch.randn(60, 50, generator=torch.Generator().manual_seed(0))
    weight = master.bfloat16()
    weight[0, 0] += 1
    tags = {
        "w": Tag(role=Role.WEIGHT, parameter="w"),
        "master": Tag(role=Role.MASTER, parameter="w"),
    }
    state = TrainingState.capture({"w": weight, "master": master}, lambda path, tensor: tags[path[-1]])
    scheme = Auto(options=AutoOptions(), save_context=SaveContext(state=state), scale=1.0)
    whole, model = restored_state(state, scheme, None).tensors, restored_model(state, scheme, None)
    assert torch.equal(whole["w"], weight)
    assert not torch.equal(whole["master"], master)
    assert torch.equal(model["w"], whole["master"].bfloat16())
