"""The bound over many restores, and the probe of resumed steps, with losses that are made up."""

import math
import warnings

import pytest
import torch
from support.training import OPTIMIZERS, TinyMLP, capture, train

from shrinkpoint.coding import encode_state
from shrinkpoint.config import SaverConfig
from shrinkpoint.errors import ConfigError, ShrinkpointWarning
from shrinkpoint.evaluation import EvaluationUnavailableError
from shrinkpoint.planner import Planner
from shrinkpoint.schemes.auto import Auto, AutoOptions
from shrinkpoint.schemes.base import Occasion
from shrinkpoint.schemes.gobo import GoboOptions
from shrinkpoint.state import Role, Tag, TrainingState
from shrinkpoint.trial import restored_model, restored_state


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
    """A loss that rises with the weights' squared distance from the true ones, part of which remains after some steps."""

    def __init__(self, states, slope=1e-2, remains=0.5, **config):
        self.states, self.slope, self.remains = states, slope, remains
        self.config = SaverConfig(**{"search_overhead": math.inf, "probe_steps": 8, **config})
        self.planner = Planner(self.config, lambda: 0.0)
        self.held, self.index, self.asked, self.resumes = None, -1, [], []

    def distance(self, weights):
        true = {n.removeprefix("model/"): t for n, t in self.state.tensors.items() if n.startswith("model/")}
        return sum(float((true[n] - w).square().sum()) for n, w in weights.items())

    def measure(self, weights):
        self.asked.append(self.distance(weights))
        return 2.0 * (1 + self.slope * self.asked[-1])

    def resume(self, state, marks):
        self.resumes.append((self.distance(state["model"]), tuple(marks)))
        return [2.0 * (1 + self.slope * self.remains * self.resumes[-1][0]) for _ in marks]

    @property
    def state(self):
        return self.states[self.index]

    def save(self, *, resume=True, restored=False, measure=True):
        self.index += 1
        step = 10 * (self.index + 1)
        occasion = Occasion(state=self.state, step=step, reference=self.held, restored=restored)
        plan = self.planner.plan(occasion, self.measure if measure else None, self.resume if resume else None)
        parent = None if self.held is None else "0" * 32
        self.held = dict(
            encode_state(self.state, plan.scheme, step=step, reference=self.held, parent=parent).held
        )
        return plan


def test_without_a_probe_a_restore_gets_its_share(states):
    run = Run(states)
    for _ in states:
        plan = run.save(resume=False)
        assert plan.scheme.name == "auto"
        assert 0 < plan.degradation <= 0.001
        assert plan.resumed == {}
        assert plan.baseline == 2.0
    assert run.resumes == []


def test_one_restore_gets_all(states):
    (shared, alone) = (Run(states, restore_budget=n).save(resume=False).degradation for n in (10, 1))
    assert shared <= 0.001 < alone <= 0.01


def test_what_was_measured_is_what_a_reader_gets(states):
    run = Run(states)
    plan = run.save()
    weights = restored_model(run.state, plan.scheme, None)
    assert run.measure(weights) / 2.0 - 1 == pytest.approx(plan.degradation, abs=1e-9)


def test_the_probe_compares_the_restored_state_with_the_true_one(states):
    run = Run(states)
    plan = run.save()
    (true, marks), (restored, again) = run.resumes
    assert marks == again == (2, 8)
    assert true == 0.0
    assert restored == pytest.approx(plan.degradation / run.slope, rel=1e-5)
    assert plan.resumed == {mark: pytest.approx(plan.degradation / 2, rel=1e-5) for mark in (2, 8)}


def test_a_restore_may_cost_more_at_once_when_training_makes_it_good(states):
    costs = {}
    for remains in (0.25, 1.0):
        run = Run(states, remains=remains)
        for _ in states[1:]:
            run.save()
            run.held = None
        costs[remains] = run.save().degradation
    assert costs[1.0] <= 0.001 < costs[0.25] <= 0.004


def test_what_shows_only_after_some_steps_is_bounded_too(states):
    run = Run(states, remains=20.0)
    plan = run.save()
    assert plan.scheme.name == "auto"
    assert plan.resumed[8] <= 0.001
    assert plan.degradation <= 0.001 / 20
    assert "after 8 resumed steps the loss was" in plan.reason


def test_what_no_settings_keep_after_some_steps_is_stored_exactly(states):
    run = Run(states)
    run.resume = lambda state, marks: [2.0 + (run.distance(state["model"]) > 0)] * len(marks)
    plan = run.save()
    assert (plan.scheme.name, plan.degradation) == ("lossless", 0.0)
    assert "stored exactly" in plan.reason


def test_restores_spend_the_bound(states):
    run = Run(states, restore_budget=2, remains=1.0)
    first = run.save()
    again = Run(states, restore_budget=2)
    again.planner.load_state_dict(run.planner.state_dict())
    told = again.planner.state_dict()["restores"]
    assert told["restores"] == 1
    assert told["spent"] == pytest.approx(first.degradation, rel=1e-5)
    assert again.save(resume=False).degradation <= 0.01 - first.degradation


def test_when_nothing_is_left_everything_is_stored_exactly(states):
    run = Run(states)
    told = {**run.planner.state_dict(), "restores": {"spent": 0.02, "restores": 3, "cost": 0.0}}
    run.planner.load_state_dict(told)
    plan = run.save()
    assert plan.scheme.name == "lossless"
    assert "nothing is left" in plan.reason


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
    assert plan.evaluations == 1
    assert "the settings given" in plan.reason


def test_a_fixed_scale_is_taken_or_not_at_all(states):
    mild, harsh = (
        Run(states, options=AutoOptions(weight_scale=scale)).save(resume=False) for scale in (0.001, 60.0)
    )
    assert "scale=0.001" in mild.configuration
    assert harsh.scheme.name == "lossless"


def test_one_warning_when_nothing_can_be_measured(states):
    run = Run(states)
    with pytest.warns(ShrinkpointWarning, match="Give evaluate="):
        plan = run.save(measure=False)
    assert plan.scheme.name == "auto"
    assert plan.degradation is None
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
        assert "nothing is left" in plan.reason
        assert run.asked == []


def test_a_bound_of_nothing_holds_for_a_search_that_measures_an_improvement(states):
    run = Run(states, max_degradation=0, scheme="inshrinkerator", slope=-1e-2)
    assert run.save(resume=False).scheme.name == "lossless"


def test_a_restore_costs_what_is_left_of_it_where_no_probe_was_due(states):
    run = Run(states, remains=0.25)
    run.save()
    run.planner._healing._overhead = 0.0
    run.held = None
    plan = run.save()
    assert plan.resumed == {}
    told = run.planner.state_dict()
    assert told["restores"]["cost"] == pytest.approx(plan.degradation * told["healing"]["remains"])
    assert told["restores"]["cost"] <= 0.001


def test_as_many_restores_as_planned_are_lossy_when_training_makes_them_good(states):
    told = {}
    for _ in range(10):
        run = Run(states, remains=0.25)
        if told:
            run.planner.load_state_dict(told)
        run.planner._healing.remains, run.planner._healing._overhead = 0.25, 0.0
        assert run.save().scheme.name == "auto"
        told = run.planner.state_dict()
    assert told["restores"]["spent"] <= 0.01


def test_a_checkpoint_restored_twice_counts_once(states):
    run = Run(states)
    run.save()
    told, again = run.planner.state_dict(), Run(states)
    again.planner.load_state_dict(told)
    again.planner.load_state_dict(told)
    assert again.planner.state_dict()["restores"]["restores"] == 1


def test_a_checkpoint_that_tells_nothing_of_restores_counts_as_one(states):
    former = {"version": 1, "phase": "exhaustive", "incumbent": None}  # a search's own state, bare
    for told in (former, {}):
        run = Run(states)
        run.planner.load_state_dict(told)
        assert run.planner.state_dict()["restores"] == {"spent": 0.0, "restores": 1, "cost": 0.0}


def test_what_training_makes_good_of_another_schemes_cost_says_nothing(states):
    run = Run(states, remains=0.25)
    run.save()
    told = run.planner.state_dict()
    assert told["healing"]["remains"] < 0.7
    same, other = Run(states), Run(states, scheme="gobo", options=GoboOptions(bits=3))
    same.planner.load_state_dict(told)
    other.planner.load_state_dict(told)
    assert same.planner.state_dict()["healing"] == told["healing"]
    assert other.planner.state_dict()["healing"] == {"remains": 1.0}
    assert other.planner.state_dict()["restores"]["restores"] == 1


def test_a_malformed_state_counts_the_restore_all_the_same(states):
    run = Run(states)
    with pytest.raises(ConfigError, match="malformed"):
        run.planner.load_state_dict({"restores": {"spent": "much", "restores": 1, "cost": 0.0}})
    assert run.planner.state_dict()["restores"]["restores"] == 1


def test_a_probe_that_finds_too_much_tells_all_evaluations(states):
    run = Run(states, remains=20.0)
    plan = run.save()
    assert plan.evaluations > 2
    assert plan.evaluations == len(run.asked) - 2  # two of the true weights


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
    scheme = Auto(options=AutoOptions(), occasion=Occasion(state=state), scale=1.0)
    whole, model = restored_state(state, scheme, None).tensors, restored_model(state, scheme, None)
    assert torch.equal(whole["w"], weight)
    assert not torch.equal(whole["master"], master)
    assert torch.equal(model["w"], whole["master"].bfloat16())
