"""Determines the moments of a Lightning run at which a checkpoint allows an exact resume.

A checkpoint taken right after a batch makes Lightning skip the validation or the epoch's end that would have followed
(with a stateful dataloader the whole next epoch is lost). So a due save is delayed until those are over.

When training ends in the middle of an epoch, Lightning ends the epoch too: its hooks run, and its counters advance. A
longer training cannot be continued from there, so the last checkpoint is taken before that.
"""

import math

from lightning.pytorch import Trainer


def ends_epoch(trainer: Trainer, batch_idx: int) -> bool:
    """Return whether the present batch is its epoch's last one."""
    batches = trainer.fit_loop.epoch_loop.batch_progress
    return batch_idx + 1 >= trainer.num_training_batches or bool(batches.is_last_batch)


def ends_training(trainer: Trainer, *, last_batch: bool) -> bool:
    """Return whether Lightning makes no step after the present batch, as far as is known at its end, or that of a
    validation or an epoch."""
    steps, epochs = trainer.max_steps, trainer.max_epochs
    if steps is not None and 0 <= steps <= trainer.global_step:
        return True
    # Lightning counts an epoch as done only after the hooks at its end.
    if last_batch and epochs is not None and 0 <= epochs <= trainer.current_epoch + 1:
        return True
    return _stops_early(trainer)


def _stops_early(trainer: Trainer) -> bool:
    return trainer.should_stop and getattr(trainer.fit_loop, "_can_stop_early", True)


def validation_follows(trainer: Trainer, batch_idx: int) -> bool:
    """Return whether Lightning may validate right after the present batch.

    A validation by wall-clock time cannot be foreseen.
    """
    if not trainer.enable_validation:
        return False
    if _stops_early(trainer):  # it validates once more before it stops
        return True
    every, epochs = trainer.val_check_batch, trainer.check_val_every_n_epoch
    if every is None or math.isinf(every):
        return False
    if epochs is None:  # counted across epochs
        return bool((trainer.fit_loop.total_batch_idx + 1) % every == 0)
    return bool((trainer.current_epoch + 1) % epochs == 0 and (batch_idx + 1) % every == 0)
