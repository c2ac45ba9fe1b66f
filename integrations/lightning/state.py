"""Locates the trained weights, and averages of them, in a checkpoint of Lightning."""

from collections.abc import Mapping
from typing import Any

from lightning.pytorch import LightningModule, Trainer, callbacks

from shrinkpoint.state.roles import describe_training
from shrinkpoint.state.training import Describe

__all__ = ["describe_checkpoint", "followed_state", "trained_key"]

# ``WeightAveraging``, since Lightning 2.6, stores its average in the model's place and the model under another key.
_AVERAGING = getattr(callbacks, "WeightAveraging", ())
_BESIDE = "current_model_state"


def trained_key(checkpoint: Mapping[str, Any]) -> str:
    """The key of the trained module's state in a checkpoint."""
    return _BESIDE if _BESIDE in checkpoint else "state_dict"


def describe_checkpoint(trainer: Trainer, module: LightningModule, checkpoint: Mapping[str, Any]) -> Describe:
    """The roles of the tensors of a checkpoint."""
    return describe_training(
        module,
        trainer.optimizers,
        model_path=(trained_key(checkpoint),),
        optimizers_path=("optimizer_states",),
    )


def followed_state(trainer: Trainer, module: LightningModule) -> dict[str, Any]:
    """The part of a checkpoint with weights, and averages of them that exist from the start."""
    checkpoint: dict[str, Any] = {"state_dict": module.state_dict()}
    for callback in trainer.callbacks:
        if isinstance(callback, _AVERAGING):
            callback.on_save_checkpoint(trainer, module, checkpoint)
    return checkpoint
