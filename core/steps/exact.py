"""The exact step log of a training: recording every step, handling checkpoints, replaying when a run is resumed."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from shrinkpoint.errors import ConfigError, StoreError
from shrinkpoint.state.stateful import parameters_of
from shrinkpoint.steps.capture import CannotLogError, Copied, Recorder
from shrinkpoint.steps.fingerprint import begin_fingerprint
from shrinkpoint.steps.log import Log
from shrinkpoint.steps.options import StepLog
from shrinkpoint.steps.record import Record, encode_record
from shrinkpoint.steps.remainder import Remainder
from shrinkpoint.steps.replay import Replay
from shrinkpoint.steps.segment import Place, TensorTable
from shrinkpoint.store.objects import ObjectStore
from shrinkpoint.store.urls import Location
from shrinkpoint.warn import warn

_WARNED = 3
_AT_ONCE_S = 1.0
"""Seconds that a training may wait before the share of its time counts."""


class ExactLog(Log):
    """Logs every optimizer step between two checkpoints, and replays them after a crash; arguments as of `TrainingLog` and `Log`.

    Raises:
        ConfigError: this training's steps cannot be logged.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        stateful: Mapping[str, Any],
        options: StepLog,
        location: Location,
        connect: Callable[[str], ObjectStore],
    ) -> None:
        super().__init__(options, location, connect)
        _refuse(optimizers)
        self._optimizers = list(optimizers)
        self._remainder = Remainder(model, self._optimizers, stateful, options.after_step)
        self._recorder = Recorder(self._optimizers, first=self._before_first, guarded=self._guarded)
        self._begin: Callable[[], str] | None = None
        """The digest of the state before the records; None before the first step."""
        self._last: int | None = None
        self._records: list[Record] = []
        self._copied: list[Copied] = []
        self._began, self._waited_s = time.monotonic(), 0.0
        self._gap = False
        self.gaps = 0
        """How often nothing was logged until the next checkpoint, since the writer was too slow or steps were missing."""

    def open(self, run: str) -> None:
        """See `Log.open`; records from now on."""
        super().open(run)
        self._recorder.start()

    def recover(self, step: int, prepare: Callable[[], Callable[[], None]]) -> int:
        """See `Log.recover`."""
        self._recorder.stop()
        assert self._reader is not None
        try:
            references, problems = self._reader.survey()
        except StoreError as error:
            warn(f"the step log is not used: {error}")
            return step
        reached = step
        if references:
            replay = Replay(self._optimizers, self._remainder, self._options.after_step, self._reader)
            reached, self._inherits, more = replay.run(step, references, prepare)
            problems += more
        if problems:
            others = f" (and {len(problems) - _WARNED} more)" if len(problems) > _WARNED else ""
            warn(
                f"the step log brings step {step} to {reached}, and the training computes what follows again. Not used:"
                f" {'; '.join(problems[:_WARNED])}{others}"
            )
        return reached

    def restart(self, step: int) -> None:
        """See `Log.restart`."""
        self._recorder.start()
        self._begin = None
        self._forget_records()
        super().restart(step)

    def _begin_at(self, step: int) -> None:
        super()._begin_at(step)
        self._last = step

    def _end_step(self, step: int, ends: bool) -> None:
        if self._gap or self._last is None:
            return
        if step < self._last:
            self._leave_gap(f"the steps go from {self._last} back to {step}")
            return
        self._note(step)
        if ends:
            self._seal()

    def _boundary(self, step: int) -> None:
        if self._gap:
            self._gap = False
            self._recorder.start()
            self._begin, self._last = self._digest(), step
            return
        if self._last is not None and (self._recorder.pending or step > self._last):
            self._note(step)
        if self._records:
            self._seal()

    def accumulates(self) -> bool:
        """Return whether there are gradients that no recorded step has used."""
        parameters = [parameter for one in self._optimizers for parameter in parameters_of(one)]
        try:
            return any(isinstance(self._recorder.fate(parameter), torch.Tensor) for parameter in parameters)
        except CannotLogError:
            return False  # a capture raises it again

    def close(self, *, whole: bool) -> None:
        """See `TrainingLog.close`; leaves the optimizers as they were."""
        if self.off is None and whole and self._records and not self._recorder.pending:
            with self._guarded():
                self._seal()
        self._recorder.close()
        self._forget_records()
        super().close(whole=whole)

    def _before_first(self) -> None:
        """Take note of the state right before the first recorded step."""
        if self._begin is None:
            self._begin = self._digest()
        self._remainder.begin()

    def _note(self, step: int) -> None:
        """Add a record; with ``after_step``, each contains the rest of the state, which that function may read."""
        assert self._last is not None
        events, copied = self._recorder.take()
        record = Record(begin=self._last, end=step, events=events)
        self._copied += copied
        self._last = step
        self._records.append(record if self._options.after_step is None else self._with_remainder(record))

    def _with_remainder(self, record: Record) -> Record:
        live = self._remainder.capture(self._recorder)
        copied = self._recorder.copies.take("remainder", live.tensors, live.tree)
        self._copied.append(copied)
        return replace(record, remainder=copied.state)

    def _seal(self) -> None:
        """Make a segment of all records since the last one, with a digest of the state after it.

        The digest is taken at once, before the training changes weights by other means, such as averages for a validation.
        """
        assert self._writer is not None
        self._remainder.check()
        if self._records[-1].remainder is None:
            self._records[-1] = self._with_remainder(self._records[-1])
        writer, records, copied, end = self._writer, self._records, self._copied, self._digest()
        begin = self._begin or end

        def write() -> None:
            for one in copied:
                one.snapshot.wait()
            table = TensorTable()
            nodes = [encode_record(record, table) for record in records]
            writer.write(Place(records[0].begin, begin()), Place(records[-1].end, end()), nodes, table)

        def release() -> None:
            for one in copied:
                one.release()

        # Only when the segment before is written: a crash then loses the steps of two segments at most.
        size, started = sum(one.nbytes for one in copied), time.monotonic()
        accepted = writer.submit(write, size, patience_s=self._patience_s(started), release=release)
        self._waited_s += time.monotonic() - started
        if not accepted:
            self._leave_gap(
                f"it cannot be written as fast as the training makes steps, which have waited for it by {self._options.overhead:.1%}"
                " of their time"
            )
            return
        self._begin, self._records, self._copied = end, [], []
        self._recorder.forget_gradients()

    def _patience_s(self, now: float) -> float:
        """Return seconds that the training may wait, of a share of its time so far and what it has waited."""
        share = self._options.overhead
        if share is None:
            return math.inf
        return max(0.0, _AT_ONCE_S + share * (now - self._began) - self._waited_s)

    def _digest(self) -> Callable[[], str]:
        return begin_fingerprint(self._optimizers, self._remainder.made())

    def _leave_gap(self, reason: str) -> None:
        """Log nothing until the next checkpoint: steps after a gap cannot be replayed without one."""
        self._gap = True
        self.gaps += 1
        self._begin = None
        self._recorder.stop()
        self._forget_records()
        if self.gaps == 1:
            warn(
                f"the step log has a gap after step {self._last}: {reason}. It continues at the next checkpoint; with overhead=None"
                " training waits for the log. This warning is shown once"
            )

    def _forget_records(self) -> None:
        for copied in self._copied:
            copied.release()
        self._records, self._copied = [], []

    def _stop(self) -> None:
        self._recorder.stop()
        self._forget_records()


def _refuse(optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Refuse what evaluates the loss several times in a step: its gradients are not those of one moment."""
    if not optimizers:
        raise ConfigError("step_log='exact' logs the steps of optimizers, and there is none: leave it out")
    for optimizer in optimizers:
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ConfigError(
                "step_log='exact' cannot log LBFGS, which computes gradients several times in each step: leave step_log out"
            )
        if not hasattr(optimizer, "register_step_pre_hook"):
            raise ConfigError(
                f"step_log='exact' needs the step hooks of torch.optim.Optimizer, and {type(optimizer).__name__} has none:"
                " leave step_log out"
            )
