"""A pool of host buffers for logged tensors: taken by the training thread, returned by the writer thread."""

import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from functools import cached_property

import torch

from shrinkpoint.state.snapshot import Snapshot, Snapshotter
from shrinkpoint.state.training import TrainingState

__all__ = ["Buffers", "CopiedState"]


class CopiedState:
    """One snapshot, with a method that returns its memory to the pool.

    Args:
        snapshot: or that of another thread, which is being made.
        free: returns the memory.
    """

    def __init__(self, snapshot: Snapshot | Future[Snapshot], free: Callable[[], None]) -> None:
        self._snapshot = snapshot
        self._free = free

    @property
    def state(self) -> TrainingState:
        """The copied state; copies from a GPU may be incomplete until `wait` returns.

        Raises:
            MemoryError: there was none for the copies.
        """
        return self._made.state

    @cached_property
    def nbytes(self) -> int:
        """Of its tensors."""
        return sum(tensor.nbytes for tensor in self.state.tensors.values())

    @property
    def _made(self) -> Snapshot:
        if isinstance(self._snapshot, Future):
            self._snapshot = self._snapshot.result()
        return self._snapshot

    def wait(self) -> None:
        """Wait until every copy has arrived; not on the training thread."""
        self._made.wait()

    def settle(self) -> None:
        """Wait until the other thread has read what it copies, whether or not it succeeded."""
        if isinstance(self._snapshot, Future):
            wait_for([self._snapshot])

    def release(self) -> None:
        """Return the memory; called once, when the snapshot is no longer needed."""
        self.settle()
        self._free()


class Buffers:
    """Keeps `Snapshotter`s for reuse, so that logging takes no memory in steady state.

    Args:
        name: of the thread that copies `during` something else.
    """

    def __init__(self, name: str = "shrinkpoint-gradients") -> None:
        self._name = name
        self._free: dict[str, deque[Snapshotter]] = {}
        self._thread: ThreadPoolExecutor | None = None
        self.cpu_s = 0.0
        """CPU seconds of the copies that were made in the other thread."""

    def take(
        self,
        what: str,
        tensors: Mapping[str, torch.Tensor],
        tree: object = None,
        *,
        during: bool = False,
        then: Callable[[Mapping[str, torch.Tensor]], None] | None = None,
    ) -> CopiedState:
        """Copy tensors to the host.

        Args:
            what: name of the buffers' purpose, for which the tensors keep their shapes.
            tensors: on any device.
            tree: plain data stored with them.
            during: return at once, and copy in another thread; the tensors must not change before the result's `state` is there.
            then: called in that thread with the copies.
        """
        free = self._free.setdefault(what, deque())
        try:
            snapshotter = free.pop()
        except IndexError:
            snapshotter = Snapshotter()
        state = TrainingState(tree, dict(tensors), {})
        snapshot: Snapshot | Future[Snapshot]
        if during:
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, self._name)
            snapshot = self._thread.submit(self._timed, snapshotter.prepare(state), then)
        else:
            snapshot = snapshotter.take(state)
        return CopiedState(snapshot, lambda: free.append(snapshotter))

    def close(self) -> None:
        """End the other thread, and keep no memory, until `take` is called again."""
        if self._thread is not None:
            self._thread.shutdown()
        self._thread, self._free = None, {}

    def _timed(
        self, copy: Callable[[], Snapshot], then: Callable[[Mapping[str, torch.Tensor]], None] | None
    ) -> Snapshot:
        started = time.thread_time()
        try:
            snapshot = copy()
            if then is not None:
                then(snapshot.state.tensors)
            return snapshot
        finally:
            self.cpu_s += time.thread_time() - started
