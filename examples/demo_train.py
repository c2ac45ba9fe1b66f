"""One training process of `make demo`: the readable script `lightning_gpt.py`, plus a log of what happens.

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
from pathlib import Path
from typing import Any

import torch
from gpt import GPT, GPTConfig, GPTModule, load_corpus, loss_on, val_batches
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning_gpt import train
from torch.utils.data import DataLoader

from shrinkpoint.callbacks.lightning import CompressedCheckpoint

QUIET = {"enable_progress_bar": False, "enable_model_summary": False}


class EventLog:
    """Appends events to a JSON-lines file; every line reaches the file before training goes on."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", buffering=1, encoding="utf-8")

    def write(self, event: str, **fields: float | str | None) -> None:
        """Append one event with the time at which it happened, in seconds of a monotonic clock."""
        self._file.write(json.dumps({"event": event, "time": time.monotonic(), **fields}) + "\n")


class LossLog(Callback):
    """Logs where training starts and every loss after it."""

    def __init__(self, log: EventLog, held_out: list[torch.Tensor]) -> None:
        self._log, self._held_out = log, held_out

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


def run_reference(
    settings: dict[str, Any], config: GPTConfig, log: EventLog, held_out: list[torch.Tensor]
) -> None:
    """Train undisturbed; torch.save writes the same states to the same disk, only the newest is kept."""
    ordinary = ModelCheckpoint(
        settings["url"], every_n_train_steps=settings["every"], save_top_k=1, enable_version_counter=False
    )
    train(
        config,
        [LossLog(log, held_out), ordinary],
        every=settings["every"],
        seed=settings["seed"],
        plugins=[TimedTorchSave(log)],
        **QUIET,
    )


def run_compressed(
    settings: dict[str, Any], config: GPTConfig, log: EventLog, held_out: list[torch.Tensor]
) -> None:
    """Train with compressed checkpoints; nothing here knows whether this is the first start or the second."""
    checkpoints = CompressedCheckpoint(
        settings["url"],
        every_n_train_steps=settings["every"],
        max_degradation=0.01,
        probe_batches=1,  # saves come every few seconds here; at hourly ones, more batches cost nothing
        search_overhead=0.002,
        busy=settings["busy"],
        save_top_k=-1,  # keep them all, so that the table can show them all
    )
    trainer = train(
        config, [LossLog(log, held_out), checkpoints], every=settings["every"], seed=settings["seed"], **QUIET
    )
    torch.save(trainer.lightning_module.state_dict(), settings["true_weights"])


def remeasure(
    settings: dict[str, Any], config: GPTConfig, log: EventLog, held_out: list[torch.Tensor]
) -> None:
    """Restore the newest checkpoint into a new model and compare its loss with the true weights'."""
    trainer = Trainer(
        accelerator="cpu", logger=False, callbacks=[CompressedCheckpoint(settings["url"])], **QUIET
    )
    restored = GPTModule(config)
    newest = f"{settings['url']}#newest"
    trainer.validate(restored, DataLoader(held_out, batch_size=None), ckpt_path=newest, verbose=False)
    true = GPTModule(config)
    true.load_state_dict(torch.load(settings["true_weights"], weights_only=True))
    models: tuple[GPT, GPT] = (restored.model, true.model)
    restored_loss, true_loss = (loss_on(model, held_out) for model in models)
    log.write("remeasured", restored_loss=restored_loss, true_loss=true_loss)


def main() -> None:
    settings = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    log = EventLog(Path(sys.argv[2]))
    torch.set_num_threads(int(settings["threads"]))
    config = GPTConfig(**settings["config"])
    held_out = val_batches(load_corpus()[1], config)
    log.write("process", pid=os.getpid(), mode=settings["mode"])
    modes = {"reference": run_reference, "compressed": run_compressed, "remeasure": remeasure}
    modes[settings["mode"]](settings, config, log, held_out)


if __name__ == "__main__":
    main()
