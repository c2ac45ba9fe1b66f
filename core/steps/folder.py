"""Where a log's segments are: a folder near the training, the run's own store, or both."""

import platform
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from shrinkpoint.errors import StoreError
from shrinkpoint.steps.reader import LogReader
from shrinkpoint.steps.room import Room
from shrinkpoint.steps.segment import Kind, Reference
from shrinkpoint.steps.supervision import CannotLogError
from shrinkpoint.steps.tiers import NearAndRun
from shrinkpoint.steps.writer import SegmentWriter
from shrinkpoint.store.connect import Options, StorageOptions, open_location, open_objects
from shrinkpoint.store.keys import STEPS_PREFIX, new_nonce
from shrinkpoint.store.objects import ObjectsBelow, ObjectStore
from shrinkpoint.store.retry import RetryingObjects, RetryPolicy
from shrinkpoint.store.urls import Location, RunUrl
from shrinkpoint.version import __version__

__all__ = ["LogFolder", "near_segments", "run_segments"]

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


def run_segments(url: RunUrl, options: StorageOptions, parity: int | None = None) -> ObjectStore:
    """The segments in the store, or the stores, of the run itself."""
    return ObjectsBelow(RetryingObjects(open_objects(url, options, parity=parity), _PATIENCE), STEPS_PREFIX)


class LogFolder:
    """Makes the readers and writers of one log.

    Args:
        kind: of the log.
        connect: opens the log's segments, given the run's nonce.
        location: where they are.
        keep: intervals between checkpoints whose segments are kept.
        every: steps between two checkpoints, if known.
    """

    def __init__(
        self,
        kind: Kind,
        connect: Callable[[str], ObjectStore],
        location: Location,
        keep: int,
        every: int | None,
    ) -> None:
        self._kind = kind
        self._connect = connect
        self._location = location
        self._keep = keep
        self._every = every
        self._run = ""
        self._objects: ObjectStore | None = None

    def open(self, run: str) -> None:
        """Make sure that the folder can be used.

        Args:
            run: the nonce of the run.

        Raises:
            StoreError: it cannot.
        """
        self._run = run
        self._objects = self._connect(run)
        try:
            # Files left half-written by a killed writer would occupy space forever.
            self._objects.sweep(self._objects.server_time())
        except StoreError as error:
            raise StoreError(
                f"step_log_url={self._location.display!r} cannot be used for a log: {error}"
            ) from error

    def reader(self) -> LogReader:
        """A reader of the log."""
        assert self._objects is not None
        objects = self._objects
        stores = [objects.near, objects.far] if isinstance(objects, NearAndRun) else [objects]
        return LogReader(stores, self._run, self._kind)

    def writer(self, inherits: Sequence[Reference]) -> SegmentWriter:
        """A new writer, whose turn is higher than all that are there.

        Args:
            inherits: the segments that it continues from; all others are removed.

        Raises:
            StoreError: the folder cannot be listed.
            CannotLogError: there is no higher turn.
        """
        assert self._objects is not None
        turn = self.reader().next_turn()
        if turn > _MAX_TURN:
            raise CannotLogError(
                f"{self._objects.display} contains a segment with the last number that there is: remove it"
            )
        if isinstance(self._objects, NearAndRun):
            self._objects.complete()
        return SegmentWriter(
            self._objects,
            run=self._run,
            kind=self._kind,
            turn=turn,
            session=new_nonce(),
            inherits=inherits,
            provenance=_provenance(),
            keep=self._keep,
            # A small log is read from its checkpoint on, so that one interval more is kept.
            room=Room(self._location, self._keep + (self._kind == "small"), self._every),
        )


def _provenance() -> dict[str, str]:
    return {
        "shrinkpoint": __version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "machine": platform.machine(),
    }
