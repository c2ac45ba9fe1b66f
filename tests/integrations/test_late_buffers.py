"""Buffers that training makes or resizes: a model that is built anew has no place for them, which is said at the first step."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shrinkpoint
from shrinkpoint.errors import ShrinkpointWarning, StateMismatchError

INPUTS = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
MESSAGE = "made or resized the model's buffers body.late"


class Body(nn.Linear):
    """Its buffer comes with the batch after some others, or is as long as all batches."""

    def __init__(self, kind: str = "none") -> None:
        super().__init__(4, 4)
        self.kind, self.batches = kind, 0
        if kind != "new":
            self.register_buffer("late", torch.zeros(0, 4) if kind == "grows" else None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        self.batches += 1
        if self.kind == "grows":
            self.late = torch.cat([self.late, x.detach()])
        elif getattr(self, "late", None) is None and self.batches > (2 if self.kind == "third" else 0):
            self.register_buffer("late", x.detach().mean(0))
        return x


class MakesRoom(Body):
    def _load_from_state_dict(self, state: Any, prefix: str, *arguments: Any) -> None:
        self.late = torch.empty_like(state[f"{prefix}late"])
        super()._load_from_state_dict(state, prefix, *arguments)


class Net(nn.Module):
    def __init__(self, kind: str = "none", body: type[Body] = Body) -> None:
        super().__init__()
        self.body = body(kind)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


def train(url: Path, model: nn.Module, until: int) -> nn.Module:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with shrinkpoint.Checkpointer(
        url, model, optimizer, every=2, scheme="lossless", advanced=shrinkpoint.Advanced(busy="wait")
    ) as checkpointer:
        for step in range(checkpointer.resume(), until):
            optimizer.zero_grad()
            model(INPUTS).square().mean().backward()
            optimizer.step()
            checkpointer.step(step + 1)
    return model


@pytest.mark.parametrize("kind", ["none", "new", "grows"])
def test_own_loop(kind: str, tmp_path: Path) -> None:
    with pytest.raises(StateMismatchError, match=MESSAGE):
        train(tmp_path, Net(kind), 1)


def test_one_that_comes_later_is_told_at_the_next_save(tmp_path: Path) -> None:
    with pytest.warns(ShrinkpointWarning, match=MESSAGE):
        train(tmp_path, Net("third"), 4)


def test_a_module_that_makes_room_and_one_that_was_called_before_go_on(tmp_path: Path) -> None:
    train(tmp_path / "room", Net(body=MakesRoom), 2)
    train(tmp_path / "room", Net(body=MakesRoom), 4)
    for until in (2, 4):
        called = Net()
        called(INPUTS)
        train(tmp_path / "called", called, until)
