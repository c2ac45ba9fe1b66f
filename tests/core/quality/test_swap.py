import operator
import sys

import pytest
import torch
import torchmetrics
from support.containers import identical
from support.training import OPTIMIZERS, TinyConvNet, TinyGPT, train
from torch import nn

from shrinkpoint.quality.swap import swapped_weights
from shrinkpoint.state.averages import Candidate, average_key, without_averages
from shrinkpoint.state.rng import capture_rng


def everything(model):
    return {
        "state": {name: value.clone() for name, value in model.state_dict().items()},
        "grads": {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None},
        "modes": [module.training for module in model.modules()],
        "places": [p.data_ptr() for p in model.parameters()],
        "rng": capture_rng(),
    }


@pytest.mark.parametrize("model_class", [TinyGPT, TinyConvNet])
@pytest.mark.parametrize("fails", [False, True])
def test_training_does_not_notice(model_class, fails):
    model = model_class()
    train(model, OPTIMIZERS["AdamW"](model), range(2))
    next(iter(model.children())).eval()
    others = {name: torch.randn_like(p) for name, p in model.named_parameters() if p.dim() >= 2}
    before = everything(model)

    def evaluate():
        with swapped_weights(model, others):
            assert not any(module.training for module in model.modules())
            assert not torch.is_grad_enabled()
            assert all(torch.equal(model.get_parameter(name), value) for name, value in others.items())
            model.train()  # an evaluation may do what it likes
            model.loss(5)
            torch.rand(3)
            if fails:
                raise ZeroDivisionError

    if fails:
        with pytest.raises(ZeroDivisionError):
            evaluate()
    else:
        evaluate()
    assert torch.is_grad_enabled()
    assert identical(everything(model), before)


def test_gradients_of_a_step_under_way_are_not_disturbed():
    model = TinyGPT()
    model.loss(0).backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    loss = model.loss(0)
    with swapped_weights(model, {"up.weight": torch.zeros_like(model.up.weight)}):
        model.loss(1)
    loss.backward()
    assert identical([p.grad for p in model.parameters()], expected)


def test_tied_weights_stay_tied():
    model = TinyGPT()
    with swapped_weights(model, {"wte.weight": torch.ones_like(model.wte.weight)}):
        assert model.head.weight is model.wte.weight
        assert bool((model.head.weight == 1).all())
    assert model.head.weight is model.wte.weight


def test_weights_of_another_precision_are_converted():
    model = nn.Linear(3, 3).bfloat16()
    before = model.weight.clone()
    with swapped_weights(model, {"weight": torch.ones(3, 3)}):
        assert model.weight.dtype == torch.bfloat16
    assert torch.equal(model.weight, before)


def test_a_weight_of_another_shape_changes_nothing():
    model = nn.Linear(3, 3)
    before = everything(model)
    with (
        pytest.raises(RuntimeError),
        swapped_weights(model, {"bias": torch.ones(3), "weight": torch.ones(4, 4)}),
    ):
        pass
    assert identical(everything(model), before)


@pytest.mark.parametrize("fails", [False, True])
def test_what_a_candidate_lends_holds_the_models_own_weights_meanwhile(fails):
    model = TinyConvNet()
    train(model, OPTIMIZERS["AdamW"](model), range(2))
    live = dict(model.named_parameters()) | dict(model.named_buffers())
    given = {name: torch.randn_like(value) for name, value in live.items() if value.is_floating_point()}
    wanted, before = {name: value.clone() for name, value in given.items()}, everything(model)
    lent = [name for name in given if name != "head.weight"]
    buffers = {name for name, _ in model.named_buffers()}
    assert buffers & given.keys()

    def evaluate():
        with swapped_weights(model, Candidate(given, lent)):
            assert all(torch.equal(live[name].detach(), value) for name, value in wanted.items())
            for name, value in given.items():
                is_lent = name in lent and name not in buffers  # an evaluation may change buffers
                own = before["state"][name]
                assert torch.equal(value, own if is_lent else wanted[name]), name
            if fails:
                raise ZeroDivisionError

    if fails:
        with pytest.raises(ZeroDivisionError):
            evaluate()
    else:
        evaluate()
    assert identical(everything(model), before)
    assert identical(given, wanted)


def test_an_interrupted_exchange_is_taken_back(monkeypatch):
    """Ctrl-C raises between any two lines, if nobody defers it."""
    monkeypatch.setattr("shrinkpoint.quality.swap._CHUNK", 4)
    model = nn.Linear(3, 3)
    before = everything(model)
    count = 0
    while True:
        count += 1
        left = count

        def interrupt(frame, event, _):
            nonlocal left
            if frame.f_code.co_name != "forth":
                return None
            left -= event == "line"
            if left == 0:
                left = -1
                raise KeyboardInterrupt
            return interrupt

        given = Candidate({"weight": torch.ones(3, 3), "bias": torch.ones(3)}, ["weight", "bias"])
        traced = sys.gettrace()
        sys.settrace(interrupt)
        try:
            with swapped_weights(model, given):
                assert bool((model.weight == 1).all())
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(traced)
        assert identical(everything(model), before)
        assert all(bool((value == 1).all()) for value in given.values())
        if left > 0:
            break
    assert count > 15


def test_what_does_not_fit_is_not_exchanged():
    model = nn.Linear(3, 3)
    before = everything(model)
    given = Candidate({"weight": torch.ones(3, 3).bfloat16(), "bias": torch.ones(6)[::2]}, ["weight", "bias"])
    with swapped_weights(model, given):
        assert bool((model.weight == 1).all())
        assert bool((model.bias == 1).all())
        assert bool((given["weight"] == 1).all())
        assert bool((given["bias"] == 1).all())
    assert identical(everything(model), before)


def test_a_candidate_without_its_averages_stays_one():
    weights = {"w": torch.ones(1), average_key("ema/w"): torch.ones(1)}
    found = without_averages(Candidate(weights, weights))
    assert isinstance(found, Candidate)
    assert found.lent == {"w"} == found.keys()
    assert not isinstance(without_averages(weights), Candidate)


def test_expanded_buffers_are_put_back():
    """Each of their places in memory is several elements, which copy_ refuses to write to."""
    module = torch.nn.Linear(3, 2)
    module.register_buffer("wide", torch.tensor([1.0, 2.0, 3.0]).expand(2, 3))
    memory = module.wide.data_ptr()
    with swapped_weights(module, {"bias": torch.ones(2), "wide": torch.tensor([4.0, 5.0, 6.0]).expand(2, 3)}):
        assert module.wide.tolist() == [[4.0, 5.0, 6.0]] * 2
        module.wide[0] += 1
    assert module.wide.tolist() == [[1.0, 2.0, 3.0]] * 2
    assert module.wide.data_ptr() == memory


class Counting(nn.Module):
    """Gives itself other tensors for its buffers on every call."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("table", torch.zeros(2), persistent=False)
        self.register_buffer("longer", torch.zeros(2))

    def forward(self, x):
        self.calls = self.calls + 1
        self.table = torch.ones(2)
        self.longer = torch.ones(len(x))
        return self.linear(x)


def test_buffers_that_an_evaluation_replaces_are_put_back():
    model = Counting()
    before = [model.calls, model.table, model.longer]
    with swapped_weights(model, {}):
        model(torch.zeros(5, 3))
    assert all(map(operator.is_, (model.calls, model.table, model.longer), before))
    assert model.calls == 0
    assert model.table.tolist() == model.longer.tolist() == [0, 0]


@pytest.mark.parametrize("lends", [False, True])
@pytest.mark.parametrize(
    "evaluate",
    [
        lambda model: model.double().float(),
        lambda model: [setattr(p, "data", p.data * 0.9) for p in model.parameters()],
    ],
    ids=["converted and back", "other memory"],
)
def test_memory_that_an_evaluation_gives_to_parameters_is_taken_away_again(evaluate, lends):
    model = TinyGPT()
    others = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    before = everything(model)
    with swapped_weights(model, Candidate(others, frozenset(others)) if lends else others):
        evaluate(model)
    assert identical(everything(model), before)


def test_metrics_do_not_wait_for_processes_that_do_not_evaluate():
    def available() -> bool:
        return True

    metric = torchmetrics.MeanMetric(distributed_available_fn=available)
    metric.update(1.0)
    with swapped_weights(nn.ModuleList([metric]), {}):
        assert not metric.distributed_available_fn()
        metric.update(5.0)
        assert metric.compute() == 3.0
    assert metric.distributed_available_fn is available
    metric.distributed_available_fn = None
    assert metric.compute() == 1.0
    assert metric.update_count == 1
