"""The small step log of a training: quantized weight updates of every step, or of every k-th."""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from shrinkpoint.errors import ChainError, FormatError, NoCheckpointError, StoreError
from shrinkpoint.runtime.threads import processors
from shrinkpoint.state.stateful import plain_names
from shrinkpoint.state.tree import JSON
from shrinkpoint.steps.capture import CannotLogError, Copied, Copies
from shrinkpoint.steps.log import Log
from shrinkpoint.steps.options import StepLog
from shrinkpoint.steps.reader import ReadBase, chain_to
from shrinkpoint.steps.segment import Place, TensorTable
from shrinkpoint.steps.updates import Layout, ReadersWeights, UpdateSizes
from shrinkpoint.store.objects import ObjectStore
from shrinkpoint.store.urls import Location
from shrinkpoint.warn import warn

_WAITING = 64 * 2**20  # bytes of weights that may wait, however small the model is; of a large one two copies
_MEASURED = 20  # steps of a measurement of the log's cost
_MOST = 10_000  # steps between two records


@dataclass
class _Chain:
    """The records since one checkpoint."""

    base: int
    weights: Mapping[str, torch.Tensor]
    reader: ReadersWeights | None = None
    begin: Place | None = None


class SmallLog(Log):
    """Logs the weights of a training between two checkpoints in under one bit per element.

    It reads nothing of the optimizers, and a training continues from its checkpoints alone: what is logged is no exact state. The
    writer's thread quantizes and writes. Arguments are as of `TrainingLog` and `Log`.
    """

    def __init__(
        self,
        model: nn.Module,
        options: StepLog,
        location: Location,
        connect: Callable[[str], ObjectStore],
        read_base: ReadBase,
    ) -> None:
        super().__init__(options, location, connect)
        self._model = model
        self._read_base = read_base
        self._copies = Copies()
        self._last = 0
        self._layout: Layout | None = None
        self._sizes: UpdateSizes | None = None
        self._sampled = False
        self._submitted = 0
        self.every = options.every
        """Steps between two records; raised where `StepLog.overhead` requires it."""
        self.share: float | None = None
        """The share of the training's time that the log took when it was measured last."""
        self._since: tuple[float, float, int] | None = None
        self._steps = 0
        # of the writer's thread
        self._chain: _Chain | None = None
        self._table = TensorTable()
        self._nodes: list[JSON] = []
        self._problems: list[str] = []
        self._records = 0
        self._records_cpu_s = 0.0

    def _begin_at(self, step: int) -> None:
        """Continue what earlier writers have logged since checkpoints that this training continues; none if it begins."""
        assert self._reader is not None
        references = self._reader.survey()[0] if step else []
        self._inherits = [
            reference
            for index, reference in enumerate(references)
            if chain_to(references, index)[0].begin.step <= step
        ]
        self._end_segment()
        super()._begin_at(step)
        self._chain, self._nodes, self._table = None, [], TensorTable()
        self._last, self._sampled = step, False
        self._rebase(step)

    def _end_step(self, step: int, ends: bool) -> None:
        self._warn_of_problems()
        if self._chain is not None:
            self._log(step)
        self._last = step
        self._pace()

    def _is_due(self, step: int, last: int) -> bool:
        return step // self.every > last // self.every

    def _log(self, step: int) -> None:
        """Copy the weights of a step that is due; of the one before it a sample, which gives the size of an update."""
        due = self._sampled and self._is_due(step, self._last)
        if not (due or not self._sampled or self._is_due(step + 1, step)):
            return
        with plain_names(self._model) as inner:
            state = inner.state_dict(keep_vars=True)
        tensors = {name: tensor for name, tensor in state.items() if isinstance(tensor, torch.Tensor)}
        layout, sizes = self._fitted(tensors)
        if due:
            logged = {spec.name: tensors[spec.name] for spec in layout.specs}
            self._submit(step, layout, sizes, self._copies.take("all", logged))
        else:
            self._submit_sample(step, sizes, self._copies.take("sample", sizes.sample(tensors)))

    def _fitted(self, tensors: Mapping[str, torch.Tensor]) -> tuple[Layout, UpdateSizes]:
        if self._layout is None or self._sizes is None:
            self._layout = Layout.of(tensors)
            self._sizes = UpdateSizes(self._layout, self._options.quantization_step)
        name = self._layout.differing(tensors) or self._layout.untied(tensors)
        if name is not None:
            raise CannotLogError(
                f"the model's tensor {name!r} is not there any more, is not tied to another one any more, or has another shape or dtype"
            )
        return self._layout, self._sizes

    def _submit_sample(self, step: int, sizes: UpdateSizes, copied: Copied) -> None:
        assert self._writer is not None

        def note() -> None:
            copied.snapshot.wait()
            sizes.note(step, copied.state.tensors)

        self._sampled = self._writer.submit(note, release=copied.release)

    def _submit(self, step: int, layout: Layout, sizes: UpdateSizes, copied: Copied) -> None:
        assert self._writer is not None
        size = layout.nbytes
        last = self._submitted + 1 >= self._options.steps_of_segment(size)

        def record() -> None:
            started = time.thread_time()
            copied.snapshot.wait()
            self._record(step, layout, sizes, copied.state.tensors)
            if last:
                self._seal()
            self._records_cpu_s += time.thread_time() - started

        if self._writer.submit(
            record,
            size,
            ahead=max(_WAITING - size, size),
            patience_s=math.inf if self._options.overhead is None else 0.0,
            release=copied.release,
        ):
            self._submitted = 0 if last else self._submitted + 1
        else:  # earlier ones are still being written: the next record has these updates too
            copied.release()

    def _pace(self) -> None:
        """Raise the interval between records until the log is within its share of the training's time.

        Its cost is the time that training waits, and the CPU time of its thread divided among the processors: what it takes from
        a training that uses them all.
        """
        if self._chain is None:
            return
        now = time.perf_counter(), self.blocked_s + self._records_cpu_s / processors(), self._records
        self._steps += 1
        if self._since is None:
            self._since, self._steps = now, 0
        at, taken, records = (one - before for one, before in zip(now, self._since, strict=True))
        if self._steps < _MEASURED or records < 2:
            return
        self.share = taken / max(at, 1e-9)
        self._since, self._steps = now, 0
        overhead = self._options.overhead
        if overhead is None or self.share <= overhead or self.every >= _MOST:
            return
        before, self.every = self.every, min(_MOST, math.ceil(self.every * self.share / overhead))
        warn(
            f"the step log takes {self.share:.1%} of the training's time, more than overhead={overhead}: it now contains every"
            f" {self.every} steps instead of every {before}"
        )

    def committed(self, step: int) -> None:
        """See `Log.committed`; the next records refer to this checkpoint."""
        if self.off is None:
            self._rebase(step)
        super().committed(step)

    def close(self, *, whole: bool) -> None:
        """See `TrainingLog.close`; every record is of a whole step."""
        self._end_segment()
        super().close(whole=whole)
        self._warn_of_problems()

    def _end_segment(self) -> None:
        if self._writer is not None:
            self._writer.submit(self._seal)

    def _warn_of_problems(self) -> None:
        while self._problems:
            warn(self._problems.pop(0))

    def _stop(self) -> None:
        self._layout = self._sizes = None

    # ---- in the writer's thread

    def _rebase(self, step: int) -> None:
        """Let the next records refer to the checkpoint of this step, if it can be read."""

        def rebase() -> None:
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

        if self._writer is not None:
            self._writer.submit(rebase)

    def _record(
        self, step: int, layout: Layout, sizes: UpdateSizes, tensors: Mapping[str, torch.Tensor]
    ) -> None:
        chain = self._chain
        if chain is None or step <= chain.base:
            return
        if chain.reader is None:
            chain.reader = ReadersWeights(layout, chain.weights)
            chain.weights = {}
            chain.begin = Place(chain.base, chain.reader.digest())
        self._nodes.append(
            chain.reader.encode(step, tensors, lambda arrays: sizes.scales(step, arrays), self._table)
        )
        self._records += 1

    def _seal(self) -> None:
        if not self._nodes or self._chain is None:
            return
        chain, nodes, table = self._chain, self._nodes, self._table
        assert self._writer is not None
        assert chain.reader is not None
        assert chain.begin is not None
        self._nodes, self._table = [], TensorTable()
        end = Place(nodes[-1]["step"], nodes[-1]["digest"])
        self._writer.write(chain.begin, end, nodes, table, chain.reader.layout.to_json())
        chain.begin = end
