"""Which rank holds what of a state, the same table on every rank; and which stored blocks each rank owns."""

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TypeVar

import torch

from shrinkpoint.errors import CannotRepresentError
from shrinkpoint.sharded.boxes import Box, Pieces, check_tiling, is_sharded, pieces_of, ranks_of
from shrinkpoint.state.specs import BLOCK_ELEMENTS, blocks_of
from shrinkpoint.state.training import Role, TensorSpec

T = TypeVar("T")

_IMBALANCE = 1.02
"""Times the mean that a rank may own before blocks are moved to others."""


@dataclass(frozen=True)
class RankTensors:
    """The tensors of a state, or their shards, on one rank."""

    specs: Mapping[str, TensorSpec]
    """Of the whole tensors, by name."""
    boxes: Mapping[str, tuple[Box, ...]]
    sharded: frozenset[str]
    """The tensors that are known to be parts or copies of whole ones; of the others the first rank's are stored."""
    ties: Mapping[str, str]
    """The first name of each tensor's memory, for those that have some here."""
    owners: Mapping[str, str]
    """For each shard, the ranks that share it as torch knows (see `ranks_of`)."""
    frozen: Mapping[str, str] = field(default_factory=dict)
    """The digests of what the state refers to, by name in the model."""


def tensors_of_rank(
    tensors: Mapping[str, torch.Tensor],
    specs: Mapping[str, TensorSpec],
    copied: Callable[[TensorSpec], bool] = lambda spec: False,
) -> tuple[RankTensors, Pieces]:
    """Return what this rank holds.

    Args:
        tensors: DTensors, ShardedTensors and plain ones, by name.
        specs: with the shapes of the whole tensors.
        copied: which plain tensors are the same on every rank.

    Raises:
        CannotRepresentError: see `pieces_of`.
    """
    pieces = {name: pieces_of(name, tensor) for name, tensor in tensors.items()}
    first: dict[tuple[object, ...], str] = {}
    ties: dict[str, str] = {}
    for name, own in pieces.items():
        for local in list(own.values())[:1]:
            view = (local.dtype, local.shape, local.stride(), local.is_conj(), local.is_neg())
            place = (local.device, local.data_ptr(), *view, tuple(tensors[name].shape))
            ties[name] = first.setdefault(place, name)
    shards = [name for name, tensor in tensors.items() if is_sharded(tensor)]
    sharded = frozenset([*shards, *(name for name in tensors if copied(specs[name]))])
    alike: dict[tuple[Box, ...], tuple[Box, ...]] = {}
    # one object for equal ones, for `layout_of` and for the message to other ranks
    boxes = {name: alike.setdefault(tuple(own), tuple(own)) for name, own in pieces.items()}
    owners = {name: ranks_of(tensors[name]) for name in shards}
    return RankTensors(dict(specs), boxes, sharded, ties, owners), pieces


@dataclass(frozen=True)
class Layout:
    """What all ranks hold of a state."""

    specs: Mapping[str, TensorSpec]
    """Of the whole tensors, tied ones once."""
    holders: Mapping[str, Mapping[Box, tuple[int, ...]]]
    """For each box, the ranks that hold it; tensors that are cut alike share one table."""
    aliases: Mapping[str, str]
    """Tied tensors: the name under which each is stored."""
    sharded: frozenset[str]
    unproven: tuple[tuple[str, Box], ...]
    """What several ranks hold without being known to torch as copies of each other: see `shrinkpoint.sharded.gathering`."""

    def first_alone(self, name: str) -> bool:
        """Return whether a save takes a tensor from the first of the ranks that hold it: what is no shard."""
        return name not in self.sharded


def layout_of(everyone: Sequence[RankTensors]) -> Layout:
    """Return the table of all ranks' tensors.

    Args:
        everyone: by rank.

    Raises:
        CannotRepresentError: the shards of a tensor do not make it up, or one name stands for different tensors.
    """
    _require_same_frozen(everyone)
    specs: dict[str, TensorSpec] = {}
    sharded: set[str] = set()
    for one in everyone:
        sharded |= one.sharded
        for name, spec in one.specs.items():
            # a plain weight is the same everywhere; other plain tensors are each rank's own matter
            if name not in specs:
                specs[name] = spec
            elif (name in sharded or spec.tag.role is Role.WEIGHT) and _differ(specs[name], spec):
                raise CannotRepresentError(
                    f"{name} is {_described(specs[name])} on one rank and {_described(spec)} on another: pipeline stages that use"
                    " one name for different tensors cannot be saved to one run. Give each stage's tensors names of their own, or"
                    " each stage a run of its own"
                )
    aliases = _aliases(everyone, specs)
    tables: dict[tuple[object, ...], tuple[dict[Box, tuple[int, ...]], dict[Box, tuple[int, ...]]]] = {}
    holders: dict[str, dict[Box, tuple[int, ...]]] = {}
    unproven: list[tuple[str, Box]] = []
    for name, spec in specs.items():
        if name in aliases:
            continue
        all_boxes = [
            one.boxes.get(name, ()) if name in sharded or _has_shape(one, name, spec) else ()
            for one in everyone
        ]
        # by identity, which is much cheaper to compare: a rank's equal tables are one object
        key = (spec.shape, *map(id, all_boxes))
        if key not in tables:
            table = _table(all_boxes)
            check_tiling(name, spec.shape, list(table))
            tables[key] = table, {box: numbers for box, numbers in table.items() if len(numbers) > 1}
        holders[name], copied = tables[key]
        unproven += [(name, box) for box, numbers in copied.items() if _is_unproven(spec, numbers, everyone)]
    kept = {name: spec for name, spec in specs.items() if name not in aliases}
    return Layout(kept, holders, aliases, frozenset(sharded), tuple(unproven))


def _require_same_frozen(everyone: Sequence[RankTensors]) -> None:
    first = everyone[0].frozen
    for rank, one in enumerate(everyone):
        differ = sorted(name for name, _ in first.items() ^ one.frozen.items())
        if differ:
            raise CannotRepresentError(
                f"rank {rank} has other frozen tensors than rank 0, to which a checkpoint would refer for all: {differ[0]}"
                f"{f' and {len({*differ}) - 1} more' if len({*differ}) > 1 else ''}. Build the same base on every rank (file, seed, dtype,"
                " quantization), or store it with Advanced(frozen='store')"
            )


def _table(all_boxes: Sequence[tuple[Box, ...]]) -> dict[Box, tuple[int, ...]]:
    found: dict[Box, list[int]] = {}
    for rank, boxes in enumerate(all_boxes):
        for box in boxes:
            found.setdefault(box, []).append(rank)
    return {box: tuple(numbers) for box, numbers in found.items()}


def _is_unproven(spec: TensorSpec, holders: tuple[int, ...], everyone: Sequence[RankTensors]) -> bool:
    owners = [everyone[rank].owners.get(spec.name) for rank in holders]
    if owners.count(None) == len(owners):
        return spec.tag.role is Role.WEIGHT
    return len(set(owners)) > 1 or "" in owners


def _differ(one: TensorSpec, other: TensorSpec) -> bool:
    return (one.dtype, one.shape, one.tag.parameter) != (other.dtype, other.shape, other.tag.parameter)


def _described(spec: TensorSpec) -> str:
    of = f" of {spec.tag.parameter}" if spec.tag.parameter not in (None, spec.name) else ""
    return f"{spec.dtype} {spec.shape}{of}"


def _has_shape(own: RankTensors, name: str, spec: TensorSpec) -> bool:
    """Return whether a rank's own tensor of this name, which is no shard, is like the first rank's."""
    return name in own.specs and (own.specs[name].dtype, own.specs[name].shape) == (spec.dtype, spec.shape)


def _aliases(everyone: Sequence[RankTensors], specs: Mapping[str, TensorSpec]) -> dict[str, str]:
    """Return tensors that are the same memory as an earlier one on every rank that has elements of them."""
    first: dict[tuple[object, ...], str] = {}
    aliases: dict[str, str] = {}
    for name, spec in specs.items():
        place = tuple(one.ties.get(name) for one in everyone)
        if all(seen is None for seen in place):
            continue
        kept = first.setdefault((place, spec.dtype, spec.shape), name)
        if kept != name:
            aliases[name] = kept
    return aliases


# ---- owners


Owners = Mapping[str, tuple[TensorSpec, int]]
"""By the name of each stored tensor, its spec and the rank that codes it."""


def owners_of(specs: Mapping[str, TensorSpec], world: int, limit: int = BLOCK_ELEMENTS) -> Owners:
    """Return what is stored of whole tensors, and which rank codes each; the same on every rank and for every layout.

    The tensors of one parameter have one owner, since they are coded together. It is chosen by a hash of the parameter's
    name, so that it stays from save to save; then some are moved until all ranks own about as many bytes.

    Args:
        specs: of the whole tensors.
        world: number of ranks.
        limit: elements of a block at most.
    """
    blocks = ([spec] if spec.block is not None else blocks_of(spec, limit) for spec in specs.values())
    stored = [*chain.from_iterable(blocks)]
    folders = {_folder(spec): _group(spec) for spec in reversed(stored) if spec.tag.parameter is not None}
    groups = {
        spec.name: _group(spec)
        if spec.tag.parameter is not None
        else folders.get(_folder(spec), _group(spec))
        for spec in stored
    }
    sizes: dict[str, int] = {}
    for spec in stored:
        sizes[groups[spec.name]] = sizes.get(groups[spec.name], 0) + spec.nbytes
    owner = _balanced(sizes, world)
    return {spec.name: (spec, owner[groups[spec.name]]) for spec in stored}


def _folder(spec: TensorSpec) -> str:
    """Return where a tensor stands in the state: an optimizer's tensors of one parameter, its count of steps too, share it."""
    return spec.name.rpartition("/")[0]


def _group(spec: TensorSpec) -> str:
    return spec.tag.parameter or f"/{spec.name}"


def _balanced(sizes: Mapping[str, int], world: int) -> dict[str, int]:
    owner = {group: zlib.crc32(group.encode()) % world for group in sorted(sizes)}
    loads = [0] * world
    for group, rank in owner.items():
        loads[rank] += sizes[group]
    allowed = _IMBALANCE * sum(loads) / world
    owned: list[list[str]] = [[] for _ in range(world)]
    for group, rank in owner.items():
        owned[rank].append(group)
    for _ in sizes:
        most, least = loads.index(max(loads)), loads.index(min(loads))
        gap = loads[most] - loads[least]
        movable = [group for group in owned[most] if 0 < sizes[group] < gap]
        if loads[most] <= allowed or not movable:
            break
        group = min(movable, key=lambda name: (abs(2 * sizes[name] - gap), name))
        owned[most].remove(group)
        owned[least].append(group)
        loads[most] -= sizes[group]
        loads[least] += sizes[group]
        owner[group] = least
    return owner


def owned_boxes(owners: Owners) -> dict[str, dict[Box, tuple[int, ...]]]:
    """Return the owner of each box of each whole tensor, in the form of `Layout.holders`."""
    return by_box((spec, (owner,)) for spec, owner in owners.values())


def owned_gradients(
    owners: Owners, rank: int, gradients: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Copy the gradients of the parameters that a rank owns, or of their blocks, to the host.

    Args:
        owners: of all that is stored.
        rank: this one.
        gradients: of the whole parameters, by name.
    """
    found: dict[str, torch.Tensor] = {}
    for spec, owner in owners.values():
        whole = gradients.get(str(spec.tag.parameter if spec.block is None else spec.block.parameter))
        if owner == rank and whole is not None and spec.tag.role is Role.WEIGHT:
            box = Box((0,) * whole.dim(), tuple(whole.shape))
            own = box.cut(whole, block_box(spec)[1])
            found[spec.tag.parameter or spec.name] = own.detach().to("cpu", copy=True)
    return found


def block_box(spec: TensorSpec) -> tuple[str, Box]:
    """Of which whole tensor a stored one is which box."""
    if spec.block is None:
        return spec.name, Box((0,) * len(spec.shape), spec.shape)
    return spec.block.of, Box(spec.block.offset, spec.shape)


def by_box(stored: Iterable[tuple[TensorSpec, T]]) -> dict[str, dict[Box, T]]:
    """Return what belongs to stored tensors by the whole tensor, and by the box of it, that each of them is."""
    found: dict[str, dict[Box, T]] = {}
    for spec, value in stored:
        of, box = block_box(spec)
        found.setdefault(of, {})[box] = value
    return found
