"""From owners of whole tensors to all that hold something of them: what a training takes over, and what it evaluates."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from shrinkpoint.sharded.boxes import Box, Piece
from shrinkpoint.sharded.comparing import compare_moved
from shrinkpoint.sharded.exchange import Target, exchange
from shrinkpoint.sharded.layout import Layout, block_box
from shrinkpoint.sharded.ranks import Ranks
from shrinkpoint.state.training import TensorSpec

__all__ = ["Shards", "spread"]


@dataclass(frozen=True)
class Shards:
    """Where a state's tensors are: in the shards of all ranks, and as whole ones at their owners."""

    ranks: Ranks
    layout: Layout
    pieces: Mapping[str, Sequence[Piece]]
    """What this rank holds of each tensor: the training's own memory, or other memory of the same layout."""
    owners: Mapping[str, tuple[TensorSpec, int]]
    """Of each stored tensor, its spec and its owner."""


def spread(
    shards: Shards, names: Sequence[str], values: Mapping[str, torch.Tensor], *, proved: bool = False
) -> None:
    """Write stored tensors into the pieces of everyone that holds something of them; a collective.

    Args:
        shards: where they are.
        names: of the stored tensors, the same on every rank.
        values: those of them that this rank owns, in whole.
        proved: whether all ranks make sure, by digests, that every one has its owner's values.

    Raises:
        StateMismatchError: with `proved`, a rank has not; on every rank.
    """
    sources: dict[str, dict[Box, tuple[int, ...]]] = {}
    whole: dict[tuple[str, Box], torch.Tensor] = {}
    for name in names:
        spec, owner = shards.owners[name]
        of, box = block_box(spec)
        sources.setdefault(of, {})[box] = (owner,)
        if name in values:
            whole[of, box] = values[name]
    holders = shards.layout.holders
    targets = {
        of: [Target(box, rank) for box, ranks in holders[of].items() for rank in ranks] for of in sources
    }
    locals_ = {(name, piece.box): piece.local for name, own in shards.pieces.items() for piece in own}

    def give(name: str, box: Box) -> torch.Tensor:
        return whole[name, box]

    def take(name: str, box: Box) -> torch.Tensor:
        return locals_[name, box]

    exchange(shards.ranks, shards.layout.specs, sources, targets, give, take)
    if proved:
        compare_moved(shards.ranks, sources, targets, give, take)
