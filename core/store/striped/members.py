"""Which stores belong to a set: `member.json` in each of them, without which a store is not one of the set.

An unmounted disk leaves an empty folder in its place, and a wrong URL some other store: neither may be written to, nor
count among those that have been asked what is there.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from shrinkpoint.errors import (
    ConfigError,
    CorruptionError,
    FormatError,
    RunMismatchError,
    StoreError,
    UnsupportedFormatError,
)
from shrinkpoint.store.catalog import read_checked
from shrinkpoint.store.keys import FORMAT_KEY, MEMBER_KEY, is_own_key, new_nonce
from shrinkpoint.store.manifest import seal, unseal
from shrinkpoint.store.objects import MissingKeyError, ObjectStore
from shrinkpoint.store.striped.parity import MAX_PARITY
from shrinkpoint.store.striped.shards import MAX_STORES, ShardName

JOINING_KEY = "joining.json"
"""What `member.json` will be, while `heal` still writes what the store lacks."""

_MAGIC = "shrinkpoint-member"
_FORMAT = 1
_MAX_BYTES = 2**16
_MAX_SHOWN = 4096
_LOOK_AT = 100


@dataclass(frozen=True)
class Quorum:
    """How many stores must take a record, and how many must be asked for it.

    A record is committed when `write` stores have it. Any `read` stores share one with them, so that it is seen. `write` is a
    majority, so that two writers cannot both have it, and more than `parity`, so that it outlives as many stores.
    """

    stores: int
    parity: int

    @property
    def write(self) -> int:
        """Copies that commit a record."""
        return max(self.stores // 2 + 1, self.parity + 1)

    @property
    def read(self) -> int:
        """Stores that must answer."""
        return self.stores - self.write + 1


def check_layout(stores: int, parity: int) -> None:
    """Refuse what cannot work.

    Raises:
        ConfigError: with the way out.
    """
    if not 2 <= stores <= MAX_STORES:
        raise ConfigError(f"{stores} stores: a set has 2 to {MAX_STORES}")
    if not isinstance(parity, int) or isinstance(parity, bool) or not 0 <= parity <= MAX_PARITY:
        raise ConfigError(f"parity={parity!r}: use 0, 1 or 2, the number of stores that may be lost")
    if parity >= stores:
        raise ConfigError(
            f"parity={parity} with {stores} stores: at most {stores - 1} of them can be lost; give more URLs or less parity"
        )


@dataclass(frozen=True, kw_only=True)
class Member:
    """A store's place in a set.

    Attributes:
        set_id: 128 random bits in hexadecimal, the same in all its stores.
        number: Its place, from 1.
        of: How many there are.
        parity: How many may be lost.
        stores: All of them as they were at the beginning, for people who have found one.
    """

    set_id: str
    number: int
    of: int
    parity: int
    stores: tuple[str, ...]

    def __post_init__(self) -> None:
        _check(isinstance(self.set_id, str) and len(self.set_id) == 32 and self.set_id.isalnum(), "set")
        for name in ("number", "of", "parity"):
            value = getattr(self, name)
            _check(isinstance(value, int) and not isinstance(value, bool), name)
        _check(2 <= self.of <= MAX_STORES and 1 <= self.number <= self.of, "number")
        _check(0 <= self.parity <= MAX_PARITY and self.parity < self.of, "parity")
        shown = len(self.stores) == self.of and all(
            isinstance(s, str) and len(s) <= _MAX_SHOWN for s in self.stores
        )
        _check(shown, "stores")

    def is_sibling_of(self, other: "Member") -> bool:
        """Return whether both are of one set; the URLs that it began with are not compared."""
        mine = (self.set_id, self.of, self.parity)
        return mine == (other.set_id, other.of, other.parity)

    def to_bytes(self) -> bytes:
        """Return the sealed record."""
        record = asdict(self)
        return seal({"type": _MAGIC, "format": _FORMAT, "set": record.pop("set_id"), **record})

    @classmethod
    def from_bytes(cls, data: bytes, shown: str) -> "Member":
        """Read what :meth:`to_bytes` wrote.

        Raises:
            CorruptionError, FormatError, UnsupportedFormatError: It is damaged, something else, or too new.
        """
        record = unseal(data, shown)
        if record.get("type") != _MAGIC:
            raise FormatError(f"{shown} is not the record of a store in a set")
        if record.get("format") != _FORMAT:
            raise UnsupportedFormatError(
                f"{shown} has format {record.get('format')!r:.20}; this version reads {_FORMAT}: upgrade shrinkpoint"
            )
        stores = record.get("stores")
        if not isinstance(stores, list):
            raise FormatError(f"{shown}: stores is not a list")
        try:
            numbers: dict[str, Any] = {name: record.get(name) for name in ("number", "of", "parity")}
            return cls(set_id=record.get("set", ""), stores=tuple(stores), **numbers)
        except FormatError as error:
            raise FormatError(f"{shown}: {error}") from None


def _check(ok: bool, name: str) -> None:
    if not ok:
        raise FormatError(f"{name} is out of its range")


def read_member(objects: ObjectStore, key: str = MEMBER_KEY) -> Member | None:
    """Return what a store says that it is; None for a blank one.

    Raises:
        RunMismatchError: What it says makes no sense.
        StoreError: It cannot be read.
    """
    try:
        return read_checked(objects, key, Member.from_bytes, max_size=_MAX_BYTES)
    except MissingKeyError:
        return None
    except CorruptionError as error:
        raise RunMismatchError(
            f"{error}. If this store is one of the set, delete that file and `shrinkpoint stores --heal`; its other files are checked"
            " before they are used"
        ) from error
    except FormatError as error:
        raise RunMismatchError(f"{error}: choose another store") from error


def holds_a_run(objects: ObjectStore) -> str | None:
    """Return a key that only runs have, where a store without `member.json` holds one."""
    for info in objects.list("", limit=_LOOK_AT):
        own = is_own_key(info.key) and not info.key.startswith("probe/")
        if own or ShardName.parse(info.key) is not None:
            return info.key
    return None


def agree(found: Mapping[int, Member | None], shown: Sequence[str], parity: int | None) -> Member | None:
    """Return the set that stores belong to, described by its first member; None where all of them are blank.

    Args:
        found: What each store that answered says.
        shown: All stores, in the order that was given.
        parity: What was asked for; None takes what is there.

    Raises:
        RunMismatchError: They are not the stores of one set in its order; the message names those that are not.
        ConfigError: It was founded with another parity.
    """
    there = {store: member for store, member in found.items() if member is not None}
    if not there:
        return None
    ids = Counter(member.set_id for member in there.values())
    set_id, most = ids.most_common(1)[0]
    first = next(member for member in there.values() if member.set_id == set_id)
    for store, member in there.items():
        name = f"{shown[store]}, given as store {store + 1} of {len(shown)},"
        if member.set_id != set_id:
            both = "belong to different sets" if most == 1 else "belongs to another set than the others"
            others = ", ".join(shown[s] for s, m in there.items() if m.set_id == set_id)
            raise RunMismatchError(
                f"{name} {'and ' + others + ' ' if most == 1 else ''}{both}: it is store {member.number} of"
                f" {_some(member.stores)}. Give the stores of one run"
            )
        if member.of != len(shown) or not member.is_sibling_of(first):
            raise RunMismatchError(
                f"{name} is one of a set of {member.of} stores, founded as {_some(member.stores)}: the number of stores of a"
                " run cannot be changed; give all of them (`shrinkpoint stores --heal --replace` puts another in one's place)"
            )
    numbers = Counter(member.number for member in there.values())
    for store, member in there.items():
        if member.number != store + 1:
            other = [s for s, m in there.items() if m.number == member.number and s != store]
            why = (
                f"as {shown[other[0]]} is: the same place under two names, or a copy"
                if numbers[member.number] > 1 and other
                else "so that stores were exchanged: give them in their order"
            )
            raise RunMismatchError(
                f"{shown[store]} was given as store {store + 1}, and is number {member.number} of its set, {why}"
            )
    if parity is not None and parity != first.parity:
        raise ConfigError(
            f"parity={parity}, but the set {_some(first.stores)} was founded with parity={first.parity}, which cannot be"
            f" changed: leave parity out or say {first.parity}"
        )
    return replace(first, number=1)


def _some(stores: Sequence[str]) -> str:
    return ", ".join(stores[:8]) + (f" and {len(stores) - 8} more" if len(stores) > 8 else "")


def found_set(stores: Sequence[ObjectStore], shown: Sequence[str], parity: int) -> Member:
    """Found one set of blank stores, all of which must answer, or finish what a killed process began.

    Of two processes at once, the one whose record is in the first store has founded it.

    Raises:
        RunMismatchError: A store holds something else, or the same place was given twice.
        StoreError: A store cannot be written to.
    """
    there_already = {store: read_member(objects) for store, objects in enumerate(stores)}
    for store, member in there_already.items():
        key = None if member is not None else holds_a_run(stores[store])
        if key is not None:
            raise RunMismatchError(
                f"{shown[store]} holds a run of its own ({key!r} for one) that is not part of a set: give an empty place"
            )
    mine = agree(there_already, shown, parity) or Member(
        set_id=new_nonce() + new_nonce(), number=1, of=len(shown), parity=parity, stores=tuple(shown)
    )
    for store, objects in enumerate(stores):
        objects.put_if_absent(MEMBER_KEY, replace(mine, number=store + 1).to_bytes())
        there = read_member(objects)
        if there is None:
            raise StoreError(f"{shown[store]} has taken {MEMBER_KEY} and does not show it: do not trust it")
        if store == 0:
            mine = there
        # Checked at each, so that nothing is written to a store that turns out to be another's.
        agree({0: mine, store: there}, shown, parity)
    return replace(mine, number=1)


def is_unfinished(stores: Sequence[ObjectStore], members: Collection[int]) -> bool:
    """Return whether nothing was ever stored in these, so that the set may still be in the making."""
    for store in members:
        try:
            stores[store].get(FORMAT_KEY, max_size=_MAX_BYTES)
            return False
        except MissingKeyError:
            pass
        except FormatError:
            return False
        if stores[store].list("commits/", limit=1):
            return False
    return True
