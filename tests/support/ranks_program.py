"""A program for the tests: two processes that tell each other things, and that fail alone."""

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from shrinkpoint.errors import ConfigError, StoreError
from shrinkpoint.group.group import Distributed
from shrinkpoint.integrations.common import ranks
from shrinkpoint.sharded.spreading import broadcast_tensors


def fails(error: Exception) -> Any:
    raise error


def told(action: Callable[[], Any]) -> Any:
    """The result, or what it raised."""
    try:
        return action()
    except Exception as error:  # noqa: BLE001 - compared
        return type(error).__name__, str(error)


def outcome_of_first() -> Any:
    outcome: ranks.Outcome[int] = ranks.Outcome()
    if ranks.is_first():
        outcome.run(lambda: fails(ConfigError("no")))
    return outcome.share()


def own_or_error(failing: int) -> int:
    return ranks.on_every(lambda: fails(StoreError("gone")) if ranks.rank() == failing else 10 + ranks.rank())


def given_to_all(rank: int) -> list[list[float]]:
    """Tensors of several dtypes and orders of memory, one of them a parameter, after the first rank gave its values."""
    whole = torch.arange(6.0).reshape(2, 3) + 10 * rank
    tensors = [
        whole.clone(),
        whole.T.contiguous().T,
        whole.to(torch.bfloat16),
        torch.tensor(float(rank)),
        torch.nn.Parameter(whole.clone()),
        torch.empty(0),
    ]
    places = [tensor.data_ptr() for tensor in tensors]
    broadcast_tensors(Distributed(), tensors)
    assert places == [tensor.data_ptr() for tensor in tensors]
    return [tensor.detach().reshape(-1).tolist() for tensor in tensors]


def program(rank: int, meeting: str, answers: Any, everybody: Any) -> None:
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    seen = {
        "rank": (ranks.rank(), ranks.world_size(), ranks.is_first()),
        "broadcast": ranks.broadcast({"of": rank}),
        "gather": ranks.gather(rank * 10),
        "on_first": ranks.on_first(lambda: f"from {ranks.rank()}"),
        "on_first of ours": told(lambda: ranks.on_first(lambda: fails(StoreError("gone")))),
        "on_first of others": told(lambda: ranks.on_first(lambda: fails(KeyError("gone")))),
        "on_every": own_or_error(failing=7),
        "on_every, one fails": told(lambda: own_or_error(failing=1)),
        "outcome": told(outcome_of_first),
        "never run": told(lambda: ranks.Outcome[int]().share()),
        "together": told(lambda: ranks.raise_together(ConfigError("no") if rank == 0 else None)),
        "tensors": given_to_all(rank),
        "no error": ranks.raise_together(None),
    }
    answers.put((rank, seen))
    everybody.wait(100)  # gloo may leave a process waiting for one that is gone
    answers.close()
    answers.join_thread()
    os._exit(0)  # taking gloo's group down, two processes at once, has left one waiting forever
