"""The exact step log of a training: recording every step, handling checkpoints, replaying when a run is resumed."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from shrinkpoint.errors import ConfigError, StoreError
from shrinkpoint.steps.buffers import Buffers, CopiedState
from shrinkpoint.steps.fingerprint import fingerprint
from shrinkpoint.steps.folder import LogFolder
from shrinkpoint.steps.hyperparameters import parameters_of
from shrinkpoint.steps.moment import Moment, Pending
from shrinkpoint.steps.options import StepLog, refuse_optimizers, steps_within
from shrinkpoint.steps.reader import FirstSegment
from shrinkpoint.steps.record import Record
from shrinkpoint.steps.recorder import Recorder
from shrinkpoint.steps.remainder import Remainder
from shrinkpoint.steps.replay import Rehearsal, Replay, ReplayBar
from shrinkpoint.steps.segment import Place, Reference
from shrinkpoint.steps.supervision import CannotLogError, Patience, Supervised
from shrinkpoint.steps.writer import SegmentWriter
from shrinkpoint.warn import warn

__all__ = ["ExactLog"]

_WARNED = 3


class ExactLog(Supervised):
    """Logs every optimizer step between two checkpoints, and replays them after a crash.

    The log only saves time: if it fails, it warns and the training continues without it. All methods are for the
    training's thread.

    Args:
        model: the module that is trained.
        optimizers: all optimizers of the module.
        stateful: further objects with a state, by name.
        options: of the log.
        folder: of its segments.
        after_step: repeats what the training does to large tensors after each step (averages of the weights).

    Raises:
        ConfigError: this training's steps cannot be logged.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        stateful: Mapping[str, Any],
        *,
        options: StepLog,
        folder: LogFolder,
        after_step: Callable[[], object] | None = None,
    ) -> None:
        super().__init__()
        refuse_optimizers(optimizers)
        if after_step is not None and not callable(after_step):
            raise ConfigError(f"after_step must be a function, not {type(after_step).__name__}")
        self._model = model
        self._optimizers = list(optimizers)
        self._options = options
        self._folder = folder
        self._after_step = after_step
        self._remainder = Remainder(model, self._optimizers, stateful, after_step)
        self._remainder.refuse()
        self._buffers = Buffers()
        self._recorder = Recorder(
            self._optimizers, failed=self._turn_off, before=self._before_step, counted=self.counted
        )
        self._writer: SegmentWriter | None = None
        self._inherits: list[Reference] = []
        self._first: FirstSegment | None = None
        self._rehearsal: Rehearsal | None = None
        self._rehearse = options.rehearse and after_step is None
        self._begin: Moment | Place | None = None
        self._sealed: Pending | None = None
        self._last: int | None = None
        self._records: list[Record] = []
        self._copied: list[CopiedState] = []
        self._patience = Patience(None if options.busy == "wait" else options.overhead)
        self._gap = False
        self.gaps = 0
        """How often nothing was logged until the next checkpoint, since the writer was too slow or steps were missing."""

    def open(self, run: str) -> None:
        """Make sure, before training starts, that the log's folder can be written, and record from now on.

        Args:
            run: the nonce of the run.

        Raises:
            StoreError: it cannot.
        """
        self._folder.open(run)
        self._recorder.start()

    # ---- resuming

    def expect(self, step: int) -> None:
        """Begin to read what would be replayed first, in another thread, while a checkpoint is being decoded.

        Args:
            step: of that checkpoint. Of several calls the last one counts: an older checkpoint, after a damaged one.
        """
        self._forget_first()
        self._first = FirstSegment(step, self._folder.reader)
        self._first.start()

    def _forget_first(self) -> None:
        if self._first is not None:
            self._first.drop()
        self._first = None

    def recover(self, step: int, prepare: Callable[[], Callable[[], None]]) -> int:
        """Replay the logged steps after a restored state; the next steps are logged as their continuation.

        Args:
            step: of that state.
            prepare: called before anything is changed; returns a function that restores the state again.

        Returns:
            The step of the state afterwards: `step`, or later.
        """
        try:
            return self._recover(step, prepare)
        finally:
            self._forget_first()

    def _recover(self, step: int, prepare: Callable[[], Callable[[], None]]) -> int:
        self._recorder.stop()
        self._sealed = None
        reader = self._folder.reader()
        try:
            survey = reader.survey()
        except StoreError as error:
            warn(f"the step log is not used: {error}")
            return step
        reached, problems = step, survey.problems
        if survey.references:
            with ReplayBar() as bar:
                replay = Replay(self._optimizers, self._remainder, self._after_step, reader, self._first, bar)
                replayed = replay.run(step, survey.references, prepare)
            self._inherits, reached = replayed.used, replayed.step
            problems = problems + replayed.problems
        if problems:
            more = f" (and {len(problems) - _WARNED} more)" if len(problems) > _WARNED else ""
            warn(
                f"the step log brings step {step} to {reached}, and the training computes what follows again. Not used:"
                f" {'; '.join(problems[:_WARNED])}{more}"
            )
        return reached

    def begin(self, step: int) -> None:
        """Log from here: the state is that of `step`."""
        if self.off is None:
            with self._guarded():
                self._take_turn(step)

    def _take_turn(self, step: int) -> None:
        if self._writer is not None:
            self._writer.close()
        self._writer = self._folder.writer(self._inherits)
        self._last = step

    def restart(self, step: int) -> None:
        """Start a new record after the state was set to that of `step` by other means than the recorded steps."""
        self._forget_first()
        self._recorder.start()
        self._begin, self._sealed, self._last = None, None, None
        self._forget_records()
        self.begin(step)

    # ---- training

    def end_step(self, step: int, *, since: int, boundary: bool = False) -> None:
        """A training step is over.

        Args:
            step: training steps done so far.
            since: the step before, where the log has not begun yet.
            boundary: whether a checkpoint of this step is due.
        """
        if self.off is not None:
            return
        with self._guarded():
            if self._writer is None:
                self._take_turn(since)
            if self._failed() or self._is_torn() or self._gap or self._last is None:
                return
            if step < self._last:
                self._leave_gap(f"the steps go from {self._last} back to {step}")
                return
            self._note(step)
            if boundary or len(self._records) >= self._segment_steps():
                self._seal()

    def boundary(self, step: int) -> None:
        """A checkpoint of this step is being saved: a replay may begin here."""
        if self.off is not None:
            return
        with self._guarded():
            if self._writer is None:
                self._take_turn(step)
            if self._failed():
                return
            if self._is_torn() or self._gap:
                self._gap = False
                self._recorder.start()
                self._begin, self._last = Place(step, self._digest()), step
                return
            if self._last is not None and (self._recorder.pending or step > self._last):
                self._note(step)
            if self._records:
                self._seal()

    def accumulates(self) -> bool:
        """Whether there are gradients that no recorded step has used."""
        parameters = [parameter for one in self._optimizers for parameter in parameters_of(one)]
        try:
            return any(isinstance(self._recorder.fate(parameter), torch.Tensor) for parameter in parameters)
        except CannotLogError:
            return False  # a capture raises it again

    def committed(self, step: int) -> None:
        """A checkpoint of this step is stored."""
        if self._writer is not None and self.off is None:
            self._writer.committed(step)

    def flush(self) -> None:
        """Wait until all whole segments are written; one whose digest was postponed, only if the weights are back."""
        if self._writer is None:
            return
        self._writer.flush()
        if self._sealed is not None and self._sealed.is_left and self._sealed.end.is_back():
            with self._guarded():
                self._settle()
            self._writer.flush()

    def close(self, *, whole: bool) -> None:
        """Write what is not written yet, and leave the optimizers as they were.

        Args:
            whole: whether the state is that of the last `end_step`; otherwise its steps since the last segment are dropped.
        """
        if self.off is None and whole and self._records and not self._recorder.pending:
            with self._guarded():
                self._seal()
        self._forget_first()
        self._recorder.close()
        self._forget_records()
        if self._writer is not None:
            self.flush()
            self._writer.close()
            self._failed()

    def _before_step(self, first: bool) -> None:
        """Called right before each recorded step, while the state is still that of the step before."""
        with self._guarded():
            self._settle()
        if first:
            self._before_first()

    def _settle(self) -> None:
        """Have the digest of the last segment, and hand that over again if it was postponed until now."""
        sealed, self._sealed = self._sealed, None
        if sealed is None:
            return
        sealed.end.settle()
        if sealed.is_left:
            self._submit(replace(sealed, again=True))

    def _submit(self, pending: Pending) -> bool:
        assert self._writer is not None
        writer = self._writer
        # Only when the segment before is written: a crash then loses the steps of two segments at most. The second time, that
        # has been waited for.
        with self._patience.spent():
            return writer.submit(
                lambda: pending.write(writer),
                pending.nbytes,
                patience_s=math.inf if pending.again else self._patience.left_s,
                release=pending.release,
            )

    def _before_first(self) -> None:
        with self._guarded():
            if self._begin is None and self._last is not None:
                self._begin = Place(self._last, self._digest())
            elif self._begin is None:
                self._begin = Place(-1, self._digest())  # its step is known when `begin` is called
            self._remainder.begin()
            if self._rehearse and Rehearsal.possible(self._optimizers):
                try:
                    self._rehearsal = Rehearsal(self._optimizers)
                except Exception as error:  # noqa: BLE001 - out of memory, or an optimizer that cannot be copied
                    warn(f"the replay of the logged steps is not tested: {type(error).__name__}: {error}")
            self._rehearse = False

    def _note(self, step: int) -> None:
        """Add a record; with ``after_step``, each contains the rest of the state, which that function may read."""
        assert self._last is not None
        events, copied = self._recorder.take()
        record = Record(begin=self._last, end=step, events=events)
        self._copied += copied
        self._last = step
        self._records.append(record if self._after_step is None else self._with_remainder(record))

    def _with_remainder(self, record: Record) -> Record:
        live = self._remainder.capture(self._recorder)
        copied = self._buffers.take("remainder", live.tensors, live.tree)
        self._copied.append(copied)
        return replace(record, remainder=copied.state)

    def _seal(self) -> None:
        """Make a segment of all records since the last one, with a digest of the state after it."""
        assert self._writer is not None
        assert self._last is not None
        self._settle()  # where no optimizer has made a step since
        self._remainder.check()
        if self._records[-1].remainder is None:
            self._records[-1] = self._with_remainder(self._records[-1])
        end = Moment(self._last, self._optimizers, self._remainder.made())
        begin = self._begin or end
        if isinstance(begin, Place) and begin.step < 0:
            begin = Place(self._records[0].begin, begin.digest)
        pending = Pending(begin=begin, end=end, records=self._records, copied=self._copied)
        if self._rehearsal is not None:
            self._rehearsed(pending)
        if not self._submit(pending):
            self._leave_gap(
                f"it cannot be written as fast as the training makes steps, which have waited for it by {self._options.overhead:.1%}"
                " of their time"
            )
            return
        self._begin, self._sealed, self._records, self._copied = end, pending, [], []
        self._recorder.forget_gradients()

    def _rehearsed(self, pending: Pending) -> None:
        rehearsal, self._rehearsal = self._rehearsal, None
        assert rehearsal is not None
        for copied in pending.copied:
            copied.wait()
        reason = rehearsal.obstacle(pending.records, self._optimizers, self._model)
        if reason is not None:
            raise CannotLogError(reason)

    def _segment_steps(self) -> int:
        size = sum(copied.nbytes for copied in self._copied) / max(1, len(self._records))
        return steps_within(self._options, size)

    def _digest(self) -> str:
        return fingerprint(self._optimizers, self._remainder.made())

    def _is_torn(self) -> bool:
        """Whether a step was not recorded; no more steps are then, until the next checkpoint."""
        if self._gap or not self._recorder.torn:
            return False
        self._leave_gap(
            "the optimizer has begun to write to its gradients during its step, while they were copied: from now on they are copied before"
        )
        return True

    def _failed(self) -> bool:
        if self._writer is not None and self._writer.failure is not None:
            self._turn_off(self._writer.failure)
        return self.off is not None

    def _leave_gap(self, reason: str) -> None:
        """Log nothing until the next checkpoint: steps after a gap cannot be replayed without one."""
        self._gap = True
        self.gaps += 1
        self._begin, self._sealed = None, None
        self._recorder.stop()
        self._forget_records()
        if self.gaps == 1:
            warn(
                f"the step log has a gap after step {self._last}: {reason}. It continues at the next checkpoint; with busy='wait'"
                " training waits for the log. This warning is shown once"
            )

    def _forget_records(self) -> None:
        for copied in self._copied:
            copied.release()
        self._records, self._copied = [], []

    def _stop(self) -> None:
        self._sealed = None
        self._recorder.stop()
        self._forget_records()
