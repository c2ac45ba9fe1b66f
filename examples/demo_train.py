"""One training process of the demo: the readable script of a framework, plus a log of what happens.

    python examples/demo_train.py SETTINGS.json EVENTS.jsonl

SETTINGS names the mode: ``reference`` trains undisturbed with the framework's own checkpoints, ``compressed`` trains
with CompressedCheckpoint, ``remeasure`` restores the newest checkpoint in a fresh process and evaluates it beside
the true weights. Each line of EVENTS is one JSON object, flushed at once, so that a kill loses none.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from gpt import GPT, GPTConfig, load_corpus, loss_on, val_batches
from torch import Tensor

from shrinkpoint import Advanced


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
    framework: str
    """``lightning`` or ``composer``."""
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

    @property
    def saving(self) -> dict[str, Any]:
        """Options of CompressedCheckpoint that do not depend on the framework; it keeps all, so that the table can show them all."""
        advanced = Advanced(busy=self.busy, search_overhead=0.002)
        return {"max_degradation": 0.01, "save_top_k": -1, "advanced": advanced}

    @classmethod
    def read(cls, settings: Path, log: EventLog) -> Task:
        """Take the task from the file that the demo wrote."""
        fields = json.loads(settings.read_text(encoding="utf-8"))
        config, true_weights = GPTConfig(**fields.pop("config")), Path(fields.pop("true_weights"))
        held_out = val_batches(load_corpus()[1], config)
        return cls(**fields, config=config, true_weights=true_weights, log=log, held_out=held_out)


class Framework(Protocol):
    """What demo_lightning.py and demo_composer.py have in common."""

    def version(self) -> str:
        """The framework's name and version."""

    def reference(self, task: Task) -> None:
        """Train undisturbed; the framework's own checkpoints of the same steps go to the same disk."""

    def compressed(self, task: Task) -> GPT:
        """Train with compressed checkpoints; nothing here knows whether this is the first start or the second."""

    def restored(self, task: Task) -> GPT:
        """A model with the newest checkpoint's weights; nothing is trained."""


def remeasure(task: Task, restored: GPT) -> None:
    """Compare the newest checkpoint's loss with the true weights'."""
    true = GPT(task.config)
    true.load_state_dict(torch.load(task.true_weights, weights_only=True))
    restored_loss, true_loss = (loss_on(model, task.held_out) for model in (restored, true))
    task.log.write("remeasured", restored_loss=restored_loss, true_loss=true_loss)


def main() -> None:
    log = EventLog(Path(sys.argv[2]))
    task = Task.read(Path(sys.argv[1]), log)
    torch.set_num_threads(task.threads)
    framework = cast(Framework, importlib.import_module(f"demo_{task.framework}"))
    versions = f"{framework.version()}, torch {torch.__version__.partition('+')[0]}"
    log.write("process", pid=os.getpid(), mode=task.mode, versions=versions)
    match task.mode:
        case "reference":
            framework.reference(task)
        case "compressed":
            torch.save(framework.compressed(task).state_dict(), task.true_weights)
        case "remeasure":
            remeasure(task, framework.restored(task))


if __name__ == "__main__":
    main()
