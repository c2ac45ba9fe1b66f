"""The state at the end of a segment, whose digest the writer's thread takes while the training leaves it alone."""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shrinkpoint.steps.buffers import CopiedState
from shrinkpoint.steps.fingerprint import begin_digests, combined, digests_of, parts_of
from shrinkpoint.steps.record import Record, TensorTable, encode_record
from shrinkpoint.steps.segment import Place
from shrinkpoint.steps.supervision import CannotLogError
from shrinkpoint.steps.writer import SegmentWriter

__all__ = ["Moment", "Pending"]

_SAMPLED = 32


class Moment:
    """A step, and the digest of the state after it.

    Weights and optimizer states change in `optimizer.step()` only. From the end of one step to the beginning of the next one
    another thread can read them as they are, without a copy. The training calls `settle` before the next step: it then waits for
    a digest that has begun, and takes one itself that has not.

    Some trainings swap the weights in between, to validate averages of them. Then the thread's digest is `postponed`: the training
    takes it in `settle`, when the weights are back. That they are is not proven by it, since it looks at few elements; where they are
    not, the digest is that of no replayed state, and a replay ends before.

    Args:
        step: training steps done.
        optimizers: in the state after that step.
        more: other tensors that a replay must reproduce, by name.
    """

    def __init__(
        self,
        step: int,
        optimizers: Sequence[torch.optim.Optimizer],
        more: Mapping[str, torch.Tensor],
    ) -> None:
        self.step = step
        self._parts: dict[str, Any] = parts_of(optimizers, more)
        self._versions = _versions(self._parts)
        self._sample = _sample(self._parts)
        self._digest: str | None = None
        self._is_settled = False
        self.postponed = False
        """Whether the thread could not take the digest, since the state was another one just then; never False again."""
        self._lock = threading.Lock()
        self._from_devices: Callable[[], dict[str, str]] | None = None
        if any(torch.is_tensor(value) and not value.is_cpu for value in self._parts.values()):
            # the devices take theirs behind the training's work so far, and before what is queued next
            self._from_devices = begin_digests(self._parts)
            self._set(None)

    def take(self) -> bool:
        """Take the digest, for the writer's thread.

        Returns:
            Whether it can be had now; otherwise the training's `settle` takes it.
        """
        with self._lock:
            if self._is_settled:
                return True
            if self._is_undisturbed():
                digest = self._digested()
                if self._is_undisturbed():
                    self._set(digest)
                    return True
            self.postponed = True
            return False

    def settle(self) -> None:
        """Make sure that the digest is taken: the state may change afterwards. For the training's thread.

        Raises:
            CannotLogError: the state is another one now.
        """
        with self._lock:
            if self._is_settled:
                return
            if _sample(self._parts) != self._sample:
                self._set(None)
                raise self._changed()
            self._set(self._digested())

    def is_back(self) -> bool:
        """Whether the state is, as far as one sees, what it was; for the training's thread, before `settle`."""
        with self._lock:
            return not self._is_settled and _sample(self._parts) == self._sample

    def place(self) -> Place:
        """The step with its digest, once it is taken.

        Raises:
            CannotLogError: there is none: the state was changed, or `abandon` was called before.
        """
        with self._lock:
            if self._from_devices is not None:
                self._digest, self._from_devices = combined(self._from_devices()), None
        if self._digest is None:
            raise self._changed()
        return Place(self.step, self._digest)

    def abandon(self) -> None:
        """Take no digest any more, and forget the state."""
        with self._lock:
            self._from_devices = None
            self._set(self._digest)

    def _digested(self) -> str:
        try:
            return combined(digests_of(self._parts))
        except BaseException:
            self._set(None)
            raise

    def _set(self, digest: str | None) -> None:
        self._digest, self._parts, self._is_settled = digest, {}, True

    def _is_undisturbed(self) -> bool:
        return _versions(self._parts) == self._versions and _sample(self._parts) == self._sample

    def _changed(self) -> CannotLogError:
        return CannotLogError(
            f"weights or optimizer states were changed outside of optimizer.step() right after step {self.step}:"
            " averages, say, that were put in their place and are still there at the next step"
        )


def _versions(parts: Mapping[str, Any]) -> list[int]:
    return [value._version for value in parts.values() if torch.is_tensor(value) and not value.is_inference()]


def _sample(parts: Mapping[str, Any]) -> list[str]:
    """One element each of some parameters on the host: what swaps weights may do it through ``data``, of which torch counts no
    changes."""
    found = [
        value
        for name, value in parts.items()
        if name.count("/") == 1
        and torch.is_tensor(value)
        and value.is_cpu
        and value.layout == torch.strided
        and value.numel()
    ]
    some = found[:: -(-len(found) // _SAMPLED) or 1]
    # as text, in which a NaN equals itself
    return [repr(value[tuple(size // 2 for size in value.shape)].item()) for value in some]


@dataclass(frozen=True, kw_only=True)
class Pending:
    """A segment queued by the training thread."""

    begin: Moment | Place
    end: Moment
    records: Sequence[Record]
    copied: Sequence[CopiedState]
    again: bool = False
    """Whether it waits for the second time, since its digest was postponed."""

    @property
    def nbytes(self) -> int:
        """Of its tensors."""
        return sum(copied.nbytes for copied in self.copied)

    @property
    def is_left(self) -> bool:
        """Whether it is not written and keeps its memory, since the training is to take its digest."""
        return self.end.postponed and not self.again

    def write(self, writer: SegmentWriter) -> None:
        """Write it, unless its digest is postponed; for the writer's thread, which takes the digest of the state first: the
        training may wait for that.

        Raises:
            ShrinkpointError: it cannot be written.
            CannotLogError: the digest cannot be taken.
        """
        if not self.end.take():
            return
        end = self.end.place()
        begin = self.begin if isinstance(self.begin, Place) else self.begin.place()
        for copied in self.copied:
            copied.wait()
        table = TensorTable()
        records = [encode_record(record, table) for record in self.records]
        writer.write(begin, end, records, table)

    def release(self) -> None:
        """Return its memory, and let the training change the state; not yet where its digest is postponed."""
        if self.is_left:
            return
        self.end.abandon()
        for copied in self.copied:
            copied.release()
