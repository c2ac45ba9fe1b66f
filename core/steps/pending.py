"""The exactly logged steps that wait to be written as one segment."""

from collections.abc import Sequence
from dataclasses import dataclass

from shrinkpoint.steps.buffers import CopiedState
from shrinkpoint.steps.record import Record, TensorTable, encode_record
from shrinkpoint.steps.segment import Place
from shrinkpoint.steps.writer import SegmentWriter

__all__ = ["Pending"]


@dataclass(frozen=True, kw_only=True)
class Pending:
    """A segment queued by the training thread."""

    begin: Place
    end: Place
    records: Sequence[Record]
    copied: Sequence[CopiedState]

    @property
    def nbytes(self) -> int:
        """Of its tensors."""
        return sum(copied.nbytes for copied in self.copied)

    def write(self, writer: SegmentWriter) -> None:
        """Write it; for the writer's thread.

        Raises:
            ShrinkpointError: it cannot be written.
        """
        for copied in self.copied:
            copied.wait()
        table = TensorTable()
        records = [encode_record(record, table) for record in self.records]
        writer.write(self.begin, self.end, records, table)

    def release(self) -> None:
        """Return its memory."""
        for copied in self.copied:
            copied.release()
