"""Writes one writer's segments in the background, and removes those that no checkpoint needs any more."""

import math
import os
import platform
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from shrinkpoint.errors import StoreError
from shrinkpoint.state.tree import JSON
from shrinkpoint.steps.capture import reason_of
from shrinkpoint.steps.reader import LogReader
from shrinkpoint.steps.segment import Head, Key, Place, Reference, TensorTable, pack
from shrinkpoint.store.keys import new_nonce
from shrinkpoint.version import __version__

_PROVENANCE = {
    "shrinkpoint": __version__,
    "torch": str(torch.__version__),
    "python": platform.python_version(),
    "machine": platform.machine(),
}
_RESERVE_SHARE, _RESERVE_MOST = 1 / 16, 2**30
"""Of a file system, left to other programs: one that finds no room in ``/dev/shm`` is killed."""


class SegmentWriter:
    """One writer's segments, written in order by a thread of its own.

    Args:
        reader: of the log's folder.
        inherits: segments that this training continues from.
        keep: intervals between checkpoints whose segments are kept.
        folder: in whose file system there must be room; None where that is not known.

    Raises:
        StoreError: the folder cannot be listed, or there is no turn higher than those that are there.
    """

    def __init__(
        self, reader: LogReader, *, inherits: Sequence[Reference], keep: int, folder: str | None
    ) -> None:
        self._objects, self._run, self._kind = reader.objects, reader.run, reader.kind
        self._turn, self._session, self._number = reader.next_turn(), new_nonce(), 0
        self._inherits = tuple(inherits)
        self._references = list(inherits)
        self._previous = "0" * 32
        self._bases: deque[int] = deque(maxlen=keep)
        self._folder = folder
        self._is_full = False
        self.bytes = 0
        """Bytes written so far."""
        self.written: int | None = None
        """The step up to which all is written."""
        self.failure: str | None = None
        """Why nothing is written any more; None while it is."""
        self._jobs: deque[tuple[Callable[[], None], int]] = deque()
        self._waiting = 0
        self._changed = threading.Condition()
        self._closed = False
        # A daemon: what is not written when the process ends is lost as in a crash, which only costs time.
        self._thread = threading.Thread(target=self._work, name="shrinkpoint-steps", daemon=True)
        self._thread.start()
        self.submit(self._begin)

    def submit(
        self,
        job: Callable[[], None],
        size: int = 0,
        *,
        ahead: int = 0,
        patience_s: float = math.inf,
        release: Callable[[], None] = lambda: None,
    ) -> bool:
        """Hand a job over to the thread, which calls `write`.

        Args:
            job: not run after a failure, or after `close`.
            size: bytes that it holds until it is done. Jobs of 0 bytes are always accepted.
            ahead: bytes that the jobs before it may still hold; with 0 they must be done.
            patience_s: seconds to wait for that.
            release: returns its memory; called after the job, or in its place.

        Returns:
            False if the jobs before it took longer; the caller then keeps the memory.
        """
        deadline = time.monotonic() + patience_s

        def run() -> None:
            try:
                if self.failure is None:
                    job()
            finally:
                release()

        with self._changed:
            while size and self._waiting > ahead and self.failure is None:
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                self._changed.wait(None if math.isinf(left) else left)
            if not self._closed:
                self._waiting += size
                self._jobs.append((run, size))
                self._changed.notify_all()
                return True
        release()  # there is no thread any more
        return True

    def flush(self) -> None:
        """Wait until everything is written, or has failed."""
        with self._changed:
            while self._jobs:
                self._changed.wait()

    def close(self) -> None:
        """Write what was handed over, and end the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._jobs and not self._closed:
                    self._changed.wait()
                if not self._jobs:
                    return
                job, size = self._jobs[0]
            try:
                job()
            except Exception as error:  # noqa: BLE001 - after any error the training continues without a log
                self._fail(reason_of(error))
            del job
            with self._changed:
                self._waiting -= size
                self._jobs.popleft()
                self._changed.notify_all()

    def _fail(self, reason: str) -> None:
        if self.failure is None:
            self.failure = reason

    def write(
        self, begin: Place, end: Place, records: Sequence[JSON], table: TensorTable, layout: JSON = None
    ) -> None:
        """Write the next segment; for the thread's own jobs.

        Raises:
            StoreError: it cannot be written.
            CannotRepresentError: the records do not fit in a header.
        """
        head = self._put(
            table.parts, begin=begin, end=end, records=records, tensors=table.specs, layout=layout
        )
        self._references.append(head.reference)
        self.written = end.step

    def committed(self, step: int) -> None:
        """Remove the steps before the last few checkpoints, of which this step's is the newest."""
        with self._changed:
            if not self._closed:
                self._jobs.append((lambda: self._collect(step), 0))
                self._changed.notify_all()

    def _begin(self) -> None:
        """Write the first segment, which takes the turn, and remove segments that are now useless."""
        self._put([], begin=None, end=None, inherits=self._inherits)
        inherited = {reference.key for reference in self._inherits}
        self._objects.delete(
            [str(key) for key in self._listed() if key.turn < self._turn and key not in inherited]
        )

    def _listed(self) -> list[Key]:
        keys = [Key.parse(info.key) for info in self._objects.list("")]
        return [key for key in keys if key is not None]

    def _put(self, parts: Sequence[memoryview], **members: Any) -> Head:
        head = Head(
            run=self._run,
            kind=self._kind,
            key=Key(self._turn, self._session, self._number),
            previous=self._previous,
            provenance=_PROVENANCE,
            **members,
        )
        data, self._previous = pack(head, parts)
        self._require_room(len(data))
        self._objects.put(str(head.key), data)
        self.bytes += len(data)
        self._number += 1
        return replace(head, seal=self._previous)

    def _require_room(self, size: int) -> None:
        if self._folder is None or not os.path.exists(self._folder):
            return
        usage = shutil.disk_usage(self._folder)
        reserve = min(_RESERVE_SHARE * usage.total, _RESERVE_MOST)
        free = max(0.0, usage.free - reserve)
        if size > free:
            self._is_full = True
            raise StoreError(
                f"the next steps take {size / 1e9:.3g} GB, and {self._folder} has {free / 1e9:.3g} GB, besides {reserve / 1e9:.3g} GB"
                " that are left to other programs: save more often, or choose another folder"
            )

    def _collect(self, step: int) -> None:
        if self.failure is not None and not self._is_full:
            return
        self._bases.append(step)
        newer = [key for key in self._listed() if key.turn > self._turn and key.number == 0]
        if newer:
            self._fail(
                f"another process has taken over the log of this run ({newer[0]} is its first segment)"
            )
            return
        if len(self._bases) < (self._bases.maxlen or 0):
            return
        whole = chain_ends(self._references) if self._kind == "small" else {}
        gone = [r for r in self._references if whole.get(r.end, r.end.step) <= self._bases[0]]
        self._objects.delete([str(reference.key) for reference in gone])
        self._references = [reference for reference in self._references if reference not in gone]


def chain_ends(references: Sequence[Reference]) -> dict[Place, int]:
    """Return the last step of the chain that each segment belongs to, by its end: a chain is read from its beginning.

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
