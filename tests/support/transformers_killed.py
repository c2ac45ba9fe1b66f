"""A program for the tests: trains with Hugging Face's Trainer until it is killed or has finished, in a process of its own.

Usage: transformers_killed.py <folder> <name> [<process>...]

It continues the run in ``<folder>/run``, or saves nothing if `name` is ``whole``; with names that begin with ``adopting`` it adopts
what is saved, and ``adopting whole`` saves to a run of its own; with those that begin with ``lossy`` it saves the same without adopting. It says the number of every step in ``<folder>/progress`` and
leaves its `Outcome` in ``<folder>/<name>-<rank>.pt``.
"""

import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from support.options import grouped
from support.transformers_models import Setup, train
from transformers import TrainerCallback

from shrinkpoint.callbacks.transformers import CompressedCheckpoint

__all__ = ["SETUP"]

SEVERAL = (
    (("ddp_backend", "gloo"), ("ddp_bucket_cap_mb", 0.004), ("ddp_find_unused_parameters", False))
    if "RANK" in os.environ
    else ()
)
"""Buckets of 4 kB, of which the model's gradients fill several; DDP makes them anew only where it looks for no unused parameters."""
SETUP = Setup(arguments=(("num_train_epochs", 4), ("eval_strategy", "no"), *SEVERAL))
"""What is trained: 44 steps on one process, 24 on two."""

_PAUSE_S = 0.05  # after each step, or it would have finished before it is killed


class Progress(TrainerCallback):  # type: ignore[misc]
    """Tells, a line each, which steps have been made."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        if state.is_world_process_zero:
            with self._path.open("a") as file:
                print(state.global_step, file=file)
        time.sleep(_PAUSE_S)


def main(folder: str, name: str) -> None:
    torch.set_num_threads(1)
    callbacks: list[Any] = []
    if name != "whole":
        run = "undisturbed" if name == "adopting whole" else "run"
        options: dict[str, Any] = {"scheme": "lossless", "busy": "wait"}
        if name.startswith("adopting"):
            options = {"adopt": 8, "max_degradation": 0.5}
        elif name.startswith("lossy"):
            options = {"busy": "wait", "max_degradation": 0.5}
        saving = CompressedCheckpoint(f"{folder}/{run}", **grouped(every_n_train_steps=5, **options))
        callbacks = [Progress(Path(folder, "progress")), saving]
    outcome = train(SETUP, f"{folder}/output", *callbacks, seed=3 if name.endswith("whole") else os.getpid())
    torch.save(outcome, f"{folder}/{name}-{os.environ.get('RANK', '0')}.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])
