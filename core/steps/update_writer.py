"""The background half of the small log: quantizes snapshots of the weights, and writes segments of records."""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch

from shrinkpoint.errors import ChainError, FormatError, NoCheckpointError, StoreError
from shrinkpoint.state.tree import JSON
from shrinkpoint.steps.buffers import CopiedState
from shrinkpoint.steps.layout import Layout, UpdateSizes
from shrinkpoint.steps.record import TensorTable
from shrinkpoint.steps.segment import Place
from shrinkpoint.steps.updates import ReadersWeights, encode_updates
from shrinkpoint.steps.weight_copies import WeightCopy
from shrinkpoint.steps.writer import SegmentWriter

__all__ = ["ReadBase", "UpdateWriter"]

_WAITING = 64 * 2**20  # bytes of weights that may wait, however small the model is; of a large one two copies

ReadBase: TypeAlias = Callable[[int], Mapping[str, torch.Tensor]]
"""The weights that a reader of the checkpoint of a step gets; raises NoCheckpointError where there is none."""


@dataclass
class _Chain:
    """The records since one checkpoint."""

    base: int
    weights: Mapping[str, torch.Tensor]
    reader: ReadersWeights | None = None
    begin: Place | None = None


class UpdateWriter:
    """Quantizes and writes the records of a `SmallLog`, in the thread of a `SegmentWriter`.

    Args:
        writer: of the segments.
        read_base: reads a checkpoint's weights.
    """

    def __init__(self, writer: SegmentWriter, read_base: ReadBase) -> None:
        self._writer = writer
        self._read_base = read_base
        self._chain: _Chain | None = None
        self._table = TensorTable()
        self._nodes: list[JSON] = []
        self._problems: list[str] = []
        self.records = 0
        """Records made so far."""
        self.records_cpu_s = 0.0
        """CPU seconds that they took, without those of reading checkpoints."""
        self.skipped = 0
        """Records that were not made since the training changed weights while they were copied."""

    @property
    def has_base(self) -> bool:
        """Whether there is a checkpoint that records can refer to."""
        return self._chain is not None

    @property
    def failure(self) -> str | None:
        """Why nothing is written any more; None while it is."""
        return self._writer.failure

    @property
    def bytes(self) -> int:
        """Bytes written so far."""
        return self._writer.bytes

    @property
    def written(self) -> int | None:
        """The step up to which all is written."""
        return self._writer.written

    def take_problems(self) -> list[str]:
        """Messages since the last call."""
        found, self._problems = self._problems, []
        return found

    def rebase(self, step: int) -> None:
        """Let the next records refer to the checkpoint of this step, if it can be read."""
        self._writer.submit(lambda: self._rebase(step))

    def committed(self, step: int) -> None:
        """A checkpoint of this step is stored: see `SegmentWriter.committed`."""
        self._writer.committed(step)

    def sample(self, sizes: UpdateSizes, step: int, copied: CopiedState) -> bool:
        """Take a sample of a step that is not logged; True."""

        def note() -> None:
            copied.wait()
            sizes.note(step, copied.state.tensors)

        return self._writer.submit(note, release=copied.release)

    def submit(
        self,
        step: int,
        layout: Layout,
        sizes: UpdateSizes,
        copied: WeightCopy,
        remainder: CopiedState | None,
        *,
        last: bool,
        wait: bool,
    ) -> bool:
        """Make a record.

        Args:
            step: training steps done.
            layout: of the model.
            sizes: of its updates.
            copied: its tensors.
            remainder: the rest of the training's state, if it is logged.
            last: whether a segment ends with it.
            wait: wait for space in the queue if it is full.

        Returns:
            False if the queue is full; nothing is then recorded.
        """

        def release() -> None:
            copied.release()
            if remainder is not None:
                remainder.release()

        def record() -> None:
            started = time.thread_time()
            self._record(step, layout, sizes, copied, remainder, last)
            self.records_cpu_s += time.thread_time() - started

        size = layout.nbytes
        accepted = self._writer.submit(
            record,
            size,
            ahead=max(_WAITING - size, size),
            patience_s=math.inf if wait else 0.0,
            release=release,
        )
        if not accepted:
            release()
        return accepted

    def flush(self) -> None:
        """Wait until everything that was handed over is done."""
        self._writer.flush()

    def close(self) -> None:
        """Write the last segment, and end the thread."""
        self._writer.submit(self._seal)
        self._writer.close()

    # ---- in the thread

    def _rebase(self, step: int) -> None:
        try:
            weights = self._read_base(step)
        except NoCheckpointError:
            return  # a training that begins has none; one that retention has removed is followed by others
        except (StoreError, FormatError, ChainError) as error:
            self._problems.append(
                f"the step log goes on without the checkpoint of step {step}, which cannot be read: {error}"
            )
            return
        self._seal()
        self._chain = _Chain(step, weights)

    def _record(
        self,
        step: int,
        layout: Layout,
        sizes: UpdateSizes,
        copied: WeightCopy,
        remainder: CopiedState | None,
        last: bool,
    ) -> None:
        chain = self._chain
        if chain is None or step <= chain.base:
            return
        tensors = copied.wait()
        if tensors is None:
            self.skipped += 1
        else:
            if chain.reader is None:
                chain.reader = ReadersWeights(layout, chain.weights)
                chain.weights = {}
                chain.begin = Place(chain.base, chain.reader.digest())
            node = encode_updates(
                chain.reader, step, tensors, lambda arrays: sizes.scales(step, arrays), self._table
            )
            node["remainder"] = _encoded(remainder, self._table)
            self._nodes.append(node)
            self.records += 1
        # a segment without the rest of the state is of no use to a resume: the next one's end has it
        if last and not (tensors is None and remainder is not None):
            self._seal()

    def _seal(self) -> None:
        if not self._nodes or self._chain is None or self._chain.begin is None:
            return
        chain, nodes, table = self._chain, self._nodes, self._table
        assert chain.reader is not None
        assert chain.begin is not None
        self._nodes, self._table = [], TensorTable()
        end = Place(nodes[-1]["step"], nodes[-1]["digest"])
        self._writer.write(chain.begin, end, nodes, table, chain.reader.layout.to_json())
        chain.begin = end


def _encoded(remainder: CopiedState | None, table: TensorTable) -> JSON:
    if remainder is None:
        return None
    remainder.wait()
    state = remainder.state
    return {"tree": state.tree, "tensors": {name: table.add(t.clone()) for name, t in state.tensors.items()}}
