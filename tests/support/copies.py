"""Data parallel trainings in a plain loop whose processes share the work of saving, by several gloo processes, for the tests."""

from typing import Any

import torch
from support.replicas import Replica

__all__ = ["CopiedTraining", "evaluated", "told", "trained"]


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
