"""The tensors of a model's state, found again at every step."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from shrinkpoint.steps.live_tensors import LiveTensors


class _Counted(nn.Sequential):
    """Counts how often its state is asked for."""

    asked = 0

    def state_dict(self, *args: Any, **options: Any) -> Any:
        self.asked += 1
        return super().state_dict(*args, **options)


class _Averaged(nn.Linear):
    """Its state contains a tensor that is made when the state is asked for."""

    def state_dict(self, *args: Any, **options: Any) -> Any:
        state = super().state_dict(*args, **options)
        state["mean"] = self.weight.detach().mean(0)
        return state


def _model() -> _Counted:
    return _Counted(nn.Linear(4, 3), nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2)))


def _agree(live: LiveTensors, model: nn.Module) -> bool:
    state = nn.Module.state_dict(model, keep_vars=True)
    found = live.current()
    return list(found) == list(state) and all(found[name] is state[name] for name in state)


def test_they_are_those_of_the_state_and_looked_for_once() -> None:
    model = _model()
    live = LiveTensors(model)
    first = live.current()
    asked = model.asked
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    model(torch.randn(5, 4)).sum().backward()
    assert live.current() is first
    assert model.asked == asked
    assert _agree(live, model)


def _other_parameter(model: nn.Module) -> None:
    model[1][1].weight = nn.Parameter(torch.zeros(2, 3))


def _other_buffer(model: nn.Module) -> None:
    model[1][0].running_mean = torch.ones(3)


def _other_module(model: nn.Module) -> None:
    model[1] = nn.Linear(3, 2)


def _without_a_module(model: nn.Module) -> None:
    del model[1][1]


def _without_a_parameter(model: nn.Module) -> None:
    model[0].bias = None


def _tied(model: nn.Module) -> None:
    model[1][0].weight = model[0].bias


def _other_shape(model: nn.Module) -> None:
    model[0].weight.data = torch.zeros(7, 4)


def _other_dtype(model: nn.Module) -> None:
    model[0].weight.data = model[0].weight.data.to(torch.bfloat16)


@pytest.mark.parametrize(
    "change",
    [
        _other_parameter,
        _other_buffer,
        _other_module,
        _without_a_module,
        _without_a_parameter,
        _tied,
        _other_shape,
        _other_dtype,
    ],
    ids=lambda change: change.__name__.strip("_"),
)
def test_what_is_replaced_is_seen(change: Callable[[nn.Module], None]) -> None:
    model = _model()
    live = LiveTensors(model)
    first = live.current()
    change(model)
    second = live.current()
    assert second is not first
    assert _agree(live, model)
    assert live.current() is second


def test_the_two_names_of_a_tied_tensor_are_told_apart() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    live = LiveTensors(model)
    live.current()
    model[0].weight = nn.Parameter(torch.zeros(3, 3))
    assert _agree(live, model)


def test_tensors_that_the_state_makes_are_made_each_time() -> None:
    model = _Averaged(4, 3)
    live = LiveTensors(model)
    before = live.current()["mean"].clone()
    with torch.no_grad():
        model.weight.add_(1.0)
    assert torch.allclose(live.current()["mean"], before + 1.0)
