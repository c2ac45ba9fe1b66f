"""What a run holds: its own record, and its checkpoints by one listing, every manifest read and checked."""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from shrinkpoint.errors import (
    ChainError,
    CorruptionError,
    FormatError,
    RunMismatchError,
    StoreError,
    UnsupportedFormatError,
)
from shrinkpoint.store.keys import COMMITTED_KEY, FORMAT_KEY, is_own_key, new_nonce, pin_name, seq_of_commit
from shrinkpoint.store.manifest import (
    FORMAT,
    MAX_MANIFEST_BYTES,
    READER_FEATURES,
    BlobRef,
    Head,
    Manifest,
    seal,
    unseal,
)
from shrinkpoint.store.objects import MissingKeyError, ObjectInfo, ObjectStore

T = TypeVar("T")

_MAGIC = "shrinkpoint-run"
_RUN_ID = re.compile("[0-9a-f]{32}")
_LOOK_AT = 1000
_NAMED = 5
_begun_here: set[str] = set()
_READERS = 8
_LARGEST_GAP = 10**6
# A byte that was damaged on its way is right the next time; one that was damaged where it lies is not.
_READS = 3


@dataclass(frozen=True, kw_only=True)
class DamagedCheckpoint:
    """A manifest that cannot be read.

    Attributes:
        key: Its key below the run's prefix.
        reason: What is wrong with it.
        modified: When it was written, by the store's clock; None where the store does not say.
        unsupported: It is sound, but only a newer shrinkpoint can read it.
        missing: It is listed, but there is nothing to read: the store contradicts itself, or a link leads nowhere.
    """

    key: str
    reason: str
    modified: float | None = None
    unsupported: bool = False
    missing: bool = False


@dataclass(frozen=True, kw_only=True)
class Listing:
    """What was in ``commits/`` at one moment.

    Attributes:
        manifests: The readable ones, newest first: by epoch, then by number. A writer that went on after another one
            had taken over is sorted below it, whatever its numbers. One that replaces another stands in its place.
        damaged: The others.
        max_seq: Highest number in use, readable or not; -1 where there is none. An unreadable manifest far above all others
            does not count: no run has counted up to it.
    """

    manifests: tuple[Manifest, ...]
    damaged: tuple[DamagedCheckpoint, ...]
    max_seq: int

    @property
    def next_epoch(self) -> int:
        """Higher than every epoch in use: an unreadable manifest may hide one more than the readable ones show."""
        return 1 + len(self.damaged) + max((manifest.epoch for manifest in self.manifests), default=0)


class Catalog:
    """Reads listings; manifests never change, so that each is fetched once.

    Args:
        objects: The run's object store.
    """

    def __init__(self, objects: ObjectStore) -> None:
        self._objects = objects
        # With how often some had been forgotten when the listing began.
        self._sound: tuple[int, dict[ObjectInfo, Manifest]] = (0, {})
        self._forgotten = 0
        self._keys: dict[str, str] = {}
        self._heads: dict[BlobRef, Head] = {}

    # ---- the run's own record

    def record(self) -> dict[str, Any] | None:
        """Read the run's ``format.json``; None where there is no run.

        Raises:
            RunMismatchError: It is damaged or foreign.
            UnsupportedFormatError: The run needs a newer shrinkpoint.
            StoreError: The store could not be read.
        """
        objects = self._objects
        try:
            record = read_checked(objects, FORMAT_KEY, unseal)
        except MissingKeyError:
            return None
        except FormatError as error:
            raise RunMismatchError(
                f"{error}. If there are checkpoints in the same folder, delete this file: they do not depend on it and it is made"
                " anew; otherwise choose another URL"
            ) from error
        if record.get("type") != _MAGIC:
            raise RunMismatchError(f"{objects.show(FORMAT_KEY)} is not a run's: choose another URL")
        version, features = record.get("format"), record.get("reader_features")
        known = isinstance(features, list) and all(feature in READER_FEATURES for feature in features)
        if version != FORMAT or not known:
            raise UnsupportedFormatError(
                f"{objects.display} has format {version} with features {features}; this version reads {FORMAT}: upgrade shrinkpoint"
            )
        return record

    def run_id(self) -> str | None:
        """Read the run's nonce; None where there is no run.

        Raises:
            RunMismatchError, UnsupportedFormatError, StoreError: As `record`.
        """
        record = self.record()
        if record is None:
            return None
        run = record.get("run")
        if not isinstance(run, str) or _RUN_ID.fullmatch(run) is None:
            raise RunMismatchError(f"{self._objects.show(FORMAT_KEY)} does not name its run: {run!r:.80}")
        return run

    def create_record(self) -> dict[str, Any]:
        """Make a run of an empty prefix; returns its ``format.json``.

        Raises:
            RunMismatchError: The prefix holds something else.
            StoreError: The store could not be written to.
        """
        objects = self._objects
        foreign = [info.key for info in objects.list("", limit=_LOOK_AT) if not is_own_key(info.key)]
        if foreign:
            raise RunMismatchError(
                f"{objects.display} holds something else ({foreign[0]!r} for one): choose an empty folder or prefix for the run"
            )
        run = new_nonce() + new_nonce()
        record = {"type": _MAGIC, "run": run, "format": FORMAT, "reader_features": []}
        # Who loses this race uses the winner's.
        objects.put_if_absent(FORMAT_KEY, seal(record))
        _begun_here.add(run)
        return self.record() or record

    def what_is_there(self) -> str:
        """Say what a prefix without a run holds, as `shrinkpoint.store.run.RunStore.what_is_there`."""
        keys = [info.key for info in self._objects.list("", limit=_LOOK_AT)]
        if not keys:
            return "it is empty or does not exist. Check the URL"
        runs = sorted({key[: -len("/format.json")] for key in keys if key.endswith("/format.json")})
        if runs:
            return f"below it are the runs {_some(runs)}. Add one of these to the URL"
        found = any(key.endswith((".ckpt", ".pt", ".bin", ".safetensors")) for key in keys)
        way = (
            "`shrinkpoint try` and `import` are for checkpoints of other programs"
            if found
            else "Check the URL"
        )
        return f"it holds {_some(keys)}. {way}"

    # ---- its checkpoints

    def scan(self) -> Listing:
        """List ``commits/`` now.

        Raises:
            StoreError: The store could not be listed or read, or lists nothing although the run has checkpoints; that never
                looks like an empty run.
        """
        forgotten = self._forgotten
        infos = self._list()
        # By size and time stamp as well: a writer that was fenced off may reuse the number of a removed manifest.
        known = self._known()  # another thread may scan meanwhile: what it finds is none of this listing's
        sound = {info: known[info] for info in infos if info in known}
        unread = [info for info in infos if info not in sound]
        damaged: list[DamagedCheckpoint] = []
        if unread:
            with ThreadPoolExecutor(min(_READERS, len(unread))) as pool:
                outcomes = list(pool.map(self._read, unread))
            for info, outcome in zip(unread, outcomes, strict=True):
                if isinstance(outcome, Manifest):
                    sound[info] = outcome
                    self.note(info.key, outcome)
                else:
                    damaged.append(outcome)
            if any(outcome.missing for outcome in damaged):  # collected since the listing, or damaged
                listed = {info.key for info in self._objects.list("commits/")}
                damaged = [outcome for outcome in damaged if not outcome.missing or outcome.key in listed]
        # Without a time stamp, a number that was used again may look the same.
        self._sound = forgotten, {info: m for info, m in sound.items() if info.modified is not None}
        manifests = sorted(
            sound.values(), key=lambda m: (m.position, m.epoch, m.seq, m.session), reverse=True
        )
        max_seq = max((manifest.seq for manifest in manifests), default=-1)
        for seq in sorted(seq_of_commit(info.key) or 0 for info in infos):
            if max_seq < seq <= max_seq + _LARGEST_GAP:
                max_seq = seq
        return Listing(manifests=tuple(manifests), damaged=tuple(damaged), max_seq=max_seq)

    def _list(self) -> list[ObjectInfo]:
        """Return what lies in ``commits/``; nothing only where no checkpoint is known of, and the store can list what it has."""
        infos = self._list_once()
        if infos or (reason := self._reason_to_doubt()) is None:
            return infos
        infos = self._list_once()  # the first checkpoint may have been committed since
        if infos:
            return infos
        raise StoreError(f"{self._objects.show('commits/')} lists no checkpoint, {reason}")

    def _reason_to_doubt(self) -> str | None:
        """Return why a listing without a checkpoint is not to be believed."""
        if exists(self._objects, COMMITTED_KEY):
            return (
                f"although {self._objects.show(COMMITTED_KEY)} says that this run has some: a disk that is not mounted, a link"
                " that leads nowhere, a copy that is not complete, or a server that lists wrongly. Nothing was changed. Bring"
                f" commits/ back; to give up what was there, use another URL or delete {COMMITTED_KEY}"
            )
        # Without that note, the file that every run has at least shows whether listings contain anything at all.
        if exists(self._objects, FORMAT_KEY) and not is_listed(self._objects, FORMAT_KEY):
            return (
                f"but {self._objects.show(FORMAT_KEY)} can be read and is not listed either, so that the store's listings are"
                " not to be believed: a server or a proxy that answers them all with nothing. Nothing was changed. Have the"
                " listings of this URL repaired; a run whose checkpoints are not seen must not begin again at step 0"
            )
        return None

    def _list_once(self) -> list[ObjectInfo]:
        return [info for info in self._objects.list("commits/") if seq_of_commit(info.key) is not None]

    def note(self, key: str, manifest: Manifest) -> None:
        """Remember under which key ``manifest`` is stored."""
        self._keys[manifest.digest] = key

    def forget(self, keys: Collection[str]) -> None:
        """These manifests were removed. Another writer may use their numbers for others, of the same size and, by the store's clock, at
        the same time."""
        known = self._known()
        self._forgotten += 1
        self._sound = self._forgotten, {info: m for info, m in known.items() if info.key not in keys}

    def _known(self) -> dict[ObjectInfo, Manifest]:
        """Return those that need not be read again; none if a listing from before the last `forget` was the last one to end."""
        forgotten, known = self._sound
        return known if forgotten == self._forgotten else {}

    def key_of(self, manifest: Manifest) -> str | None:
        """Under which key ``manifest`` was seen; None when it never was."""
        return self._keys.get(manifest.digest)

    def head(self, ref: BlobRef) -> Head:
        """Return the table of parts that ``ref`` is the head of; read once.

        Raises:
            ChainError: It is missing.
            FormatError: It is damaged.
            StoreError: The store could not be read.
        """
        known = self._heads.get(ref)
        if known is not None:
            return known

        try:
            head = read_checked(
                self._objects, ref.key, lambda data, shown: Head.from_bytes(ref.verify(data, shown), shown)
            )
        except MissingKeyError as error:
            raise ChainError(
                f"{self._objects.show(ref.key)}, the head of {ref.parts} parts, is missing"
            ) from error
        if (len(head.parts), head.parts_bytes) != (ref.parts, ref.parts_bytes):
            raise FormatError(
                f"{self._objects.show(ref.key)} does not name the parts that its manifest counts"
            )
        self._heads[ref] = head
        return head

    def refs(self, manifest: Manifest) -> tuple[BlobRef, ...]:
        """Return every object that a restore of ``manifest`` needs: its chain, and the parts of the heads in it.

        Raises:
            ChainError, FormatError, StoreError: As :meth:`head`.
        """
        found: list[BlobRef] = []
        for ref in manifest.chain:
            found.append(ref)
            if ref.parts:
                found += [part.ref for part in self.head(ref).parts]
        return tuple(found)

    def sizes(self) -> dict[str, int]:
        """List the bytes of every object in ``data/`` by its key."""
        return {info.key: info.size for info in self._objects.list("data/")}

    def is_whole(self, manifest: Manifest, sizes: Mapping[str, int]) -> bool:
        """Return whether all that ``manifest`` needs is there in its size, by a listing of ``data/``."""
        if any(sizes.get(ref.key) != ref.size for ref in manifest.chain):
            return False
        try:
            return all(sizes.get(ref.key) == ref.size for ref in self.refs(manifest))
        except (ChainError, FormatError):
            return False

    def published_key(self, manifest: Manifest) -> str | None:
        """Under which key ``manifest`` is stored, asked now; None where it is gone, damaged, or its number was used again."""
        key = self.key_of(manifest)
        if key is None:
            return None
        try:
            if read_checked(self._objects, key, Manifest.from_bytes).digest == manifest.digest:
                return key
        except (MissingKeyError, FormatError):
            pass  # neither is what was stored there
        self.forget([key])
        return None

    def pins(self, *, without: str | None = None) -> dict[str, int]:
        """Read the pinned sequence numbers by name; of the pin `without` nothing is read.

        Raises:
            FormatError: A pin is damaged; the message says which and what to do.
        """
        pins: dict[str, int] = {}
        for info in self._objects.list("pins/"):
            name = pin_name(info.key)
            if name is not None and name != without:
                try:
                    pins[name] = int(read_checked(self._objects, info.key, self._parse_pin))
                except MissingKeyError as error:
                    if is_listed(self._objects, info.key):
                        raise FormatError(
                            f"{self._objects.show(info.key)} is listed, but cannot be read ({error}): remove the pin and set"
                            " it again"
                        ) from error
                    continue  # unpinned since the listing
        return pins

    def _parse_pin(self, data: bytes, shown: str) -> int:
        seq = unseal(data, shown).get("seq")
        if not isinstance(seq, int):
            raise FormatError(f"{shown} names no checkpoint: remove the pin and set it again")
        return seq

    def _read(self, info: ObjectInfo) -> Manifest | DamagedCheckpoint:
        def parse(data: bytes, shown: str) -> Manifest:
            manifest = Manifest.from_bytes(data, shown)
            if manifest.seq != seq_of_commit(info.key):
                raise FormatError(f"{shown} says that it is number {manifest.seq}")
            return manifest

        try:
            return read_checked(self._objects, info.key, parse)
        except MissingKeyError as error:
            reason = f"{self._objects.show(info.key)} is listed, but cannot be read: {error}"
            return DamagedCheckpoint(key=info.key, reason=reason, modified=info.modified, missing=True)
        except FormatError as error:
            unsupported = isinstance(error, UnsupportedFormatError)
            return DamagedCheckpoint(
                key=info.key, reason=str(error), modified=info.modified, unsupported=unsupported
            )


def is_listed(objects: ObjectStore, key: str) -> bool:
    """Return whether a listing shows ``key``, asked now."""
    return any(info.key == key for info in objects.list(key))


def exists(objects: ObjectStore, key: str) -> bool:
    """Return whether ``key`` can be read. A damaged object counts: that it was written at all is what is asked."""
    try:
        objects.get(key, max_size=MAX_MANIFEST_BYTES)
    except MissingKeyError:
        return False
    except CorruptionError:
        return True
    return True


def read_checked(
    objects: ObjectStore, key: str, parse: Callable[[bytes, str], T], *, max_size: int = MAX_MANIFEST_BYTES
) -> T:
    """Read a whole object; what ``parse`` finds damaged is read again before it counts as that.

    Args:
        objects: The store.
        key: Of the object.
        parse: Checks and reads its bytes, given how messages name it.
        max_size: As of `ObjectStore.get`.
    """
    for _ in range(_READS - 1):
        with suppress(CorruptionError):
            return parse(objects.get(key, max_size=max_size), objects.show(key))
    return parse(objects.get(key, max_size=max_size), objects.show(key))


def is_begun_here(record: Mapping[str, Any]) -> bool:
    """Return whether this process has begun the run, so that it is no surprise that it holds nothing yet."""
    return str(record.get("run")) in _begun_here


def _some(names: Sequence[str]) -> str:
    more = f" and {'at least ' if len(names) == _LOOK_AT else ''}{len(names) - _NAMED} more"
    return ", ".join(names[:_NAMED]) + (more if len(names) > _NAMED else "")
