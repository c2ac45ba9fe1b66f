"""Where the weights that are trained, and averages of them, stand in a checkpoint of Lightning."""

from collections.abc import Mapping
from typing import Any

from lightning.pytorch import LightningModule, Trainer, callbacks

from shrinkpoint.state.roles import describe_training
from shrinkpoint.state.training import Describe

__all__ = ["describe_checkpoint", "followed_state", "trained_key"]

# ``WeightAveraging``, since Lightning 2.6, puts its average in the model's place and the model beside it.
_AVERAGING = getattr(callbacks, "WeightAveraging", ())
_BESIDE = "current_model_state"


def trained_key(checkpoint: Mapping[str, Any]) -> str:
    """Under which key a checkpoint has the state of the module that is trained."""
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
    """What of a checkpoint holds weights, and averages of them that exist from the start."""
    checkpoint: dict[str, Any] = {"state_dict": module.state_dict()}
    for callback in trainer.callbacks:
        if isinstance(callback, _AVERAGING):
            callback.on_save_checkpoint(trainer, module, checkpoint)
    return checkpoint
