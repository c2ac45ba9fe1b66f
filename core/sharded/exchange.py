"""Moves pieces of tensors between ranks: from shards to owners of whole ones at a save, and back at a restore.

What moves where is planned once for a layout (`ExchangePlan`), by each rank for itself: it looks up what its own boxes meet,
not all pairs of boxes.
"""

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from shrinkpoint.arrays import Int64s
from shrinkpoint.errors import StoreError
from shrinkpoint.group.group import Distributed, connected
from shrinkpoint.sharded.boxes import Box, Pieces, intersection
from shrinkpoint.state.training import TensorSpec

Holders = Mapping[Box, tuple[int, ...]]
"""The ranks that hold each of some boxes of a tensor, or are to be given it."""

_BUCKETS = 16
_BUCKET_BYTES = 2**22, 2**26
"""Bytes that a rank sends and receives at once, about: a sixteenth of its share, between these; more takes memory, and is no faster."""
_ALIGNED = 16
"""Every piece begins at a multiple of so many bytes of a buffer, so that a view of any dtype can be taken of it."""


class Move(NamedTuple):
    """A piece that one rank sends to another, or copies."""

    name: str
    dtype: torch.dtype
    source: Box
    target: Box
    cut: Box
    sender: int
    receiver: int

    @property
    def room(self) -> int:
        """Bytes of a buffer that it takes."""
        return -(-self.cut.numel * self.dtype.itemsize // _ALIGNED) * _ALIGNED

    def out_of(self, given: Pieces) -> torch.Tensor:
        """Return what is sent, as a view of the sender's memory."""
        return self.source.cut(given[self.name][self.source], self.cut)

    def into(self, taken: Pieces) -> torch.Tensor:
        """Return where it is received, as a view of the receiver's memory."""
        return self.target.cut(taken[self.name][self.target], self.cut)

    def in_buffer(self, buffer: torch.Tensor, at: int) -> torch.Tensor:
        """Return the piece, as a view of a buffer."""
        size = self.cut.numel * self.dtype.itemsize
        return buffer[at : at + size].view(self.dtype).reshape(self.cut.size)


class Buffers(NamedTuple):
    """Memory for what a rank sends and receives at once, on the device of the process group."""

    sending: torch.Tensor
    receiving: torch.Tensor


@dataclass(frozen=True)
class _Bucket:
    """What one rank does in one collective."""

    names: Sequence[str]
    """Of the tensors that are moved in it."""
    own: Sequence[Move]
    """From its own memory to its own."""
    out: Sequence[Move]
    """In the order of their receivers."""
    into: Sequence[Move]
    """In the order of their senders."""
    sizes_out: Sequence[int]
    """Bytes for each receiver."""
    sizes_in: Sequence[int]

    @classmethod
    def of(cls, names: Sequence[str], moves: Sequence[Move], rank: int, world: int) -> "_Bucket":
        out: list[list[Move]] = [[] for _ in range(world)]
        into: list[list[Move]] = [[] for _ in range(world)]
        own = []
        for move in moves:
            if move.sender == move.receiver:
                own.append(move)
            else:
                (out[move.receiver] if move.sender == rank else into[move.sender]).append(move)
        sizes_out, sizes_in = ([sum(move.room for move in moves) for moves in way] for way in (out, into))
        return cls(
            names, own, [m for ms in out for m in ms], [m for ms in into for m in ms], sizes_out, sizes_in
        )


class ExchangePlan:
    """What one rank gives and takes to fill boxes of tensors from those that hold them.

    Args:
        group: all ranks.
        specs: of the whole tensors, in the same order on every rank, like the tables.
        sources: for each box of a tensor, the ranks that hold it; different boxes do not overlap.
        targets: the boxes to be filled; tensors that are cut alike share a table, as in `sources`.
        first_alone: of which tensors the first of the ranks that hold a box gives it, whatever the others hold.
        bucket: bytes that a rank sends and receives at once, about; None chooses it by the tensors' size.
    """

    def __init__(
        self,
        group: Distributed,
        specs: Mapping[str, TensorSpec],
        sources: Mapping[str, Holders],
        targets: Mapping[str, Holders],
        *,
        first_alone: Callable[[str], bool] = lambda name: False,
        bucket: int | None = None,
    ) -> None:
        self._group, rank, world = group, group.rank, group.size
        if bucket is None:
            share = sum(specs[name].nbytes for name in targets) // (_BUCKETS * world)
            bucket = min(max(share, _BUCKET_BYTES[0]), _BUCKET_BYTES[1])
        tables: dict[int, _Boxes] = {}

        def table(holders: Holders) -> _Boxes:
            if id(holders) not in tables:
                tables[id(holders)] = _Boxes.of(holders, rank)
            return tables[id(holders)]

        def of_tensor(name: str) -> Iterator[Move]:
            given, wanted = table(sources[name]), table(targets[name])
            return _moves(name, specs[name].dtype, given, wanted, rank, first_alone=first_alone(name))

        self._buckets = [
            _Bucket.of(names, [move for name in names for move in of_tensor(name)], rank, world)
            for names in _buckets(specs, targets, bucket * world)
        ]

    @property
    def moves(self) -> Iterator[Move]:
        """What this rank gives and takes, in an order that both sides know."""
        for bucket in self._buckets:
            yield from (*bucket.own, *bucket.out, *bucket.into)

    def buffers(self) -> Buffers:
        """Return memory for the exchange.

        Raises:
            StoreError: there is too little.
        """
        device = self._group.device
        out = max((sum(bucket.sizes_out) for bucket in self._buckets), default=0)
        into = max((sum(bucket.sizes_in) for bucket in self._buckets), default=0)
        try:
            return Buffers(*(torch.empty(size, dtype=torch.uint8, device=device) for size in (out, into)))
        except (MemoryError, RuntimeError) as error:  # torch's allocators raise RuntimeErrors
            raise StoreError(
                f"too little memory on {device} for what this rank sends to others and receives, {out / 1e6:.3g} and"
                f" {into / 1e6:.3g} MB: {str(error).splitlines()[0][:200]}"
            ) from error

    def run(
        self,
        buffers: Buffers,
        given: Pieces,
        taken: Pieces,
        moved: Callable[[str], None] = lambda name: None,
        *,
        pinned: bool = False,
    ) -> None:
        """Fill the boxes; a collective, on the training thread. Its memory is there already, so that no rank stays away from it.

        Args:
            buffers: as `buffers` gave them.
            given: what this rank holds of the sources.
            taken: memory for this rank's targets.
            moved: called with the name of each tensor of which nothing will be given any more.
            pinned: `taken` is pinned memory, to which a GPU copies while the host goes on: it is there once the GPU's
                current stream has come so far.
        """

        def put(move: Move, piece: torch.Tensor) -> None:
            into = move.into(taken)
            into.copy_(piece, non_blocking=pinned and into.is_contiguous())

        with torch.no_grad():
            for bucket in self._buckets:
                for move in bucket.own:
                    put(move, move.out_of(given))
                if self._group.size > 1:
                    at = 0
                    for move in bucket.out:
                        move.in_buffer(buffers.sending, at).copy_(move.out_of(given))
                        at += move.room
                    with connected():
                        dist.all_to_all_single(
                            buffers.receiving[: sum(bucket.sizes_in)],
                            buffers.sending[:at],
                            list(bucket.sizes_in),
                            list(bucket.sizes_out),
                            group=self._group.process_group,
                        )
                    at = 0
                    for move in bucket.into:
                        put(move, move.in_buffer(buffers.receiving, at))
                        at += move.room
                for name in bucket.names:
                    moved(name)


def _moves(
    name: str, dtype: torch.dtype, given: "_Boxes", wanted: "_Boxes", rank: int, *, first_alone: bool
) -> Iterator[Move]:
    pairs = {(i, j) for i in wanted.own for j in given.meeting(wanted.boxes[i])}
    pairs |= {(i, j) for j in given.own for i in wanted.meeting(given.boxes[j])}
    for i, j in sorted(pairs):
        box, target, holders = given.boxes[j], wanted.boxes[i], given.holders[j]
        cut = intersection(box, target)
        if cut is None:
            continue
        for receiver in wanted.holders[i]:
            sender = min(holders) if first_alone else _sender(name, box, holders, receiver)
            if rank in (sender, receiver):
                yield Move(name, dtype, box, target, cut, sender, receiver)


def plain_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's elements as bytes, on its device."""
    return tensor.contiguous().resolve_conj().resolve_neg().reshape(-1).view(torch.uint8)


@dataclass(frozen=True)
class _Boxes:
    """Boxes of one tensor, to be searched for those that another one meets."""

    boxes: Sequence[Box]
    holders: Sequence[tuple[int, ...]]
    own: Sequence[int]
    """Those of this rank."""
    low: Int64s
    """First indices, a row for each."""
    high: Int64s
    """Behind the last ones."""

    @classmethod
    def of(cls, table: Holders, rank: int) -> "_Boxes":
        boxes, holders = list(table), list(table.values())
        shape = len(boxes), len(boxes[0].offset) if boxes else 0
        low = np.array([box.offset for box in boxes], dtype=np.int64).reshape(shape)
        size = np.array([box.size for box in boxes], dtype=np.int64).reshape(shape)
        own = [number for number, ranks in enumerate(holders) if rank in ranks]
        return cls(boxes, holders, own, low, low + size)

    def meeting(self, box: Box) -> list[int]:
        """Return numbers of those that have elements in common with a box."""
        if not self.boxes:  # nobody has any: not even the number of dimensions is known
            return []
        offset = np.array(box.offset, dtype=np.int64)
        end = offset + np.array(box.size, dtype=np.int64)
        meets = ((self.low < end) & (self.high > offset)).all(axis=1)
        return [int(number) for number in np.flatnonzero(meets)]


def _buckets(
    specs: Mapping[str, TensorSpec], targets: Mapping[str, Holders], limit: int
) -> Iterator[list[str]]:
    """Yield tensors that are moved together; by shapes alone, so that all ranks agree."""
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


def _sender(name: str, box: Box, holders: tuple[int, ...], receiver: int) -> int:
    """Of several that hold the same box: the receiver itself, or one that is chosen by a hash."""
    if receiver in holders:
        return receiver
    return holders[zlib.crc32(f"{name}{box.offset}{receiver}".encode()) % len(holders)]
