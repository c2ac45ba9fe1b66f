"""Measuring by the functions that a `Checkpointer` is given leaves no trace in what the model and the objects with a state write down."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from support.traces import CALLS, LASTING, Lasting, Traces
from torch import nn

import shrinkpoint


class Recording(nn.Module):
    def __init__(self, lasting: Lasting | None = None) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 1))
        self.traces, self.lasting = Traces(), lasting

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.net(x)
        if self.lasting is not None:
            self.lasting.touch()
        else:
            self.traces.touch(round(out.mean().item(), 3))
        return out


class Curriculum:
    """An object with a state that is given by name, and writes down more than its state."""

    def __init__(self) -> None:
        self.traces = Traces()

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass


def trained(url: str | None, lasting: Lasting | None = None) -> tuple[Any, ...]:
    CALLS.clear()
    torch.manual_seed(1)
    x, y = torch.randn(64, 8), torch.randn(64, 1)
    model, curriculum = Recording(lasting), Curriculum()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def loss(index: int) -> torch.Tensor:
        found = (model(x[8 * index : 8 * index + 8]) - y[8 * index : 8 * index + 8]).square().mean()
        if lasting is None:
            curriculum.traces.touch(round(found.item(), 3))
        return found

    checkpointer = None
    if url is not None:
        checkpointer = shrinkpoint.Checkpointer(
            url,
            model,
            optimizer,
            every=4,
            evaluate=lambda: [loss(6).item(), loss(7).item()],
            train_loss=loss if lasting is None else None,
            curriculum=curriculum,
            advanced=shrinkpoint.Advanced(busy="wait"),
        )
    for step in range(1, 15):
        optimizer.zero_grad()
        loss(step % 6).backward()
        optimizer.step()
        if checkpointer is not None:
            checkpointer.step(step)
    if checkpointer is not None:
        checkpointer.close()
    return [model.traces.seen(), curriculum.traces.seen()], model.state_dict(), len(CALLS)


def test_what_the_model_writes_down_is_as_without_checkpoints(tmp_path: Path) -> None:
    plain = trained(None)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "the quality of checkpoints")
        saved = trained(str(tmp_path / "run"))
    assert saved[2] > plain[2]  # it was measured
    assert plain[0] == saved[0]
    assert all(torch.equal(value, saved[1][name]) for name, value in plain[1].items())


@pytest.mark.parametrize("kind", LASTING)
def test_what_cannot_be_put_back_is_named_once_and_ends_measuring(tmp_path: Path, kind: str) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        *_, calls = trained(str(tmp_path / "run"), Lasting(kind, tmp_path))
    told = [str(each.message) for each in caught if "cannot be put back" in str(each.message)]
    assert len(told) == 1, told
    assert "of Lasting" in told[0]
    assert calls == 14 + 2
