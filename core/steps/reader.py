"""Finds the segments of a run's newest writer, and reports what is wrong with the others."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from shrinkpoint.errors import CorruptionError, FormatError, StoreError
from shrinkpoint.steps.record import Tensors
from shrinkpoint.steps.segment import (
    ForeignSegmentError,
    Head,
    Key,
    Kind,
    Reference,
    check_payload,
    header_end,
    read_head,
)
from shrinkpoint.store.objects import ObjectInfo, ObjectStore

__all__ = ["LogOverview", "LogReader", "Survey", "overview"]

_FIRST_READ = 1 << 16
_MAX_SEGMENT = 1 << 46


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
        objects: the log's folder.
        run: the nonce of the run.
        kind: of the log.
    """

    def __init__(self, objects: ObjectStore, run: str, kind: Kind) -> None:
        self._objects = objects
        self._run = run
        self._kind = kind
        self._sizes: dict[Key, int] = {}

    def survey(self) -> Survey:
        """List the folder and read the head of each segment.

        Raises:
            StoreError: the folder cannot be listed.
        """
        survey = self._listed()
        first = self._newest_writer(survey)
        if first is not None:
            survey.references = [*first.inherits, *self._own(first, survey)]
        return survey

    def next_turn(self) -> int:
        """As of `Survey`, from the list alone.

        Raises:
            StoreError: the folder cannot be listed.
        """
        return self._listed().next_turn

    def _listed(self) -> Survey:
        survey = Survey()
        self._sizes = {}
        for info in self._objects.list(""):
            key = Key.parse(info.key)
            if key is None:
                survey.problems.append(
                    f"{self._objects.show(info.key)} is not a segment of a step log, and is ignored"
                )
            else:
                self._sizes[key] = info.size
        survey.next_turn = 1 + max((key.turn for key in self._sizes), default=0)
        return survey

    def _newest_writer(self, survey: Survey) -> Head | None:
        """The first segment of the newest writer. Of several with one turn, the smallest nonce wins, as in a run."""
        writers = sorted({(-key.turn, key.session) for key in self._sizes})
        for turn, session in writers:
            key = Key(-turn, session, 0)
            if key not in self._sizes:
                some = min(other for other in self._sizes if other.session == session and other.turn == -turn)
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
            for key in self._sizes
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
        head = _load_head(self._objects, key, self._size(key), self._run)
        if head.kind != self._kind:
            raise ForeignSegmentError(
                f"it is of a log with step_log={head.kind!r}, and this one is {self._kind!r}"
            )
        return head

    def load(self, reference: Reference) -> tuple[Head, Tensors]:
        """A whole segment.

        Args:
            reference: from `survey`.

        Returns:
            Its head, and its tensors, verified by their checksum.

        Raises:
            FormatError: it is damaged, or not the one that is referred to.
            StoreError: it cannot be read.
        """
        key, size = reference.key, self._size(reference.key)
        if size > _MAX_SEGMENT:
            raise CorruptionError(f"{size} bytes are more than a segment may have")
        data = self._objects.get(str(key), max_size=size)
        head = read_head(data, size, key, self._run)
        if head.seal != reference.seal or head.reference != reference:
            raise CorruptionError("it is another segment than the one that was written")
        payload = memoryview(data)[header_end(data, size) :]
        check_payload(payload, head)
        return head, Tensors(head.tensors, payload)

    def _size(self, key: Key) -> int:
        if key not in self._sizes:
            raise CorruptionError("it is missing")
        return self._sizes[key]

    def show(self, reference: Reference) -> str:
        """The location of a segment, for messages."""
        return self._show(reference.key)

    def _show(self, key: Key) -> str:
        return self._objects.show(str(key))


def _load_head(objects: ObjectStore, key: Key, size: int, run: str) -> Head:
    """A segment's file, of a listed size, without its tensors; verified by its seal."""
    data = objects.get(str(key), 0, min(size, _FIRST_READ), max_size=_FIRST_READ)
    end = header_end(data, size)
    if end > len(data):
        data += objects.get(str(key), len(data), end, max_size=end - len(data))
    return read_head(data, size, key, run)


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
            head = _load_head(objects, key, sizes[key], run)
        except FormatError:  # `resume` and `load_weights` say so, and do without it
            continue
        ends = [place.step for place in (head.end, *(one.end for one in head.inherits)) if place is not None]
        return LogOverview(len(sizes), sum(sizes.values()), head.kind, max(ends, default=None))
    return LogOverview(len(sizes), sum(sizes.values()))
