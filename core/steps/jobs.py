"""A queue of jobs for one background thread, bounded by the memory that they hold."""

import math
import threading
import time
from collections import deque
from collections.abc import Callable

from shrinkpoint.errors import ShrinkpointError

__all__ = ["JobQueue"]


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
