"""What one training process of the demo is told, and how it tells what happens; the same for every framework."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from gpt import GPT, GPTConfig, load_corpus, val_batches
from torch import Tensor

from shrinkpoint import Advanced

__all__ = ["SAVING", "EventLog", "Framework", "Task"]

SAVING: Mapping[str, Any] = {
    "max_degradation": 0.01,
    "save_top_k": -1,  # keep them all, so that the table can show them all
}
"""Options of `CompressedCheckpoint` that do not depend on the framework."""


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
    """``reference``, ``compressed`` or ``remeasure``; see demo_train.py."""
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
    adopt: bool | int
    """With ``--adopt``, the number of saves, from all of which training goes on."""
    config: GPTConfig
    true_weights: Path
    """Where the run leaves its final weights, exactly."""
    log: EventLog
    held_out: list[Tensor]

    @property
    def saving(self) -> dict[str, Any]:
        """Options of CompressedCheckpoint."""
        advanced = Advanced(busy=self.busy, search_overhead=0.002)
        return {**SAVING, "adopt": self.adopt, "advanced": advanced}

    @classmethod
    def read(cls, settings: Path, log: EventLog) -> Task:
        """Take the task from the file that the demo wrote."""
        fields = json.loads(settings.read_text(encoding="utf-8"))
        config = GPTConfig(**fields.pop("config"))
        true_weights = Path(fields.pop("true_weights"))
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
