"""Writes one writer's segments in the background, and removes those that no checkpoint needs any more."""

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from shrinkpoint.errors import ShrinkpointError, StoreError
from shrinkpoint.state.tree import JSON
from shrinkpoint.steps.record import TensorTable
from shrinkpoint.steps.room import Room
from shrinkpoint.steps.segment import Head, Key, Kind, Place, Reference, pack
from shrinkpoint.store.objects import ObjectStore

__all__ = ["JobQueue", "SegmentWriter", "chain_ends"]


class SegmentWriter:
    """One writer's segments, written in order by a thread of its own.

    Args:
        objects: the log's folder.
        run: the nonce of the run.
        kind: of the log.
        turn: higher than that of every writer before.
        session: this writer's nonce.
        inherits: segments that this training continues from.
        provenance: for people.
        keep: intervals between checkpoints whose segments are kept.
        room: in its file system.
    """

    def __init__(
        self,
        objects: ObjectStore,
        *,
        run: str,
        kind: Kind,
        turn: int,
        session: str,
        inherits: Sequence[Reference],
        provenance: JSON,
        keep: int,
        room: Room,
    ) -> None:
        self._objects = objects
        self._run, self._kind, self._turn, self._session = run, kind, turn, session
        self._references = list(inherits)
        self._inherits = tuple(inherits)
        self._provenance = provenance
        self._previous = "0" * 32
        self._number = 0
        self._bases: deque[int] = deque(maxlen=keep)
        self._keep = keep
        self._room = room
        self._sizes: dict[str, int] = {}
        self._queue = JobQueue("shrinkpoint-steps")
        self._closed = False
        self.bytes = 0
        """Bytes written so far."""
        self.written: int | None = None
        """The step up to which all is written."""
        self._queue.submit(self._begin)

    @property
    def failure(self) -> str | None:
        """Why the writer has stopped; None while it runs."""
        return self._queue.failure

    def submit(
        self,
        job: Callable[[], None],
        size: int = 0,
        *,
        ahead: int = 0,
        patience_s: float = math.inf,
        release: Callable[[], None] | None = None,
    ) -> bool:
        """Hand a job over to the thread, which calls `write`.

        Args:
            job: not run after a failure, or after `close`.
            size: bytes that it holds.
            ahead: bytes that the jobs before it may still hold; with 0 they must be done.
            patience_s: seconds to wait for that.
            release: returns its memory; called after the job, or after a failure in its place.

        Returns:
            False if the jobs before it took longer; the caller then keeps the memory.
        """

        def run() -> None:
            try:
                if self.failure is None:
                    job()
            finally:
                if release is not None:
                    release()

        if self._closed:  # there is no thread any more
            if release is not None:
                release()
            return True
        return self._queue.submit(run, size, ahead=ahead, patience_s=patience_s)

    def write(
        self,
        begin: Place,
        end: Place,
        records: Sequence[JSON],
        table: TensorTable,
        layout: JSON = None,
    ) -> None:
        """Write the next segment; for the thread's own jobs.

        Raises:
            StoreError: it cannot be written.
            CannotRepresentError: the records do not fit in a header.
        """
        head = Head(
            run=self._run,
            kind=self._kind,
            key=self._key(),
            begin=begin,
            end=end,
            records=records,
            tensors=table.specs,
            layout=layout,
            provenance=self._provenance,
            previous=self._previous,
        )
        seal = self._put(head, table.parts)
        self._references.append(Reference(head.key, seal, begin, end))
        self.written = end.step

    def committed(self, step: int) -> None:
        """A checkpoint of this step is stored: steps before the last few checkpoints are not needed any more."""
        self.submit(lambda: self._collect(step))

    def flush(self) -> None:
        """Wait until everything is written, or has failed."""
        self._queue.flush()

    def close(self) -> None:
        """Write what was handed over, and end the thread."""
        self._queue.close()
        self._closed = True

    def _begin(self) -> None:
        """Write the first segment, which takes the turn, and remove segments that are now useless."""
        self._put(
            Head(
                run=self._run, kind=self._kind, key=self._key(), begin=None, end=None, inherits=self._inherits
            ),
            [],
        )
        inherited = {str(reference.key) for reference in self._inherits}
        there = self._objects.list("")
        self._sizes |= {info.key: info.size for info in there if info.key in inherited}
        self._objects.delete(
            [
                info.key
                for info in there
                if (key := Key.parse(info.key)) is not None
                and key.turn < self._turn
                and info.key not in inherited
            ]
        )

    def _key(self) -> Key:
        return Key(self._turn, self._session, self._number)

    def _put(self, head: Head, parts: Sequence[memoryview]) -> str:
        data, seal = pack(head, parts)
        self._require_room(head, len(data))
        self._objects.put(str(head.key), data)
        self._sizes[str(head.key)] = len(data)
        self.bytes += len(data)
        self._previous = seal
        self._number += 1
        return seal

    def _require_room(self, head: Head, size: int) -> None:
        if head.begin is None or head.end is None:
            return
        kept = sum(self._sizes.values())
        steps = sum(reference.end.step - reference.begin.step for reference in self._references)
        steps = max(1, steps + head.end.step - head.begin.step)
        reason = self._room.lack(size=size, kept=kept, step_bytes=(kept + size) / steps)
        if reason is not None:
            raise StoreError(reason)

    def _collect(self, step: int) -> None:
        self._bases.append(step)
        self._room.committed(step)
        newer = [
            key
            for info in self._objects.list("")
            if (key := Key.parse(info.key)) is not None and key.turn > self._turn and key.number == 0
        ]
        if newer:
            self._queue.fail(
                f"another process has taken over the log of this run ({newer[0]} is its first segment)"
            )
            return
        if len(self._bases) < self._keep:
            return
        whole = chain_ends(self._references) if self._kind == "small" else {}
        gone = [r for r in self._references if whole.get(r.end, r.end.step) <= self._bases[0]]
        self._objects.delete([str(reference.key) for reference in gone])
        self._references = [reference for reference in self._references if reference not in gone]
        for reference in gone:
            self._sizes.pop(str(reference.key), None)


def chain_ends(references: Sequence[Reference]) -> dict[Place, int]:
    """The last step of the chain that each segment belongs to, by its end: a chain is read from its beginning.

    Args:
        references: in the order of their writing.
    """
    last: dict[Place, int] = {}
    found: dict[Place, int] = {}
    for reference in reversed(references):
        end = max(reference.end.step, last.get(reference.end, 0))
        found[reference.end] = end
        last[reference.begin] = max(end, last.get(reference.begin, 0))
    return found


class JobQueue:
    """Runs jobs one after the other in a thread of its own; after one has failed, `failure` has the reason.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._jobs: deque[tuple[Callable[[], None], int]] = deque()
        self._waiting = 0
        self._changed = threading.Condition()
        self._stopping = False
        self.failure: str | None = None
        """Why a job failed; None where none has. The jobs themselves decide what they do after a failure."""
        # A daemon: what is not written when the process ends is lost as in a crash, which only costs time.
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def submit(
        self, job: Callable[[], None], size: int = 0, *, ahead: int = 0, patience_s: float = math.inf
    ) -> bool:
        """Append a job.

        Args:
            job: called in the thread.
            size: bytes that it holds until it is done. Jobs of 0 bytes are always accepted.
            ahead: bytes that the jobs before it may still hold; with 0 they must be done.
            patience_s: seconds to wait for that.

        Returns:
            False if the queue is full; the job is then not run.
        """
        deadline = time.monotonic() + patience_s
        with self._changed:
            while size and self._waiting > ahead and not self.failure:
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                self._changed.wait(None if math.isinf(left) else left)
            self._waiting += size
            self._jobs.append((job, size))
            self._changed.notify_all()
        return True

    def fail(self, reason: str) -> None:
        """Note a failure, the first one only."""
        if self.failure is None:
            self.failure = reason

    def flush(self) -> None:
        """Wait until every job is done."""
        with self._changed:
            while self._jobs:
                self._changed.wait()

    def close(self) -> None:
        """Finish all jobs, and end the thread."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._thread.join()

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._jobs and not self._stopping:
                    self._changed.wait()
                if not self._jobs:
                    return
                job, size = self._jobs[0]
            try:
                job()
            except ShrinkpointError as error:
                self.fail(str(error))
            except Exception as error:  # noqa: BLE001 - after any error the training continues without a log
                self.fail(f"{type(error).__name__}: {error}")
            del job
            with self._changed:
                self._waiting -= size
                self._jobs.popleft()
                self._changed.notify_all()
