import math

import pytest
import torch
from support.training import OPTIMIZERS, TinyMLP, capture, train

from shrinkpoint.config import SaverConfig
from shrinkpoint.quality.evaluation import EvaluationUnavailableError
from shrinkpoint.quality.planner import Planner
from shrinkpoint.schemes.base import SaveContext
from shrinkpoint.state.training import TrainingState

INSHRINKERATOR = SaverConfig(scheme="inshrinkerator", restore_budget=1, search_overhead=math.inf)


@pytest.fixture(scope="module")
def state():
    torch.manual_seed(0)
    model = TinyMLP()
    optimizer = OPTIMIZERS["AdamW"](model)
    train(model, optimizer, range(3))
    return capture(model, optimizer)


class Loss:
    """Grows with the distance of the weights from the true ones."""

    def __init__(self, state, slope):
        self.true = {n.removeprefix("model/"): t for n, t in state.tensors.items() if n.startswith("model/")}
        self.slope, self.calls, self.fail_at = slope, 0, None

    def __call__(self, weights):
        self.calls += 1
        if self.calls == self.fail_at:
            raise EvaluationUnavailableError("closed")
        assert all(bool(torch.isfinite(value).all()) for value in weights.values())
        distance = sum(float((self.true[n] - w).square().sum()) for n, w in weights.items())
        return 1.0 + self.slope * distance


def plan(state, measure, **config):
    config = SaverConfig(
        **{"scheme": "inshrinkerator", "restore_budget": 1, "search_overhead": math.inf, **config}
    )
    return Planner(config, lambda: 0.0).plan(SaveContext(state=state), measure)


def test_the_choice_keeps_the_bound_and_no_smaller_budget_buys_more(state):
    loss = Loss(state, 1e-3)
    chosen = plan(state, loss)
    assert chosen.scheme.name == "inshrinkerator"
    assert chosen.configuration == str(chosen.scheme.configuration)
    assert chosen.baseline == 1.0
    assert chosen.rise.mean <= 0.01
    assert chosen.rise.mean < chosen.rise.high <= 0.01
    assert loss.calls == chosen.evaluations
    again = loss(chosen.scheme.weights.restored(chosen.scheme.configuration))
    assert again - 1 == pytest.approx(chosen.rise.mean, abs=1e-7)  # the mirrored weights are rounded


def test_the_upper_end_must_hold_and_not_the_mean(state):
    chosen = plan(state, Loss(state, 1e-3))
    allowed = (chosen.rise.mean + chosen.rise.high) / 2
    stricter = plan(state, Loss(state, 1e-3), max_degradation=2 * allowed)
    assert stricter.rise.high <= allowed


def test_searches_are_paid_by_the_clock_that_the_planner_is_given(state):
    """All ranks, and a replay of an adopting training, search by the same clock."""
    loss = Loss(state, 1e-3)

    def seconds() -> float:
        return float(loss.calls)

    config = SaverConfig(scheme="inshrinkerator", restore_budget=1, search_overhead=0.5)
    planner = Planner(config, seconds, clock=seconds)
    for _ in range(3):  # no time but that of evaluations passes: the true weights, a pair, and noise at first
        assert planner.plan(SaveContext(state=state), loss).evaluations <= 4


def test_a_bound_that_nothing_keeps(state):
    chosen = plan(state, Loss(state, 1e9))
    assert (chosen.scheme.name, chosen.configuration, chosen.rise.mean) == ("lossless", "exact", 0.0)
    assert "stored exactly" in chosen.reason
    assert chosen.baseline == 1.0


def test_an_evaluation_that_becomes_unavailable(state):
    loss = Loss(state, 1e-3)
    planner = Planner(INSHRINKERATOR, lambda: 0.0)
    loss.fail_at = 3
    chosen = planner.plan(SaveContext(state=state), loss)
    assert (chosen.scheme.name, chosen.rise.mean) == ("lossless", 0.0)
    assert "could not be measured (closed)" in chosen.reason
    assert planner.plan(SaveContext(state=state), loss).scheme.name == "inshrinkerator"


def test_exact_and_lossless_ask_for_nothing(state):
    loss = Loss(state, 0)
    planner = Planner(INSHRINKERATOR, lambda: 0.0)
    assert planner.plan(SaveContext(state=state), loss, exact=True).scheme.name == "lossless"
    assert plan(state, loss, scheme="lossless").scheme.name == "lossless"
    assert loss.calls == 0


def test_a_state_without_weights():
    chosen = plan(TrainingState.capture({"a": torch.ones(90, 90)}), lambda weights: 1.0)
    assert chosen.scheme.name == "lossless"
    assert "no weight" in chosen.reason


def test_the_searchs_state_moves_to_another_planner(state):
    loss = Loss(state, 1e-3)
    first = Planner(INSHRINKERATOR, lambda: 0.0)
    chosen = first.plan(SaveContext(state=state), loss)
    second = Planner(INSHRINKERATOR, lambda: 0.0)
    second.load_state_dict(first.state_dict())
    again = second.plan(SaveContext(state=state), loss)
    assert again.evaluations < chosen.evaluations
    assert again.rise.mean <= 0.01
