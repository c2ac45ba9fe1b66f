"""The step log of a hand-written loop that several processes run on copies of a model: the first one writes and replays it.

Gradients are the same on all. What differs, generators and positions in the data, is gathered once for each segment, and not for
each step; it is one object of the rest of the state. After a replay the first process gives its state to the others.
"""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch

from shrinkpoint.errors import ConfigError
from shrinkpoint.group.group import Distributed
from shrinkpoint.loop.objects import LoopObjects
from shrinkpoint.loop.replicas import ReplicatedObjects
from shrinkpoint.steps.exact import ExactLog
from shrinkpoint.steps.hyperparameters import parameters_of
from shrinkpoint.steps.opening import LogRequest, TrainingLog, log_of_training
from shrinkpoint.steps.options import StepLog, steps_of_segment
from shrinkpoint.steps.supervision import CannotLogError

__all__ = ["NEVER", "ReplicatedLog", "StatesOfRanks", "log_of_loop", "on_host"]

NEVER = 10_000
"""Steps of a segment that ends where all ranks say so."""
_ALLOWANCE = 256 * 1024  # for each process
_NAME = "every process"  # no keyword of a Checkpointer


def log_of_loop(
    objects: LoopObjects, stateful: Mapping[str, Any], request: LogRequest, **run: Any
) -> "TrainingLog | ReplicatedLog | None":
    """Make the log that a loop asks for: where several processes train copies of its model, on the first of them.

    Args:
        objects: of the loop.
        stateful: further objects with a state, by name.
        request: the options.
        run: the checkpoints' side, as of `log_of_training`.

    Raises:
        ConfigError: there can be no such log of this training; on every rank.
    """

    def make(more: Mapping[str, Any], options: StepLog | None) -> TrainingLog | None:
        own = replace(request, step_log=options)
        return log_of_training(objects.model, objects.optimizers, {**stateful, **more}, own, **run)

    if isinstance(objects, ReplicatedObjects) and request.options is not None:
        return ReplicatedLog(objects, request.options, make)
    return make({}, request.options)


class ReplicatedLog:
    """As `ExactLog` or `SmallLog`, on one of the processes that train copies of a model.

    Every method but `measured`, `committed`, `flush` and `close` is called on every rank.

    Args:
        objects: of the loop.
        options: of the log.
        make: makes the first rank's log, with further objects with a state, and these options.

    Raises:
        ConfigError: there can be no such log of this training; on every rank.
    """

    def __init__(
        self,
        objects: ReplicatedObjects,
        options: StepLog,
        make: Callable[[Mapping[str, Any], StepLog], TrainingLog | None],
    ) -> None:
        if options.resume_weights:
            raise ConfigError(
                "resume_weights=True is for one process: leave it out, and resume from checkpoints"
            )
        self._objects = objects
        self._group = Distributed()
        self._states = StatesOfRanks(self._group.size)
        self._is_exact = options.kind == "exact"
        self._steps = steps_of_segment(options, objects.optimizers)
        self._since = 0
        if self._is_exact:
            options = replace(options, segment_steps=NEVER)  # segments end here, on every rank
        self.log = self._group.on_every(
            lambda: make({_NAME: self._states}, options) if self._group.rank == 0 else None
        )
        """The log itself, on the first rank."""

    @property
    def off(self) -> str | None:
        """Why the log is off; known on the first rank."""
        return None if self.log is None else self.log.off

    @property
    def blocked_s(self) -> float:
        """Seconds that the first rank's training has spent in the log so far, and the others have waited for."""
        return 0.0 if self.log is None else self.log.blocked_s

    @property
    def blocked_cpu_s(self) -> float:
        """The CPU seconds of `blocked_s`."""
        return 0.0 if self.log is None else self.log.blocked_cpu_s

    @property
    def bytes(self) -> int:
        """Bytes written so far; known on the first rank."""
        return 0 if self.log is None else self.log.bytes

    @property
    def written(self) -> int | None:
        """The step up to which all is written; known on the first rank."""
        return None if self.log is None else self.log.written

    def open(self, run: str) -> None:
        """See `ExactLog.open`."""
        self._group.on_every(lambda: None if self.log is None else self.log.open(run))

    def expect(self, step: int) -> None:
        """See `ExactLog.expect`; of use on the first rank alone."""
        if self.log is not None:
            self.log.expect(step)

    def recover(self, step: int, prepare: Callable[[], Callable[[], None]]) -> int:
        """See `ExactLog.recover`.

        Args:
            step: of the restored state.
            prepare: called on the first rank alone.
        """
        self._states.replayed = None
        log = self.log
        reached = self._group.broadcast(
            self._group.on_every(lambda: step if log is None else log.recover(step, prepare))
        )
        if reached > step:
            self._share(reached)
        self._states.replayed = None
        return reached

    def _share(self, step: int) -> None:
        """Give the first rank's state to the others, with what is each one's own."""
        first = self._group.rank == 0
        state = gradients = None
        if first:
            state = on_host({**LoopObjects.state(self._objects, step), **(self._states.replayed or {})})
            gradients = [on_host(parameter.grad) for parameter in self._parameters()]
        self._objects.load(self._group.broadcast(state), "", warns=False)
        found = self._group.broadcast(gradients)
        if not first:
            for parameter, gradient in zip(self._parameters(), found or (), strict=True):
                parameter.grad = None if gradient is None else gradient.to(parameter.device)

    def _parameters(self) -> list[torch.Tensor]:
        return [parameter for one in self._objects.optimizers for parameter in parameters_of(one)]

    def restart(self, step: int) -> None:
        """See `ExactLog.restart`."""
        self._since = 0
        if self.log is not None:
            self.log.restart(step)

    def end_step(self, step: int, *, since: int, boundary: bool = False) -> None:
        """See `ExactLog.end_step`."""
        self._since += 1
        due = boundary or self._since >= self._steps
        if due:
            self._take()
        if self.log is not None:
            self.log.end_step(step, since=since, boundary=due)

    def boundary(self, step: int) -> None:
        """See `ExactLog.boundary`."""
        self._take()
        if self.log is not None:
            self.log.boundary(step)

    def _take(self) -> None:
        """Gather what is each rank's own, where a segment ends."""
        self._since = 0
        if not self._is_exact:
            return
        with nullcontext() if self.log is None else self.log.counted():
            self._states.captured = self._objects.of_ranks()
            if isinstance(self.log, ExactLog):
                self._states.accumulated = self.log.accumulates()
                self._states.hook = self._objects.stateful_hook

    def committed(self, step: int) -> None:
        """See `ExactLog.committed`."""
        if self.log is not None:
            self.log.committed(step)

    def flush(self) -> None:
        """See `ExactLog.flush`."""
        if self.log is not None:
            self.log.flush()

    def close(self, *, whole: bool) -> None:
        """See `ExactLog.close`."""
        if self.log is not None:
            self.log.close(whole=whole)


class StatesOfRanks:
    """What is each rank's own, as an object that the first one's log stores and restores.

    Args:
        world: how many ranks there are.
    """

    def __init__(self, world: int) -> None:
        self._world = world
        self.captured: Mapping[str, Any] = {}
        """The present states, set before each segment ends."""
        self.replayed: dict[str, Any] | None = None
        """The states at the end of a replay; None where nothing was replayed."""
        self.hook_bytes = 0
        """Of these, in the states of communication hooks."""
        self.accumulated = False
        """Whether there are gradients that no step has used, other ones on each rank."""
        self.hook: str | None = None
        """The name of a communication hook's state that is not among these."""

    @property
    def log_allowance(self) -> int:
        """Bytes of these states that may be logged: the generators of each process take most of the others."""
        return self._world * _ALLOWANCE + self.hook_bytes

    def state_dict(self) -> Mapping[str, Any]:
        """What was gathered last.

        Raises:
            CannotLogError: there is more that is each rank's own.
        """
        if self.accumulated:
            raise CannotLogError(
                "gradients are accumulated over several calls of Checkpointer.step, other ones on each process: call it after"
                " optimizer.step() only"
            )
        if self.hook is not None:
            raise CannotLogError(
                f"the state of the DDP communication hook, a {self.hook}, is each process's own, and not logged here: the callbacks"
                " of Lightning and Composer log it"
            )
        return self.captured

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keep them for all ranks."""
        self.replayed = state


def on_host(value: Any) -> Any:
    """A copy of a state whose tensors are on the host."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if isinstance(value, Mapping):
        return {key: on_host(item) for key, item in value.items()}
    return [on_host(item) for item in value] if isinstance(value, list) else value
