"""Brings a state from the ranks' shards to the owners of its tensors, and from these to all that hold something of them."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import xxhash

from shrinkpoint.engine.placement import NoMemoryError
from shrinkpoint.errors import CannotRepresentError, StateMismatchError, StoreError
from shrinkpoint.group.group import Distributed
from shrinkpoint.sharded.boxes import Box, Pieces
from shrinkpoint.sharded.exchange import Buffers, ExchangePlan, plain_bytes
from shrinkpoint.sharded.layout import Layout, Owners, by_box, owned_boxes
from shrinkpoint.sharded.trees import renamed_tensors
from shrinkpoint.state.digest import state_digest, tensor_digest
from shrinkpoint.state.dtypes import empty_tensor
from shrinkpoint.state.snapshot import DeviceCopy, empty_tensors
from shrinkpoint.state.training import TrainingState
from shrinkpoint.state.tree import JSON
from shrinkpoint.warn import some


class Gathering:
    """What one rank does at each save of a layout.

    Args:
        group: all ranks.
        layout: what all ranks hold.
        owners: of what is stored.
    """

    def __init__(self, group: Distributed, layout: Layout, owners: Owners) -> None:
        self._group, self._layout = group, layout
        self._blocks = {name: spec for name, (spec, owner) in owners.items() if owner == group.rank}
        self._plan = ExchangePlan(
            group, layout.specs, layout.holders, owned_boxes(owners), first_alone=layout.first_alone
        )
        self._is_new = True
        self._pinned: dict[str, torch.Tensor] = {}

    def gathered(self, tree: JSON, pieces: Pieces) -> tuple[TrainingState, DeviceCopy | None]:
        """Return whole tensors of this rank's own, in host memory; a collective, on the training thread.

        From a GPU they are copied into pinned memory, which is kept for the next call, while the host goes on. The training's
        stream makes the copies, so that no later step can overtake them.

        Args:
            tree: of this rank's state.
            pieces: what this rank holds of each tensor.

        Returns:
            What this rank is to code; and for shards on a GPU, what is to be waited for before that is read.

        Raises:
            NoMemoryError: a rank has too little memory. CannotRepresentError: see `check_copies`. On every rank.
        """
        # what may fail on one rank comes before the first collective that the others would wait in
        try:
            tensors, buffers, numbers, gpu = self._group.on_every(lambda: self._prepared(pieces))
        except StoreError as error:
            raise NoMemoryError(str(error)) from error
        check_copies(self._group, self._layout.unproven, numbers)
        self._is_new = False
        owned = by_box((self._blocks[name], tensor) for name, tensor in tensors.items())
        copy = None if gpu is None else DeviceCopy(torch.cuda.current_stream(gpu))
        self._plan.run(buffers, pieces, owned, pinned=gpu is not None)
        if copy is not None:
            copy.end()
        state = TrainingState(renamed_tensors(tree, self._layout.aliases), tensors, dict(self._blocks))
        return state, copy

    def _prepared(
        self, pieces: Pieces
    ) -> tuple[dict[str, torch.Tensor], Buffers, list[int | None], torch.device | None]:
        """Return memory for this rank's tensors and for the exchange, `fingerprints`, and the GPU that shards are on."""
        locals_ = (local for own in pieces.values() for local in own.values())
        gpu = next((local.device for local in locals_ if local.is_cuda), None)
        try:
            return (
                self._memory(pinned=gpu is not None),
                self._plan.buffers(),
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
        if not pinned:
            return {name: empty_tensor(spec.shape, spec.dtype) for name, spec in self._blocks.items()}
        if not self._pinned:  # at most one save is under way: nobody reads the last one's any more
            like = {n: torch.empty(s.shape, dtype=s.dtype, device="meta") for n, s in self._blocks.items()}
            self._pinned = empty_tensors(like, pinned=True)
        return dict(self._pinned)


_SOME = 2**14
"""Elements of a tensor that are compared at every save, evenly spread."""
_ABSENT = -(2**62)

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
        raise CannotRepresentError(
            f"ranks that are not on one device mesh have different values under one name, of which a save would keep one:"
            f" {some(differ, 3)}. If these are stages of a pipeline, give each stage's tensors names of their own, or"
            " each stage a run of its own. If they should be copies of each other, they have drifted apart: put them on the mesh"
            " of all these ranks, or broadcast them before training"
        )


def _number(data: torch.Tensor) -> int:
    return xxhash.xxh3_64(data.numpy().data).intdigest() >> 2  # lets other threads run


# ---- from owners, or from the first of copies, to all: what a training takes over, and evaluates


@dataclass(frozen=True)
class Shards:
    """Where a state's tensors are: in the shards of all ranks, and as whole ones at their owners."""

    group: Distributed
    layout: Layout
    pieces: Pieces
    """What this rank holds of each tensor: the training's own memory, or other memory of the same layout."""
    owners: Owners


def spread(
    shards: Shards,
    names: Iterable[str],
    values: Mapping[str, torch.Tensor],
    *,
    proved: bool = False,
    moved: Callable[[str], None] = lambda name: None,
) -> None:
    """Write stored tensors into the pieces of everyone that holds something of them; a collective.

    Args:
        shards: where they are.
        names: of the stored tensors, the same on every rank.
        values: those of them that this rank owns, in whole.
        proved: whether all ranks make sure, by digests, that every one has its owner's values.
        moved: called with the name of each of `values` that is not needed any more.

    Raises:
        StoreError: a rank has too little memory for it; on every rank, and nothing is filled.
        StateMismatchError: with `proved`, a rank has not; on every rank.
    """
    group = shards.group
    wanted = {name: shards.owners[name] for name in names}
    sources, holders = owned_boxes(wanted), shards.layout.holders
    targets = {of: holders[of] for of in sources if of in holders}  # else it is tied to one that is
    own = values.keys() & wanted.keys()
    given = by_box((wanted[name][0], values[name]) for name in own)
    stored = by_box((wanted[name][0], name) for name in own)

    def all_moved(of: str) -> None:
        if not proved:
            given.pop(of, None)
        for name in stored.get(of, {}).values():
            moved(name)

    def planned() -> tuple[ExchangePlan, Buffers]:
        plan = ExchangePlan(group, shards.layout.specs, sources, targets)
        return plan, plan.buffers()

    plan, buffers = group.on_every(planned)
    plan.run(buffers, given, shards.pieces, all_moved)
    if proved:
        compare_moved(shards, plan, given)


def moved_to(
    group: Distributed,
    layout: Layout,
    before: Owners,
    after: Owners,
    values: Mapping[str, torch.Tensor],
) -> TrainingState:
    """Return what was stored by other owners, at those of now: the tensors that are cut as before; a collective.

    Args:
        group: all ranks.
        layout: of the state.
        before: the owners that have the values.
        after: the owners that get them.
        values: those that this rank has.

    Raises:
        StoreError: a rank has too little memory for it; on every rank.
    """
    same = {
        name: own
        for name, own in after.items()
        if name in before and (before[name][0].shape, before[name][0].dtype) == (own[0].shape, own[0].dtype)
    }
    specs = {name: spec for name, (spec, owner) in same.items() if owner == group.rank}
    tensors = group.on_every(
        lambda: {name: empty_tensor(spec.shape, spec.dtype) for name, spec in specs.items()}
    )
    pieces = by_box((spec, tensors[name]) for name, spec in specs.items())
    there = replace(layout, holders=owned_boxes(same))
    spread(Shards(group, there, pieces, before), same, values)
    return TrainingState(None, tensors, specs)


def compare_moved(shards: Shards, plan: ExchangePlan, owned: Pieces) -> None:
    """Make sure that all pieces were filled with what their owners hold, by one exchange of digests; a collective.

    Args:
        shards: where the tensors are.
        plan: by which they were filled.
        owned: what this rank has given.

    Raises:
        StateMismatchError: a rank holds something else, on every rank; it names the first such tensor.
    """
    group = shards.group
    given: list[list[tuple[str, str]]] = [[] for _ in range(group.size)]
    received: list[list[tuple[str, str]]] = [[] for _ in range(group.size)]
    for move in plan.moves:
        if move.sender == group.rank:
            given[move.receiver].append((move.name, _digest(move.out_of(owned))))
        if move.receiver == group.rank:
            received[move.sender].append((move.name, _digest(move.into(shards.pieces))))
    totals = group.gather(([*map(_total, given)], [*map(_total, received)]))
    pairs = [(sender, receiver) for sender in range(group.size) for receiver in range(group.size)]
    if all(totals[sender][0][receiver] == totals[receiver][1][sender] for sender, receiver in pairs):
        return
    pieces = group.gather((given, received))
    wrong = {
        name: receiver
        for sender, receiver in pairs
        for (name, one), (_, other) in zip(
            pieces[sender][0][receiver], pieces[receiver][1][sender], strict=True
        )
        if one != other
    }
    first = next(name for name in shards.layout.specs if name in wrong)
    raise StateMismatchError(
        f"rank {wrong[first]} does not have the values of {first!r} that its owner has restored: memory or the network between them"
        " has failed. Start the training again: it goes on from its last checkpoint"
    )


def _total(pieces: Sequence[tuple[str, str]]) -> str:
    return state_digest({f"{number} {name}": digest for number, (name, digest) in enumerate(pieces)})


def _digest(piece: torch.Tensor) -> str:
    return tensor_digest(piece.detach().cpu().contiguous())
