"""Campaigns that kill ranks of a sharded training, and account for what it was told is stored."""

import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support.sharded import LIMIT_S, launch
from support.sharded_programs import POINTS, saves

import shrinkpoint
from shrinkpoint.store.run import RunStore

__all__ = ["EVERYWHERE", "Account", "acknowledged", "check", "kill_ranks"]

_OF_FIRST = {point for point, (kind, _, _) in POINTS.items() if kind.__name__ == "RunWriter"}
EVERYWHERE = [(rank, point) for point in POINTS for rank in (0, 1) if rank == 0 or point not in _OF_FIRST]
"""Which rank may be killed at which point."""


def acknowledged(log: Path) -> int:
    """The last step of which the training was told that it is stored."""
    return int(log.read_text().split()[-1]) if log.exists() else 0


def check(url: str, log: Path, storage_options: Mapping[str, Any] | None = None) -> int:
    """The newest checkpoint is of one step in every element, and not older than the last that was acknowledged."""
    if not RunStore(url, storage_options=storage_options).manifests():
        assert acknowledged(log) == 0
        return 0
    state = shrinkpoint.load(url, storage_options=storage_options)
    numbers = {
        number
        for tensors in (state["model"], *state["optimizers"][0]["state"].values())
        for tensor in tensors.values()
        for number in tensor.flatten().tolist()
    }
    assert numbers == {float(state["step"])}
    assert state["step"] >= acknowledged(log)
    return int(state["step"])


@dataclass
class Account:
    """What a campaign did."""

    kills: int = 0
    at: Counter[str] = field(default_factory=Counter)
    """Where: at a point, or at a random moment."""
    stored: int = 0
    """Checkpoints that were acknowledged, and found."""


def kill_ranks(
    folder: Path,
    url: str,
    kills: int,
    *,
    seed: int,
    lifetime: tuple[float, float] = (0.5, 4.0),
    faulted: Mapping[str, Any] | None = None,
    direct: Mapping[str, Any] | None = None,
    lazily: bool = False,
) -> Account:
    """Kill a rank of two or three again and again, at random moments and at each named point in turn; look after each.

    Args:
        folder: for what the ranks note.
        url: the run.
        kills: how many.
        seed: of the moments and the ranks.
        lifetime: seconds from the ranks' start to a random kill, at least and at most.
        faulted: storage options of the ranks.
        direct: those of the account.
        lazily: as of `saves`.

    Raises:
        AssertionError, ShrinkpointError: what was acknowledged is not there, or is a mixture.
    """
    chance, account, log = random.Random(seed), Account(), folder / "acknowledged"
    while account.kills < kills:
        world = chance.choice((2, 3))
        named = account.kills % 2 == 1
        rank, point = EVERYWHERE[account.kills // 2 % len(EVERYWHERE)]
        kill = (rank, point, chance.randrange(1, 4)) if named else None
        after_s = None if named else chance.uniform(*lifetime)
        launch(
            saves,
            world,
            folder,
            url,
            str(log),
            kill,
            100,
            faulted,
            lazily,
            killed=True,
            kill_after_s=after_s,
            victim=chance.randrange(world),
            limit_s=max(200.0, LIMIT_S),
        )
        account.kills += 1
        account.at[point if named else "a random moment"] += 1
        account.stored = check(url, log, direct)
        if account.kills % 10 == 0:
            print(account, flush=True)  # a long campaign that is stopped has counted so far
    return account
