"""What a set holds and lacks, store by store, and writing it again: `shrinkpoint stores`."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace

from shrinkpoint.errors import CorruptionError, FormatError, RunMismatchError, StoreError
from shrinkpoint.store.keys import MEMBER_KEY, seq_of_commit
from shrinkpoint.store.manifest import MAX_MANIFEST_BYTES, Manifest, is_sealed
from shrinkpoint.store.objects import MissingKeyError
from shrinkpoint.store.striped.blobs import layouts_of
from shrinkpoint.store.striped.group import Group
from shrinkpoint.store.striped.members import JOINING_KEY, Member, holds_a_run, read_member
from shrinkpoint.store.striped.objects import StripedObjects
from shrinkpoint.store.striped.reading import Layout
from shrinkpoint.store.striped.shards import (
    Geometry,
    ShardName,
    block_sums,
    cut_data,
    encode_shard,
    sound_blocks,
)


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


def _is_mirrored(key: str) -> bool:
    """Return whether every store is to have a copy: records, but neither probes nor what says which store it is."""
    own = key in (MEMBER_KEY, JOINING_KEY) or key.startswith("probe/")
    return not own and ShardName.parse(key) is None


def survey(objects: StripedObjects, manifests: list[Manifest], needed: Collection[str]) -> Survey:
    """Look at all stores; nothing is read but their listings, so that damage is not seen (`shrinkpoint verify`, `heal`).

    Args:
        objects: The set.
        manifests: The run's checkpoints.
        needed: Keys of all containers that they need.

    Raises:
        StoreError: Fewer stores answer than it takes to be sure.
    """
    group = objects.group
    listed = group.listings("")
    layouts = layouts_of(listed)
    present = {
        store: {info.key for info in infos if _is_mirrored(info.key)} for store, infos in listed.items()
    }
    records: set[str] = set().union(*present.values())
    by_seq: dict[int | None, Manifest] = {manifest.seq: manifest for manifest in reversed(manifests)}
    missing = dict.fromkeys(group.everyone, 0)
    spares = [group.parity, len(listed) - group.quorum.read]
    unrestorable = []
    for key in needed:
        best = _best_geometry(layouts.get(key, {}))
        if best is None:
            unrestorable.append(key)
            continue
        geometry, places = best
        spares.append(len(places) - geometry.k)
        for store in _lacking_stores(group, geometry, places):
            missing[store] += 1
    for key in records:
        if seq_of_commit(key) is not None:
            spares.append(sum(key in keys for keys in present.values()) - 1)
    states = []
    for store in group.everyone:
        problem = None if store in listed else group.health.why(store) or "does not answer"
        listed_here = [by_seq[seq] for key in present.get(store, ()) if (seq := seq_of_commit(key)) in by_seq]
        last = max(listed_here, key=lambda manifest: manifest.position, default=None)
        files = [info for info in listed.get(store, ()) if ShardName.parse(info.key) is not None]
        states.append(
            StoreState(
                number=store + 1,
                shown=group.shown[store],
                problem=problem,
                last_step=None if last is None else last.step,
                last_seq=None if last is None else last.seq,
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


def _best_geometry(layout: Layout) -> tuple[Geometry, Mapping[int, list[int]]] | None:
    """Return the geometry with the most shards to spare; None where none has enough."""
    whole = [(geometry, places) for geometry, places in layout.items() if len(places) >= geometry.k]
    return max(whole, key=lambda item: (len(item[1]) - item[0].k, item[0]), default=None)


def _lacking_stores(group: Group, geometry: Geometry, places: Mapping[int, list[int]]) -> list[int]:
    """Return which stores are to be given the shards that no store has: those that hold none of this geometry."""
    holders = {store for stores in places.values() for store in stores}
    absent = geometry.shards - len(places)
    return [store for store in group.everyone if store not in holders][:absent]


Progress = Callable[[int, int, str], None]
"""Called with how many objects are done, how many there are, and the next one's key."""


@dataclass(kw_only=True)
class Healed:
    """What was written.

    Attributes:
        joined: Numbers of the stores that were blank.
        records: Copies of records.
        shards: Shards that were missing.
        repaired: Shards and records that were damaged.
        lost: Containers of which too few shards are sound, and why.
        orphans: The same of containers that no checkpoint needs, as killed saves leave behind.
        outdated: Steps of checkpoints that were removed while a store was away that still holds their records; the next
            collection removes these again.
    """

    joined: tuple[int, ...] = ()
    records: int = 0
    shards: int = 0
    repaired: int = 0
    lost: dict[str, str] = field(default_factory=dict)
    orphans: int = 0
    outdated: tuple[int, ...] = ()


def heal(
    objects: StripedObjects, needed: Collection[str], progress: Progress = lambda done, of, key: None
) -> Healed:
    """Read everything, and write what is missing or damaged. A run may be saved to meanwhile.

    A blank store becomes a member when it holds everything, and not before: until then it must not count among those that
    have been asked what is there.

    Args:
        objects: The set.
        needed: Keys of the containers that the run's checkpoints need.
        progress: Gets how far it is.

    Raises:
        RunMismatchError: A store without `member.json` holds something.
        StoreError: A store does not answer: what it holds is not known.
    """
    return _Repair(objects, set(needed), progress).run()


class _Repair:
    def __init__(self, objects: StripedObjects, needed: set[str], progress: Progress) -> None:
        self._objects = objects
        self._group: Group = objects.group
        self._needed = needed
        self._progress = progress
        self._healed = Healed()
        self._outdated: dict[str, int] = {}
        self._acknowledged: set[str] = set()

    def run(self) -> Healed:
        group = self._group
        member = group.member
        if member is None:
            raise StoreError(f"nothing was ever stored in {self._objects.display}: there is nothing to heal")
        joining = self._join(member)
        listed = {store: group.stores[store].list("") for store in group.everyone}
        records = sorted({i.key for infos in listed.values() for i in infos if _is_mirrored(i.key)})
        layouts = layouts_of(listed)
        of = len(records) + len(layouts)
        for done, key in enumerate(records):
            self._progress(done, of, key)
            self._heal_record(key, layouts, len(joining))
        for done, key in enumerate(sorted(layouts), len(records)):
            self._progress(done, of, key)
            self._heal_blob(key, layouts[key])
        self._progress(of, of, "")
        for store in joining:
            stores = group.stores[store]
            if not stores.put_if_absent(MEMBER_KEY, replace(member, number=store + 1).to_bytes()):
                group.confirm(store)
            stores.delete([JOINING_KEY])
            group.health.answered(store)
        self._healed.joined = tuple(store + 1 for store in joining)
        self._healed.outdated = tuple(sorted(set(self._outdated.values())))
        return self._healed

    def _join(self, member: Member) -> list[int]:
        """Mark the blank stores, so that an interrupted healing is gone on with, and nothing else is written over."""
        group, joining = self._group, []
        for store, objects in enumerate(group.stores):
            if read_member(objects) is not None:
                group.confirm(store)
                continue
            begun = read_member(objects, JOINING_KEY)
            if begun is None:
                if (key := holds_a_run(objects)) is not None:
                    raise RunMismatchError(
                        f"{group.shown[store]} has no {MEMBER_KEY}, and holds a run's files all the same ({key!r} for one):"
                        " empty it, or replace it by another place (--replace)"
                    )
                objects.put_if_absent(JOINING_KEY, replace(member, number=store + 1).to_bytes())
                begun = read_member(objects, JOINING_KEY)
            if begun is None or not begun.is_sibling_of(member) or begun.number != store + 1:
                raise RunMismatchError(
                    f"{group.shown[store]} is being made a store of another set: choose another place"
                )
            joining.append(store)
        return joining

    def _heal_record(self, key: str, layouts: dict[str, Layout], joining: int) -> None:
        group = self._group
        copies: dict[int, bytes | None] = {}
        for store in group.everyone:
            try:
                copies[store] = group.stores[store].get(key, max_size=MAX_MANIFEST_BYTES)
            except MissingKeyError:
                continue  # it gets a copy below
            except CorruptionError:
                copies[store] = None  # and this one is replaced
        sound = [data for data in copies.values() if data is not None and is_sealed(data)]
        if not sound:
            return  # gone since, or damaged in every copy, which a reader reports
        best = max(sound, key=lambda data: (sound.count(data), data))
        if self._is_outdated(key, best, sound.count(best) + joining, layouts):
            return  # nobody acknowledges it any more: more copies would bring it back
        for store in group.everyone:
            if store not in copies:
                self._healed.records += group.stores[store].put_if_absent(key, best)
            elif (mine := copies[store]) is None or not is_sealed(mine):
                group.stores[store].put(key, best)
                self._healed.repaired += 1

    def _is_outdated(self, key: str, data: bytes, copies: int, layouts: dict[str, Layout]) -> bool:
        """Return whether a manifest's containers are gone of which there may be fewer copies than it takes to commit one."""
        if seq_of_commit(key) is None:
            return False
        try:
            manifest = Manifest.from_bytes(data, key)
        except FormatError:
            return False  # sealed, but of a newer version: it is copied as it is
        keys = [ref.key for ref in manifest.chain]
        gone = [
            blob
            for blob in keys
            if not any(len(places) >= cut.k for cut, places in layouts.get(blob, {}).items())
        ]
        if copies < self._group.quorum.write and gone:
            self._outdated.update(dict.fromkeys(gone, manifest.step))
            return True
        self._acknowledged.update(keys)
        return False

    def _heal_blob(self, key: str, layout: Layout) -> None:
        group = self._group
        sound, damaged = self._look_at(key, layout)
        best = _best_geometry(sound)
        if best is None and damaged:  # blocks of several damaged shards may still be put together
            likeliest = max(layout, key=lambda g: (len(layout[g]) - g.k, g))
            best = likeliest, sound.get(likeliest, {})
        if best is None:
            self._cannot(key, "too few shards are left")
            return
        geometry, places = best
        holders = {store for stores in places.values() for store in stores}
        absent = [place for place in range(geometry.shards) if place not in places]
        bad = {
            name.place: store for store, name in damaged if name.geometry == geometry and name.place in absent
        }
        if not absent:
            return
        try:
            data = self._objects.get(key, max_size=geometry.length)
        except (FormatError, StoreError) as error:
            self._cannot(key, str(error))
            return
        cut = cut_data(geometry, data)
        free = [store for store in group.everyone if store not in holders and store not in bad.values()]
        for place in absent:
            store = bad[place] if place in bad else free.pop(0) if free else None
            if store is not None:
                name = ShardName(key, geometry, place)
                group.stores[store].put(str(name), encode_shard(name, cut))
                self._healed.repaired += place in bad
                self._healed.shards += place not in bad

    def _cannot(self, key: str, why: str) -> None:
        if key in self._needed and (key in self._acknowledged or key not in self._outdated):
            self._healed.lost[key] = why
        else:
            self._healed.orphans += 1

    def _look_at(self, key: str, layout: Layout) -> tuple[Layout, list[tuple[int, ShardName]]]:
        """Read every shard of a blob: the layout of those that are sound, and those that are not."""
        sound: Layout = {}
        damaged = []
        for geometry, places in layout.items():
            for place, stores in places.items():
                name = ShardName(key, geometry, place)
                for store in stores:
                    state = self._state_of(store, name)
                    if state:
                        sound.setdefault(geometry, {}).setdefault(place, []).append(store)
                    elif state is False:
                        damaged.append((store, name))
        return sound, damaged

    def _state_of(self, store: int, name: ShardName) -> bool | None:
        """Return whether a shard is sound; None where it has gone meanwhile."""
        cut: Geometry = name.geometry
        try:
            file = self._group.stores[store].get(str(name), max_size=cut.file_bytes)
            sums = block_sums(name, file[: cut.header_bytes])
        except MissingKeyError:
            return None
        except CorruptionError:
            return False
        return all(block is not None for block in sound_blocks(sums, file[cut.header_bytes :]))
