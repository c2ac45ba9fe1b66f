"""Data parallel trainings in a plain loop whose processes share the work of saving, by several gloo processes, for the tests."""

import os
import warnings
from contextlib import nullcontext
from typing import Any

import torch
from support.options import grouped
from support.replicas import Replica
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import shrinkpoint
from shrinkpoint.group import group

__all__ = [
    "CopiedTraining",
    "accumulated",
    "evaluated",
    "evaluates_alone",
    "first_alone",
    "in_own_folders",
    "one_fails",
    "swapped",
    "told",
    "trained",
]


class CopiedTraining(Replica):
    """As `Replica`, without adoption."""

    def __init__(self, rank: int, world: int, url: str, *, measures: bool = False, **options: Any) -> None:
        own: dict[str, Any] = {"adopt": False, "scheme": "lossless", "busy": "wait"}
        own["evaluate"] = self.evaluate if measures else None
        super().__init__(rank, world, url, **{**own, **options})


def trained(rank: int, world: int, url: str, end: int, **options: Any) -> Any:
    """Where it began, what was noted at each step, and the generators and the place in the end."""
    training = CopiedTraining(rank, world, url, **options).run(end)
    training.checkpointer.close()
    kept = training.noted, torch.get_rng_state().tolist(), training.place.at
    return training.began, kept, [report.kind for report in training.checkpointer.reports()]


def accumulated(rank: int, world: int, url: str, end: int) -> Any:
    """Where it began, and the weights in the end, of a training that makes a step after four calls; each process has its own gradients."""
    torch.manual_seed(3)
    model = nn.Linear(600, 600)
    wrapped, optimizer = DistributedDataParallel(model), torch.optim.Adam(model.parameters(), 0.01)
    given = grouped(every=1, scheme="lossless", busy="wait")
    checkpointer = shrinkpoint.Checkpointer(url, wrapped, optimizer, **given)
    began = checkpointer.resume()
    for step in range(began, end):
        last = step % 4 == 3
        with nullcontext() if last else wrapped.no_sync():
            generator = torch.Generator().manual_seed(world * step + rank)
            wrapped(torch.randn(2, 600, generator=generator)).square().sum().backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()
        checkpointer.step(step + 1)
    checkpointer.close()
    return began, model.weight.detach()


def evaluated(rank: int, world: int, url: str, end: int) -> Any:
    """How the saves of a lossy training were measured."""
    training = CopiedTraining(rank, world, url, measures=True, scheme="auto", guards=False).run(end)
    training.checkpointer.close()
    return [(report.measured, report.degradation) for report in training.checkpointer.reports()]


def told(rank: int, world: int, url: str) -> str:
    """The error of a save of copies that have drifted apart."""
    training = CopiedTraining(rank, world, url)
    with torch.no_grad():
        training.model.head.weight[0, 0] += rank
    try:
        training.checkpointer.save(1, wait=True)
    except Exception as error:  # noqa: BLE001 - the answer
        return f"{type(error).__name__}: {error}"
    return "saved"


def error_of(action: Any) -> str:
    """What it raises."""
    try:
        action()
    except Exception as error:  # noqa: BLE001 - the answer
        return f"{type(error).__name__}: {error}"
    return "nothing"


def in_own_folders(rank: int, world: int, folder: str) -> str:
    """What is raised where the URL is another folder on each rank."""
    os.makedirs(f"{folder}/{rank}")
    os.chdir(f"{folder}/{rank}")
    return error_of(lambda: CopiedTraining(rank, world, "run"))


def first_alone(rank: int, world: int, url: str) -> str:
    """What the first rank learns where the others make no Checkpointer."""
    group._AWAITS_S = 0.5
    if rank:
        shrinkpoint.Checkpointer = None  # type: ignore[misc, assignment]
    return error_of(lambda: CopiedTraining(rank, world, url))


def one_fails(rank: int, world: int, url: str) -> str:
    """What each rank learns where the second one's own object cannot give its state."""
    training = CopiedTraining(rank, world, url)

    def fails() -> Any:
        raise RuntimeError("not here")

    if rank == 1:
        training.place.state_dict = fails  # type: ignore[method-assign]
    return error_of(lambda: training.checkpointer.save(1, wait=True))


def swapped(rank: int, world: int, url: str) -> list[str]:
    """The warnings where the first rank alone has put its weights back after the last step, which is not a planned save."""
    training = CopiedTraining(rank, world, url, every=2).run(3)
    if rank == 0:
        with torch.no_grad():
            training.model.head.weight.copy_(training.model.head.weight.clone())
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        training.checkpointer.close()
    return [str(each.message) for each in shown]


def evaluates_alone(rank: int, world: int, url: str) -> str:
    """What is raised where the first rank alone has a way to evaluate."""
    return error_of(lambda: CopiedTraining(rank, world, url, measures=rank == 0))
