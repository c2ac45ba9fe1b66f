"""At which moments of a Lightning run a checkpoint can be taken from which the run continues exactly.

A checkpoint taken right after a batch makes Lightning skip the validation or the epoch's end that would have followed
(with a stateful dataloader the whole next epoch is lost). So a save that is due waits until those are over.
"""

import math

from lightning.pytorch import Trainer

__all__ = ["ends_epoch", "validation_follows"]


def ends_epoch(trainer: Trainer, batch_idx: int) -> bool:
    """Whether the batch that has just been done is its epoch's last one."""
    batches = trainer.fit_loop.epoch_loop.batch_progress
    return batch_idx + 1 >= trainer.num_training_batches or bool(batches.is_last_batch)


def validation_follows(trainer: Trainer, batch_idx: int) -> bool:
    """Whether Lightning may validate right after the batch that has just been done.

    A validation by wall-clock time cannot be foreseen.
    """
    if not trainer.enable_validation:
        return False
    if trainer.should_stop:  # it validates once more before it stops
        return True
    every, epochs = trainer.val_check_batch, trainer.check_val_every_n_epoch
    if every is None or math.isinf(every):
        return False
    if epochs is None:  # counted across epochs
        return bool((trainer.fit_loop.total_batch_idx + 1) % every == 0)
    return bool((trainer.current_epoch + 1) % epochs == 0 and (batch_idx + 1) % every == 0)
