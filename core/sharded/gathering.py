"""Brings a state from the ranks' shards to the owners of its tensors, as planned for a layout."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import xxhash

from shrinkpoint.engine.placement import NoMemoryError
from shrinkpoint.errors import CannotRepresentError, StoreError
from shrinkpoint.group.group import Distributed
from shrinkpoint.sharded.boxes import Box, Pieces
from shrinkpoint.sharded.exchange import Buffers, ExchangePlan, plain_bytes
from shrinkpoint.sharded.layout import Layout, block_box, owned_boxes
from shrinkpoint.sharded.trees import renamed_tensors
from shrinkpoint.state.dtypes import empty_tensor
from shrinkpoint.state.snapshot import DeviceCopy, empty_tensors
from shrinkpoint.state.training import TensorSpec, TrainingState
from shrinkpoint.state.tree import JSON

__all__ = ["Gathering", "fingerprints"]


class _Prepared(NamedTuple):
    tensors: dict[str, torch.Tensor]
    buffers: Buffers
    fingerprints: list[int | None]
    gpu: torch.device | None


class Gathering:
    """What one rank does at each save of a layout.

    Args:
        rank: this one.
        world: number of ranks.
        layout: what all ranks hold.
        owners: by the name of each stored tensor, its spec and its owner.
    """

    def __init__(
        self, rank: int, world: int, layout: Layout, owners: Mapping[str, tuple[TensorSpec, int]]
    ) -> None:
        self._layout = layout
        self._blocks = {name: spec for name, (spec, owner) in owners.items() if owner == rank}
        self._plan = ExchangePlan(
            rank, world, layout.specs, layout.holders, owned_boxes(owners), first_alone=layout.first_alone
        )
        self._is_new = True
        self._pinned: dict[str, torch.Tensor] = {}

    def gathered(
        self, group: Distributed, tree: JSON, pieces: Pieces
    ) -> tuple[TrainingState, DeviceCopy | None, int]:
        """Whole tensors of this rank's own, in host memory; a collective, on the training thread.

        From a GPU they are copied into pinned memory, which is kept for the next call, while the host goes on. The training's
        stream makes the copies, so that no later step can overtake them.

        Args:
            group: all ranks.
            tree: of this rank's state.
            pieces: what this rank holds of each tensor.

        Returns:
            What this rank is to code; for shards on a GPU, what is to be waited for before that is read; and the bytes that it has
            sent to others.

        Raises:
            NoMemoryError: a rank has too little memory. CannotRepresentError: see `check_copies`. On every rank.
        """
        # what may fail on one rank comes before the first collective that the others would wait in
        try:
            prepared = group.on_every(lambda: self._prepared(group, pieces))
        except StoreError as error:
            raise NoMemoryError(str(error)) from error
        check_copies(group, self._layout.unproven, prepared.fingerprints)
        self._is_new = False
        owned: dict[str, dict[Box, torch.Tensor]] = {}
        for name, tensor in prepared.tensors.items():
            of, box = block_box(self._blocks[name])
            owned.setdefault(of, {})[box] = tensor
        gpu = prepared.gpu
        copy = None if gpu is None else DeviceCopy(torch.cuda.current_stream(gpu))
        moved = self._plan.run(group, prepared.buffers, pieces, owned, pinned=gpu is not None)
        if copy is not None:
            copy.end()
        state = TrainingState(
            renamed_tensors(tree, self._layout.aliases), prepared.tensors, dict(self._blocks)
        )
        return state, copy, moved

    def _prepared(self, group: Distributed, pieces: Pieces) -> _Prepared:
        locals_ = (local for own in pieces.values() for local in own.values())
        gpu = next((local.device for local in locals_ if local.is_cuda), None)
        try:
            return _Prepared(
                self._memory(pinned=gpu is not None),
                self._plan.buffers(group.device),
                fingerprints(self._layout.unproven, pieces, whole=self._is_new),
                gpu,
            )
        except (MemoryError, RuntimeError) as error:  # torch's allocators raise RuntimeErrors
            size = sum(spec.nbytes for spec in self._blocks.values())
            raise StoreError(
                f"too little host memory for a copy of what this rank stores, {size / 1e6:.3g} MB:"
                f" {str(error).splitlines()[0][:200]}"
            ) from error

    def _memory(self, *, pinned: bool) -> dict[str, torch.Tensor]:
        if pinned and self._pinned:  # at most one save is under way: nobody reads the last one's any more
            return dict(self._pinned)
        if not pinned:
            return {name: empty_tensor(spec.shape, spec.dtype) for name, spec in self._blocks.items()}
        like = {
            name: torch.empty(spec.shape, dtype=spec.dtype, device="meta")
            for name, spec in self._blocks.items()
        }
        self._pinned = empty_tensors(like, pinned=True)
        return dict(self._pinned)


_SOME = 2**14
"""Elements of a tensor that are compared at every save, evenly spread."""
_ABSENT = -(2**62)
_SHOWN = 3

Unproven = Sequence[tuple[str, Box]]


# ---- Makes sure that what several ranks hold under one name and as one box are copies: a save stores one of them.
#
# Ranks of one mesh hold copies by what a DTensor is. Ranks of different meshes need not: with tensor parallelism a layer that is not
# parallelized has a copy on every data-parallel mesh, and the stages of a pipeline may have different layers of one name and shape there.
# Nothing but their values distinguishes the two, so these are compared: all bytes when the layout is new, and some elements at every
# save, since different layers may begin with equal values.


def fingerprints(unproven: Unproven, pieces: Pieces, *, whole: bool) -> list[int | None]:
    """Return a number of this rank's values for each of some boxes; None where it does not hold one.

    Args:
        unproven: names and boxes.
        pieces: what this rank holds.
        whole: of all elements, or of some of each.
    """
    found: list[int | None] = [None] * len(unproven)
    samples: dict[torch.device, list[tuple[int, torch.Tensor]]] = {}
    for number, (name, box) in enumerate(unproven):
        local = pieces.get(name, {}).get(box)
        if local is None:
            continue
        if whole:
            found[number] = _number(plain_bytes(local).cpu())
            continue
        step = -(-local.numel() // _SOME)
        samples.setdefault(local.device, []).append((number, plain_bytes(local.reshape(-1)[::step])))
    for chosen in samples.values():
        # one copy from a GPU for all of them
        joined, at = torch.cat([sample for _, sample in chosen]).cpu(), 0
        for number, sample in chosen:
            found[number] = _number(joined[at : at + sample.numel()])
            at += sample.numel()
    return found


def check_copies(group: Distributed, unproven: Unproven, own: Sequence[int | None]) -> None:
    """Refuse different values under one name; a collective of 16 bytes for each box.

    Args:
        group: all ranks.
        unproven: names and boxes, the same on all ranks.
        own: this rank's `fingerprints` of these.

    Raises:
        CannotRepresentError: they differ; on every rank.
    """
    if not unproven:
        return
    high = [_ABSENT if number is None else number for number in own]
    low = [_ABSENT if number is None else -number for number in own]
    most = group.most([*high, *low])
    count = len(unproven)
    differ = sorted({unproven[i][0] for i in range(count) if most[i] != -most[count + i]})
    if differ:
        more = f" and {len(differ) - _SHOWN} more" if len(differ) > _SHOWN else ""
        raise CannotRepresentError(
            f"ranks that are not on one device mesh have different values under one name, of which a save would keep one:"
            f" {', '.join(differ[:_SHOWN])}{more}. If these are stages of a pipeline, give each stage's tensors names of their own, or"
            " each stage a run of its own. If they should be copies of each other, they have drifted apart: put them on the mesh"
            " of all these ranks, or broadcast them before training"
        )


def _number(data: torch.Tensor) -> int:
    return xxhash.xxh3_64(data.numpy().data).intdigest() >> 2  # lets other threads run
