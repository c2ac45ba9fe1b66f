"""Moves pieces of tensors between ranks: from shards to owners of whole ones at a save, and back at a restore."""

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from shrinkpoint.sharded.boxes import Box, intersection
from shrinkpoint.sharded.ranks import Ranks
from shrinkpoint.state.training import TensorSpec

__all__ = ["Move", "Sources", "Take", "Target", "exchange", "moves"]

Take = Callable[[str, Box], torch.Tensor]
Sources = Mapping[str, Mapping[Box, tuple[int, ...]]]

_BUCKET = 2**28
"""Bytes that a rank sends and receives at once, about."""


@dataclass(frozen=True)
class Target:
    """A box that a rank is to be given."""

    box: Box
    rank: int


@dataclass(frozen=True)
class Move:
    """A piece that one rank sends to another, or copies."""

    name: str
    source: Box
    target: Box
    cut: Box
    sender: int
    receiver: int


def exchange(
    ranks: Ranks,
    specs: Mapping[str, TensorSpec],
    sources: Sources,
    targets: Mapping[str, Sequence[Target]],
    give: Take,
    take: Take,
    *,
    bucket: int = _BUCKET,
) -> int:
    """Fill boxes of tensors from those that hold them; a collective, on the training thread.

    Args:
        ranks: all of them.
        specs: of the whole tensors, in the same order on every rank, like the tables.
        sources: for each box of a tensor, the ranks that hold it; different boxes do not overlap.
        targets: the boxes to be filled.
        give: what this rank holds of a box of `sources`.
        take: memory for a box of `targets` of this rank.
        bucket: bytes that a rank sends and receives at once, about.

    Returns:
        Bytes that this rank has sent to others.
    """
    sent = 0
    for names in _buckets(specs, targets, bucket * ranks.world):
        due = [move for name in names for move in moves(name, sources[name], targets[name], ranks.rank)]
        sent += _move(ranks, due, specs, give, take)
    return sent


def _buckets(
    specs: Mapping[str, TensorSpec], targets: Mapping[str, Sequence[Target]], limit: int
) -> Iterator[list[str]]:
    """Tensors that are moved together; by shapes alone, so that all ranks agree."""
    names: list[str] = []
    size = 0
    for name in specs:
        if name not in targets:
            continue
        if names and size + specs[name].nbytes > limit:
            yield names
            names, size = [], 0
        names.append(name)
        size += specs[name].nbytes
    if names:
        yield names


def moves(
    name: str, sources: Mapping[Box, tuple[int, ...]], targets: Sequence[Target], rank: int
) -> Iterator[Move]:
    """What this rank sends or receives of a tensor, in an order that both sides know.

    Args:
        name: of the tensor.
        sources: its entry of `exchange`'s.
        targets: its entry of `exchange`'s.
        rank: this one.
    """
    for target in targets:
        for box, holders in sources.items():
            if rank != target.rank and rank not in holders:
                continue
            cut = intersection(box, target.box)
            if cut is None:
                continue
            sender = _sender(name, box, holders, target.rank)
            if rank in (sender, target.rank):
                yield Move(name, box, target.box, cut, sender, target.rank)


def _sender(name: str, box: Box, holders: tuple[int, ...], receiver: int) -> int:
    """Of several that hold the same box: the receiver itself, or one that is chosen by a hash."""
    if receiver in holders:
        return receiver
    return holders[zlib.crc32(f"{name}{box.offset}{receiver}".encode()) % len(holders)]


def _move(ranks: Ranks, due: Sequence[Move], specs: Mapping[str, TensorSpec], give: Take, take: Take) -> int:
    with torch.no_grad():
        for move in due:
            if move.sender == move.receiver:
                taken = move.target.cut(take(move.name, move.target), move.cut)
                taken.copy_(move.source.cut(give(move.name, move.source), move.cut))
        if ranks.world == 1:
            return 0
        out: list[list[Move]] = [[] for _ in range(ranks.world)]
        into: list[list[Move]] = [[] for _ in range(ranks.world)]
        for move in due:
            if move.sender != move.receiver:
                sends = move.sender == ranks.rank
                (out[move.receiver] if sends else into[move.sender]).append(move)
        sizes_out, sizes_in = ([sum(_nbytes(m, specs) for m in ms) for ms in way] for way in (out, into))
        chunks = [_bytes(m.source.cut(give(m.name, m.source), m.cut), ranks.device) for ms in out for m in ms]
        sending = torch.cat(chunks) if chunks else torch.empty(0, dtype=torch.uint8, device=ranks.device)
        del chunks
        received = torch.empty(sum(sizes_in), dtype=torch.uint8, device=ranks.device)
        dist.all_to_all_single(received, sending, sizes_in, sizes_out, group=ranks.group)
        _unpack(received, [m for ms in into for m in ms], specs, take)
    return sum(sizes_out)


def _unpack(received: torch.Tensor, due: Sequence[Move], specs: Mapping[str, TensorSpec], take: Take) -> None:
    at = 0
    for move in due:
        taken = move.target.cut(take(move.name, move.target), move.cut)
        size = _nbytes(move, specs)
        # in memory of its own, since a dtype's view must be aligned
        taken.copy_(received[at : at + size].clone().view(specs[move.name].dtype).reshape(taken.shape))
        at += size


def _nbytes(move: Move, specs: Mapping[str, TensorSpec]) -> int:
    return move.cut.numel * specs[move.name].dtype.itemsize


def _bytes(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    return tensor.to(device).contiguous().resolve_conj().resolve_neg().reshape(-1).view(torch.uint8)
