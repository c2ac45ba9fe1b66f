"""The small step log of a training: quantized weight updates of every step, or of every k-th."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from shrinkpoint.errors import ShrinkpointError
from shrinkpoint.steps.buffers import Buffers, CopiedState
from shrinkpoint.steps.folder import LogFolder
from shrinkpoint.steps.layout import Layout, UpdateSizes
from shrinkpoint.steps.logged import LoggedWeights, chain_to
from shrinkpoint.steps.options import StepLog, steps_within
from shrinkpoint.steps.remainder import Remainder
from shrinkpoint.steps.segment import Reference
from shrinkpoint.steps.supervision import Cadence, CannotLogError, Supervised
from shrinkpoint.steps.update_writer import ReadBase, UpdateWriter
from shrinkpoint.steps.weight_copies import LiveTensors, WeightCopies
from shrinkpoint.warn import warn

__all__ = ["SmallLog"]


class SmallLog(Supervised):
    """Logs the weights of a training between two checkpoints in under one bit per element.

    It reads nothing of the optimizers. All methods are for the training's thread.

    Args:
        model: the module that is trained.
        optimizers: whose gradients are dropped where a training continues from logged weights.
        stateful: further objects with a state, by name.
        options: of the log.
        folder: of its segments.
        read_base: the weights that a reader of the checkpoint of a step gets; called in the log's thread.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        stateful: Mapping[str, Any],
        *,
        options: StepLog,
        folder: LogFolder,
        read_base: ReadBase,
    ) -> None:
        super().__init__()
        self._live = LiveTensors(model)
        self._options = options
        self._folder = folder
        self._read_base = read_base
        self._remainder = Remainder(model, optimizers, stateful, None)
        if options.resume_weights:
            self._remainder.refuse("small")
        self._buffers = Buffers()
        self._copies = WeightCopies(optimizers, self.counted)
        self._cadence = Cadence(options.every, options.overhead)
        self._writer: UpdateWriter | None = None
        self._inherits: list[Reference] = []
        self._base: int | None = None
        self._last: int | None = None
        self._layout: Layout | None = None
        self._fitting: Mapping[str, torch.Tensor] = {}
        self._logged: Mapping[str, torch.Tensor] = {}
        self._sizes: UpdateSizes | None = None
        self._sampled = False
        self._submitted = 0
        self._refused = 0

    @property
    def every(self) -> int:
        """Steps between two records; raised where `StepLog.overhead` requires it."""
        return self._cadence.every

    @property
    def share(self) -> float | None:
        """The share of the training's time that the log took when it was measured last."""
        return self._cadence.share

    @property
    def skipped(self) -> int:
        """Records that were not made, since earlier ones were still being written or the training changed weights while they were
        copied; the next one contains their updates."""
        return self._refused + (self._writer.skipped if self._writer is not None else 0)

    def open(self, run: str) -> None:
        """Make sure, before training starts, that the log can be written.

        Args:
            run: the nonce of the run.

        Raises:
            StoreError: it cannot.
        """
        self._folder.open(run)

    # ---- resuming

    def expect(self, step: int) -> None:
        """Nothing: which weights are read depends on what the log has, and on the model."""

    def recover(self, step: int, prepare: Callable[[], Callable[[], None]]) -> int:
        """Continue from the weights of the newest logged step, if `StepLog.resume_weights` says so.

        Args:
            step: of the restored state.
            prepare: called before anything is changed; returns a function that restores the state again.

        Returns:
            The step of the state afterwards: `step`, or later.
        """
        self._base = step
        if not self._options.resume_weights:
            return step
        live = self._live.current()
        try:
            found = LoggedWeights(self._folder.reader()).newest(step, live)
        except ShrinkpointError as error:
            warn(f"the step log is not used: {error}")
            return step
        if found is None:
            return step
        reload = prepare()
        self._copies.settle()
        try:
            with torch.no_grad():
                for name, tensor in found.tensors.items():
                    live[name].copy_(tensor)
            self._remainder.load(found.remainder)
        except Exception as error:  # noqa: BLE001 - an object's load_state_dict may raise anything
            warn(f"the logged state of step {found.step} does not fit: {error}")
            reload()
            return step
        warn(
            f"the training continues from the logged weights of step {found.step}, with the optimizer's state of step {step}"
            " (StepLog(resume_weights=True))"
        )
        return found.step

    def restart(self, step: int) -> None:
        """Log from here: the state is that of `step`."""
        base, self._base = (step if self._base is None else self._base), None
        if self.off is not None:
            return
        with self._guarded():
            self._copies.settle()
            self._take_turn(step)
            assert self._writer is not None
            self._writer.rebase(base)

    def _take_turn(self, step: int) -> None:
        if self._writer is not None:
            self._writer.close()
        self._inherits = self._earlier(step)
        writer = UpdateWriter(self._folder.writer(self._inherits), self._read_base)
        self._refused += self._writer.skipped if self._writer is not None else 0
        self._writer = writer
        self._last, self._sampled = step, False

    def _earlier(self, step: int) -> list[Reference]:
        """What earlier writers have logged since checkpoints that this training continues; none if it begins."""
        references = self._folder.reader().survey().references if step else []
        return [
            reference
            for index, reference in enumerate(references)
            if chain_to(references, index)[0].begin.step <= step
        ]

    # ---- training

    def end_step(self, step: int, *, since: int, boundary: bool = False) -> None:
        """A training step is over.

        Args:
            step: training steps done so far.
            since: the step before, where the log has not begun yet.
            boundary: of no meaning here: a new chain begins when a checkpoint is stored.
        """
        if self.off is not None:
            return
        with self._guarded():
            if self._writer is None:
                self._take_turn(since)
            if self._failed():
                return
            assert self._writer is not None
            if self._writer.has_base:
                self._log(step)
            self._last = step
        self._pace()

    def _log(self, step: int) -> None:
        assert self._writer is not None
        due = self._sampled and self._cadence.is_due(step, self._last)
        if not (due or not self._sampled or self._cadence.is_due(step + 1, step)):
            return
        tensors = self._live.current()
        sizes = self._fitted(tensors)
        if due:
            self._submit(step)
            if not self._live.lasting:  # they are the model's only here
                self._forget_tensors()
        else:
            copied = self._buffers.take("sample", sizes.sample(tensors))
            self._sampled = self._writer.sample(sizes, step, copied)

    def _submit(self, step: int) -> None:
        assert self._writer is not None
        assert self._layout is not None
        assert self._sizes is not None
        last = self._submitted + 1 >= self._segment_records()
        copied = self._copies.take(self._logged)
        rest = self._captured() if last and self._options.resume_weights else None
        wait = self._options.busy == "wait"
        if not self._writer.submit(step, self._layout, self._sizes, copied, rest, last=last, wait=wait):
            self._refused += 1
            return
        self._submitted = 0 if last else self._submitted + 1

    def _captured(self) -> CopiedState:
        live = self._remainder.capture(None)
        return self._buffers.take("remainder", live.tensors, live.tree)

    def _fitted(self, tensors: Mapping[str, torch.Tensor]) -> UpdateSizes:
        if self._layout is None or self._sizes is None:
            self._layout = Layout.of(tensors)
            self._sizes = UpdateSizes(self._layout, self._options.quantization_step)
        if tensors is not self._fitting or not self._live.lasting:
            name = self._layout.differing(tensors) or self._layout.untied(tensors)
            if name is not None:
                raise CannotLogError(
                    f"the model's tensor {name!r} is not there any more, is not tied to another one any more, or has another shape or dtype"
                )
            self._fitting = tensors
            logged = (*self._layout.coded, *self._layout.exact)
            self._logged = {spec.name: tensors[spec.name] for spec in logged}
        return self._sizes

    def _segment_records(self) -> int:
        assert self._layout is not None
        return steps_within(self._options, self._layout.nbytes)

    def _pace(self) -> None:
        if self._writer is None or self.off is not None or not self._writer.has_base:
            return
        before = self._cadence.every
        raised = self._cadence.step(
            blocked_s=self.blocked_s,
            cpu_s=self._writer.records_cpu_s + self._copies.cpu_s,
            records=self._writer.records,
        )
        if raised is not None:
            share = self._cadence.share or 0.0
            warn(
                f"the step log takes {share:.1%} of the training's time, more than overhead={self._options.overhead}: it now"
                f" contains every {raised} steps instead of every {before}"
            )

    def boundary(self, step: int) -> None:
        """A checkpoint of this step is being saved, and may be measured: the records after its commit refer to it."""
        with self._guarded():
            self._copies.settle()

    def committed(self, step: int) -> None:
        """A checkpoint of this step is stored: the next records refer to it."""
        if self._writer is not None and self.off is None:
            self._writer.rebase(step)
            self._writer.committed(step)

    def flush(self) -> None:
        """Wait until all whole segments are written."""
        if self._writer is not None:
            self._writer.flush()

    def close(self, *, whole: bool) -> None:
        """Write what is not written yet.

        Args:
            whole: of no meaning here: every record is of a whole step.
        """
        if self._writer is not None:
            self._writer.close()
            self._failed()
        self._copies.close()

    def _failed(self) -> bool:
        if self._writer is not None:
            for problem in self._writer.take_problems():
                warn(problem)
            if self._writer.failure is not None:
                self._turn_off(self._writer.failure)
        return self.off is not None

    def _stop(self) -> None:
        self._layout = self._sizes = None
        self._forget_tensors()
        self._copies.close()
        self._live.forget()

    def _forget_tensors(self) -> None:
        self._fitting = self._logged = {}
        self._copies.forget()
