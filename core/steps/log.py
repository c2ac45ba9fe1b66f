"""What both kinds of log share: where their segments are, who writes them, and that no error of theirs ends a training."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from shrinkpoint.errors import StoreError
from shrinkpoint.steps.capture import reason_of
from shrinkpoint.steps.options import StepLog
from shrinkpoint.steps.reader import LogReader
from shrinkpoint.steps.segment import Reference
from shrinkpoint.steps.writer import SegmentWriter
from shrinkpoint.store.connect import Options, StorageOptions, open_location, open_objects
from shrinkpoint.store.keys import STEPS_PREFIX
from shrinkpoint.store.objects import ObjectsBelow, ObjectStore
from shrinkpoint.store.retry import RetryingObjects, RetryPolicy
from shrinkpoint.store.urls import Location, RunUrl
from shrinkpoint.warn import warn

_PATIENCE = RetryPolicy(attempts=4, max_delay_s=2.0, deadline_s=20.0)


def near_segments(location: Location, options: Options | None, run: str) -> ObjectStore:
    """Open the segments of a run, given its nonce, in a folder that several runs may share."""
    path = f"{location.path.rstrip('/')}/{run}"
    below = replace(location, path=path, display=location.show(run))
    return RetryingObjects(open_location(below, options), _PATIENCE)


def run_segments(url: RunUrl, options: StorageOptions) -> ObjectStore:
    """Open the segments in the store, or the stores, of the run itself."""
    return ObjectsBelow(RetryingObjects(open_objects(url, options), _PATIENCE), STEPS_PREFIX)


class Log:
    """A log that is turned off, with one warning, when it fails. All methods are for the training's thread.

    Args:
        options: of the log.
        location: of its folder.
        connect: opens its segments, given the run's nonce.
    """

    def __init__(self, options: StepLog, location: Location, connect: Callable[[str], ObjectStore]) -> None:
        self.off: str | None = None
        """Why the log is off; None while it is on."""
        self.blocked_s = self.blocked_cpu_s = 0.0
        """Seconds that the training's thread has spent in the log so far, everything; and CPU seconds, without waiting."""
        self._is_counting = False
        self._options, self._location, self._connect = options, location, connect
        self._reader: LogReader | None = None
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
        """Make sure, before training starts, that the log's folder can be written; `run` is the nonce of the run.

        Raises:
            StoreError: it cannot.
        """
        objects = self._connect(run)
        self._reader = LogReader(objects, run, self._options.kind)
        try:
            # Files left half-written by a killed writer would occupy space forever.
            objects.sweep(objects.server_time())
        except StoreError as error:
            raise StoreError(
                f"StepLog(url={self._location.display!r}) cannot be used for a log: {error}"
            ) from error

    def recover(self, step: int, prepare: Callable[[], Callable[[], None]]) -> int:
        """Replay what an exact log has after a restored state, and give the step of the state then; as of `TrainingLog.recover`."""
        return step

    def restart(self, step: int) -> None:
        """See `TrainingLog.restart`."""
        if self.off is None:
            with self._guarded():
                self._begin_at(step)

    def end_step(self, step: int, *, since: int, ends: bool) -> None:
        """See `TrainingLog.end_step`.

        Args:
            step: training steps done so far.
            since: the step before, where the log has not begun yet.
            ends: whether a segment of an exact log ends here.
        """
        if self._goes_on(since):
            with self._guarded():
                self._end_step(step, ends)

    def boundary(self, step: int) -> None:
        """See `TrainingLog.boundary`."""
        if self._goes_on(step):
            with self._guarded():
                self._boundary(step)

    def committed(self, step: int) -> None:
        """Take note that a checkpoint of this step is stored."""
        if self._writer is not None:
            self._writer.committed(step)

    def flush(self) -> None:
        """Wait until all whole segments are written."""
        if self._writer is not None:
            self._writer.flush()

    def close(self, *, whole: bool) -> None:
        """Write what is not written yet; `whole`: the state is that of the last `end_step`."""
        if self._writer is not None:
            self._writer.close()
            self._failed()

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

    def _begin_at(self, step: int) -> None:
        """Begin with a new writer, whose turn is higher than all that are there; segments that it does not inherit are removed.

        Raises:
            StoreError: the folder cannot be listed, or there is no higher turn.
        """
        if self._writer is not None:
            self._writer.close()
        assert self._reader is not None
        self._writer = SegmentWriter(
            self._reader,
            inherits=self._inherits,
            keep=self._options.keep,
            folder=self._location.path if self._location.kind == "local" else None,
        )

    def _end_step(self, step: int, ends: bool) -> None:
        raise NotImplementedError

    def _boundary(self, step: int) -> None:
        """Nothing, in a log of which a new chain begins when a checkpoint is stored."""

    def _stop(self) -> None:
        """Release everything that the log needs while it is on."""
        raise NotImplementedError

    def _goes_on(self, since: int) -> bool:
        """Return whether the log is on; it begins with the first step where nothing was resumed."""
        if self.off is None and self._writer is None:
            with self._guarded():
                self._begin_at(since)
        return not self._failed()

    def _failed(self) -> bool:
        """Return whether the log is off, also since its writer has failed meanwhile."""
        if self._writer is not None and self._writer.failure is not None:
            self._turn_off(self._writer.failure)
        return self.off is not None

    def _turn_off(self, reason: str) -> None:
        if self.off is not None:
            return
        self.off = reason
        self._stop()
        warn(f"the step log is off: {reason}. Training continues, and its checkpoints are saved as before")

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Count the time, and let no error of the log end the training."""
        try:
            with self.counted():
                yield
        except Warning:
            raise
        except Exception as error:  # noqa: BLE001 - any error of the log
            self._turn_off(reason_of(error))
