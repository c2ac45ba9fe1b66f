"""A pool of host buffers for logged tensors: taken by the training thread, returned by the writer thread."""

from collections import deque
from collections.abc import Callable, Mapping

import torch

from shrinkpoint.state.snapshot import Snapshot, Snapshotter
from shrinkpoint.state.training import TrainingState

__all__ = ["Buffers", "CopiedState"]


class CopiedState:
    """One snapshot, with a method that returns its memory to the pool."""

    def __init__(self, snapshot: Snapshot, release: Callable[[], None]) -> None:
        self._snapshot = snapshot
        self.release = release
        """Returns the memory; called once, when the snapshot is no longer needed."""

    @property
    def state(self) -> TrainingState:
        """The copied state; copies from a GPU may be incomplete until `wait` returns."""
        return self._snapshot.state

    @property
    def nbytes(self) -> int:
        """Of its tensors."""
        return sum(tensor.nbytes for tensor in self._snapshot.state.tensors.values())

    def wait(self) -> None:
        """Wait until every copy has arrived; not on the training thread."""
        self._snapshot.wait()


class Buffers:
    """Keeps `Snapshotter`s for reuse, so that logging takes no memory in steady state."""

    def __init__(self) -> None:
        self._free: dict[str, deque[Snapshotter]] = {}

    def take(self, what: str, tensors: Mapping[str, torch.Tensor], tree: object = None) -> CopiedState:
        """Copy tensors to the host.

        Args:
            what: name of the buffers' purpose, for which the tensors keep their shapes.
            tensors: on any device.
            tree: plain data stored with them.
        """
        free = self._free.setdefault(what, deque())
        try:
            snapshotter = free.pop()
        except IndexError:
            snapshotter = Snapshotter()
        snapshot = snapshotter.take(TrainingState(tree, dict(tensors), {}))
        return CopiedState(snapshot, lambda: free.append(snapshotter))
