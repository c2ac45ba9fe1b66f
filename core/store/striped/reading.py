"""A range of a blob out of its shards: those blocks that are asked for, and others only to rebuild what is missing."""

from typing import TypeAlias

from shrinkpoint.errors import CorruptionError
from shrinkpoint.runtime.memory import join_bytes
from shrinkpoint.store.objects import MissingKeyError
from shrinkpoint.store.striped.group import Group
from shrinkpoint.store.striped.parity import Shard, rebuild
from shrinkpoint.store.striped.shards import BLOCK, Geometry, ShardName, block_sums, sound_blocks

Layout: TypeAlias = dict[Geometry, dict[int, list[int]]]
"""Of one blob: which stores hold which place of which geometry."""

Blocks: TypeAlias = tuple[int, int]
"""The first block and the one after the last."""


class Insufficient(Exception):
    """Too few shards are sound.

    Attributes:
        damaged: Those that are not.
    """

    def __init__(self, message: str, damaged: list[str]) -> None:
        super().__init__(message)
        self.damaged = damaged


class RangeReader:
    """Reads one blob of one geometry, once.

    Args:
        group: The stores.
        key: The blob's.
        geometry: How it was cut.
        holders: The stores of each place.
    """

    def __init__(self, group: Group, key: str, geometry: Geometry, holders: dict[int, list[int]]) -> None:
        self._group = group
        self._key = key
        self._cut = geometry
        self._holders = holders
        self._blocks: dict[int, dict[int, Shard]] = {}
        self._tried: set[tuple[int, int, int, int]] = set()
        self._damaged: list[str] = []

    def read(self, start: int, end: int) -> bytes:
        """Return bytes `start` to `end`, every block of them checked.

        Raises:
            Insufficient: There are not enough sound shards.
        """
        if start == end:
            return b""
        wanted = self._wanted(start, end)
        while lacking := self._lacking(wanted):
            self._fetch(self._next(lacking))
        size = self._cut.shard_bytes
        rebuilt: dict[int, list[Shard]] = {}
        parts = []
        for place in sorted(wanted):
            for block in range(*wanted[place]):
                data = self._blocks.get(place, {}).get(block)
                if data is None:
                    if block not in rebuilt:
                        found = {p: blocks[block] for p, blocks in self._blocks.items() if block in blocks}
                        rebuilt[block] = rebuild(found, self._cut.k, self._cut.spare)
                    data = rebuilt[block][place]
                offset = place * size + block * BLOCK
                parts.append(data[max(0, start - offset) : max(0, end - offset)].data)
        return join_bytes(parts, end - start)

    def _wanted(self, start: int, end: int) -> dict[int, Blocks]:
        """Return which blocks of which data shards the range lies in."""
        size = self._cut.shard_bytes
        wanted = {}
        for place in range(start // size, (end - 1) // size + 1):
            first, last = max(0, start - place * size), min(size, end - place * size)
            wanted[place] = first // BLOCK, (last - 1) // BLOCK + 1
        return wanted

    def _count(self, block: int) -> int:
        return sum(block in blocks for blocks in self._blocks.values())

    def _lacking(self, wanted: dict[int, Blocks]) -> dict[int, list[int]]:
        """Places by block that are neither here nor to be rebuilt from what is here."""
        lacking: dict[int, list[int]] = {}
        for place, blocks in wanted.items():
            for block in range(*blocks):
                if block not in self._blocks.get(place, {}) and self._count(block) < self._cut.k:
                    lacking.setdefault(block, []).append(place)
        return lacking

    def _next(self, lacking: dict[int, list[int]]) -> dict[int, tuple[int, Blocks]]:
        """Return what to fetch now: by store, the place and the blocks. The data itself where its stores work, else parity."""
        chosen: dict[int, tuple[int, Blocks]] = {}
        places = sorted({place for by in lacking.values() for place in by})
        unavailable: set[int] = set()  # blocks whose own shard is in a store that fails
        for place in places:
            mine = [block for block, by in lacking.items() if place in by]
            blocks = min(mine), max(mine) + 1
            store = self._holder(place, blocks, chosen, failing=False)
            if store is None:
                unavailable.update(mine)
            else:
                chosen[store] = place, blocks
        if not unavailable:
            return chosen
        hull = min(unavailable), max(unavailable) + 1
        narrow = chosen
        # To rebuild, every shard must reach over all of it. What was asked for in vain in this width is not asked for again.
        wide = {s: (p, (min(b[0], hull[0]), max(b[1], hull[1]))) for s, (p, b) in chosen.items()}
        chosen = {s: (p, b) for s, (p, b) in wide.items() if (s, p, *b) not in self._tried}
        short = self._cut.k - min(self._count(block) for block in unavailable) - len(chosen)
        for failing in (False, True):
            for place in range(self._cut.shards):
                if short <= 0:
                    break
                if place in {p for p, _ in chosen.values()} or self._has(place, hull):
                    continue
                store = self._holder(place, hull, chosen, failing=failing)
                if store is not None:
                    chosen[store] = place, hull
                    short -= 1
        chosen = chosen or narrow
        if not chosen:
            sound = min(self._count(block) for block in lacking)
            raise Insufficient(
                f"{sound} of the {self._cut.k} shards that are needed (of {self._cut.k}+{self._cut.spare}) can be read",
                sorted(set(self._damaged)),
            )
        return chosen

    def _has(self, place: int, blocks: Blocks) -> bool:
        return all(block in self._blocks.get(place, {}) for block in range(*blocks))

    def _holder(
        self, place: int, blocks: Blocks, chosen: dict[int, tuple[int, Blocks]], *, failing: bool
    ) -> int | None:
        """Return a store that has this place, is free, and was not asked for it before."""
        for store in self._holders.get(place, ()):
            tried = store in chosen or (store, place, *blocks) in self._tried
            if not tried and (failing or not self._group.health.is_failing(store)):
                return store
        return None

    def _fetch(self, chosen: dict[int, tuple[int, Blocks]]) -> None:
        for store, (place, blocks) in chosen.items():
            self._tried.add((store, place, *blocks))
        patience = self._group.calls.patience
        most = max((blocks[1] - blocks[0]) * BLOCK for _, blocks in chosen.values())
        answers = self._group.calls.ask(
            list(chosen),
            lambda store: self._read_blocks(store, *chosen[store]),
            enough=max(1, len(chosen) - self._cut.spare),
            alone_s=patience.alone_s + most / patience.bytes_per_s,
        )
        for store, found in answers.of.items():
            place, (first, _) = chosen[store]
            mine = self._blocks.setdefault(place, {})
            for number, block in enumerate(found):
                if block is not None:
                    mine[first + number] = block
            if found and any(block is None for block in found):
                name = ShardName(self._key, self._cut, place)
                self._damaged.append(self._group.stores[store].show(str(name)))

    def _read_blocks(self, store: int, place: int, blocks: Blocks) -> list[Shard | None]:
        """Return blocks of a shard, None for a damaged one; nothing where the shard is gone."""
        cut, name = self._cut, ShardName(self._key, self._cut, place)
        objects, header_bytes = self._group.stores[store], self._cut.header_bytes
        first, last = blocks[0] * BLOCK, min(blocks[1] * BLOCK, cut.shard_bytes)
        try:
            if blocks == (0, cut.blocks):
                data = memoryview(objects.get(str(name), max_size=cut.file_bytes))
                header, payload = bytes(data[:header_bytes]), data[header_bytes:]
            else:
                header = objects.get(str(name), 0, header_bytes, max_size=header_bytes)
                begin, end = header_bytes + first, header_bytes + last
                payload = memoryview(objects.get(str(name), begin, end, max_size=end - begin))
            return sound_blocks(block_sums(name, header)[slice(*blocks)], payload)
        except MissingKeyError:
            self._group.confirm(store)  # a blank store knows nothing of what is missing
            return []
        except CorruptionError:
            return [None] * (blocks[1] - blocks[0])
