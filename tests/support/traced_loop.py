"""A loop whose model, and whose objects with a state, write down what they see."""

from typing import Any

import torch
from support.traces import CALLS, Lasting, Traces
from torch import nn

import shrinkpoint

__all__ = ["trained"]


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


def trained(
    url: str | None, lasting: Lasting | None = None, *, seed: int = 1, wrap: Any = lambda module: module
) -> tuple[Any, ...]:
    """Train for some steps, with or without checkpoints.

    Returns:
        What was written down, the model's state, how often anything was.
    """
    CALLS.clear()
    torch.manual_seed(seed)
    x, y = torch.randn(64, 8), torch.randn(64, 1)
    recording, curriculum = Recording(lasting), Curriculum()
    model = wrap(recording)
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
    buffers = []  # of each step: DDP gives the first rank's to all, and the next step hides what was left out
    for step in range(1, 15):
        optimizer.zero_grad()
        loss(step % 6).backward()
        optimizer.step()
        buffers.append(recording.net[1].running_mean.tolist())
        if checkpointer is not None:
            checkpointer.step(step)
    if checkpointer is not None:
        checkpointer.close()
    return [recording.traces.seen(), curriculum.traces.seen(), buffers], recording.state_dict(), len(CALLS)
