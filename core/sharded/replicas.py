"""Gives all ranks of a data parallel training the values that the first one has taken over, and proves that they have them."""

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist

from shrinkpoint.errors import StateMismatchError
from shrinkpoint.sharded.ranks import Ranks
from shrinkpoint.state.digest import state_digest, tensor_digest
from shrinkpoint.state.training import TrainingState, plain

__all__ = ["broadcast_tensors", "compare_replicas", "share_adopted"]


def share_adopted(ranks: Ranks, names: Sequence[str], live: Callable[[], object]) -> None:
    """Give every rank the values that the first one has taken over; a collective, after each planned save.

    Args:
        ranks: all of them.
        names: of the tensors, on the first rank; nothing where it has taken nothing over.
        live: returns the state whose tensors are the training's own, alike on every rank.

    Raises:
        StateMismatchError: the ranks do not train the same model with the same optimizers; or a rank does not have the first
            one's values afterwards. On every rank.
    """
    wanted = ranks.broadcast(list(names))
    if not wanted:
        return

    def find() -> dict[str, torch.Tensor]:
        tensors = TrainingState.capture(live(), plain).tensors
        missing = [name for name in wanted if name not in tensors]
        if missing:
            raise StateMismatchError(
                f"the first process has adopted {missing[0]!r}, which this one does not have: with adopt=True every process must"
                " train the same model with the same optimizers"
            )
        return {name: tensors[name] for name in wanted}

    found = ranks.on_every(find)
    broadcast_tensors(ranks, list(found.values()))
    compare_replicas(ranks, found)


def broadcast_tensors(ranks: Ranks, tensors: Sequence[torch.Tensor]) -> None:
    """Give tensors the first rank's values, in place; a collective.

    Args:
        ranks: all of them.
        tensors: of the same shapes and dtypes on every rank, in the same order.
    """
    with torch.no_grad():
        for tensor in tensors:
            if not tensor.numel():
                continue
            sent = tensor.detach().contiguous().to(ranks.device)
            dist.broadcast(sent.reshape(-1).view(torch.uint8), src=0, group=ranks.group)
            if sent.data_ptr() != tensor.data_ptr() and ranks.rank:
                tensor.copy_(sent)


def compare_replicas(ranks: Ranks, tensors: Mapping[str, torch.Tensor]) -> None:
    """Make sure that tensors are the same on every rank, by one exchange of a digest; a collective.

    Args:
        ranks: all of them.
        tensors: of the same names on every rank, in the same order.

    Raises:
        StateMismatchError: they are not, on every rank; it names the first tensor that differs.
    """
    digests = {name: tensor_digest(tensor.detach().cpu()) for name, tensor in tensors.items()}
    if len(set(ranks.gather(state_digest(digests)))) == 1:
        return
    by_rank = ranks.gather(digests)
    for name, wanted in by_rank[0].items():
        others = [str(rank) for rank, found in enumerate(by_rank) if found.get(name) != wanted]
        if others:
            raise StateMismatchError(
                f"process {', '.join(others)} does not have the values of {name!r} that the first process has adopted: memory or the"
                " network between them has failed. Start the training again: it goes on from its last checkpoint"
            )
