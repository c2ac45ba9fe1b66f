"""What a set holds and lacks, store by store: the numbers of `shrinkpoint stores`."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from shrinkpoint.store.keys import seq_of_commit
from shrinkpoint.store.manifest import Manifest
from shrinkpoint.store.objects import ObjectInfo
from shrinkpoint.store.striped.blobs import layouts_of
from shrinkpoint.store.striped.group import Group
from shrinkpoint.store.striped.members import JOINING_KEY, MEMBER_KEY
from shrinkpoint.store.striped.objects import StripedObjects
from shrinkpoint.store.striped.reading import Layout
from shrinkpoint.store.striped.shards import Geometry, ShardName

__all__ = ["StoreState", "Survey", "is_mirrored", "list_all", "survey"]


@dataclass(frozen=True, kw_only=True)
class StoreState:
    """One store.

    Attributes:
        number: Its place in the set, from 1.
        shown: Its URL.
        problem: What is wrong with it; None where it answers and belongs here.
        last_step: Step of the newest checkpoint whose manifest it holds.
        last_seq: That one's number.
        records_missing: Records that other stores have and this one does not.
        shards_missing: Shards of the run's checkpoints that no store holds and that this one, holding none, is to be given.
        files: Shards that it holds.
        bytes: Their size.
    """

    number: int
    shown: str
    problem: str | None
    last_step: int | None = None
    last_seq: int | None = None
    records_missing: int = 0
    shards_missing: int = 0
    files: int = 0
    bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Survey:
    """All of them.

    Attributes:
        stores: In their order.
        parity: How many were to be spare.
        redundancy: How many more stores may be lost now, and every checkpoint is still restored and seen.
        unrestorable: Containers of the run's checkpoints of which too few shards are left.
    """

    stores: tuple[StoreState, ...]
    parity: int
    redundancy: int
    unrestorable: tuple[str, ...]


def is_mirrored(key: str) -> bool:
    """Whether every store is to have a copy: records, but neither probes nor what says which store it is."""
    own = key in (MEMBER_KEY, JOINING_KEY) or key.startswith("probe/")
    return not own and ShardName.parse(key) is None


def list_all(group: Group) -> dict[int, list[ObjectInfo]]:
    """Everything in every store that answers and belongs to the set.

    Raises:
        StoreError: Fewer answer than it takes to be sure.
    """

    def look(store: int) -> list[ObjectInfo]:
        infos = group.stores[store].list("")
        group.confirm(store)
        return infos

    return group.read(look)


def survey(
    objects: StripedObjects, manifests: list[Manifest], needed: Collection[str] | None = None
) -> Survey:
    """Look at all stores; nothing is read but their listings, so that damage is not seen (`shrinkpoint verify`, `heal`).

    Args:
        objects: The set.
        manifests: The run's checkpoints.
        needed: Keys of all containers that they need; None where no chain has heads.

    Raises:
        StoreError: Fewer stores answer than it takes to be sure.
    """
    group = objects.group
    listed = list_all(group)
    layouts = layouts_of(listed)
    if needed is None:
        needed = {ref.key for manifest in manifests for ref in manifest.chain}
    present = {
        store: {info.key for info in infos if is_mirrored(info.key)} for store, infos in listed.items()
    }
    records: set[str] = set().union(*present.values())
    by_seq = {manifest.seq: manifest for manifest in reversed(manifests)}
    missing = dict.fromkeys(group.everyone, 0)
    spares = [group.parity, len(listed) - group.quorum.read]
    unrestorable = []
    for key in needed:
        best = best_geometry(layouts.get(key, {}))
        if best is None:
            unrestorable.append(key)
            continue
        geometry, places = best
        spares.append(len(places) - geometry.k)
        for store in lacking_stores(group, geometry, places):
            missing[store] += 1
    for key in records:
        if seq_of_commit(key) is not None:
            spares.append(sum(key in keys for keys in present.values()) - 1)
    states = []
    for store in group.everyone:
        problem = None if store in listed else group.health.why(store) or "does not answer"
        seqs = [seq_of_commit(key) for key in present.get(store, ())]
        last = max(
            (seq for seq in seqs if seq in by_seq),
            key=lambda seq: by_seq[seq].position if seq in by_seq else (0, 0),
            default=None,
        )
        files = [info for info in listed.get(store, ()) if ShardName.parse(info.key) is not None]
        states.append(
            StoreState(
                number=store + 1,
                shown=group.shown[store],
                problem=problem,
                last_step=None if last is None else by_seq[last].step,
                last_seq=last,
                records_missing=len(records - present[store]) if store in present else 0,
                shards_missing=missing[store],
                files=len(files),
                bytes=sum(info.size for info in files),
            )
        )
    redundancy = 0 if unrestorable else max(0, min(spares))
    return Survey(
        stores=tuple(states),
        parity=group.parity,
        redundancy=redundancy,
        unrestorable=tuple(sorted(unrestorable)),
    )


def best_geometry(layout: Layout) -> tuple[Geometry, Mapping[int, list[int]]] | None:
    """The geometry with the most shards to spare; None where none has enough."""
    whole = [(geometry, places) for geometry, places in layout.items() if len(places) >= geometry.k]
    return max(whole, key=lambda item: (len(item[1]) - item[0].k, item[0]), default=None)


def lacking_stores(group: Group, geometry: Geometry, places: Mapping[int, list[int]]) -> list[int]:
    """Which stores are to be given the shards that no store has: those that hold none of this geometry."""
    holders = {store for stores in places.values() for store in stores}
    absent = geometry.shards - len(places)
    return [store for store in group.everyone if store not in holders][:absent]
