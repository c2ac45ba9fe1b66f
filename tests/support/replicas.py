"""Data parallel trainings in a plain loop that adopt their checkpoints, by several gloo processes, for the tests."""

import os
import signal
from typing import Any

import torch
from support.options import grouped, leave
from support.sharded import warm
from support.sharded_adopting import damage_exchange
from support.traced_loop import trained
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import shrinkpoint
from shrinkpoint.state.digest import state_digest, tensor_digest
from shrinkpoint.state.training import TrainingState
from shrinkpoint.steps import replay
from shrinkpoint.steps.record import decode_record

__all__ = [
    "EVERY",
    "STEPS",
    "Replica",
    "asked_to_end",
    "corrupted",
    "differing",
    "journey",
    "logged",
    "spoiled",
    "traced",
]

EVERY, STEPS = 3, 14
_WORDS, _WIDTH = 60, 32

warm()


class _Net(nn.Module):
    """Its parameters get their gradients in another order than they stand in, so that DDP makes other buckets."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(_WIDTH, _WORDS)
        self.table = nn.Embedding(_WORDS, _WIDTH)
        self.body = nn.Linear(_WIDTH, _WIDTH)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.body(self.table(tokens)))
        return self.head(functional.dropout(x, 0.1, self.training))


class _Place:
    """An object of which each process has another state."""

    def __init__(self, rank: int) -> None:
        self.at = 1000 * rank

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Replica:
    """One process of a training: made afresh, it knows nothing but the URL."""

    def __init__(self, rank: int, world: int, url: str, **options: Any) -> None:
        torch.manual_seed(3)
        self.model = _Net()
        self.wrapped = DistributedDataParallel(self.model, bucket_cap_mb=0.004)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        torch.manual_seed(100 + rank)
        self.place = _Place(rank)
        wanted = {
            "every": EVERY,
            "adopt": STEPS // EVERY,
            "evaluate": self.evaluate,
            "key_every": 2,
            "max_degradation": 0.5,
        }
        self.checkpointer = shrinkpoint.Checkpointer(
            url, self.wrapped, self.optimizer, **grouped(place=self.place, **wanted | options)
        )
        self.began = self.reached = self.checkpointer.resume()
        self.noted: dict[int, tuple[str, str]] = {}
        """By step: this process's loss, and the digest of weights and moments."""

    def evaluate(self) -> list[float]:
        """Losses of two batches."""
        with torch.no_grad():
            return [self._loss(self.model, seed).item() for seed in (-1, -2)]

    def run(self, end: int) -> "Replica":
        """Train up to a step."""
        for step in range(self.reached, end):
            self.wrapped.train()
            self.optimizer.zero_grad()
            self.place.at += 1
            loss = self._loss(self.wrapped, self.place.at)
            loss.backward()
            self.optimizer.step()
            self.checkpointer.step(step + 1)
            self.noted[step + 1] = loss.item().hex(), self.digest
        self.reached = end
        return self

    @property
    def digest(self) -> str:
        """Of all tensors that training changes."""
        parts = [self.model.state_dict(), self.optimizer.state_dict()]
        tensors = TrainingState.capture(parts).tensors
        return str(state_digest({name: tensor_digest(value.detach()) for name, value in tensors.items()}))

    def _loss(self, model: nn.Module, seed: int) -> torch.Tensor:
        tokens = torch.randint(_WORDS, (8, 7), generator=torch.Generator().manual_seed(5000 + seed))
        return functional.cross_entropy(
            model(tokens[:, :-1]).flatten(0, 1), tokens.sort()[0][:, 1:].flatten()
        )


def journey(rank: int, world: int, url: str, stop: int | None = None, adopts: bool = True) -> Any:
    """The first step and what was noted, by a training of which one process kills itself after step `stop`.

    With ``adopts=False`` it stores what it would with adoption, and goes on from its own values: nothing else differs.
    """
    if not adopts:
        from shrinkpoint.sharded import placement

        placement.spread = lambda *arguments, **named: None
    replica = Replica(rank, world, url).run(stop or STEPS)
    if stop is not None:
        replica.checkpointer.flush()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        replica.run(STEPS)
    leave(replica.checkpointer)
    return replica.began, replica.noted


LOGGED = {
    "adopt": False,
    "evaluate": None,
    "scheme": "lossless",
    "max_degradation": 0.03,
    "key_every": 10,
    "busy": "wait",
}
"""Options of a training with an exact log."""


def spoiled(end: int) -> Any:
    """Decodes records, and that of the step `end` wrongly: its replay leads to another state, which must be undone."""

    def decode(*arguments: Any) -> Any:
        decoded = decode_record(*arguments)
        if decoded.end == end:
            decoded.events[0].gradients[0].values.mul_(2)
        return decoded

    return decode


def logged(
    rank: int, world: int, folder: str, every: int, stop: int | None = None, wrong: int | None = None
) -> Any:
    """As `journey`, of a training that logs its steps; `wrong` is one that is replayed wrongly."""
    if wrong is not None:
        replay.decode_record = spoiled(wrong)
    log = {"step_log": shrinkpoint.StepLog(segment_steps=2, overhead=None), "log_url": f"{folder}/log"}
    replica = Replica(rank, world, f"{folder}/run", every=every, **LOGGED, **log).run(stop or STEPS)
    replica.checkpointer.step_log.flush()
    replica.checkpointer.flush()
    off = None if replica.checkpointer.step_log.log is None else replica.checkpointer.step_log.log.off
    if stop is not None:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        replica.run(STEPS)
    leave(replica.checkpointer)
    return replica.began, replica.noted, off


def asked_to_end(rank: int, world: int, url: str) -> str:
    """What ends a training of which one process alone gets a SIGTERM in step 7."""
    replica = Replica(rank, world, url).run(6)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    try:
        replica.run(STEPS)
    except SystemExit as error:
        return f"exit {error.code} at {max(replica.noted) + 1}"
    return "nothing"


def corrupted(rank: int, world: int, url: str) -> str:
    """What is raised where the second process gets another value of one tensor than its owner has restored."""
    damage_exchange(rank)
    try:
        Replica(rank, world, url).run(STEPS)
    except Exception as error:  # noqa: BLE001 - compared
        return f"{type(error).__name__}: {error}"
    return "nothing"


def differing(rank: int, world: int, url: str) -> str:
    """What is raised where the processes are given different options."""
    try:
        Replica(rank, world, url, adopt=5 + rank)
    except Exception as error:  # noqa: BLE001 - compared
        return f"{type(error).__name__}: {error}"
    return "nothing"


def traced(rank: int, world: int, url: str | None) -> Any:
    """Train a model that every rank has a copy of, each on its own batches."""
    return trained(url, seed=1 + rank, wrap=DistributedDataParallel)
