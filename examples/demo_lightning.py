"""The demo's training with Lightning: `lightning_gpt.py`, watched."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import lightning
import torch
from demo_train import EventLog, Task
from gpt import GPT, loss_on
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning_gpt import GPTModule, train
from torch.utils.data import DataLoader

from shrinkpoint.callbacks.lightning import CompressedCheckpoint
from shrinkpoint.store.urls import url_text

QUIET = {"enable_progress_bar": False, "enable_model_summary": False}


class LossLog(Callback):
    """Logs where training starts and every loss after it."""

    def __init__(self, task: Task) -> None:
        self._log, self._held_out = task.log, task.held_out

    def on_train_start(self, trainer: Trainer, pl_module: GPTModule) -> None:
        # Evaluated right after the restore: together with the undisturbed run's loss at this step it says what
        # restoring cost, independently of what the encoder measured when it saved.
        loss = loss_on(pl_module.model, self._held_out) if trainer.global_step else None
        self._log.write("start", step=trainer.global_step, val_loss=loss, threads=torch.get_num_threads())

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: torch.Tensor, batch_idx: int
    ) -> None:
        self._log.write("train", step=trainer.global_step, loss=float(outputs["loss"].detach()))

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._log.write("val", step=trainer.global_step, loss=float(trainer.callback_metrics["val_loss"]))

    def on_train_end(self, trainer: Trainer, pl_module: GPTModule) -> None:
        self._log.write("end", step=trainer.global_step, val_loss=loss_on(pl_module.model, self._held_out))


class TimedTorchSave(TorchCheckpointIO):
    """Lightning's ordinary checkpoints, with their size on disk and the time they take logged."""

    def __init__(self, log: EventLog) -> None:
        super().__init__()
        self._log = log

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        started = time.perf_counter()
        super().save_checkpoint(checkpoint, path, storage_options)
        seconds = time.perf_counter() - started
        step = int(checkpoint["global_step"])
        self._log.write("torch_save", step=step, bytes=Path(path).stat().st_size, seconds=seconds)


def version() -> str:
    return f"Lightning {lightning.__version__}"


def reference(task: Task) -> None:
    ordinary = ModelCheckpoint(
        task.url, every_n_train_steps=task.every, save_top_k=1, enable_version_counter=False
    )
    plugins, callbacks = [TimedTorchSave(task.log)], [LossLog(task), ordinary]
    train(task.config, callbacks, every=task.every, seed=task.seed, plugins=plugins, **QUIET)


def compressed(task: Task) -> GPT:
    checkpoints = CompressedCheckpoint(task.url, every_n_train_steps=task.every, **task.saving)
    trainer = train(task.config, [LossLog(task), checkpoints], every=task.every, seed=task.seed, **QUIET)
    return trainer.lightning_module.model


def restored(task: Task) -> GPT:
    trainer = Trainer(accelerator="cpu", logger=False, callbacks=[CompressedCheckpoint(task.url)], **QUIET)
    module = GPTModule(task.config)
    batches = DataLoader(task.held_out, batch_size=None)
    trainer.validate(module, batches, ckpt_path=f"{url_text(task.url)}#newest", verbose=False)
    return module.model
