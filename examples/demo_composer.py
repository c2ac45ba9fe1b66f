"""The demo's training with Composer: `composer_gpt.py`, watched."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import composer
import torch
from composer import Callback, Logger, State, Trainer
from composer.callbacks import CheckpointSaver
from composer_gpt import ComposerGPT, train
from demo_train import EventLog, Task
from gpt import GPT, build_optimizer, loss_on

from shrinkpoint.callbacks.composer import CompressedCheckpoint

QUIET = {"progress_bar": False}


class LossLog(Callback):
    """Logs where training starts and every loss after it."""

    def __init__(self, task: Task) -> None:
        self._log, self._held_out = task.log, task.held_out

    def fit_start(self, state: State, logger: Logger) -> None:
        # Evaluated right after the restore, as in demo_lightning.py.
        step = int(state.timestamp.batch)
        loss = loss_on(state.model.model, self._held_out) if step else None
        self._log.write("start", step=step, val_loss=loss, threads=torch.get_num_threads())

    def batch_end(self, state: State, logger: Logger) -> None:
        loss = float(state.total_loss_dict["loss/train/total"])
        self._log.write("train", step=int(state.timestamp.batch), loss=loss)

    def eval_end(self, state: State, logger: Logger) -> None:
        loss = float(state.eval_metric_values["loss"])
        self._log.write("val", step=int(state.timestamp.batch), loss=loss)

    def fit_end(self, state: State, logger: Logger) -> None:
        loss = loss_on(state.model.model, self._held_out)
        self._log.write("end", step=int(state.timestamp.batch), val_loss=loss)


class TimedTorchSave(CheckpointSaver):
    """Composer's ordinary checkpoints, with their size on disk and the time they take logged."""

    def __init__(self, log: EventLog, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._log = log

    def batch_checkpoint(self, state: State, logger: Logger) -> None:
        before, started = self.last_checkpoint_batch, time.perf_counter()
        super().batch_checkpoint(state, logger)
        seconds = time.perf_counter() - started
        if self.last_checkpoint_batch != before:
            size = Path(self.saved_checkpoints[-1]).stat().st_size
            self._log.write("torch_save", step=int(state.timestamp.batch), bytes=size, seconds=seconds)


def version() -> str:
    return f"Composer {composer.__version__}"


def reference(task: Task) -> None:
    ordinary = TimedTorchSave(
        task.log, task.url, save_interval=f"{task.every}ba", num_checkpoints_to_keep=1, overwrite=True
    )
    train(task.config, [LossLog(task), ordinary], every=task.every, seed=task.seed, **QUIET)


def compressed(task: Task) -> GPT:
    checkpoints = CompressedCheckpoint(task.url, save_interval=f"{task.every}ba", **task.saving)
    trainer = train(task.config, [LossLog(task), checkpoints], every=task.every, seed=task.seed, **QUIET)
    return trainer.state.model.model


def restored(task: Task) -> GPT:
    model = ComposerGPT(task.config)
    optimizer, _ = build_optimizer(model.model, task.config)  # without one, Composer takes another kind
    newest = CompressedCheckpoint(task.url, resume="must")
    # Building the trainer is enough: its callback restores, and nothing is trained.
    Trainer(model=model, optimizers=optimizer, callbacks=[newest], device="cpu", **QUIET).close()
    return model.model
