"""Locates the trained weights, and averages of them, in a checkpoint of Lightning."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from lightning.pytorch import LightningModule, Trainer, callbacks

from shrinkpoint.state.roles import describe_training
from shrinkpoint.state.stateful import plain_names
from shrinkpoint.state.training import Describe

__all__ = ["describe_checkpoint", "followed_state", "plainly_named", "trained_key", "with_own_names"]

# ``WeightAveraging``, since Lightning 2.6, stores its average in the model's place and the model under another key.
_AVERAGING = getattr(callbacks, "WeightAveraging", ())
_BESIDE = "current_model_state"


def trained_key(checkpoint: Mapping[str, Any]) -> str:
    """Return the key of the trained module's state in a checkpoint."""
    return _BESIDE if _BESIDE in checkpoint else "state_dict"


def describe_checkpoint(trainer: Trainer, module: LightningModule, checkpoint: Mapping[str, Any]) -> Describe:
    """Return the roles of the tensors of a checkpoint."""
    return describe_training(
        module,
        trainer.optimizers,
        model_path=(trained_key(checkpoint),),
        optimizers_path=("optimizer_states",),
    )


def followed_state(trainer: Trainer, module: LightningModule) -> dict[str, Any]:
    """Return the part of a checkpoint with weights, and averages of them that exist from the start."""
    with plainly_named(trainer, module):
        checkpoint: dict[str, Any] = {"state_dict": module.state_dict()}
        for callback in trainer.callbacks:
            if isinstance(callback, _AVERAGING):
                callback.on_save_checkpoint(trainer, module, checkpoint)
    return checkpoint


@contextmanager
def plainly_named(trainer: Trainer, module: LightningModule) -> Iterator[None]:
    """Inside the block the module, and an average of it, have names without those of wrappers."""
    averages = [getattr(part, "_average_model", None) for part in trainer.callbacks]
    with ExitStack() as stack:
        for model in (module, *averages):
            if model is not None:
                stack.enter_context(plain_names(model))
        yield


def with_own_names(checkpoint: dict[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Return a checkpoint whose weights have a module's own names again.

    Args:
        checkpoint: as it was stored.
        names: as of `own_names`; what is not among them keeps its name.
    """
    renamed = {
        key: {names.get(name, name): value for name, value in checkpoint[key].items()}
        for key in ("state_dict", _BESIDE)
        if key in checkpoint
    }
    return checkpoint | renamed
