"""The step log of a framework's training: the framework's own state is one object of what the log stores next to the steps.

It contains the states of all processes, which are gathered once for each segment, not for each step.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

from shrinkpoint.errors import ConfigError
from shrinkpoint.group.group import world
from shrinkpoint.io.loading import weights_of_step
from shrinkpoint.reports import SaveReport
from shrinkpoint.session.hook_states import HookStates
from shrinkpoint.session.settings import RunSettings
from shrinkpoint.store.run import RunStore

if TYPE_CHECKING:
    from shrinkpoint.steps.replicated import ReplicatedLog

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
        self._last = 0
        self._replayed: Mapping[str, Any] = {}
        self.shared: ReplicatedLog | None = None
        """The log, once training begins."""

    @property
    def is_wanted(self) -> bool:
        """Whether there is to be a log."""
        return self._settings.step_log is not None

    @property
    def is_exact(self) -> bool:
        """Whether the log continues a training exactly."""
        options = self._settings.step_log
        return options is not None and options.kind == "exact"

    def begin(self, model: nn.Module, optimizers: Sequence[Optimizer], store: RunStore) -> None:
        """Make the log when model and optimizers exist.

        Raises:
            ConfigError: there can be no such log of this training.
            StoreError: it cannot be written.
        """
        settings = self._settings
        if settings.step_log is None:
            return
        if settings.step_log.after_step is not None:
            raise ConfigError(
                "after_step is for Checkpointer: the callbacks' step logs have no averages of the weights (docs/resuming.md)"
            )
        from shrinkpoint.steps.replicated import ReplicatedLog  # most trainings have no log

        self.close()
        self.shared = ReplicatedLog(
            model,
            optimizers,
            {},
            settings.step_log,
            capture=dict,  # each segment's own
            share=lambda step: self._share(model, optimizers),
            run_url=settings.stores,
            storage_options=settings.storage_options,
            config=settings.saver,
            alone=True,
            read_base=lambda step: weights_of_step(settings.url, step, settings.storage_options),
        )
        self.shared.open(world().on_first(store.run_id))

    def recover(self, base: int, reload: Callable[[], None]) -> dict[str, Any] | None:
        """Replay what was logged since a checkpoint that has just been restored.

        Args:
            base: the step of the checkpoint.
            reload: restores weights and optimizers of the checkpoint again.

        Returns:
            The framework's state at the end of the replay, for every rank; None where nothing was replayed.
        """
        assert self.shared is not None
        self._replayed = {}
        reached = self.shared.recover(base, lambda: reload)
        replayed, self._replayed = self._replayed, {}
        return dict(replayed) if reached > base else None

    def _share(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Give the first rank's weights and optimizer states to the others, and the framework's state to all."""
        from shrinkpoint.steps.replicated import on_host

        assert self.shared is not None
        self._replayed = world().broadcast(self.shared.states.replayed)
        if world().size == 1:
            return
        first = world().is_first
        weights = world().broadcast(on_host(model.state_dict()) if first else {})
        states = world().broadcast([on_host(one.state_dict()) for one in optimizers] if first else [])
        if not first:
            model.load_state_dict(weights)
            for optimizer, state in zip(optimizers, states, strict=True):
                optimizer.load_state_dict(state)

    def restart(self, step: int) -> None:
        """Log from here: the state is that of this step."""
        self._last = step
        if self.shared is not None:
            self.shared.restart(step)

    def end_step(self, step: int, capture: Callable[[], Mapping[str, Any]], *, allowed: bool = True) -> None:
        """Take note that a training step is over.

        Args:
            step: training steps done.
            capture: the framework's state; called on every rank where a segment ends.
            allowed: whether training can be continued from this moment, so that a segment may end here.
        """
        if self.shared is None or step == self._last:
            return
        since, self._last = self._last, step
        self.shared.states.hook_bytes = self._hooks.nbytes
        self.shared.capture = capture
        self.shared.end_step(step, since=since, allowed=allowed)

    def boundary(self, step: int, captured: Mapping[str, Any]) -> None:
        """Take note that a checkpoint of this step is being saved.

        Args:
            step: training steps done.
            captured: the framework's state.
        """
        if self.shared is None:
            return
        self._last = step
        self.shared.states.hook_bytes = self._hooks.nbytes
        self.shared.capture = lambda: captured
        self.shared.boundary(step)
        self.shared.capture = dict

    def committed(self, reports: Sequence[SaveReport]) -> None:
        """Checkpoints are stored."""
        for report in reports:
            if self.shared is not None:
                self.shared.committed(report.step)

    def close(self) -> None:
        """Finish the log; does not communicate with other ranks."""
        shared, self.shared = self.shared, None
        if shared is not None:
            shared.close(whole=False)
