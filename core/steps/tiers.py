"""A log near the training, and its copy in the run's own store (LowDiff+, arXiv 2509.04084, section V)."""

import threading
from collections import deque
from collections.abc import Collection

from shrinkpoint.errors import ShrinkpointError, StoreError
from shrinkpoint.store.objects import MissingKeyError, ObjectInfo, ObjectStore
from shrinkpoint.warn import warn

__all__ = ["NearAndRun"]


class NearAndRun:
    """An `ObjectStore` of segments: written near the training, and copied from there in the background.

    After a failure of the process both are there, and the near one has more; after the loss of the machine only the copies
    are. `LogReader` reads both, and each segment from the one where it is sound.

    Args:
        near: written at once.
        far: gets copies, in the order of their writing; what is removed before it was copied is left out.
    """

    def __init__(self, near: ObjectStore, far: ObjectStore) -> None:
        self.near = near
        """The folder near the training."""
        self.far = far
        """The copies."""
        self._waiting: deque[str] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self.copied = 0
        """Segments that are in the run's store by now, of those that this process wrote."""
        self.failure: str | None = None
        """Why no more segments are copied; None while they are."""

    @property
    def display(self) -> str:
        """See `ObjectStore`."""
        return self.near.display

    @property
    def create_is_atomic(self) -> bool | None:
        """See `ObjectStore`."""
        return self.near.create_is_atomic

    def show(self, key: str) -> str:
        """See `ObjectStore`."""
        return self.near.show(key)

    def put_if_absent(self, key: str, data: bytes) -> bool:
        """See `ObjectStore`."""
        created = self.near.put_if_absent(key, data)
        if created:
            self._enqueue(key)
        return created

    def put(self, key: str, data: bytes) -> None:
        """See `ObjectStore`."""
        self.near.put(key, data)
        self._enqueue(key)

    def get(self, key: str, start: int | None = None, end: int | None = None, *, max_size: int) -> bytes:
        """See `ObjectStore`; of the near folder alone, since a reader knows both (`stores`)."""
        return self.near.get(key, start, end, max_size=max_size)

    def list(self, prefix: str, *, limit: int | None = None) -> list[ObjectInfo]:
        """See `ObjectStore`; of both."""
        near = self.near.list(prefix, limit=limit)
        try:
            far = self.far.list(prefix, limit=limit)
        except StoreError as error:
            warn(f"the copies of the step log cannot be listed, and are not used: {error}")
            return near
        found = {info.key: info for info in [*far, *near]}
        return [found[key] for key in sorted(found)][:limit]

    def delete(self, keys: Collection[str]) -> None:
        """See `ObjectStore`."""
        with self._changed:
            self._waiting = deque(key for key in self._waiting if key not in set(keys))
        self.near.delete(keys)
        try:
            self.far.delete(keys)
        except StoreError as error:
            self._fail(str(error))

    def server_time(self) -> float:
        """See `ObjectStore`."""
        return self.near.server_time()

    def sweep(self, before: float) -> int:
        """See `ObjectStore`."""
        return self.near.sweep(before)

    def complete(self) -> None:
        """Copy what a writer before this one has left behind, too."""
        try:
            copied = {info.key for info in self.far.list("")}
        except StoreError as error:
            self._fail(str(error))
            return
        for info in self.near.list(""):
            if info.key not in copied:
                self._enqueue(info.key)

    def flush(self) -> None:
        """Wait until everything is copied, or copying has failed."""
        with self._changed:
            while self._waiting and self.failure is None:
                self._changed.wait()

    def _enqueue(self, key: str) -> None:
        with self._changed:
            self._waiting.append(key)
            self._changed.notify_all()
            if self._thread is None:
                # A daemon: what is not copied when the process ends is in the near folder.
                self._thread = threading.Thread(target=self._work, name="shrinkpoint-steps-copy", daemon=True)
                self._thread.start()

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._waiting:
                    self._changed.wait()
                key = self._waiting[0]
            if self.failure is None:
                self._copy(key)
            with self._changed:
                if self._waiting and self._waiting[0] == key:
                    self._waiting.popleft()
                self._changed.notify_all()

    def _copy(self, key: str) -> None:
        try:
            size = next((info.size for info in self.near.list(key)), 0)
            self.far.put(key, self.near.get(key, max_size=size))
            self.copied += 1
            if not self.near.list(key):  # removed while it was copied
                self.far.delete([key])
        except MissingKeyError:
            pass  # removed meanwhile: a newer checkpoint has made it useless
        except ShrinkpointError as error:
            self._fail(str(error))

    def _fail(self, reason: str) -> None:
        if self.failure is None:
            self.failure = reason
            warn(f"the step log is no longer copied to the run: {reason}. Near the training it goes on")
