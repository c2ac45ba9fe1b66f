"""Gradients are averaged where they count, and only there."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_module

from shrinkpoint.session.gradients import GradientCollector


def model() -> nn.Module:
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    module(torch.ones(4, 3)).sum().backward()
    return module


def sgd(module: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(module.parameters(), lr=0.1)]


@pytest.mark.parametrize(
    ("remaining", "counts"), [(None, True), (0, True), (49, True), (50, False), (1000, False)]
)
def test_the_last_steps_before_a_save_count(remaining: int | None, counts: bool) -> None:
    module, gradients = model(), GradientCollector()
    gradients.update(module, sgd(module), remaining)
    average = gradients.take(sgd(module))
    if not counts:
        assert average is None
        return
    assert average is not None
    assert average.keys() == dict(module.named_parameters()).keys()
    assert module[0].weight.grad is not None
    torch.testing.assert_close(average["0.weight"], 0.1 * module[0].weight.grad)


def test_a_new_average_starts_after_each_save() -> None:
    module, gradients = model(), GradientCollector()
    gradients.update(module, sgd(module), 0)
    assert gradients.take(sgd(module)) is not None
    assert gradients.take(sgd(module)) is None


def test_adam_averages_itself_from_its_first_step_on() -> None:
    module, gradients = model(), GradientCollector()
    optimizers: list[torch.optim.Optimizer] = [torch.optim.AdamW(module.parameters())]
    gradients.update(module, optimizers, 0)
    optimizers[0].step()
    assert gradients.take(optimizers) is None
    gradients.update(module, optimizers, 0)
    assert gradients.take(sgd(module)) is None


def test_a_step_that_a_loss_scaler_skips_does_not_count() -> None:
    module, gradients = model(), GradientCollector()
    assert module[1].bias.grad is not None
    module[1].bias.grad.fill_(torch.inf)
    gradients.update(module, sgd(module), 0)
    assert gradients.take(sgd(module)) is None


def test_names_in_a_checkpoint() -> None:
    module, gradients = model(), GradientCollector()
    gradients.update(module, sgd(module), 0, names={"0.weight": "first"})
    average = gradients.take(sgd(module))
    assert average is not None
    assert average.keys() == {"first", "0.bias", "1.weight", "1.bias"}


@pytest.fixture(name="process_group")
def _process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("process_group")
def test_sharded_gradients_do_not_count() -> None:
    module = distribute_module(nn.Linear(3, 2), init_device_mesh("cpu", (1,)))
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    gradients = GradientCollector()
    gradients.update(module, sgd(module), 0)
    assert gradients.take(sgd(module)) is None
