"""What both kinds of log share: where their segments are, who writes them, and that no error of theirs ends a training."""

import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from shrinkpoint.errors import StoreError
from shrinkpoint.steps.capture import CannotLogError
from shrinkpoint.steps.reader import LogReader
from shrinkpoint.steps.segment import Kind, Reference
from shrinkpoint.steps.writer import SegmentWriter
from shrinkpoint.store.connect import Options, StorageOptions, open_location, open_objects
from shrinkpoint.store.keys import STEPS_PREFIX, new_nonce
from shrinkpoint.store.objects import ObjectsBelow, ObjectStore
from shrinkpoint.store.retry import RetryingObjects, RetryPolicy
from shrinkpoint.store.urls import Location, RunUrl
from shrinkpoint.version import __version__
from shrinkpoint.warn import warn

__all__ = ["Log", "LogFolder", "near_segments", "run_segments"]

_MAX_TURN = 10**8 - 1
_PATIENCE = RetryPolicy(attempts=4, max_delay_s=2.0, deadline_s=20.0)


def near_segments(location: Location, options: Options | None, run: str) -> ObjectStore:
    """The segments of a run in a folder that several runs may share.

    Args:
        location: of the folder.
        options: for fsspec.
        run: the nonce of the run.
    """
    path = f"{location.path.rstrip('/')}/{run}"
    below = replace(location, path=path, display=location.show(run))
    return RetryingObjects(open_location(below, options), _PATIENCE)


def run_segments(url: RunUrl, options: StorageOptions) -> ObjectStore:
    """The segments in the store, or the stores, of the run itself."""
    return ObjectsBelow(RetryingObjects(open_objects(url, options), _PATIENCE), STEPS_PREFIX)


@dataclass(frozen=True)
class LogFolder:
    """Where the segments of one log are."""

    kind: Kind
    connect: Callable[[str], ObjectStore]
    """Opens them, given the run's nonce."""
    location: Location
    keep: int
    """Intervals between checkpoints whose segments are kept."""


class Log:
    """A log that is turned off, with one warning, when it fails.

    Args:
        folder: of its segments.
    """

    def __init__(self, folder: LogFolder) -> None:
        self.off: str | None = None
        """Why the log is off; None while it is on."""
        self.blocked_s = 0.0
        """Seconds that the training's thread has spent in the log so far: copies, digests and waiting, everything."""
        self.blocked_cpu_s = 0.0
        """The CPU seconds of `blocked_s`, without waiting: what other programs do on the machine has no influence on it."""
        self._is_counting = False
        self._folder = folder
        self._run = ""
        self._objects: ObjectStore | None = None
        self._writer: SegmentWriter | None = None
        self._inherits: list[Reference] = []
        """The segments of earlier writers that this training continues from."""

    @property
    def bytes(self) -> int:
        """Bytes written so far by this process."""
        return self._writer.bytes if self._writer is not None else 0

    @property
    def written(self) -> int | None:
        """The step up to which all is written; None before the first segment."""
        return self._writer.written if self._writer is not None else None

    def open(self, run: str) -> None:
        """Make sure, before training starts, that the log's folder can be written.

        Args:
            run: the nonce of the run.

        Raises:
            StoreError: it cannot.
        """
        self._run, self._objects = run, self._folder.connect(run)
        try:
            # Files left half-written by a killed writer would occupy space forever.
            self._objects.sweep(self._objects.server_time())
        except StoreError as error:
            raise StoreError(
                f"StepLog(url={self._folder.location.display!r}) cannot be used for a log: {error}"
            ) from error

    def committed(self, step: int) -> None:
        """A checkpoint of this step is stored."""
        if self._writer is not None:
            self._writer.committed(step)

    def flush(self) -> None:
        """Wait until all whole segments are written."""
        if self._writer is not None:
            self._writer.flush()

    def _reader(self) -> LogReader:
        assert self._objects is not None
        return LogReader(self._objects, self._run, self._folder.kind)

    def _take_turn(self) -> None:
        """Begin with a new writer, whose turn is higher than all that are there; segments that it does not inherit are removed.

        Raises:
            StoreError: the folder cannot be listed.
            CannotLogError: there is no higher turn.
        """
        assert self._objects is not None
        if self._writer is not None:
            self._writer.close()
        turn, location = self._reader().next_turn(), self._folder.location
        if turn > _MAX_TURN:
            raise CannotLogError(
                f"{self._objects.display} contains a segment with the last number that there is: remove it"
            )
        self._writer = SegmentWriter(
            self._objects,
            run=self._run,
            kind=self._folder.kind,
            turn=turn,
            session=new_nonce(),
            inherits=self._inherits,
            provenance={
                "shrinkpoint": __version__,
                "torch": str(torch.__version__),
                "python": platform.python_version(),
                "machine": platform.machine(),
            },
            keep=self._folder.keep,
            folder=location.path if location.kind == "local" else None,
        )

    def _stop(self) -> None:
        """Release everything that the log needs while it is on."""
        raise NotImplementedError

    def _turn_off(self, reason: str) -> None:
        if self.off is not None:
            return
        self.off = reason
        self._stop()
        warn(f"the step log is off: {reason}. Training continues, and its checkpoints are saved as before")

    def _failed(self) -> bool:
        """Whether the log is off, also since its writer has failed meanwhile."""
        if self._writer is not None and self._writer.failure is not None:
            self._turn_off(self._writer.failure)
        return self.off is not None

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count the time of the block; of nested blocks the outermost counts."""
        if self._is_counting:
            yield
            return
        self._is_counting = True
        started, cpu = time.perf_counter(), time.thread_time()
        try:
            yield
        finally:
            self.blocked_s += time.perf_counter() - started
            self.blocked_cpu_s += time.thread_time() - cpu
            self._is_counting = False

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Count the time, and let no error of the log end the training."""
        try:
            with self.counted():
                yield
        except Warning:
            raise
        except Exception as error:  # noqa: BLE001 - any error of the log
            reason = str(error) if isinstance(error, CannotLogError) else f"{type(error).__name__}: {error}"
            self._turn_off(reason)
