"""Reads a checkpoint on all ranks: each decodes the tensors that it will own, then all fill their shards from these."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

import torch

from shrinkpoint.coding.decode import Row
from shrinkpoint.coding.parts import PartsHeader
from shrinkpoint.coding.selective import decode_batches, sources_of_run
from shrinkpoint.container.reader import Header
from shrinkpoint.engine.adopt import CARRIED
from shrinkpoint.engine.placement import Found
from shrinkpoint.errors import ChainError, CorruptionError, FormatError
from shrinkpoint.group.group import Distributed
from shrinkpoint.runtime.memory import Returns
from shrinkpoint.schemes.base import ReferenceState
from shrinkpoint.sharded.gathering import Shards, spread
from shrinkpoint.sharded.layout import Owners, layout_of, owners_of, tensors_of_rank
from shrinkpoint.state.specs import whole_specs
from shrinkpoint.state.training import TensorSpec, TrainingState, merged_tree
from shrinkpoint.state.tree import JSON, tensor_names
from shrinkpoint.store.manifest import Manifest
from shrinkpoint.store.run import RunStore

RANKS_KEY = "shrinkpoint ranks"
"""The entry that a restored state has in addition: ``stored``, ``here`` and ``rank``."""


@dataclass(frozen=True)
class ReadPlan:
    """What is known of a checkpoint by its headers, before any of its tensors is read."""

    manifest: Manifest
    tree: JSON
    specs: Mapping[str, TensorSpec]
    """Of the tensors as they are stored, blocks among them."""
    places: tuple[Mapping[str, int], ...]
    """For each checkpoint of the chain, the part that has each tensor."""
    own: tuple[JSON, ...]
    """Each writing rank's own data."""


@dataclass
class Decoded(Found):
    """What one rank has decoded of a checkpoint; `own_state` has what is still in memory of it (see `fill`), and what an exact save carries."""

    plan: ReadPlan
    owners: Owners
    apart: Mapping[str, torch.Tensor]
    """What a rank of this number had for itself."""


def plan_of(
    manifest: Manifest,
    headers: Sequence[Header],
    tables: Sequence[tuple[Mapping[str, TensorSpec], Mapping[str, int]]] = (),
) -> ReadPlan:
    """Return what a checkpoint's headers say.

    Args:
        manifest: of the checkpoint.
        headers: of each checkpoint of its chain.
        tables: specs and parts of the stored tensors of each, where the headers are not those of all parts.

    Raises:
        CorruptionError: the manifest says something else.
    """
    newest = headers[-1]
    if (newest.state_digest, newest.step) != (manifest.state_digest, manifest.step):
        raise CorruptionError(
            f"{manifest.chain[-1].key} contains another state than its manifest (commit {manifest.seq}) states"
        )
    specs = tables[-1][0] if tables else {name: record.spec for name, record in newest.tensors.items()}
    places = tuple(each for _, each in tables) or tuple(
        header.places if isinstance(header, PartsHeader) else dict.fromkeys(header.tensors, 0)
        for header in headers
    )
    own = tuple(own for _, own in sorted(newest.own.items())) if isinstance(newest, PartsHeader) else ()
    return ReadPlan(manifest, newest.tree, specs, places, own)


def rows_of(store: RunStore, plan: ReadPlan, wanted: AbstractSet[str], threads: int) -> Iterator[Row]:
    """Decode some tensors of a checkpoint, and what they need; only the parts that have these are read.

    Args:
        store: the run.
        plan: of the checkpoint.
        wanted: names of stored tensors.
        threads: that decode.

    Raises:
        FormatError: one is not there. ShrinkpointError: what is needed is damaged or missing.
    """

    def parts(at: int) -> AbstractSet[int]:
        return {plan.places[at][name] for name in wanted if name in plan.places[at]}

    if not wanted:
        return
    header, _, batches = decode_batches(
        sources_of_run(store, plan.manifest, parts),
        lambda header: header.tensors.keys() & wanted,
        threads=threads,
        lasting=True,
    )
    missing = wanted - header.tensors.keys()
    if missing:
        raise FormatError(f"the checkpoint of step {header.step} lacks {min(missing)!r}")
    memory = Returns(sum(header.tensors[name].spec.nbytes for name in wanted))
    for rows in batches:  # not all at once: what was read of a batch is forgotten with it
        for entry, reference, value in rows:
            yield entry, reference, value
            memory.after(value.nbytes)


def decoded(store: RunStore, group: Distributed, plan: ReadPlan, threads: int, limit: int) -> Decoded:
    """Decode what this rank will own of a checkpoint, in blocks of at most `limit` elements, and what it had for itself.

    Raises:
        ShrinkpointError: as `rows_of`.
    """
    names = [_own_names(plan, rank) for rank in range(len(plan.own))]
    of_ranks = {name for own in names for name in own}
    common = {n: spec for n, spec in plan.specs.items() if n not in of_ranks and not n.startswith(CARRIED)}
    owners = _owners(common, group.size, limit)
    wanted = {name for name, (_, owner) in owners.items() if owner == group.rank}
    wanted |= plan.specs.keys() & {CARRIED + name for name in wanted}
    own = names[group.rank] if group.rank < len(names) else set()
    values: dict[str, torch.Tensor] = {}
    apart: dict[str, torch.Tensor] = {}
    reference: dict[str, ReferenceState] = {}
    for entry, now, value in rows_of(store, plan, wanted | own, threads):
        reference[entry.spec.name] = now
        if entry.spec.name in wanted:
            values[entry.spec.name] = value
        elif entry.spec.name in own:
            apart[entry.spec.name] = value
    specs = {name: spec for name, (spec, _) in owners.items() if name in values}
    specs |= {name: plan.specs[name] for name in values if name.startswith(CARRIED)}
    return Decoded(plan.manifest, reference, TrainingState(None, values, specs), plan, owners, apart)


def _own_names(plan: ReadPlan, rank: int) -> set[str]:
    """Return the tensors that a rank which has written the checkpoint had for itself."""
    tree = plan.own[rank]
    return plan.specs.keys() & tensor_names(tree) if tree is not None else set()


def _owners(specs: Mapping[str, TensorSpec], world: int, limit: int) -> Owners:
    """Who decodes what is stored: the rank that will code it next."""
    coming = owners_of(whole_specs(specs.values()), world, limit)
    first = {spec.block.of: rank for spec, rank in reversed(list(coming.values())) if spec.block is not None}
    found: dict[str, tuple[TensorSpec, int]] = {}
    for name, spec in specs.items():
        known = coming.get(name)
        if known is not None:
            found[name] = (spec, known[1])
        else:  # stored in one piece by a single process, or in other blocks
            of = spec.whole
            found[name] = (spec, first.get(of, coming[of][1] if of in coming else 0))
    return found


def fill(
    group: Distributed,
    found: Decoded,
    tree: JSON,
    targets: Callable[[Mapping[str, TensorSpec]], Mapping[str, torch.Tensor]],
    keep: Callable[[TensorSpec], bool],
) -> TrainingState:
    """Put a decoded checkpoint into the training's own tensors; a collective.

    Args:
        group: all ranks.
        found: what each of them has decoded. Its tensors are forgotten as they are moved, so that no rank has them twice.
        tree: the checkpoint's plain data.
        targets: gives the tensors to be filled, with shards or whole, by name, for the specs of whole tensors.
        keep: which decoded tensors stay in `found.own_state` all the same.

    Returns:
        The state, in these tensors; plain data of this rank in the place of the first rank's where it is known. The entry
        `RANKS_KEY` says how many ranks stored it (1 for a single container), how many there are here, and which this is.

    Raises:
        ShrinkpointError: a target does not fit; on every rank, and nothing is changed then.
    """
    whole = whole_specs(spec for spec, _ in found.owners.values())
    into, own, pieces = group.on_every(lambda: _targets(whole, targets))
    values, specs = dict(found.own_state.tensors), dict(found.own_state.specs)
    found.own_state, memory = TrainingState(None, values, specs), Returns(found.own_state.nbytes)

    def moved(name: str) -> None:
        if not keep(specs[name]):
            memory.after(values.pop(name).nbytes)
            del specs[name]

    shards = Shards(group, layout_of(group.gather(own)), pieces, found.owners)
    spread(shards, found.owners, values, moved=moved)
    apart = {name: value.clone() for name, value in found.apart.items()}
    return TrainingState(_own_tree(found.plan, tree, group), {**into, **apart}, whole)


def _targets(
    whole: Mapping[str, TensorSpec],
    targets: Callable[[Mapping[str, TensorSpec]], Mapping[str, torch.Tensor]],
) -> tuple[dict[str, torch.Tensor], Any, Any]:
    into = dict(targets(whole))
    for name, spec in whole.items():
        found = into[name]
        if (found.dtype, tuple(found.shape)) != (spec.dtype, spec.shape):
            raise ChainError(
                f"{name} is {found.dtype} {tuple(found.shape)} here, and {spec.dtype} {spec.shape} there"
            )
    own, pieces = tensors_of_rank(into, whole)
    return into, own, pieces


def _own_tree(plan: ReadPlan, tree: JSON, group: Distributed) -> JSON:
    """Return the tree for this rank, with its own values where as many ranks wrote; its generators where it is one of them."""
    world = max(len(plan.own), 1)
    own = plan.own[group.rank] if group.rank < len(plan.own) else None
    if isinstance(own, dict) and world != group.size:
        own = {group: values for group, values in own.items() if group == "rng"}
    tree = merged_tree(dict(tree) if isinstance(tree, dict) else tree, own)
    if isinstance(tree, dict):
        tree[RANKS_KEY] = {"stored": world, "here": group.size, "rank": group.rank}
    return tree
