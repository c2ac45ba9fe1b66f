"""One Composer run whose model FSDP2 shards: every rank saves and restores its part."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from composer.core import State
from composer.loggers import Logger

from shrinkpoint.engine.takeover import Adoption
from shrinkpoint.group.group import world
from shrinkpoint.integrations.composer.schedule import Settings
from shrinkpoint.integrations.composer.session import Session
from shrinkpoint.integrations.composer.state import (
    model_state,
    parameter_names,
    sharded_state,
    shards_model,
    trained_module,
)
from shrinkpoint.session.run_session import RunSession
from shrinkpoint.sharded.targets import require_model, reshard, target_for
from shrinkpoint.state.averages import AverageFinder
from shrinkpoint.state.roles import model_tags
from shrinkpoint.state.training import TensorSpec, TrainingState
from shrinkpoint.state.wrappers import named_parameters

__all__ = ["ShardedSession", "session_for"]

_PLACE = "place"  # of a stored state: each rank's own position in the data


def session_for(settings: Settings, state: State) -> Session:
    """The session that a trainer needs.

    Args:
        settings: the callback's options.
        state: while the trainer is being built.

    Raises:
        ConfigError: an option is not for sharded models.
    """
    return ShardedSession(settings) if shards_model(state) else Session(settings)


class ShardedSession(Session):
    """As `Session`; the first rank does nothing for the others, and all measure together.

    Args:
        settings: the callback's options.

    Raises:
        ConfigError: an option is not for sharded models.
    """

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self._own: Mapping[str, Mapping[str, Any]] = {}
        self._state: State | None = None

    def _new_run(self) -> RunSession:
        return RunSession(self.settings.run, targets=self._targets, own=lambda: self._own)

    def _require_adoptable(self, state: State) -> None:
        """Nothing: the owners' restored values travel back to the shards."""

    # ---- restoring

    def after_load(self, state: State, logger: Logger) -> None:
        """See `Session.after_load`."""
        self._state = state
        try:
            super().after_load(state, logger)
        finally:
            self._state = None

    def _targets(self, specs: Mapping[str, TensorSpec]) -> dict[str, torch.Tensor]:
        """The tensors that a restore fills: the model's own; new ones for all others, with shards where a parameter has them."""
        state = self._state
        assert state is not None
        module = trained_module(state)
        reshard(module)
        names = parameter_names(module)
        live = TrainingState.capture({"state": {"model": model_state(state)}}, shards=True).tensors
        require_model(
            specs,
            live,
            module,
            below="state/model/",
            writer="Composer's callback",
            named=lambda name: names.get(name, name),
        )
        parameters = {
            names.get(name, name): parameter
            for name, parameter in named_parameters(module, remove_duplicate=False)
        }
        averages = AverageFinder(module, model_tags(module))
        return {
            name: target_for(spec, live.get(name), parameters, averages, names)
            for name, spec in specs.items()
        }

    # ---- during training

    def _begin_saving(self, state: State) -> None:
        """Nothing: movement is counted from the first save on."""

    def _stored(self, state: State) -> dict[str, Any]:
        reshard(trained_module(state))
        place = self._data.state(state)
        self._own = {_PLACE: place}
        return world().on_every(lambda: {**sharded_state(state, place), "trained": self._trained_part(state)})

    def _adoption(self, state: State) -> Adoption:
        return replace(super()._adoption(state), live=lambda: {"state": sharded_state(state, {})["state"]})

    # ---- ending

    def _end(self, state: State) -> None:
        self.run.attend()
        self.run.warn_unsaved(int(state.timestamp.batch))
        super()._end(state)
