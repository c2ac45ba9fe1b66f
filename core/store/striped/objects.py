"""The object store that a run store sees: several stores under the same operations."""

from collections.abc import Collection, Sequence
from typing import Any

from shrinkpoint.errors import CorruptionError
from shrinkpoint.store.keys import MEMBER_KEY
from shrinkpoint.store.objects import MissingKeyError, ObjectInfo, ObjectStore
from shrinkpoint.store.striped.blobs import Blobs
from shrinkpoint.store.striped.calls import Patience
from shrinkpoint.store.striped.group import Group
from shrinkpoint.store.striped.members import JOINING_KEY
from shrinkpoint.store.striped.records import Records, stored_prefix
from shrinkpoint.store.striped.shards import ShardName

_OWN = (MEMBER_KEY, JOINING_KEY)


class StripedObjects:
    """An :class:`~shrinkpoint.store.objects.ObjectStore` over 2 to 32 others (docs/stores.md). Making one does no I/O.

    Args:
        stores: The stores, always in the same order; each repeats by itself, for a short while, what fails for a passing
            reason.
        parity: How many of them may be lost: 0, 1 or 2. None takes what the set was founded with, or 1.
        read_anyway: Read from however few stores answer: a newer checkpoint may then be missed.
        patience: How long to wait for a store.

    Raises:
        ConfigError: These numbers cannot work.
    """

    def __init__(
        self,
        stores: Sequence[ObjectStore],
        *,
        parity: int | None = None,
        read_anyway: bool = False,
        patience: Patience | None = None,
    ) -> None:
        self._arguments = {
            "stores": tuple(stores),
            "parity": parity,
            "read_anyway": read_anyway,
            "patience": patience,
        }
        self.group = Group(stores, parity=parity, read_anyway=read_anyway, patience=patience or Patience())
        self._records = Records(self.group)
        self._blobs = Blobs(self.group)

    def __getstate__(self) -> dict[str, Any]:
        # Opinions on stores are of one process.
        return self._arguments

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    @property
    def display(self) -> str:
        """All stores, as one string that is a run's URL too."""
        return ",".join(self.group.shown)

    def show(self, key: str) -> str:
        """As a shell would expand it to the files."""
        return f"{{{self.display}}}/{key}"

    @property
    def create_is_atomic(self) -> bool | None:
        """Whether every store that answers honours put-if-absent; those of which that is not known are tried out, once."""
        return self.group.all_exclusive()

    def put_if_absent(self, key: str, data: bytes) -> bool:
        """See :class:`~shrinkpoint.store.objects.ObjectStore`; the first call founds the set."""
        self.group.found()
        created = self._records.put_if_absent(key, data)
        self.group.warn_of_changes()
        return created

    def put(self, key: str, data: bytes) -> None:
        """See :class:`~shrinkpoint.store.objects.ObjectStore`; the first call founds the set."""
        self.group.found()
        if key.startswith("data/"):
            self._blobs.put(key, data)
        else:
            self._records.put(key, data)
        self.group.warn_of_changes()

    def get(self, key: str, start: int | None = None, end: int | None = None, *, max_size: int) -> bytes:
        """See :class:`~shrinkpoint.store.objects.ObjectStore`."""
        if key in _OWN or self.group.member is None:
            raise MissingKeyError(f"{key} is not in {self.display}, as far as a run may know")
        if key.startswith("data/"):
            data = self._blobs.get(key, start, end, max_size)
            self.group.warn_of_changes()
            if data is not None:
                return data
        record = self._records.get(key)
        self.group.warn_of_changes()
        first, last = start or 0, len(record) if end is None else end
        if not 0 <= first <= last <= len(record) or last - first > max_size:
            raise CorruptionError(
                f"{self.show(key)} has {len(record)} bytes, which is not what its manifest says"
            )
        return record[first:last]

    def list(self, prefix: str, *, limit: int | None = None) -> list[ObjectInfo]:
        """See :class:`~shrinkpoint.store.objects.ObjectStore`."""
        if self.group.member is None:
            return _list_raw(self.group.stores, prefix, limit)
        listed = self.group.listings(stored_prefix(prefix))
        shards: dict[int, list[tuple[ShardName, ObjectInfo]]] = {store: [] for store in listed}
        records: dict[int, list[ObjectInfo]] = {store: [] for store in listed}
        for store, infos in listed.items():
            for info in infos:
                name = ShardName.parse(info.key)
                if name is not None:
                    shards[store].append((name, info))
                elif info.key not in _OWN:
                    records[store].append(info)
        entries = self._records.fold(records)
        if len(records) < self.group.to_read:
            raise self.group.unreadable(
                f"{len(records)} of {len(listed)} listings could be read to their end",
                self.group.health.failing,
            )
        entries = [info for info in entries if info.key.startswith(prefix)]
        entries += self._blobs.fold(shards)
        self.group.warn_of_changes()
        return sorted(entries, key=lambda info: info.key)[:limit]

    def delete(self, keys: Collection[str]) -> None:
        """See :class:`~shrinkpoint.store.objects.ObjectStore`; what a store that does not answer holds, the next one deletes."""
        if not keys or self.group.member is None:
            return
        blobs = [key for key in keys if key.startswith("data/")]

        def remove(store: int) -> None:
            self._records.remove(store, list(keys))
            if blobs:
                self._blobs.remove(store, blobs)

        self.group.write(remove, self.group.everyone)
        self.group.warn_of_changes()

    def server_time(self) -> float:
        """Return the slowest clock of all stores: with the youngest copy's time stamp, ages come out too short, never too long."""
        if self.group.member is None:
            return min(objects.server_time() for objects in self.group.stores)
        return min(self.group.read(lambda store: self.group.stores[store].server_time()).values())

    def sweep(self, before: float) -> int:
        """See :class:`~shrinkpoint.store.objects.ObjectStore`."""
        if self.group.member is None:
            return 0
        return sum(
            self.group.write(
                lambda store: self.group.stores[store].sweep(before), self.group.everyone
            ).values()
        )


def _list_raw(stores: Sequence[ObjectStore], prefix: str, limit: int | None) -> list[ObjectInfo]:
    """Return what lies in stores that are no set yet: nothing, or something foreign."""
    found = {
        info.key: info
        for objects in stores
        for info in objects.list(prefix, limit=None if limit is None else limit + len(_OWN))
        if info.key not in _OWN
    }
    return [found[key] for key in sorted(found)][:limit]
