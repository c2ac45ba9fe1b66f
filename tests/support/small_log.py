"""A training with a small log of its steps."""

from pathlib import Path
from typing import Any

import torch
from support.options import leave
from torch import nn

import shrinkpoint
from shrinkpoint.steps.options import StepLog


class SmallLogTraining:
    """A regression with batch normalization; remembers the state after each step."""

    def __init__(self, url: str | Path, *, scheme: str = "lossless", log: str | None = None, **fields: Any):
        torch.manual_seed(2)
        self.model = nn.Sequential(nn.Linear(64, 48), nn.BatchNorm1d(48), nn.Linear(48, 64))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1 / (1 + step / 50))
        self.truth: dict[int, dict[str, torch.Tensor]] = {}
        more = {
            name: fields.pop(name)
            for name in ("every", "keep_last", "resume", "scheme", "storage_options")
            if name in fields
        }
        self.checkpointer = shrinkpoint.Checkpointer(
            str(url),
            self.model,
            self.optimizer,
            step_log=StepLog(kind="small", **{"segment_steps": 2, "overhead": None, "url": log, **fields}),
            scheduler=self.scheduler,
            **{"scheme": scheme, "every": 10, **more},
        )

    @property
    def log(self) -> Any:
        """The step log."""
        return self.checkpointer.step_log.log

    def step(self) -> float:
        """One step of training."""
        self.optimizer.zero_grad()
        batch = torch.randn(16, 64)
        loss = (self.model(batch) - batch.roll(1, 1)).square().mean()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        return float(loss)

    def run(self, begin: int, end: int) -> "SmallLogTraining":
        """Some steps; every save, and all that the log does, is done before the next one."""
        for step in range(begin, end):
            self.step()
            self.checkpointer.step(step + 1)
            self.checkpointer.flush()
            self.log.flush()
            self.truth[step + 1] = {name: t.clone() for name, t in self.model.state_dict().items()}
        return self

    def leave(self) -> None:
        """Close the log and the run, without a last save."""
        leave(self.checkpointer)

    def crash(self) -> None:
        """What remains after a kill -9: all whole segments."""
        self.log.flush()
        self.checkpointer.saver.close()

    def miss(self, step: int, found: dict[str, torch.Tensor], base: int) -> float:
        """The error of logged weights, of the movement since a checkpoint."""
        true, before = self.truth[step], self.truth[base]
        names = ["0.weight", "2.weight"]
        error = sum(float((found[name] - true[name]).square().sum()) for name in names)
        return (error / sum(float((before[name] - true[name]).square().sum()) for name in names)) ** 0.5
