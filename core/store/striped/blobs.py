"""Containers as shards over the stores: written in parallel, read from whichever of them are enough."""

import threading
import zlib
from collections.abc import Sequence
from contextlib import suppress

from shrinkpoint.errors import CorruptionError
from shrinkpoint.store.objects import MissingKeyError, ObjectInfo
from shrinkpoint.store.striped.group import Group
from shrinkpoint.store.striped.parity import Shard
from shrinkpoint.store.striped.reading import Insufficient, Layout, RangeReader
from shrinkpoint.store.striped.records import youngest
from shrinkpoint.store.striped.shards import Geometry, ShardName, cut_data, encode_shard

MIRROR_BELOW = 2**16
"""Bytes below which a blob is mirrored: to cut it would save less than another request takes."""

_REMEMBERED = 16


def choose_geometry(stores: int, parity: int, length: int) -> Geometry:
    """Return how a blob is cut over so many stores: never with fewer spare shards than `parity`, whatever the number of stores."""
    if length < MIRROR_BELOW and parity:
        return Geometry(1, stores - 1, length)
    if stores <= parity:
        raise ValueError(f"{stores} stores for {parity} spare shards")
    return Geometry(stores - parity, parity, length)


class Blobs:
    """The containers of a set.

    Args:
        group: The stores.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._layouts: dict[str, Layout] = {}
        self._lock = threading.Lock()

    def put(self, key: str, data: bytes) -> None:
        """Put a shard in every store. Where one fails or is far behind, all is cut anew for those that are
        left.

        Raises:
            StoreError: Fewer stores than it takes to commit can be written to.
        """
        group = self._group
        transient = False
        while True:
            stores = group.writable()
            if len(stores) < group.quorum.write:
                raise group.too_few(len(stores), transient)
            geometry = choose_geometry(len(stores), group.parity, len(data))
            # Not always the same store for the parity, which nobody reads as long as all is well.
            turn = zlib.crc32(key.encode()) % len(stores)
            order = stores[turn:] + stores[:turn]
            cut = cut_data(geometry, data)

            def write(
                store: int, order: list[int] = order, cut: list[Shard] = cut, geometry: Geometry = geometry
            ) -> None:
                place = order.index(store)
                name = ShardName(key, geometry, place)
                group.stores[store].put(str(name), encode_shard(name, cut))

            enough = max(group.quorum.write, len(stores) - group.parity)
            answers = group.ask_to_write(stores, write, enough=enough)
            transient |= answers.transient
            done = len(answers.of)
            if done == len(stores) or (
                geometry.k == 1 and done > group.parity and done >= group.quorum.write
            ):
                return
            if done < group.quorum.write or len(group.writable()) >= len(stores):
                raise group.too_few(done, transient)

    def get(self, key: str, start: int | None, end: int | None, max_size: int) -> bytes | None:
        """Return bytes of a blob; None where no store that answers has a shard of it.

        Raises:
            CorruptionError: It is damaged beyond repair, longer than `max_size`, or ends before `end`.
            MissingKeyError: Too few shards are there, and every store answers.
            StoreError: Too few are there, and the others may be in a store that does not answer.
        """
        with self._lock:
            layout = self._layouts.get(key)
        if layout is not None:
            try:
                return self._get(key, layout, start, end, max_size)
            except (Insufficient, CorruptionError):
                pass  # it is looked for anew, and what is wrong then is raised
        layout = layouts_of(self._group.listings(f"{key}.")).get(key, {})
        if not layout:
            return None
        data = self._get_or_explain(key, layout, start, end, max_size)
        with self._lock:
            self._layouts[key] = layout
            while len(self._layouts) > _REMEMBERED:
                del self._layouts[next(iter(self._layouts))]
        return data

    def _get_or_explain(
        self, key: str, layout: Layout, start: int | None, end: int | None, max_size: int
    ) -> bytes:
        try:
            return self._get(key, layout, start, end, max_size)
        except Insufficient as error:
            with suppress(
                Insufficient
            ):  # a listing may lag behind what is there; else the first error is raised
                return self._get(key, self._guess(layout), start, end, max_size)
            silent = self._group.health.failing
            what = f"{key}: {error}"
            if silent and not self._group.reads_anyway:
                raise self._group.unreadable(
                    f"{what}; the others may be in a store that does not answer", silent
                ) from error
            if error.damaged:
                raise CorruptionError(f"{what}; damaged: {', '.join(error.damaged)}") from error
            raise MissingKeyError(what) from error

    def _get(self, key: str, layout: Layout, start: int | None, end: int | None, max_size: int) -> bytes:
        problem: Insufficient | None = None
        # The geometry of which the most stores that work have a shard comes first.
        for geometry in sorted(layout, key=lambda g: (self._well(layout[g]) - g.k, g), reverse=True):
            first, last = start or 0, geometry.length if end is None else end
            if not 0 <= first <= last <= geometry.length or last - first > max_size:
                raise CorruptionError(
                    f"{key} has {geometry.length} bytes in {', '.join(self._group.shown)}, which is not what its manifest says"
                )
            try:
                return RangeReader(self._group, key, geometry, layout[geometry]).read(first, last)
            except Insufficient as error:
                if problem is None or len(error.damaged) > len(problem.damaged):
                    problem = error
        assert problem is not None
        raise problem

    def _guess(self, layout: Layout) -> Layout:
        """Return the same, with the places that no listing shows in any store that shows none of this geometry."""
        guessed: Layout = {}
        for geometry, places in layout.items():
            shown = {store for stores in places.values() for store in stores}
            others = [store for store in self._group.everyone if store not in shown]
            guessed[geometry] = {place: places.get(place, others) for place in range(geometry.shards)}
        return guessed

    def _well(self, places: dict[int, list[int]]) -> int:
        return sum(
            any(not self._group.health.is_failing(store) for store in stores) for stores in places.values()
        )

    def fold(self, listed: dict[int, list[tuple[ShardName, ObjectInfo]]]) -> list[ObjectInfo]:
        """One entry for each blob out of the listings: with its length where enough shards are there, with fewer bytes else.

        Args:
            listed: By store.
        """
        by_key: dict[str, list[tuple[ShardName, ObjectInfo]]] = {}
        for shards in listed.values():
            for shard in shards:
                by_key.setdefault(shard[0].key, []).append(shard)
        entries = []
        for key, shards in by_key.items():
            places: dict[Geometry, set[int]] = {}
            for name, info in shards:
                if info.size == name.geometry.file_bytes:
                    places.setdefault(name.geometry, set()).add(name.place)
            whole = [geometry for geometry, there in places.items() if len(there) >= geometry.k]
            if whole:
                size = max(whole, key=lambda geometry: len(places[geometry]) - geometry.k).length
            else:  # not restorable: what looks for it must find another size than its manifest says
                partial = [min(g.length - 1, len(there) * g.shard_bytes) for g, there in places.items()]
                size = max([0, *partial])
            entries.append(ObjectInfo(key=key, size=size, modified=youngest([info for _, info in shards])))
        return entries

    def remove(self, store: int, keys: Sequence[str]) -> None:
        """Delete a store's shards, of whatever geometry."""
        wanted, objects = set(keys), self._group.stores[store]
        with self._lock:
            for key in wanted:
                self._layouts.pop(key, None)
        names = []
        for info in objects.list("data/"):
            name = ShardName.parse(info.key)
            if name is not None and name.key in wanted:
                names.append(info.key)
        objects.delete(names)


def layouts_of(listed: dict[int, list[ObjectInfo]]) -> dict[str, Layout]:
    """Return where the shards are, by blob: those whose files have the size that their names say; the others are junk."""
    found: dict[str, Layout] = {}
    for store, infos in listed.items():
        for info in infos:
            name = ShardName.parse(info.key)
            if name is not None and info.size == name.geometry.file_bytes:
                places = found.setdefault(name.key, {}).setdefault(name.geometry, {})
                places.setdefault(name.place, []).append(store)
    return found
