"""A trainer's counters that are not in its state: the sum of the losses since its last log entry."""

from collections.abc import Mapping
from typing import Any

import torch

from shrinkpoint.integrations.common.ranks import rank, world_size

__all__ = ["Progress", "inside_epoch"]

_LAST_LOGGED = "_globalstep_last_logged"
_TOTAL = "_total_loss_scalar"
_FIRST_STEP = "_initial_global_step"
_SUM = "_tr_loss"


def inside_epoch(state: Any) -> bool:
    """Whether batches of the present epoch are still to be trained on."""
    return bool(state.epoch) and float(state.epoch) != round(state.epoch)


class Progress:
    """The sums behind the losses that a trainer logs, saved and put back."""

    def __init__(self) -> None:
        self._pending = 0.0

    def state(self, trainer: Any, tr_loss: torch.Tensor | None) -> dict[str, Any]:
        """This rank's sums.

        Args:
            trainer: after a step has been logged.
            tr_loss: the sum since it has logged last; None where training has ended.
        """
        return {
            "loss": 0.0 if tr_loss is None else float(tr_loss.item()),
            "total_loss": float(getattr(trainer, _TOTAL, 0.0)),
            "last_logged": int(getattr(trainer, _LAST_LOGGED, trainer.state.global_step)),
        }

    def restore(self, trainer: Any, stored: Mapping[str, Any]) -> None:
        """Put a checkpoint's sums and counts back; the trainer has just set them as if it had logged at this step.

        Args:
            trainer: about to train.
            stored: the checkpoint.
        """
        step, ranks = stored["trainer"]["global_step"], stored["ranks"]
        trainer.state.global_step = step  # it was given a different one where nothing is left to train
        setattr(trainer, _LAST_LOGGED, step)
        if hasattr(trainer, _FIRST_STEP):
            setattr(trainer, _FIRST_STEP, step)
        if len(ranks) != world_size():
            return
        own = ranks[rank()]
        setattr(trainer, _LAST_LOGGED, own["last_logged"])
        if hasattr(trainer, _FIRST_STEP):
            # Since transformers 5 the loss of a whole call is that of its own steps.
            setattr(trainer, _TOTAL, -sum(each["loss"] for each in ranks) / len(ranks))
        else:
            setattr(trainer, _TOTAL, own["total_loss"])
        if isinstance(getattr(trainer, _SUM, None), torch.Tensor):
            getattr(trainer, _SUM).fill_(own["loss"])
        else:
            self._pending = own["loss"]

    def add_pending(self, tr_loss: torch.Tensor) -> None:
        """Before the first step is logged, add the stored sum to the trainer's local variable."""
        if self._pending:
            tr_loss += self._pending
            self._pending = 0.0
