"""The step log of a training that several processes run on copies of a model: the first one writes and replays it.

Gradients are the same on all. What differs, generators and positions in the data, is gathered once for each segment, and not for
each step; it is one object of the rest of the state. After a replay the first process gives its state to the others.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from shrinkpoint.group.group import world
from shrinkpoint.steps.capture import CannotLogError
from shrinkpoint.steps.opening import log_of_training
from shrinkpoint.steps.options import StepLog, nbytes_of, steps_of_segment

__all__ = ["ReplicatedLog", "on_host"]

_NEVER = 10_000
"""Steps of a segment that ends where all ranks say so."""
_NAME = "the training"  # no keyword of a Checkpointer
_ALLOWANCE = 256 * 1024  # for each process


class ReplicatedLog:
    """An `ExactLog` or `SmallLog` on the first of the processes that train copies of a model, or on the only one.

    Every method but `committed`, `flush` and `close` is called on every rank.

    Args:
        model: the module that is trained.
        optimizers: all that train it.
        stateful: further objects with a state, by name.
        options: of the log.
        capture: what is each rank's own, gathered on the first; called on every rank where a segment ends.
        share: gives the first rank's state to the others after a replay; called on every rank with the step.
        run: the checkpoints' side, as of `log_of_training`.

    Raises:
        ConfigError: there can be no such log of this training; on every rank.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        stateful: Mapping[str, Any],
        options: StepLog,
        *,
        capture: Callable[[], Mapping[str, Any]],
        share: Callable[[int], None],
        **run: Any,
    ) -> None:
        self.states = StatesOfRanks()
        self.capture, self._share = capture, share
        self._is_exact = options.kind == "exact"
        self._steps = steps_of_segment(options, nbytes_of(optimizers))
        self._since = 0
        if self._is_exact:
            options = replace(options, segment_steps=_NEVER)  # segments end here, on every rank
        objects = {**stateful, _NAME: self.states}
        self.log = world().on_every(
            lambda: log_of_training(model, optimizers, objects, options, **run) if world().is_first else None
        )
        """The log itself, on the first rank."""

    def open(self, run: str) -> None:
        """See `Log.open`."""
        world().on_every(lambda: None if self.log is None else self.log.open(run))

    def recover(self, step: int, prepare: Callable[[], Callable[[], None]]) -> int:
        """See `ExactLog.recover`.

        Args:
            step: of the restored state.
            prepare: called on the first rank alone.
        """
        self.states.replayed = {}
        reached = world().on_first(lambda: step if self.log is None else self.log.recover(step, prepare))
        if reached > step:
            self._share(reached)
        self.states.replayed = {}
        return reached

    def restart(self, step: int) -> None:
        """See `ExactLog.restart`."""
        self._since = 0
        if self.log is not None:
            self.log.restart(step)

    def end_step(self, step: int, *, since: int, boundary: bool = False, allowed: bool = True) -> None:
        """See `ExactLog.end_step`.

        Args:
            step: training steps done so far.
            since: the step before.
            boundary: whether a checkpoint of this step is due.
            allowed: whether training can be continued from this moment, so that a segment may end here.
        """
        self._since += 1
        due = boundary or (allowed and self._since >= self._steps)
        if due:
            self._take()
        if self.log is not None:
            self.log.end_step(step, since=since, boundary=due)
        self.states.captured = {}

    def boundary(self, step: int) -> None:
        """See `ExactLog.boundary`."""
        self._take()
        if self.log is not None:
            self.log.boundary(step)
        self.states.captured = {}

    def _take(self) -> None:
        self._since = 0
        if self._is_exact:
            with nullcontext() if self.log is None else self.log.counted():
                self.states.captured = self.capture()

    def committed(self, step: int) -> None:
        """See `Log.committed`."""
        if self.log is not None:
            self.log.committed(step)

    def flush(self) -> None:
        """See `Log.flush`."""
        if self.log is not None:
            self.log.flush()

    def close(self, *, whole: bool) -> None:
        """See `ExactLog.close`."""
        if self.log is not None:
            self.log.close(whole=whole)


class StatesOfRanks:
    """What is each rank's own, as an object that the first one's log stores and restores."""

    def __init__(self) -> None:
        self.captured: Mapping[str, Any] = {}
        """The present states, while a segment ends."""
        self.replayed: Mapping[str, Any] = {}
        """The states at the end of a replay; empty where nothing was replayed."""
        self.hook_bytes = 0
        """Of these, in the states of communication hooks."""
        self.obstacle: str | None = None
        """Why these states are not enough to continue from."""

    @property
    def log_allowance(self) -> int:
        """Bytes of these states that may be logged: the generators of each process take most of the others."""
        return world().size * _ALLOWANCE + self.hook_bytes

    def state_dict(self) -> Mapping[str, Any]:
        """What was gathered last.

        Raises:
            CannotLogError: there is more that is each rank's own.
        """
        if self.obstacle is not None:
            raise CannotLogError(self.obstacle)
        return self.captured

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Keep them for all ranks."""
        self.replayed = state


def on_host(value: Any) -> Any:
    """A copy of a state whose tensors are on the host."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if isinstance(value, Mapping):
        return {key: on_host(item) for key, item in value.items()}
    return [on_host(item) for item in value] if isinstance(value, list) else value
