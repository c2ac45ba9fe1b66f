"""Sharded trainings that adopt their checkpoints, for the tests."""

import time
import warnings
from collections.abc import Collection
from typing import Any

import torch
from support.options import grouped, leave
from support.sharded import batch, build, full_state, train, warm
from support.sharded_programs import POINTS, _at
from torch.nn import functional

import shrinkpoint
from shrinkpoint.errors import StoreError
from shrinkpoint.state.digest import state_digest, tensor_digest

__all__ = [
    "EVERY",
    "STEPS",
    "Ranked",
    "behind_a_kill",
    "continued",
    "corrupted",
    "damage_exchange",
    "failing",
    "from_an_exact_save",
    "measured",
    "refused",
    "until_killed",
]

EVERY, STEPS = 3, 20

warm()


class Ranked:
    """One rank's process of a training: made afresh, it knows nothing but the URL."""

    def __init__(
        self, rank: int, world: int, url: str, kind: str = "fsdp", *, measures: bool = False, **options: Any
    ) -> None:
        self.rank = rank
        self.model, self.optimizer = build(kind, world, rank, d=64)
        wanted = {
            "every": EVERY,
            "adopt": STEPS // EVERY,
            "threads": 1,
            "busy": "wait",
            "key_every": 2,
            "evaluate": self.loss if measures else None,
        }
        self.checkpointer = shrinkpoint.Checkpointer(
            url, self.model, self.optimizer, **grouped(**wanted | options)
        )
        self.reached = self.checkpointer.resume()
        self.digests: dict[int, str] = {}
        """Of weights and moments, by step."""

    def run(self, end: int) -> "Ranked":
        """Train up to a step."""
        for step in range(self.reached, end):
            train(self.model, self.optimizer, step)
            self.checkpointer.step(step + 1)
            self.digests[step + 1] = self.digest
        self.reached = end
        return self

    def loss(self) -> float:
        """Held out, of this rank's own batch."""
        tokens, labels = batch(1000 + self.rank)
        with torch.no_grad():
            return float(functional.cross_entropy(self.model(tokens).flatten(0, 1), labels.flatten()))

    @property
    def digest(self) -> str:
        """Of all weights and moments; a collective."""
        state = full_state(self.model, self.optimizer)
        return str(state_digest({name: tensor_digest(state[name]) for name in sorted(state)}))

    def end(self) -> dict[int, str]:
        """Let go of the run; what was noted."""
        leave(self.checkpointer)
        return self.digests


def continued(
    rank: int, world: int, folder: str, kind: str, stops: Collection[int], adopt: bool = True
) -> Any:
    """The digests of an undisturbed training, and of one that is stopped and made afresh several times."""
    whole = Ranked(rank, world, f"{folder}/whole", kind, adopt=adopt and STEPS // EVERY).run(STEPS)
    digests, reports = whole.end(), whole.checkpointer.reports()
    parts = []
    for stop in (*stops, STEPS):
        part = Ranked(rank, world, f"{folder}/run", kind, adopt=adopt and STEPS // EVERY)
        began = part.reached
        parts.append((began, part.run(stop).end()))
    return digests, parts, [(r.step, r.kind, r.measured, r.adopt_s, r.ratio) for r in reports]


def measured(rank: int, world: int, folder: str) -> Any:
    """What an undisturbed training and one that is stopped have come to, by losses of each rank's own batch; and the reports."""
    whole = Ranked(rank, world, f"{folder}/whole", measures=True).run(STEPS)
    digests, reports = whole.end(), whole.checkpointer.reports()
    Ranked(rank, world, f"{folder}/run", measures=True).run(2 * EVERY + 1).end()
    rest = Ranked(rank, world, f"{folder}/run", measures=True)
    began = rest.reached
    return began, digests, rest.run(STEPS).end(), [(r.measured, r.degradation) for r in reports]


def failing(rank: int, world: int, folder: str) -> Any:
    """The digests of a training whose second and third save fail on one rank, and of what continues it."""
    calls = 0

    def fails() -> None:
        nonlocal calls
        calls += 1
        if calls in (2, 3):
            raise StoreError("the disk is full")

    owner, name, _ = POINTS["before-put"]
    original = getattr(owner, name)
    if rank == 1:
        setattr(owner, name, lambda self, *a, **o: (fails(), original(self, *a, **o))[1])
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", "training waits for", shrinkpoint.ShrinkpointWarning)
        first = Ranked(rank, world, f"{folder}/run").run(STEPS - 4)
        digests = first.end()
    setattr(owner, name, original)
    second = Ranked(rank, world, f"{folder}/run")
    again = second.reached
    return digests, again, second.run(STEPS).end(), [str(one.message) for one in shown]


def from_an_exact_save(rank: int, world: int, folder: str, at: int) -> Any:
    """The digests of a training that is continued from a save that was not planned."""
    first = Ranked(rank, world, f"{folder}/run").run(at)
    first.checkpointer.save(at, wait=True)
    first.end()
    second = Ranked(rank, world, f"{folder}/run")
    return second.reached, second.run(STEPS).end()


def behind_a_kill(rank: int, world: int, folder: str, point: str | None) -> Any:
    """Train until one rank kills itself at a point of the second save; without a point, to the end."""
    if point is not None and rank == 0:
        from support.sharded import die

        _at(point, 2, die)
    part = Ranked(rank, world, f"{folder}/run")
    began = part.reached
    return began, part.run(STEPS).end()


def until_killed(rank: int, world: int, folder: str, noted: str) -> bool:
    """Train to the end, each step's digest on the disk before the next one; whether it came there."""
    part = Ranked(rank, world, f"{folder}/run")
    with open(f"{noted}-{rank}", "a") as file:
        for step in range(part.reached, STEPS):
            part.run(step + 1)
            file.write(f"{step + 1} {part.digests[step + 1]}\n")
            file.flush()
            time.sleep(0.05)
    part.end()
    return True


def damage_exchange(rank: int) -> None:
    """Let the second rank get another value of one tensor than its owner has sent, in each exchange from now on."""
    from shrinkpoint.sharded.exchange import ExchangePlan

    original = ExchangePlan.run

    def damaging(
        self: ExchangePlan, buffers: Any, given: Any, taken: Any, *more: Any, **options: Any
    ) -> None:
        original(self, buffers, given, taken, *more, **options)
        if rank == 1 and not options:  # what owners are given at a save is as it was
            name = sorted({move.name for move in self.moves if move.receiver == rank})[1]
            with torch.no_grad():
                next(iter(taken[name].values())).view(-1)[:1] += 1

    ExchangePlan.run = damaging  # type: ignore[method-assign]


def corrupted(rank: int, world: int, folder: str) -> str:
    """What is raised where the second rank gets another value of one tensor than its owner has restored."""
    damage_exchange(rank)
    try:
        Ranked(rank, world, f"{folder}/run").run(EVERY)
    except Exception as error:  # noqa: BLE001 - compared
        return f"{type(error).__name__}: {error}"
    return "nothing"


def refused(rank: int, world: int, folder: str) -> str:
    """What is raised where a rank is given other options of adoption."""
    try:
        Ranked(rank, world, f"{folder}/run", adopt=5 + rank)
    except Exception as error:  # noqa: BLE001 - compared
        return f"{type(error).__name__}: {error}"
    return "nothing"
