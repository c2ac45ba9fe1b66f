"""Whatever a block does to a model, it is undone."""

from collections import OrderedDict, deque
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from shrinkpoint.quality.preserve import is_plain_tensor, preserved_state


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("seen", torch.arange(3))
        self.values = [1, [2, {"a": {3}}]]
        self.queue = deque([1, 2], maxlen=2)
        self.order = OrderedDict(a=1, b=2)
        self.array = np.arange(3)
        self.expanded = torch.ones(1).expand(4)
        self.bf16 = torch.tensor([float("nan"), -0.0], dtype=torch.bfloat16)
        self.teacher = [nn.Linear(1, 1)]
        self.values.append(self.values)


def test_all_kinds_of_values_come_back_and_are_the_same_objects() -> None:
    holder = Holder()
    parts: list[Any] = [holder.values, holder.queue, holder.order, holder.array, holder.seen, holder.bf16]
    bits = holder.bf16.view(torch.int16).clone()
    weight, place = holder.linear.weight, holder.linear.weight.data_ptr()
    values = holder.linear.weight.detach().clone()
    teacher = holder.teacher[0].weight.detach().clone()
    with preserved_state(holder):
        holder.linear.weight.data = torch.zeros(3, 3)
        holder.linear.weight = nn.Parameter(torch.zeros(1))
        holder.values[1][1]["a"].add(4)  # type: ignore[index]
        holder.values.clear()
        holder.queue.append(3)
        holder.order.move_to_end("a")
        holder.array[:] = 0
        holder.seen.zero_()
        holder.bf16.zero_()
        holder.expanded = torch.zeros(4)
        holder.teacher[0].weight.data.zero_()
        holder.teacher.append(nn.Linear(1, 1))
        holder.new = 1  # type: ignore[assignment]
        del holder.linear.bias
    assert [id(part) for part in parts] == [
        id(part)
        for part in (holder.values, holder.queue, holder.order, holder.array, holder.seen, holder.bf16)
    ]
    assert holder.values[:2] == [1, [2, {"a": {3}}]]
    assert holder.values[2] is holder.values
    assert list(holder.queue) == [1, 2]
    assert list(holder.order) == ["a", "b"]
    assert holder.array.tolist() == holder.seen.tolist() == [0, 1, 2]
    assert torch.equal(holder.bf16.view(torch.int16), bits)
    assert holder.expanded.tolist() == [1, 1, 1, 1]
    assert holder.linear.weight is weight
    assert holder.linear.weight.data_ptr() == place
    assert torch.equal(holder.linear.weight, values)
    assert holder.linear.bias is not None
    assert len(holder.teacher) == 1
    assert torch.equal(holder.teacher[0].weight, teacher)
    assert not hasattr(holder, "new")


def test_after_an_error_too() -> None:
    values = [1]

    def fail() -> None:
        with preserved_state(values):
            values.append(2)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert values == [1]


def test_gradients_come_back() -> None:
    layer = nn.Linear(2, 2)
    layer(torch.ones(1, 2)).sum().backward()
    weight, gradient = layer.weight.grad, layer.bias.grad
    layer.bias.grad = None
    with preserved_state(layer):
        layer.weight.grad = None
        layer.bias.grad = gradient
    assert layer.weight.grad is weight
    assert layer.bias.grad is None


def test_what_is_no_plain_memory_is_let_be() -> None:
    sparse = torch.eye(2).to_sparse()
    meta = torch.empty(2, device="meta")
    with preserved_state([sparse, meta]):
        pass
    assert not is_plain_tensor(sparse)
    assert not is_plain_tensor(meta)
    assert is_plain_tensor(nn.Parameter(torch.ones(1)))


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_undo_that_fails_or_is_interrupted_leaves_none_of_the_others_out(monkeypatch, error) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    times = []

    def write(memory: torch.Tensor, copy: torch.Tensor) -> None:
        times.append(None)
        if len(times) == 1:
            raise error
        memory.copy_(copy)

    monkeypatch.setattr("shrinkpoint.quality.preserve._write", write)

    def change() -> None:
        with preserved_state(model), torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()

    with pytest.raises(error):
        change()
    same = [torch.equal(now, value) for now, value in zip(model.parameters(), before, strict=True)]
    assert same.count(False) == (0 if error is KeyboardInterrupt else 1)


class Packed(torch.Tensor):
    """A weight as libraries pack it: it has other memory, and says in an attribute how."""


def test_packed_weights_and_generators_come_back() -> None:
    layer: Any = nn.Module()
    layer.weight = nn.Parameter(torch.arange(4).as_subclass(Packed), requires_grad=False)
    layer.weight.layouts = ["rows"]
    place, expected = layer.weight.data_ptr(), torch.rand(2, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(1)
    with preserved_state(layer):
        layer.weight.data = torch.zeros(2)
        layer.weight.layouts.append("columns")
        torch.rand(3)
    assert layer.weight.data_ptr() == place
    assert layer.weight.tolist() == [0, 1, 2, 3]
    assert layer.weight.layouts == ["rows"]
    assert torch.equal(torch.rand(2), expected)
