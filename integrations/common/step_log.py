"""The step log of a framework's training, on every process: the first one writes and replays it.

A framework's own state is one object of the log's remainder. It contains the states of all processes, which are gathered once
for each segment, not for each step.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

from shrinkpoint.errors import ConfigError
from shrinkpoint.group.group import world
from shrinkpoint.integrations.common.hook_states import HookStates
from shrinkpoint.integrations.common.settings import RunSettings
from shrinkpoint.loading import weights_of_step
from shrinkpoint.reports import SaveReport
from shrinkpoint.saver import Saver

if TYPE_CHECKING:
    from shrinkpoint.loop.replicated_log import StatesOfRanks
    from shrinkpoint.steps.opening import TrainingLog
    from shrinkpoint.steps.options import StepLog

__all__ = ["SessionLog"]


class SessionLog:
    """Drives a training's log from a framework's session; every method is called on every rank.

    Args:
        settings: the callback's options.
        hooks: the states of DDP's communication hooks, which are part of the framework's state.
    """

    def __init__(self, settings: RunSettings, hooks: HookStates) -> None:
        self._settings = settings
        self._hooks = hooks
        self._options = None if settings.step_log is None else settings.step_log.options
        self._state: StatesOfRanks | None = None
        self._steps = 0
        self._since = 0
        self._last = 0
        self.every: int | None = None
        """Optimizer steps between two checkpoints, where the framework's session knows it beforehand."""
        self.log: TrainingLog | None = None
        """The log, on the first rank, once training begins."""

    @property
    def is_wanted(self) -> bool:
        """Whether there is to be a log."""
        return self._options is not None

    @property
    def is_exact(self) -> bool:
        """Whether the log continues a training exactly."""
        return self._options is not None and self._options.kind == "exact"

    def begin(self, model: nn.Module, optimizers: Sequence[Optimizer], saver: Saver) -> None:
        """Make the log when model and optimizers exist.

        Raises:
            ConfigError: there can be no such log of this training.
            StoreError: it cannot be written.
        """
        options = self._options
        if options is None:
            return
        from shrinkpoint.loop.replicated_log import StatesOfRanks
        from shrinkpoint.steps.options import steps_of_segment

        if options.resume_weights:
            raise ConfigError(
                "resume_weights=True is for Checkpointer: leave it out, and resume from checkpoints"
            )
        self._steps, self._state = steps_of_segment(options, optimizers), StatesOfRanks(world().size)
        world().on_first(lambda: self._open(options, model, optimizers, saver))

    def _open(
        self, options: "StepLog", model: nn.Module, optimizers: Sequence[Optimizer], saver: Saver
    ) -> None:
        from shrinkpoint.loop.replicated_log import NEVER
        from shrinkpoint.steps.opening import log_of_training

        if self.log is not None:
            self.log.close(whole=False)
        settings = self._settings
        assert settings.step_log is not None
        steps = (
            NEVER if options.kind == "exact" else options.segment_steps
        )  # segments end here, on every rank
        self.log = log_of_training(
            model,
            optimizers,
            {"trainer": self._state},
            replace(settings.step_log, step_log=replace(options, segment_steps=steps)),
            run_url=settings.url,
            storage_options=settings.storage_options,
            parity=settings.parity,
            config=settings.saver,
            every=self.every,
            alone=True,
            read_base=lambda step: weights_of_step(settings.url, step, settings.storage_options),
        )
        assert self.log is not None
        self.log.open(saver.store.run_id())

    def recover(
        self,
        base: int,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        reload: Callable[[], None],
    ) -> dict[str, Any] | None:
        """Replay what was logged since a checkpoint that has just been restored.

        Args:
            base: the step of the checkpoint.
            model: the module, with its weights.
            optimizers: with their states.
            reload: restores weights and optimizers of the checkpoint again.

        Returns:
            The framework's state at the end of the replay, for every rank; None where nothing was replayed.
        """
        assert self._state is not None
        self._state.replayed = None
        reached = world().on_first(
            lambda: self.log.recover(base, lambda: reload) if self.log is not None else base
        )
        replayed: dict[str, Any] | None = world().broadcast(self._state.replayed if reached > base else None)
        if replayed is not None and world().size > 1:
            _share(model, optimizers)
        self._state.replayed = None
        return replayed

    def restart(self, step: int) -> None:
        """Log from here: the state is that of this step."""
        self._since, self._last = 0, step
        if self.log is not None:
            self.log.restart(step)

    def end_step(self, step: int, capture: Callable[[], Mapping[str, Any]], *, allowed: bool = True) -> None:
        """A training step is over.

        Args:
            step: training steps done.
            capture: the framework's state; called on every rank where a segment ends.
            allowed: whether training can be continued from this moment, so that a segment may end here.
        """
        if self._options is None or step == self._last:
            return
        assert self._state is not None
        since, self._last = self._last, step
        self._since += 1
        due = allowed and self.is_exact and self._since >= self._steps
        if due:
            # The log counts what the training waits for it: on the first rank, that of all.
            with self.log.counted() if self.log is not None else nullcontext():
                self._take(capture())
            self._since = 0
        if self.log is not None:
            self.log.end_step(step, since=since, boundary=due)
        self._state.captured = {}

    def boundary(self, step: int, captured: Mapping[str, Any]) -> None:
        """A checkpoint of this step is being saved.

        Args:
            step: training steps done.
            captured: the framework's state.
        """
        if self._options is None:
            return
        assert self._state is not None
        self._since, self._last = 0, step
        self._take(captured)
        if self.log is not None:
            self.log.boundary(step)
        self._state.captured = {}

    def _take(self, captured: Mapping[str, Any]) -> None:
        assert self._state is not None
        self._state.captured, self._state.hook_bytes = captured, self._hooks.nbytes

    def committed(self, reports: Sequence[SaveReport]) -> None:
        """Checkpoints are stored."""
        for report in reports:
            if self.log is not None:
                self.log.committed(report.step)

    def close(self) -> None:
        """Finish the log; does not communicate with other ranks."""
        log, self.log = self.log, None
        if log is not None and world().is_first:
            log.close(whole=False)


def _share(model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Give the first rank's weights and optimizer states to the others."""
    from shrinkpoint.loop.replicated_log import on_host

    weights = world().broadcast(on_host(model.state_dict()) if world().is_first else None)
    states = world().broadcast(
        [on_host(one.state_dict()) for one in optimizers] if world().is_first else None
    )
    if not world().is_first:
        assert weights is not None
        assert states is not None
        model.load_state_dict(weights)
        for optimizer, state in zip(optimizers, states, strict=True):
            optimizer.load_state_dict(state)
