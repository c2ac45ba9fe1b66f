"""Proves, by digests, that what ranks hold of tensors is what was moved to them."""

from collections.abc import Mapping, Sequence

import torch

from shrinkpoint.errors import StateMismatchError
from shrinkpoint.sharded.exchange import Sources, Take, Target, moves
from shrinkpoint.sharded.ranks import Ranks
from shrinkpoint.state.digest import state_digest, tensor_digest

__all__ = ["compare_moved"]


def compare_moved(
    ranks: Ranks, sources: Sources, targets: Mapping[str, Sequence[Target]], give: Take, take: Take
) -> None:
    """Make sure that all boxes were filled with what their sources hold, by one exchange of digests; a collective.

    Args:
        ranks: all of them.
        sources, targets, give, take: as of `shrinkpoint.sharded.exchange.exchange`, after it.

    Raises:
        StateMismatchError: a rank holds something else, on every rank; it names the first such tensor.
    """
    given: list[list[tuple[str, str]]] = [[] for _ in range(ranks.world)]
    received: list[list[tuple[str, str]]] = [[] for _ in range(ranks.world)]
    for name in targets:
        for move in moves(name, sources[name], targets[name], ranks.rank):
            if move.sender == ranks.rank:
                source = move.source.cut(give(name, move.source), move.cut)
                given[move.receiver].append((name, _digest(source)))
            if move.receiver == ranks.rank:
                taken = move.target.cut(take(name, move.target), move.cut)
                received[move.sender].append((name, _digest(taken)))
    totals = ranks.gather(([*map(_total, given)], [*map(_total, received)]))
    pairs = [(sender, receiver) for sender in range(ranks.world) for receiver in range(ranks.world)]
    if all(totals[sender][0][receiver] == totals[receiver][1][sender] for sender, receiver in pairs):
        return
    pieces = ranks.gather((given, received))
    wrong = {
        name: receiver
        for sender, receiver in pairs
        for (name, one), (_, other) in zip(
            pieces[sender][0][receiver], pieces[receiver][1][sender], strict=True
        )
        if one != other
    }
    first = next(name for name in targets if name in wrong)
    raise StateMismatchError(
        f"rank {wrong[first]} does not have the values of {first!r} that its owner has restored: memory or the network between them"
        " has failed. Start the training again: it goes on from its last checkpoint"
    )


def _total(pieces: Sequence[tuple[str, str]]) -> str:
    return state_digest({f"{number} {name}": digest for number, (name, digest) in enumerate(pieces)})


def _digest(piece: torch.Tensor) -> str:
    return tensor_digest(piece.detach().cpu().contiguous())
