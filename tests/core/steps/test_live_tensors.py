"""The tensors of a model's state, found again at every step."""

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from shrinkpoint.steps.weight_copies import LiveTensors


class _Averaged(nn.Linear):
    """Its state contains a tensor that is made when the state is asked for."""

    def state_dict(self, *args: Any, **options: Any) -> Any:
        state = super().state_dict(*args, **options)
        state["mean"] = self.weight.detach().mean(0)
        return state


def _model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 3), nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2)))


def _agree(live: LiveTensors, model: nn.Module) -> bool:
    state = nn.Module.state_dict(model, keep_vars=True)
    found = live.current()
    return list(found) == list(state) and all(found[name] is state[name] for name in state)


def test_they_are_those_of_the_state_and_looked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _model()
    live = LiveTensors(model)
    first = live.current()
    assert live.lasting
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    model(torch.randn(5, 4)).sum().backward()
    assert _agree(live, model)
    monkeypatch.delattr(nn.Module, "named_modules")  # without which nothing can be looked for
    assert live.current() is first


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


def _another_module(model: nn.Module) -> None:
    model.add_module("head", nn.Linear(2, 2))


def _another_parameter(model: nn.Module) -> None:
    model.register_parameter("scale", nn.Parameter(torch.ones(1)))


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
        _another_module,
        _another_parameter,
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


class _Either(nn.Module):
    """Its state is that of one of its modules or of the other."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.average = nn.Linear(3, 2), nn.Linear(3, 2)

    def state_dict(self, *args: Any, **options: Any) -> Any:
        return (self.net if self.training else self.average).state_dict(*args, **options)


def test_a_state_that_chooses_among_its_tensors_is_asked_for_each_time() -> None:
    model = _Either().eval()
    live = LiveTensors(model)
    assert live.current()["weight"] is model.average.weight
    assert live.current()["weight"] is model.average.weight
    model.train()
    assert live.current()["weight"] is model.net.weight
    assert not live.lasting


def test_hooks_of_the_state_count() -> None:
    model = _model()

    def without_bias(module: nn.Module, state: dict[str, Any], prefix: str, metadata: object) -> None:
        del state[prefix + "bias"]

    model[0].register_state_dict_post_hook(without_bias)
    live = LiveTensors(model)
    assert "0.bias" not in live.current()
    assert not live.lasting


def test_scripted_models_have_tensors_too() -> None:
    model = torch.jit.script(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)))
    live = LiveTensors(model)
    for _ in range(2):
        assert {name: tensor.data_ptr() for name, tensor in live.current().items()} == {
            name: tensor.data_ptr() for name, tensor in model.state_dict().items()
        }


def test_tensors_that_are_replaced_are_not_kept() -> None:
    model = _model()
    live = LiveTensors(model)
    live.current()
    old = weakref.ref(model[0].weight)
    model[0] = nn.Linear(4, 3)
    live.current()
    assert old() is None
    now = weakref.ref(model[0].weight)
    live.forget()
    model[0] = nn.Linear(4, 3)
    assert now() is None
