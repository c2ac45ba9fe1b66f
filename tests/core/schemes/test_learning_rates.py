"""How far a first moment will still move its weight, as saved optimizers say it."""

from collections import OrderedDict

import pytest
import torch

from shrinkpoint.schemes.learning_rates import Reach, reach_of_first_moments
from shrinkpoint.state import TrainingState


def reach_of(saved):
    return reach_of_first_moments(TrainingState.capture(saved))


def reach(saved):
    found = reach_of(saved)
    return found and found.distance


def optimizer(kind=torch.optim.AdamW, **settings):
    return kind([torch.nn.Parameter(torch.zeros(2))], **settings).state_dict()


def test_the_rate_times_the_steps_that_a_moment_lasts():
    assert reach({"optimizers": [optimizer(lr=1e-3, betas=(0.9, 0.95))]}) == pytest.approx(1e-2)
    assert reach({"a": {"b": (optimizer(lr=1e-3, betas=(0.99, 0.95)),)}}) == pytest.approx(1e-1)


def test_the_largest_of_all_groups():
    p, q = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(2))
    groups = torch.optim.Adam([{"params": [p], "lr": 1e-4}, {"params": [q], "lr": 3e-3}])
    assert reach([groups.state_dict(), optimizer(lr=2e-3)]) == pytest.approx(3e-2)


def test_dicts_of_every_kind():
    group = OrderedDict(lr=1, betas=[0.5, 0.9])
    assert reach({3: OrderedDict(param_groups=[group])}) == pytest.approx(2)


@pytest.mark.parametrize("rate", [torch.tensor(1e-3), torch.tensor([1e-3], dtype=torch.float64)])
def test_rates_of_capturable_optimizers_are_tensors(rate):
    assert reach(optimizer(lr=rate, betas=(0.9, 0.95), capturable=True)) == pytest.approx(1e-2)


def test_a_rate_of_zero_is_one():
    assert reach(optimizer(lr=0.0)) == 0


@pytest.mark.parametrize(
    "saved",
    [
        None,
        {},
        optimizer(torch.optim.SGD, lr=0.1, momentum=0.9),
        {"param_groups": [{"lr": torch.zeros(2), "betas": (0.9, 0.95)}]},
        {"param_groups": [{"lr": torch.zeros((), dtype=torch.complex64), "betas": (0.9, 0.95)}]},
        {"param_groups": {"lr": 1e-3}},
        {"param_groups": [{"lr": True, "betas": (0.9, 0.95)}, {"lr": 1e-3, "betas": ()}, 7]},
        {"param_groups": [{"lr": float("nan"), "betas": (0.9, 0.95)}, {"lr": 1e-3, "betas": (1.0, 0.9)}]},
    ],
)
def test_nothing_is_made_up(saved):
    assert reach(saved) is None


def trained(steps, **settings):
    """A weight and its AdamW after so many steps on gradients of one size."""
    weight = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
    optimizer = torch.optim.AdamW([weight], weight_decay=0.0, **settings)
    for _ in range(steps):
        weight.grad = torch.full_like(weight, 0.01)
        optimizer.step()
    return weight, optimizer


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.9, 0.95), (0.8, 0.7)])
@pytest.mark.parametrize("steps", [3, 50, 1000])
def test_a_moment_moves_the_weight_as_far_as_is_said(steps, betas):
    moved = {}
    for off in (0.0, 0.5):
        weight, optimizer = trained(steps, lr=1e-3, betas=betas)
        said = reach_of(optimizer.state_dict())
        state = optimizer.state[weight]
        state["exp_avg"] += off * state["exp_avg_sq"].sqrt()
        for _ in range(300):
            weight.grad = torch.full_like(weight, 0.01)
            optimizer.step()
        moved[off] = float(weight.detach()[0])
    # while training has only begun, the first moment's own correction falls within the steps that it lasts
    least = 0.4 if steps == 3 else 0.99 * betas[0]
    reached = (moved[0.0] - moved[0.5]) / (0.5 * said.distance * said.correction)
    assert least < reached < 1


def test_steps_are_those_of_the_optimizer_or_of_a_group():
    correction = pytest.approx((1 - 0.999**50) ** 0.5 / (1 - 0.9**50))
    group = {"lr": 1e-3, "betas": (0.9, 0.999)}
    assert reach_of({"param_groups": [group | {"step": 50}]}).correction == correction
    assert reach_of({"param_groups": [group], "state": {"a.weight": {"step": 50}}}).correction == correction
    # parameters that were added later
    some = {0: {"step": torch.tensor(50.0)}, 1: {"step": 3}, 2: {}}
    assert reach_of({"param_groups": [group], "state": some}).correction == correction


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"step": 0},
        {"step": float("nan")},
        {"step": 50, "bias_correction": False},
        {"step": 50, "use_bias_correction": False},
        {"step": 50, "betas": (0.9,)},
        {"step": 50, "betas": (0.9, 1.0)},
        {"step": 50, "betas": (0.9, None)},
    ],
)
def test_no_correction_is_made_up(more):
    assert reach_of({"param_groups": [{"lr": 1e-3, "betas": (0.9, 0.999)} | more]}) == Reach(
        pytest.approx(1e-2)
    )


def test_the_group_that_reaches_farthest_as_it_is_stored():
    groups = [{"lr": 2e-3, "betas": (0.9, 0.999), "step": 50}, {"lr": 1e-3, "betas": (0.9, 0.95), "step": 50}]
    assert reach_of({"param_groups": groups}).distance == pytest.approx(1e-2)
