"""One training process of the demo: `lightning_gpt.py`, and a log of what happens.

    python examples/demo_train.py SETTINGS.json EVENTS.jsonl

SETTINGS names the mode: ``reference`` trains undisturbed with Lightning's own checkpoints, ``compressed`` trains
with CompressedCheckpoint, ``remeasure`` restores the newest checkpoint in a fresh process and evaluates it beside
the true weights. Each line of EVENTS is one JSON object, flushed at once, so that a kill loses none.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning
import torch
from gpt import GPT, GPTConfig, load_corpus, loss_on, val_batches
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning_gpt import GPTModule, train
from torch import Tensor
from torch.utils.data import DataLoader

from shrinkpoint import Advanced
from shrinkpoint.callbacks.lightning import CompressedCheckpoint
from shrinkpoint.store.urls import url_text

QUIET = {"enable_progress_bar": False, "enable_model_summary": False}


class EventLog:
    """Appends events to a JSON-lines file; every line reaches the file before training goes on."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", buffering=1, encoding="utf-8")

    def write(self, event: str, **fields: float | str | None) -> None:
        """Append one event with the time at which it happened, in seconds of a monotonic clock."""
        self._file.write(json.dumps({"event": event, "time": time.monotonic(), **fields}) + "\n")


@dataclass(frozen=True, kw_only=True)
class Task:
    """One process's part of the demo."""

    mode: str
    url: Any
    """Where the checkpoints are: one URL for ``reference``, for the others a list with one, or with several stores."""
    every: int
    """Steps between two checkpoints, and between two validations."""
    seed: int
    threads: int
    busy: str
    """What to do when a checkpoint is due while one is written: ``skip`` it, or ``wait``."""
    config: GPTConfig
    true_weights: Path
    """Where the run leaves its final weights, exactly."""
    log: EventLog
    held_out: list[Tensor]

    @classmethod
    def read(cls, settings: Path, log: EventLog) -> Task:
        """Take the task from the file that the demo wrote."""
        fields = json.loads(settings.read_text(encoding="utf-8"))
        config, true_weights = GPTConfig(**fields.pop("config")), Path(fields.pop("true_weights"))
        held_out = val_batches(load_corpus()[1], config)
        return cls(**fields, config=config, true_weights=true_weights, log=log, held_out=held_out)


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
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Tensor, batch_idx: int
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


def reference(task: Task) -> None:
    """Train undisturbed; Lightning's own checkpoints of the same steps go to the same disk."""
    every = {"every_n_train_steps": task.every, "save_top_k": 1, "enable_version_counter": False}
    callbacks, plugins = [LossLog(task), ModelCheckpoint(task.url, **every)], [TimedTorchSave(task.log)]
    train(task.config, callbacks, every=task.every, seed=task.seed, plugins=plugins, **QUIET)


def compressed(task: Task) -> None:
    """Train with compressed checkpoints; nothing here knows whether this is the first start or the second."""
    advanced = Advanced(busy=task.busy, search_overhead=0.002)
    # It keeps all, so that the table can show them all.
    saving = {"max_degradation": 0.01, "save_top_k": -1, "advanced": advanced}
    checkpoints = CompressedCheckpoint(task.url, every_n_train_steps=task.every, **saving)
    trainer = train(task.config, [LossLog(task), checkpoints], every=task.every, seed=task.seed, **QUIET)
    torch.save(trainer.lightning_module.model.state_dict(), task.true_weights)


def remeasure(task: Task) -> None:
    """Compare the newest checkpoint's loss with the true weights'; nothing is trained."""
    trainer = Trainer(accelerator="cpu", logger=False, callbacks=[CompressedCheckpoint(task.url)], **QUIET)
    module, batches = GPTModule(task.config), DataLoader(task.held_out, batch_size=None)
    trainer.validate(module, batches, ckpt_path=f"{url_text(task.url)}#newest", verbose=False)
    true = GPT(task.config)
    true.load_state_dict(torch.load(task.true_weights, weights_only=True))
    restored_loss, true_loss = (loss_on(model, task.held_out) for model in (module.model, true))
    task.log.write("remeasured", restored_loss=restored_loss, true_loss=true_loss)


def main() -> None:
    log = EventLog(Path(sys.argv[2]))
    task = Task.read(Path(sys.argv[1]), log)
    torch.set_num_threads(task.threads)
    versions = f"Lightning {lightning.__version__}, torch {torch.__version__.partition('+')[0]}"
    log.write("process", pid=os.getpid(), mode=task.mode, versions=versions)
    {"reference": reference, "compressed": compressed, "remeasure": remeasure}[task.mode](task)


if __name__ == "__main__":
    main()
