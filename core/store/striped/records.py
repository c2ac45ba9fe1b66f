"""Small records (manifests, pins, trash, format): a whole copy in every store, committed when a majority has it."""

import re
import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence

import xxhash

from shrinkpoint.errors import CorruptionError, StoreError
from shrinkpoint.store.keys import commit_key, seq_of_commit
from shrinkpoint.store.manifest import MAX_MANIFEST_BYTES, is_sealed
from shrinkpoint.store.objects import MissingKeyError, ObjectInfo
from shrinkpoint.store.striped.calls import for_each, is_transient
from shrinkpoint.store.striped.group import Group

_ALIAS = re.compile(r"commits/([0-9]{10})-([0-9a-f]{16})-([0-9a-f]{16})\.json")
_JUST_LISTED_S = 5.0
_JUST_LOST_S = 60.0
_MOST_KEPT = 1000
_MOST_SEEN = 100_000


class Records:
    """The records of a set.

    One number may hold different manifests in different stores: two writers saw different stores fail, or one was killed
    before a majority had it. Then each is listed under a name of its own, which is made of its digest and has the form of
    those that single writers use; whether it can be restored decides, not how many copies there are.

    Args:
        group: The stores.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._seen: dict[tuple[int, ObjectInfo], str | None] = {}
        """Digests of the copies that were read; None of what is no sound record."""
        self._just_listed: dict[str, tuple[float, bytes]] = {}
        self._lost: dict[str, tuple[float, str]] = {}
        self._lock = threading.Lock()

    # ---- writing

    def put(self, key: str, data: bytes) -> None:
        """Put a copy in every store; see :class:`~shrinkpoint.store.objects.ObjectStore`."""
        self._group.write(lambda store: self._group.stores[store].put(key, data))

    def put_if_absent(self, key: str, data: bytes) -> bool:
        """See :class:`~shrinkpoint.store.objects.ObjectStore`.

        One store is asked first, and the others only by whoever has won there: who loses leaves no copies behind, unless
        writers differ in which stores they see. True when a majority holds these very bytes, which only one record can have.
        """
        group, waiting = self._group, self._group.writable()

        def take(store: int) -> bool:
            return self._take(store, key, data)

        mine, transient = 0, False
        while waiting and not mine:
            first = waiting.pop(0)
            answers = group.calls.ask([first], take, enough=1, alone_s=group.calls.patience.alone_s)
            transient |= answers.transient
            if answers.of.get(first) is False:
                return self._note_lost(key, data)
            mine = len(answers.of)
        rest = group.calls.ask(waiting, take, enough=max(0, group.quorum.write - mine))
        mine += sum(rest.of.values())
        if mine >= group.quorum.write:
            with self._lock:  # what had been lost before, to a record that is gone since, is won now
                self._lost.pop(key, None)
            return True
        if not all(rest.of.values()):
            return self._note_lost(key, data)
        raise group.too_few(mine, transient or rest.transient)

    def _take(self, store: int, key: str, data: bytes) -> bool:
        """Return whether this store holds our record now, written by this attempt or by one whose response was lost."""
        objects = self._group.stores[store]
        self._group.confirm(store)
        self._group.check_exclusive(store)
        if objects.put_if_absent(key, data):
            return True
        try:
            # As much as any record may have: one that is longer than ours is another one, not damage.
            return objects.get(key, max_size=MAX_MANIFEST_BYTES) == data
        except (MissingKeyError, CorruptionError):
            return False  # removed since, or damaged: it is not ours in any case

    def _note_lost(self, key: str, data: bytes) -> bool:
        """Remember that a minority may hold this record of ours: it is not who has won the number."""
        with self._lock:
            self._lost[key] = time.monotonic(), _digest(data)
            while len(self._lost) > _MOST_KEPT:
                del self._lost[next(iter(self._lost))]
        return False

    # ---- reading

    def get(self, key: str) -> bytes:
        """Return the record; of several under one number, the one that most stores hold.

        Raises:
            MissingKeyError: No store that answers has it.
            CorruptionError: None has a copy of a possible size.
        """
        with self._lock:
            listed = self._just_listed.pop(key, None)
        if listed is not None and time.monotonic() - listed[0] < _JUST_LISTED_S:
            return listed[1]
        copies = self._copies(key)
        if not copies and (alias := _ALIAS.fullmatch(key)) is not None:
            wanted = alias[2] + alias[3]
            copies = [
                data for data in self._copies(commit_key(int(alias[1]))) if data and _digest(data) == wanted
            ]
        elif copies:
            copies = self._without_lost(key, copies)
        if not copies:
            raise MissingKeyError(f"{key} is in none of the stores {', '.join(self._group.shown)}")
        count = Counter(data for data in copies if data is not None)
        if not count:
            raise CorruptionError(f"{key} is too large, or no file, in every store that has it")
        return max(count, key=lambda data: (is_sealed(data), count[data], data))

    def _copies(self, key: str) -> list[bytes | None]:
        """Return every copy there is; None for one that is no file, or longer than any record."""
        group = self._group

        def read(store: int) -> tuple[bool, bytes | None]:
            try:
                return True, group.stores[store].get(key, max_size=MAX_MANIFEST_BYTES)
            except MissingKeyError:
                group.confirm(store)  # that it is not there counts only from a store of the set
                return False, None
            except CorruptionError:
                return True, None

        return [data for there, data in group.read(read).values() if there]

    def _without_lost(self, key: str, copies: Sequence[bytes | None]) -> list[bytes | None]:
        """Leave out what this process has just failed to commit, lest it takes a minority's copies for its success."""
        with self._lock:
            at, digest = self._lost.get(key, (0.0, ""))
        others = [data for data in copies if data is None or _digest(data) != digest]
        return others if others or time.monotonic() - at < _JUST_LOST_S else list(copies)

    # ---- listing

    def fold(self, listed: dict[int, list[ObjectInfo]]) -> list[ObjectInfo]:
        """Return one entry for each record out of the stores' listings.

        Args:
            listed: By store; without shards. A store whose copies cannot be read is taken out: what it holds is not known.
        """
        with self._lock:
            self._just_listed.clear()
        holders = _by_key(listed)
        ambiguous = _ambiguous(holders)
        for store in self._look_at(ambiguous):
            del listed[store]
            holders = _by_key(listed)
            ambiguous = _ambiguous(holders)
        entries: list[ObjectInfo] = []
        for key, by in holders.items():
            versions: dict[str, list[tuple[int, ObjectInfo]]] = {}
            for item in by.items() if key in ambiguous else ():
                digest = self._seen.get(item)
                if digest is not None:
                    versions.setdefault(digest, []).append(item)
            if len(versions) <= 1:
                sizes = Counter(info.size for info in by.values())
                sound = [info.size for items in versions.values() for _, info in items]
                size = sound[0] if sound else max(sizes, key=lambda s: (sizes[s], s))
                entries.append(ObjectInfo(key=key, size=size, modified=youngest(by.values())))
                continue
            for digest, items in versions.items():
                alias = _alias_of(key, digest)
                infos = [info for _, info in items]
                entries.append(ObjectInfo(key=alias, size=infos[0].size, modified=youngest(infos)))
        return entries

    def _look_at(self, ambiguous: dict[str, dict[int, ObjectInfo]]) -> set[int]:
        """Read those copies that were not seen before; nothing is ever changed under a key. Returns the stores that failed."""
        failed: set[int] = set()
        if len(self._seen) > _MOST_SEEN:
            self._seen.clear()
        unread = [(s, i) for by in ambiguous.values() for s, i in by.items() if (s, i) not in self._seen]

        def look(item: tuple[int, ObjectInfo]) -> None:
            store, info = item
            if store in failed:
                return
            try:
                data = self._group.stores[store].get(info.key, max_size=MAX_MANIFEST_BYTES)
            except MissingKeyError:
                return  # removed since, or listed without being there: another copy answers
            except CorruptionError:
                self._seen[item] = None
                return
            except StoreError as error:
                failed.add(store)
                self._group.health.failed(store, str(error), transient=is_transient(error))
                return
            self._seen[item] = digest = _digest(data) if is_sealed(data) else None
            if digest is not None:
                alias = _alias_of(info.key, digest)
                with self._lock:
                    self._just_listed[alias] = self._just_listed[info.key] = time.monotonic(), data

        for_each(unread, look)
        with self._lock:
            for key, by in ambiguous.items():
                if len({self._seen[item] for item in by.items() if item in self._seen}) > 1:
                    self._just_listed.pop(key, None)  # which of them is meant, is for a new look to decide
        return failed

    # ---- removing

    def remove(self, store: int, keys: Sequence[str]) -> None:
        """Delete a store's copies; of a name made of a digest, the copy that has this digest."""
        objects = self._group.stores[store]
        plain = list(keys)
        for key in keys:
            alias = _ALIAS.fullmatch(key)
            if alias is None:
                continue
            numbered = commit_key(int(alias[1]))
            try:
                data = objects.get(numbered, max_size=MAX_MANIFEST_BYTES)
            except (MissingKeyError, CorruptionError):
                continue
            if _digest(data) == alias[2] + alias[3]:
                plain.append(numbered)
        try:
            objects.delete(plain)
        finally:  # a number that is used again may get a copy of the same size at the same time
            for item in [item for item in list(self._seen) if item[0] == store and item[1].key in plain]:
                self._seen.pop(item, None)


def _alias_of(key: str, digest: str) -> str:
    return f"{key.removesuffix('.json')}-{digest[:16]}-{digest[16:]}.json"


def stored_prefix(prefix: str) -> str:
    """Below what to list in the stores: a name that is made of a digest is none that they know."""
    alias = _ALIAS.fullmatch(prefix)
    return prefix if alias is None else f"commits/{alias[1]}"


def youngest(infos: Iterable[ObjectInfo]) -> float | None:
    """When the last of some copies was written; None, which is never old, where a store does not say."""
    stamps = [info.modified for info in infos]
    return None if None in stamps else max(stamp for stamp in stamps if stamp is not None)


def _by_key(listed: dict[int, list[ObjectInfo]]) -> dict[str, dict[int, ObjectInfo]]:
    holders: dict[str, dict[int, ObjectInfo]] = {}
    for store, infos in listed.items():
        for info in infos:
            holders.setdefault(info.key, {})[store] = info
    return holders


def _ambiguous(holders: dict[str, dict[int, ObjectInfo]]) -> dict[str, dict[int, ObjectInfo]]:
    """Return what may be several records under one number."""
    return {
        key: by
        for key, by in holders.items()
        if len(by) > 1 and seq_of_commit(key) is not None and _ALIAS.fullmatch(key) is None
    }


def _digest(data: bytes) -> str:
    return xxhash.xxh3_128(data).hexdigest()
