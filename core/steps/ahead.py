"""Reads the segment that a replay begins with while the checkpoint before it is still being decoded."""

import threading
from collections.abc import Callable

from shrinkpoint.steps.reader import LogReader
from shrinkpoint.steps.record import UnpackedTensors
from shrinkpoint.steps.segment import Head, Reference

__all__ = ["FirstSegment"]


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
