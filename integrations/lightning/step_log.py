"""The step log of a Lightning run: its state without weights and optimizers, and where a replay takes place.

Lightning loads a checkpoint in two parts: model and callbacks before the optimizers exist, loops and optimizers after
``on_fit_start``. A replay takes place there, and changes what the second part is restored from.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lightning.pytorch import LightningModule
from lightning.pytorch.trainer import call

from shrinkpoint.integrations.lightning.adapter import LightningAdapter

if TYPE_CHECKING:
    from shrinkpoint.steps.training import TrainingLog

__all__ = ["replay"]


def replay(log: "TrainingLog", adapter: LightningAdapter) -> int:
    """Replay the logged steps after the checkpoint that Lightning is loading; in ``on_fit_start``, on every rank.

    Returns:
        The step that the training continues from.
    """
    trainer, module = adapter.trainer, adapter.module
    connector: Any = trainer._checkpoint_connector
    loaded: dict[str, Any] = connector._loaded_checkpoint
    base = int(loaded["global_step"])
    connector.restore_optimizers()
    reached, rest = log.recover(base, lambda: _reloader(connector, module))
    if reached == base:
        return base
    loaded.clear()
    loaded.update(
        rest,
        state_dict=module.state_dict(),
        optimizer_states=[optimizer.state_dict() for optimizer in trainer.optimizers],
    )
    call._call_lightning_module_hook(trainer, "on_load_checkpoint", loaded)
    connector.restore_datamodule()
    connector.restore_callbacks()
    return int(rest["global_step"])


def _reloader(connector: Any, module: LightningModule) -> Callable[[], None]:
    loaded = connector._loaded_checkpoint

    def reload() -> None:
        module.load_state_dict(loaded["state_dict"])
        connector.restore_optimizers()

    return reload
