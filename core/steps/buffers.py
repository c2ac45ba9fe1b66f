"""Host buffers for what is logged: taken by the training thread, given back by the thread that writes."""

from collections import deque
from collections.abc import Callable, Mapping

import torch

from shrinkpoint.state.snapshot import Snapshot, Snapshotter
from shrinkpoint.state.training import TrainingState

__all__ = ["Buffers", "CopiedState"]


class CopiedState:
    """One snapshot, and the way to give its memory back."""

    def __init__(self, snapshot: Snapshot, release: Callable[[], None]) -> None:
        self._snapshot = snapshot
        self.release = release
        """To be called once, when nothing of the snapshot is needed any more."""

    @property
    def state(self) -> TrainingState:
        """Its tensors may still be on their way from a GPU: `wait` before reading them."""
        return self._snapshot.state

    @property
    def nbytes(self) -> int:
        """Of its tensors."""
        return sum(tensor.nbytes for tensor in self._snapshot.state.tensors.values())

    def wait(self) -> None:
        """Until every copy has arrived; off the training thread."""
        self._snapshot.wait()


class Buffers:
    """Keeps `Snapshotter`s for reuse, so that logging takes no memory in steady state."""

    def __init__(self) -> None:
        self._free: dict[str, deque[Snapshotter]] = {}

    def take(self, what: str, tensors: Mapping[str, torch.Tensor], tree: object = None) -> CopiedState:
        """Copy tensors to the host.

        Args:
            what: buffers of one name are used for one thing, whose tensors keep their shapes.
            tensors: on any device.
            tree: goes with them.
        """
        free = self._free.setdefault(what, deque())
        try:
            snapshotter = free.pop()
        except IndexError:
            snapshotter = Snapshotter()
        snapshot = snapshotter.take(TrainingState(tree, dict(tensors), {}))
        return CopiedState(snapshot, lambda: free.append(snapshotter))
