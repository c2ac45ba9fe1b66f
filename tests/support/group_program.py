"""Programs for the tests: processes that tell each other things, that fail alone, and that lose one of them."""

import os
import signal
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from shrinkpoint.errors import ConfigError, StoreError
from shrinkpoint.group.group import Distributed, world
from shrinkpoint.group.mailbox import Mailbox
from shrinkpoint.sharded.gathering import Shards, spread
from shrinkpoint.sharded.layout import layout_of, tensors_of_rank
from shrinkpoint.state.training import TrainingState, plain


def fails(error: Exception) -> Any:
    raise error


def told(action: Callable[[], Any]) -> Any:
    """The result, or what it raised."""
    try:
        return action()
    except Exception as error:  # noqa: BLE001 - compared
        return type(error).__name__, str(error)


def without_the_first(rank: int, size: int) -> Any:
    """Return what the others get in a collective to which the first process, which is killed, never comes."""
    group = world()
    group.most([0])
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    kind, _ = told(lambda: group.on_every(lambda: group.most([1])))
    return kind


def own_or_error(failing: int) -> int:
    rank = world().rank
    return world().on_every(lambda: fails(StoreError("gone")) if rank == failing else 10 + rank)


def given_to_all(rank: int) -> list[list[float]]:
    """Tensors of several dtypes and orders of memory, one of them a parameter, after the first rank has adopted its values."""
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
    state = TrainingState.capture(tensors, plain)
    own, pieces = tensors_of_rank(state.tensors, state.specs, lambda spec: True)
    layout = layout_of(Distributed().gather(own))
    owners = {name: (spec, 0) for name, spec in layout.specs.items()}
    shards = Shards(Distributed(), layout, pieces, owners)
    spread(shards, owners, {} if rank else state.tensors, proved=True)
    assert places == [tensor.data_ptr() for tensor in tensors]
    return [tensor.detach().reshape(-1).tolist() for tensor in tensors]


def summed(mailbox: Mailbox, key: str, own: dict[str, Any]) -> dict[str, Any]:
    def reduce(messages: list[dict[str, Any]]) -> dict[str, Any]:
        return {"sum": sum(message["number"] for message in messages)}

    return mailbox.combine(key, own, reduce, timeout_s=30.0)


def program(rank: int, size: int) -> dict[str, Any]:
    group = world()
    mailbox = Mailbox(group)
    seen = {
        "rank": (group.rank, group.size, group.is_first),
        "broadcast": group.broadcast({"of": rank}),
        "gather": group.gather(rank * 10),
        "gather_first": group.gather_first(rank * 10),
        "any_of": group.any_of(rank == 1, False),
        "on_first": group.on_first(lambda: f"from {rank}"),
        "on_first of ours": told(lambda: group.on_first(lambda: fails(StoreError("gone")))),
        "on_first of others": told(lambda: group.on_first(lambda: fails(KeyError("gone")))),
        "on_every": own_or_error(failing=7),
        "on_every, one fails": told(lambda: own_or_error(failing=1)),
        "together": told(lambda: group.raise_together(ConfigError("no") if rank == 0 else None)),
        "tensors": given_to_all(rank),
        "no error": group.raise_together(None),
        "combined": summed(mailbox, "a", {"number": rank + 1}),
        "one has failed": told(lambda: summed(mailbox, "b", {"error": "no"} if rank else {"number": 1})),
    }
    dist.barrier()  # the first one serves the messages
    return seen
