"""From owners of whole tensors, or from the first of copies, to all that hold something of them: what a training takes over, and evaluates."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from shrinkpoint.errors import StateMismatchError
from shrinkpoint.group.group import Distributed
from shrinkpoint.sharded.boxes import Box, Pieces
from shrinkpoint.sharded.exchange import Buffers, ExchangePlan
from shrinkpoint.sharded.layout import Layout, block_box, owned_boxes
from shrinkpoint.state.digest import state_digest, tensor_digest
from shrinkpoint.state.dtypes import empty_tensor
from shrinkpoint.state.training import TensorSpec, TrainingState

__all__ = ["Owners", "Shards", "moved_to", "spread"]

Owners = Mapping[str, tuple[TensorSpec, int]]


@dataclass(frozen=True)
class Shards:
    """Where a state's tensors are: in the shards of all ranks, and as whole ones at their owners."""

    group: Distributed
    layout: Layout
    pieces: Pieces
    """What this rank holds of each tensor: the training's own memory, or other memory of the same layout."""
    owners: Owners
    """Of each stored tensor, its spec and its owner."""


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
    given: dict[str, dict[Box, torch.Tensor]] = {}
    stored: dict[str, list[str]] = {}
    for name in values.keys() & wanted.keys():
        of, box = block_box(wanted[name][0])
        given.setdefault(of, {})[box] = values[name]
        stored.setdefault(of, []).append(name)

    def all_moved(of: str) -> None:
        if not proved:
            given.pop(of, None)
        for name in stored.get(of, ()):
            moved(name)

    def planned() -> tuple[ExchangePlan, Buffers]:
        plan = ExchangePlan(group.rank, group.size, shards.layout.specs, sources, targets)
        return plan, plan.buffers(group.device)

    plan, buffers = group.on_every(planned)
    plan.run(group, buffers, given, shards.pieces, all_moved)
    if proved:
        compare_moved(shards, plan, given)


def moved_to(
    group: Distributed,
    layout: Layout,
    before: Owners,
    after: Owners,
    values: Mapping[str, torch.Tensor],
) -> TrainingState:
    """What was stored by other owners, at those of now: the tensors that are cut as before; a collective.

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
    pieces: dict[str, dict[Box, torch.Tensor]] = {}
    for name, spec in specs.items():
        of, box = block_box(spec)
        pieces.setdefault(of, {})[box] = tensors[name]
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
