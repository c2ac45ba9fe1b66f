"""Finds the segments of a run's newest writer, reports what is wrong with the others, and reads the weights of logged steps."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch

from shrinkpoint.errors import CorruptionError, FormatError, NoCheckpointError, StoreError
from shrinkpoint.steps.segment import (
    ForeignSegmentError,
    Head,
    Key,
    Kind,
    Place,
    Reference,
    Tensors,
    check_payload,
    header_end,
    read_head,
)
from shrinkpoint.steps.updates import Layout, ReadersWeights, checked_record, step_of
from shrinkpoint.store.objects import ObjectInfo, ObjectStore

_FIRST_READ = 1 << 16
_MAX_SEGMENT = 1 << 46
_MAX_TURN = 10**8 - 1
_TRIED = 3
_OTHER_WEIGHTS = "its records give other weights than the training had"


class LogReader:
    """Reads the segments of one kind of log in its folder, of the run with this nonce."""

    def __init__(self, objects: ObjectStore, run: str, kind: Kind) -> None:
        self.objects, self.run, self.kind = objects, run, kind
        self._sizes: dict[Key, int] = {}

    def survey(self) -> tuple[list[Reference], list[str]]:
        """List the folder and read the head of each segment.

        Returns:
            Segments of the newest writer, preceded by those that it continued from, in the order of their steps, with gaps where one
            is missing; and descriptions of what was found but is not used, with the reasons.

        Raises:
            StoreError: the folder cannot be listed.
        """
        problems = self._list()
        first = self._newest_writer(problems)
        return ([] if first is None else [*first.inherits, *self._own(first, problems)]), problems

    def next_turn(self) -> int:
        """Give a turn higher than that of every writer so far.

        Raises:
            StoreError: the folder cannot be listed, or there is no such turn.
        """
        self._list()
        turn = 1 + max((key.turn for key in self._sizes), default=0)
        if turn > _MAX_TURN:
            raise StoreError(
                f"{self.objects.display} contains a segment with the last number that there is: remove it"
            )
        return turn

    def _list(self) -> list[str]:
        """Note the size of each segment, and describe the other files."""
        found = [(Key.parse(info.key), info) for info in self.objects.list("")]
        self._sizes = {key: info.size for key, info in found if key is not None}
        return [
            f"{self.objects.show(info.key)} is not a segment of a step log, and is ignored"
            for key, info in found
            if key is None
        ]

    def _newest_writer(self, problems: list[str]) -> Head | None:
        """Return the first segment of the newest writer. Of several with one turn, the smallest nonce wins, as in a run."""
        for turn, session in sorted({(-key.turn, key.session) for key in self._sizes}):
            key = Key(-turn, session, 0)
            if key not in self._sizes:
                some = min(other for other in self._sizes if (-other.turn, other.session) == (turn, session))
                problems.append(f"{self.show(some)} lacks its writer's first segment, and is passed over")
                continue
            try:
                return self.head(key)
            except ForeignSegmentError as error:
                problems.append(f"{self.show(key)}: {error}")
            except (FormatError, StoreError) as error:
                # An earlier writer may have continued after this one began: its later segments are not used.
                problems.append(
                    f"{self.show(key)}, which names the segments that its writer continued from: {error}"
                )
                return None
        return None

    def _own(self, first: Head, problems: list[str]) -> list[Reference]:
        found: list[Reference] = []
        seals = {0: first.seal}
        writer = first.key.turn, first.key.session
        for key in sorted(k for k in self._sizes if (k.turn, k.session) == writer and k.number > 0):
            number = key.number
            try:
                head = self.head(key)
                if number - 1 in seals and head.previous != seals[number - 1]:
                    raise CorruptionError("it does not follow the segment before it")
            except (FormatError, StoreError) as error:
                problems.append(f"{self.show(key)}: {error}")
                continue
            seals[number] = head.seal
            found.append(head.reference)
        return found

    def head(self, key: Key) -> Head:
        """Read a segment without its tensors, verified by its seal.

        Raises:
            FormatError: it is damaged, or another segment.
            StoreError: it cannot be read.
        """
        head = _load_head(self.objects, key, self._size(key), self.run)
        if head.kind != self.kind:
            raise ForeignSegmentError(
                f"it is of a log with step_log={head.kind!r}, and this one is {self.kind!r}"
            )
        return head

    def load(self, reference: Reference) -> tuple[Head, Tensors]:
        """Read a whole segment of a `survey`: its head, and its tensors, verified by their checksum.

        Raises:
            FormatError: it is damaged, or not the one that is referred to.
            StoreError: it cannot be read.
        """
        key, size = reference.key, self._size(reference.key)
        if size > _MAX_SEGMENT:
            raise CorruptionError(f"{size} bytes are more than a segment may have")
        data = self.objects.get(str(key), max_size=size)
        head = read_head(data, size, key, self.run)
        if head.reference != reference:
            raise CorruptionError("it is another segment than the one that was written")
        payload = memoryview(data)[header_end(data, size) :]
        check_payload(payload, head)
        return head, Tensors(head.tensors, payload)

    def _size(self, key: Key) -> int:
        if key not in self._sizes:
            raise CorruptionError("it is missing")
        return self._sizes[key]

    def show(self, key: Key) -> str:
        """Give the location of a segment, for messages."""
        return self.objects.show(str(key))


def _load_head(objects: ObjectStore, key: Key, size: int, run: str) -> Head:
    """Return a segment's file, of a listed size, without its tensors; verified by its seal."""
    data = objects.get(str(key), 0, min(size, _FIRST_READ), max_size=_FIRST_READ)
    end = header_end(data, size)
    if end > len(data):
        data += objects.get(str(key), len(data), end, max_size=end - len(data))
    return read_head(data, size, key, run)


@dataclass(frozen=True)
class LogOverview:
    """A log, for people."""

    segments: int
    bytes: int
    """Of all segments."""
    kind: Kind | None = None
    """None where its newest segments are damaged."""
    last_step: int | None = None
    """The last step that is logged; None where that is not known, or nothing is."""


def overview(objects: ObjectStore, listed: Iterable[ObjectInfo], run: str) -> LogOverview | None:
    """Describe the log of a run, given its nonce, in a folder where these files are; None where there is none.

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


# ---- the weights of a small log: a checkpoint's, advanced by the records since

ReadBase = Callable[[int], Mapping[str, torch.Tensor]]
"""Gives the weights that a reader of the checkpoint of a step gets; raises NoCheckpointError where there is none."""


class LoggedWeights:
    """The small log of one run, for reading.

    Raises:
        StoreError: the folder cannot be read.
    """

    def __init__(self, reader: LogReader) -> None:
        self._reader = reader
        self._references, _ = reader.survey()

    @property
    def is_empty(self) -> bool:
        """Whether nothing is logged."""
        return not self._references

    def steps(self) -> list[int]:
        """List all logged steps of sound segments, in order.

        Raises:
            StoreError: the folder cannot be read.
        """
        found: set[int] = set()
        for reference in self._references:
            with suppress(FormatError):
                found.update(map(step_of, self._reader.head(reference.key).records))
        return sorted(found)

    def at(self, step: int, read_base: ReadBase) -> dict[str, torch.Tensor]:
        """Read the weights of one step, by their names in the model.

        Raises:
            NoCheckpointError: the step is not logged; or its weights were not finite.
            FormatError: a segment that is needed is missing or damaged, or the checkpoint is another one.
            StoreError: the log cannot be read.
        """
        problem: FormatError | None = None
        for index in reversed(range(len(self._references))):
            reference = self._references[index]
            if not reference.begin.step < step <= reference.end.step:
                continue
            try:
                if step in map(step_of, self._reader.head(reference.key).records):
                    return self._read(chain_to(self._references, index), step, read_base)
            except FormatError as error:  # another writer may have logged this step too
                problem = problem or error
        if problem is not None:
            raise problem
        steps = self.steps()
        has = f"{len(steps)} steps from {steps[0]} to {steps[-1]}" if steps else "none"
        raise NoCheckpointError(f"step {step} is not in the log, which has {has}")

    def _read(self, chain: Sequence[Reference], step: int, read_base: ReadBase) -> dict[str, torch.Tensor]:
        try:
            base = read_base(chain[0].begin.step)
        except NoCheckpointError as error:
            raise CorruptionError(
                f"the checkpoint that the log refers to is not there any more: {error}"
            ) from error
        weights: ReadersWeights | None = None
        for reference in chain:
            head, tensors = self._reader.load(reference)
            layout = Layout.from_json(head.layout)
            if weights is None:
                weights = ReadersWeights(layout, base)
                what = "its checkpoint has other weights than those that it refers to"
                weights.compare(reference.begin, what)
            elif layout != weights.layout:
                raise FormatError(f"{self._reader.show(reference.key)}: its layout is another one")
            for node in map(checked_record, head.records):
                weights.apply(node, tensors)
                if node["step"] == step:
                    weights.compare(Place(step, node["digest"]), _OTHER_WEIGHTS)
                    for name, count in node["not_finite"].items():
                        raise NoCheckpointError(
                            f"step {step} is logged, but {count} weights of {name!r} were not finite, and the log does not contain them"
                        )
                    return weights.tensors()
            weights.compare(reference.end, _OTHER_WEIGHTS)
        raise CorruptionError(f"its records do not contain step {step}")


def chain_to(references: Sequence[Reference], index: int) -> list[Reference]:
    """List the segments that lead from a checkpoint to segment number `index`, that one included."""
    chain = [references[index]]
    for reference in reversed(references[:index]):
        if reference.end == chain[0].begin and reference.begin.step < chain[0].begin.step:
            chain.insert(0, reference)
    return chain
