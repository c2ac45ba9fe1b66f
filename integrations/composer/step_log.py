"""The step log of a Composer run: its state without weights and optimizers, and the replay of a resume."""

from collections.abc import Mapping
from typing import Any

from composer.core import State
from composer.loggers import Logger

from shrinkpoint.errors import ConfigError
from shrinkpoint.integrations.common.run_session import RunSession
from shrinkpoint.integrations.common.step_log import SessionLog
from shrinkpoint.integrations.composer.state import load_state, stored_state, trained_module

__all__ = ["replayed", "rest_of", "start_log"]

_NOT_IN_THE_REST = ("model", "optimizers")


def start_log(run: RunSession, state: State) -> None:
    """Make the log, if one is wanted.

    Raises:
        ConfigError: there can be no such log of this training.
        StoreError: it cannot be written.
    """
    if run.log.is_wanted and state.fsdp_enabled:
        raise ConfigError(
            "step_log= is not available with FSDP, where no process has all gradients: leave it out"
        )
    run.log.begin(trained_module(state), state.optimizers, run.saver)


def rest_of(stored: Mapping[str, Any]) -> dict[str, Any]:
    """A stored state without what the log restores by itself."""
    rest = {key: value for key, value in stored["state"].items() if key not in _NOT_IN_THE_REST}
    return {**stored, "state": rest}


def replayed(
    log: SessionLog, stored: dict[str, Any], state: State, logger: Logger, url: str
) -> dict[str, Any]:
    """Replay the logged steps after a checkpoint that has just been loaded.

    Args:
        log: of the run.
        stored: the checkpoint.
        state: of the run.
        logger: for Composer.
        url: the run's, for messages.

    Returns:
        The stored state that the run continues from: the checkpoint's, or that after the last replayed step.
    """
    if not log.is_wanted:
        return stored
    base, model = int(state.timestamp.batch), trained_module(state)
    rest = log.recover(base, model, state.optimizers, lambda: load_state(stored, state, logger, url))
    if rest is not None:
        now = stored_state(state, [], [])["state"]
        kept = {key: now[key] for key in _NOT_IN_THE_REST}
        stored = {**rest, "state": {**rest["state"], **kept}}
        load_state(stored, state, logger, url)
    log.restart(int(state.timestamp.batch))
    return stored
