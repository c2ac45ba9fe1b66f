"""Data parallel trainings of adapters in a plain loop, by several gloo processes, for the tests."""

from pathlib import Path
from typing import Any, NamedTuple

import peft  # noqa: F401 - once, and not in every process
import torch
from support.adapters import adapted, points, trained
from support.copies import error_of
from support.options import grouped
from support.sharded import build, die, train, warm
from torch.nn.parallel import DistributedDataParallel

import shrinkpoint
from shrinkpoint.state.digest import state_digest, tensor_digest
from shrinkpoint.state.training import TrainingState

__all__ = ["AdaptedCopy", "Passed", "in_one_process", "killed", "other_base", "sharded", "through"]

warm()


class AdaptedCopy:
    """One process of a training of LoRA; one process alone gives the model without a wrapper."""

    def __init__(self, rank: int, world: int, url: str, **options: Any) -> None:
        self.rank = rank
        self.model = adapted()
        self.called = DistributedDataParallel(self.model) if world > 1 else self.model
        self.optimizer = torch.optim.AdamW(trained(self.model), lr=1e-2)
        given = {"every": 2, "scheme": "lossless", "busy": "wait", **options}
        if given.pop("measures", False):
            given["evaluate"] = self.evaluate
        self.checkpointer = shrinkpoint.Checkpointer(url, self.called, self.optimizer, **grouped(**given))

    def evaluate(self) -> list[float]:
        """Losses of two batches."""
        with torch.no_grad():
            return [self.loss(self.model, -1 - number).item() for number in range(2)]

    def loss(self, model: Any, step: int) -> torch.Tensor:
        """Of this process's batch."""
        x, y = points(2 * step + self.rank + 100)
        return (model(x) - y).pow(2).mean()

    def run(self, begin: int, end: int) -> None:
        """Train from one step to another."""
        for step in range(begin, end):
            self.loss(self.called, step).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.checkpointer.step(step + 1)

    @property
    def digest(self) -> str:
        """Of the model, its base too, and the optimizer."""
        parts = [self.model.state_dict(), self.optimizer.state_dict()]
        tensors = TrainingState.capture(parts).tensors
        return str(state_digest({name: tensor_digest(value.detach()) for name, value in tensors.items()}))


class Passed(NamedTuple):
    """What one start of a training has come to, on one process."""

    began: int
    resumed: str
    """The digest where it began."""
    ended: str
    measured: list[str]
    """Of its saves."""


def through(rank: int, world: int, url: str, end: int, options: dict[str, Any] | None = None) -> Passed:
    """Train up to a step."""
    copy = AdaptedCopy(rank, world, url, **(options or {}))
    began = copy.checkpointer.resume()
    resumed = copy.digest
    copy.run(began, end)
    copy.checkpointer.close()
    return Passed(began, resumed, copy.digest, [report.measured for report in copy.checkpointer.reports()])


def killed(rank: int, world: int, url: str, end: int) -> None:
    """Train up to a step, after the last save, and die."""
    copy = AdaptedCopy(rank, world, url)
    copy.run(copy.checkpointer.resume(), end)
    copy.checkpointer.flush()
    die()


def other_base(rank: int, world: int, url: str, resumes: bool) -> tuple[str, bool]:
    """What a resume or a save raises where the second rank has another base, and whether nothing was changed."""
    copy = AdaptedCopy(rank, world, url)
    with torch.no_grad():
        copy.model.base_model.model.second.base_layer.weight[3, 5] += 1e-6 * rank
    before = copy.digest
    call = copy.checkpointer.resume if resumes else lambda: copy.checkpointer.save(1, wait=True)
    return error_of(call), copy.digest == before


def in_one_process(url: str, **options: Any) -> None:
    """Train a model of which a part is frozen for a step more."""
    model, optimizer = build("plain", 1, 0, frozen=True)
    checkpointer = shrinkpoint.Checkpointer(
        url, model, optimizer, **grouped(every=1, scheme="lossless", **options)
    )
    begin = checkpointer.resume()
    train(model, optimizer, begin)
    checkpointer.step(begin + 1)
    checkpointer.close()


def sharded(rank: int, world: int, url: str) -> tuple[str, str]:
    """What a resume raises with shards, and the option by itself."""
    model, optimizer = build("fsdp", world, rank, frozen=True)

    def continued(url: str, **options: Any) -> str:
        return error_of(
            lambda: shrinkpoint.Checkpointer(url, model, optimizer, **grouped(**options)).resume()
        )

    return continued(url), continued(str(Path(url).with_name("new")), frozen="reference")
