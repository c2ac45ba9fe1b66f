"""One Composer run whose model FSDP2 shards: every rank saves and restores its part."""

from collections.abc import Mapping

import torch
from composer.core import State
from composer.loggers import Logger

from shrinkpoint.integrations.composer.adapter import ComposerAdapter, ShardsAdapter
from shrinkpoint.integrations.composer.schedule import Settings
from shrinkpoint.integrations.composer.session import Session
from shrinkpoint.integrations.composer.state import (
    model_state,
    parameter_names,
    shards_model,
    trained_module,
)
from shrinkpoint.session.session import TrainingSession
from shrinkpoint.sharded.targets import require_model, reshard, target_for
from shrinkpoint.state.averages import AverageFinder
from shrinkpoint.state.roles import model_tags
from shrinkpoint.state.stateful import named_parameters
from shrinkpoint.state.training import TensorSpec, TrainingState

__all__ = ["ShardedSession", "session_for"]

_PLACE = "place"  # of a stored state: each rank's own position in the data


def session_for(settings: Settings, state: State) -> Session:
    """Return the session that a trainer needs.

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

    adapter: ShardsAdapter

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self._state: State | None = None

    def _new_adapter(self) -> ComposerAdapter:
        return ShardsAdapter(self.settings)

    def _new_run(self) -> TrainingSession:
        adapter = self.adapter
        return TrainingSession(self.settings.run, adapter, targets=self._targets, own=lambda: adapter.own)

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
