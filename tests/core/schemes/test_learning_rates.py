"""How far a first moment will still move its weight, as saved optimizers say it."""

from collections import OrderedDict

import pytest
import torch

from shrinkpoint.schemes.learning_rates import reach_of_first_moments
from shrinkpoint.state import TrainingState


def reach(saved):
    return reach_of_first_moments(TrainingState.capture(saved))


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
