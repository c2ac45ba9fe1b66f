"""Finds the segments of a run's newest writer, and reports what is wrong with the others."""

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import xxhash

from shrinkpoint.errors import CorruptionError, FormatError, StoreError
from shrinkpoint.steps.record import UnpackedTensors
from shrinkpoint.steps.segment import (
    PREFIX,
    ForeignSegmentError,
    Head,
    Key,
    Kind,
    Reference,
    check_digest,
    check_payload,
    read_head,
    read_prefix,
)
from shrinkpoint.store.objects import ObjectInfo, ObjectStore

__all__ = ["FirstSegment", "LogOverview", "LogReader", "Survey", "load_head", "overview"]

T = TypeVar("T")

_FIRST_READ = 1 << 16
_MAX_SEGMENT = 1 << 46
_PIECE = 1 << 24
"""Bytes of a segment that are read at once, where its tensors are unpacked: the memory for the next piece is that of the one before."""


@dataclass
class Survey:
    """The usable segments of a log, and the problems found."""

    next_turn: int = 1
    """Higher than that of every writer so far."""
    references: list[Reference] = field(default_factory=list)
    """Segments of the newest writer, preceded by those that it continued from, in the order of their steps; there are
    gaps where one is missing."""
    problems: list[str] = field(default_factory=list)
    """Descriptions of the segments that were found but not used, with the reasons."""


class LogReader:
    """Reads the segments of one run.

    Args:
        stores: the log's folders; a segment is read from the first one where it is sound.
        run: the nonce of the run.
        kind: of the log.
    """

    def __init__(self, stores: Sequence[ObjectStore], run: str, kind: Kind) -> None:
        self._stores = list(stores)
        self._run = run
        self._kind = kind
        self._places: dict[Key, list[_Stored]] = {}

    def survey(self) -> Survey:
        """List the folders and read the head of each segment.

        Raises:
            StoreError: no folder can be listed.
        """
        survey = self._listed()
        first = self._newest_writer(survey)
        if first is not None:
            survey.references = [*first.inherits, *self._own(first, survey)]
        return survey

    def next_turn(self) -> int:
        """As of `Survey`, from the list alone.

        Raises:
            StoreError: no folder can be listed.
        """
        return self._listed().next_turn

    def _listed(self) -> Survey:
        survey = Survey()
        self._places = {}
        failures = []
        for objects in self._stores:
            try:
                self._list(objects, survey)
            except StoreError as error:
                failures.append(error)
        if len(failures) == len(self._stores):
            raise failures[0]
        survey.problems += map(str, failures)
        survey.next_turn = 1 + max((key.turn for key in self._places), default=0)
        return survey

    def _list(self, objects: ObjectStore, survey: Survey) -> None:
        for info in objects.list(""):
            key = Key.parse(info.key)
            if key is None:
                survey.problems.append(
                    f"{objects.show(info.key)} is not a segment of a step log, and is ignored"
                )
            else:
                self._places.setdefault(key, []).append(_Stored(objects, info.size))

    def _newest_writer(self, survey: Survey) -> Head | None:
        """The first segment of the newest writer. Of several with one turn, the smallest nonce wins, as in a run."""
        writers = sorted({(-key.turn, key.session) for key in self._places})
        for turn, session in writers:
            key = Key(-turn, session, 0)
            if key not in self._places:
                some = min(
                    other for other in self._places if other.session == session and other.turn == -turn
                )
                survey.problems.append(
                    f"{self._show(some)} lacks its writer's first segment, and is passed over"
                )
                continue
            try:
                return self.head(key)
            except ForeignSegmentError as error:
                survey.problems.append(f"{self._show(key)}: {error}")
            except (FormatError, StoreError) as error:
                # An earlier writer may have continued after this one began: its later segments are not used.
                survey.problems.append(
                    f"{self._show(key)}, which names the segments that its writer continued from: {error}"
                )
                return None
        return None

    def _own(self, first: Head, survey: Survey) -> list[Reference]:
        found: list[Reference] = []
        seals = {0: first.seal}
        numbers = sorted(
            key.number
            for key in self._places
            if key.turn == first.key.turn and key.session == first.key.session and key.number > 0
        )
        for number in numbers:
            key = Key(first.key.turn, first.key.session, number)
            try:
                head = self.head(key)
                if number - 1 in seals and head.previous != seals[number - 1]:
                    raise CorruptionError("it does not follow the segment before it")
            except (FormatError, StoreError) as error:
                survey.problems.append(f"{self._show(key)}: {error}")
                continue
            seals[number] = head.seal
            found.append(head.reference)
        return found

    def head(self, key: Key) -> Head:
        """A segment without its tensors, verified by its seal.

        Raises:
            FormatError: it is damaged, or another segment.
            StoreError: it cannot be read.
        """
        return self._from_any(key, lambda stored: self._head(key, stored))

    def _head(self, key: Key, stored: "_Stored") -> Head:
        head = load_head(stored.objects, key, stored.size, self._run)
        if head.kind != self._kind:
            raise ForeignSegmentError(
                f"it is of a log with step_log={head.kind!r}, and this one is {self._kind!r}"
            )
        return head

    def load(self, reference: Reference) -> tuple[Head, memoryview]:
        """A whole segment.

        Args:
            reference: from `survey`.

        Returns:
            Its head, and its tensors' bytes, verified by their checksum.

        Raises:
            FormatError: it is damaged, or not the one that is referred to.
            StoreError: it cannot be read.
        """
        return self._from_any(reference.key, lambda stored: self._load(reference, stored))

    def _load(self, reference: Reference, stored: "_Stored") -> tuple[Head, memoryview]:
        key, size = reference.key, stored.size
        if size > _MAX_SEGMENT:
            raise CorruptionError(f"{size} bytes are more than a segment may have")
        data = stored.objects.get(str(key), max_size=size)
        if len(data) != size:
            raise CorruptionError(f"{len(data)} of {size} bytes could be read")
        prefix = read_prefix(data, size)
        payload_at = PREFIX.size + prefix.header
        head = read_head(data[:payload_at], prefix, key, self._run)
        _require(head, reference)
        payload = memoryview(data)[payload_at:]
        check_payload(payload, prefix)
        return head, payload

    def load_unpacked(self, reference: Reference) -> tuple[Head, UnpackedTensors]:
        """As `load`, with the tensors where they can stay; little more memory than theirs is needed.

        Args:
            reference: from `survey`.

        Raises:
            FormatError: it is damaged, or not the one that is referred to.
            StoreError: it cannot be read.
        """
        return self._from_any(reference.key, lambda stored: self._load_unpacked(reference, stored))

    def _load_unpacked(self, reference: Reference, stored: "_Stored") -> tuple[Head, UnpackedTensors]:
        size = stored.size
        if size > _MAX_SEGMENT:
            raise CorruptionError(f"{size} bytes are more than a segment may have")

        def read(begin: int, end: int) -> bytes:
            data = stored.objects.get(str(reference.key), begin, end, max_size=end - begin)
            if len(data) != end - begin:
                raise CorruptionError(f"{begin + len(data)} of {size} bytes could be read")
            return data

        data = read(0, min(size, _PIECE))
        prefix = read_prefix(data, size)
        begin = PREFIX.size + prefix.header
        if begin > len(data):
            data += read(len(data), begin)
        head = read_head(data[:begin], prefix, reference.key, self._run)
        _require(head, reference)
        tensors, digest = UnpackedTensors(head.tensors, prefix.payload), xxhash.xxh3_128()
        piece, at = memoryview(data)[begin:], len(data)
        while True:
            digest.update(piece)
            tensors.fill(piece)
            if at == size:
                break
            del piece, data  # its memory is that of the next one
            data = read(at, min(size, at + _PIECE))
            piece, at = memoryview(data), at + len(data)
        check_digest(digest.digest(), prefix)
        return head, tensors

    def _from_any(self, key: Key, read: Callable[["_Stored"], T]) -> T:
        """The result from the first folder where the segment is sound; else the first folder's error."""
        problem: FormatError | StoreError = CorruptionError("it is missing")
        for number, stored in enumerate(self._places.get(key, ())):
            try:
                return read(stored)
            except (FormatError, StoreError) as error:
                problem = problem if number else error
        raise problem

    def show(self, reference: Reference) -> str:
        """The location of a segment, for messages."""
        return self._show(reference.key)

    def _show(self, key: Key) -> str:
        return self._stores[0].show(str(key))


def _require(head: Head, reference: Reference) -> None:
    if head.seal != reference.seal or head.reference != reference:
        raise CorruptionError("it is another segment than the one that was written")


def load_head(objects: ObjectStore, key: Key, size: int, run: str) -> Head:
    """A segment's file without its tensors, verified by its seal.

    Args:
        objects: the folder.
        key: of the segment.
        size: of the file, as listed.
        run: the nonce of the run.

    Raises:
        FormatError: it is damaged, or another segment.
        StoreError: it cannot be read.
    """
    data = objects.get(str(key), 0, min(size, _FIRST_READ), max_size=_FIRST_READ)
    prefix = read_prefix(data, size)
    end = PREFIX.size + prefix.header
    if end > len(data):
        data += objects.get(str(key), len(data), end, max_size=end - len(data))
    return read_head(data, prefix, key, run)


@dataclass(frozen=True)
class _Stored:
    """A segment in one folder."""

    objects: ObjectStore
    size: int


_TRIED = 3


@dataclass(frozen=True)
class LogOverview:
    """A log, for people.

    Attributes:
        segments: how many files it has.
        bytes: their size.
        kind: of the log; None where its newest segments are damaged.
        last_step: the last step that is logged; None where that is not known, or nothing is.
    """

    segments: int
    bytes: int
    kind: Kind | None = None
    last_step: int | None = None


def overview(objects: ObjectStore, listed: Iterable[ObjectInfo], run: str) -> LogOverview | None:
    """What is logged in a folder of segments; None where there is none.

    Args:
        objects: the folder.
        listed: what lies in it.
        run: the nonce of the run.

    Raises:
        StoreError: it cannot be read.
    """
    sizes = {key: info.size for info in listed if (key := Key.parse(info.key)) is not None}
    if not sizes:
        return None
    newest = sorted(sizes, key=lambda key: (key.turn, key.number), reverse=True)
    for key in newest[:_TRIED]:
        try:
            head = load_head(objects, key, sizes[key], run)
        except FormatError:  # `resume` and `load_weights` say so, and do without it
            continue
        ends = [place.step for place in (head.end, *(one.end for one in head.inherits)) if place is not None]
        return LogOverview(len(sizes), sum(sizes.values()), head.kind, max(ends, default=None))
    return LogOverview(len(sizes), sum(sizes.values()))


class FirstSegment:
    """A segment that another thread reads before it is asked for.

    It decides nothing: the replay surveys the log itself, as if this were not there, and takes from here the contents of a segment
    that it would read just then. What cannot be read here is read again there, where errors are reported.

    Args:
        step: of the checkpoint that is being decoded.
        reader: makes a reader of the log; called in the thread.
    """

    def __init__(self, step: int, reader: Callable[[], LogReader]) -> None:
        self._step = step
        self._reader = reader
        self._lock = threading.Lock()
        self._dropped = False
        self._reference: Reference | None = None
        self._found: tuple[Head, UnpackedTensors] | None = None
        # A daemon: a store that does not answer must not keep the process from ending.
        self._thread = threading.Thread(target=self._work, name="shrinkpoint-replay-first", daemon=True)

    def start(self) -> None:
        """Begin to read."""
        try:
            self._thread.start()
        except RuntimeError:  # no more threads: the replay reads it
            self.drop()

    def _work(self) -> None:
        try:
            self._read()
        except Exception:  # noqa: BLE001 - the replay meets it again, if it needs this segment
            self.drop()

    def _read(self) -> None:
        reader = self._reader()
        references = reader.survey().references
        first = next((one for one in reversed(references) if one.begin.step == self._step), None)
        if first is None or self._dropped:
            return
        self._reference = first
        found = reader.load_unpacked(first)
        with self._lock:
            if not self._dropped:
                self._found = found

    def take(self, reference: Reference) -> tuple[Head, UnpackedTensors] | None:
        """What `LogReader.load_unpacked` returns, once; waits for it if it is being read.

        Args:
            reference: to the segment that is needed. Its seal covers everything in it.

        Returns:
            None where that is another segment, or could not be read.
        """
        if self._reference in (None, reference) and self._thread.is_alive():
            self._thread.join()
        with self._lock:
            found, self._found = self._found, None
            self._dropped = True
        return found if self._reference == reference else None

    def drop(self) -> None:
        """Forget it. The thread ends by itself, at the latest when the segment is read."""
        with self._lock:
            self._dropped, self._found = True, None
