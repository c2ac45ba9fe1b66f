"""Writes segments in the background, removes those that no checkpoint needs any more, and reports failures."""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shrinkpoint.errors import ShrinkpointError
from shrinkpoint.state.tree import JSON
from shrinkpoint.steps.buffers import CopiedState
from shrinkpoint.steps.record import Record, TensorTable, encode_record
from shrinkpoint.steps.segment import Head, Key, Place, Reference, pack
from shrinkpoint.store.objects import ObjectStore

__all__ = ["Pending", "SegmentWriter"]

_ALWAYS = 64 * 2**20  # bytes that may wait however small the steps are
_KEPT_BASES = 2


@dataclass(frozen=True, kw_only=True)
class Pending:
    """A segment queued by the training thread."""

    begin: Place
    end: Place
    records: Sequence[Record]
    copied: Sequence[CopiedState]

    @property
    def nbytes(self) -> int:
        """Of its tensors."""
        return sum(copied.nbytes for copied in self.copied)


class SegmentWriter:
    """One writer's segments, written in order by a thread of its own.

    Args:
        objects: the log's folder.
        run: the nonce of the run.
        turn: higher than that of every writer before.
        session: this writer's nonce.
        inherits: segments that this training continues from.
        provenance: for people.
    """

    def __init__(
        self,
        objects: ObjectStore,
        *,
        run: str,
        turn: int,
        session: str,
        inherits: Sequence[Reference],
        provenance: JSON,
    ) -> None:
        self._objects = objects
        self._run, self._turn, self._session = run, turn, session
        self._references = list(inherits)
        self._inherits = tuple(inherits)
        self._provenance = provenance
        self._previous = "0" * 32
        self._number = 0
        self._bases: deque[int] = deque(maxlen=_KEPT_BASES)
        self._jobs: deque[Callable[[], None]] = deque()
        self._waiting = 0
        self._changed = threading.Condition()
        self._stopping = False
        self.failure: str | None = None
        """Why the writer has stopped; None while it runs."""
        self.bytes = 0
        """Bytes written so far."""
        self.segments = 0
        self.written: int | None = None
        """The step up to which all is written."""
        # A daemon: segments not written when the process ends are lost as in a crash, which only costs time.
        self._thread = threading.Thread(target=self._work, name="shrinkpoint-steps", daemon=True)
        self._enqueue(self._begin)
        self._thread.start()

    def submit(self, pending: Pending, *, wait: bool) -> bool:
        """Hand a segment over.

        Args:
            pending: its memory is returned when it is written.
            wait: wait for space in the queue if it is full.

        Returns:
            False if the queue is full; the caller then keeps the segment.
        """
        size = pending.nbytes
        with self._changed:
            while self._waiting and self._waiting + size > max(_ALWAYS, 2 * size) and self.failure is None:
                if not wait:
                    return False
                self._changed.wait()
            self._waiting += size
        self._enqueue(lambda: self._write(pending, size))
        return True

    def committed(self, step: int) -> None:
        """A checkpoint of this step is stored: steps before the one before it are not needed any more."""
        self._enqueue(lambda: self._collect(step))

    def flush(self) -> None:
        """Wait until everything is written, or has failed."""
        with self._changed:
            while self._jobs:
                self._changed.wait()

    def close(self) -> None:
        """Write what was handed over, and end the thread."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._thread.join()

    def _enqueue(self, job: Callable[[], None]) -> None:
        with self._changed:
            self._jobs.append(job)
            self._changed.notify_all()

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._jobs and not self._stopping:
                    self._changed.wait()
                if not self._jobs:
                    return
                job = self._jobs[0]
            try:
                job()
            except ShrinkpointError as error:
                self._fail(str(error))
            except Exception as error:  # noqa: BLE001 - after any error the training continues without a log
                self._fail(f"{type(error).__name__}: {error}")
            with self._changed:
                self._jobs.popleft()
                self._changed.notify_all()

    def _fail(self, reason: str) -> None:
        if self.failure is None:
            self.failure = reason

    def _begin(self) -> None:
        """Write the first segment, which takes the turn, and remove segments that are now useless."""
        self._put(Head(run=self._run, key=self._key(), begin=None, end=None, inherits=self._inherits), [])
        inherited = {str(reference.key) for reference in self._inherits}
        self._objects.delete(
            [
                info.key
                for info in self._objects.list("")
                if (key := Key.parse(info.key)) is not None
                and key.turn < self._turn
                and info.key not in inherited
            ]
        )

    def _write(self, pending: Pending, size: int) -> None:
        try:
            if self.failure is not None:
                return
            for copied in pending.copied:
                copied.wait()
            table = TensorTable()
            records = [encode_record(record, table) for record in pending.records]
            head = Head(
                run=self._run,
                key=self._key(),
                begin=pending.begin,
                end=pending.end,
                records=records,
                tensors=table.specs,
                provenance=self._provenance,
                previous=self._previous,
            )
            seal = self._put(head, table.parts)
            self._references.append(Reference(head.key, seal, pending.begin, pending.end))
            self.segments += 1
            self.written = pending.end.step
        finally:
            for copied in pending.copied:
                copied.release()
            with self._changed:
                self._waiting -= size

    def _key(self) -> Key:
        return Key(self._turn, self._session, self._number)

    def _put(self, head: Head, parts: Sequence[memoryview]) -> str:
        data, seal = pack(head, parts)
        self._objects.put(str(head.key), data)
        self.bytes += len(data)
        self._previous = seal
        self._number += 1
        return seal

    def _collect(self, step: int) -> None:
        if self.failure is not None:
            return
        self._bases.append(step)
        newer = [
            key
            for info in self._objects.list("")
            if (key := Key.parse(info.key)) is not None and key.turn > self._turn and key.number == 0
        ]
        if newer:
            self._fail(
                f"another process has taken over the log of this run ({newer[0]} is its first segment)"
            )
            return
        if len(self._bases) < _KEPT_BASES:
            return
        gone = [reference for reference in self._references if reference.end.step <= self._bases[0]]
        self._objects.delete([str(reference.key) for reference in gone])
        self._references = [reference for reference in self._references if reference not in gone]
