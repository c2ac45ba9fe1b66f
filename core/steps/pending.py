"""The exactly logged steps that wait to be written as one segment."""

from collections.abc import Sequence
from dataclasses import dataclass

from shrinkpoint.steps.buffers import CopiedState
from shrinkpoint.steps.moment import Moment
from shrinkpoint.steps.record import Record, TensorTable, encode_record
from shrinkpoint.steps.segment import Place
from shrinkpoint.steps.writer import SegmentWriter

__all__ = ["Pending"]


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
