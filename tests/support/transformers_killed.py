"""A program for the tests: trains with Hugging Face's Trainer until it is killed or has finished, in a process of its own.

Usage: transformers_killed.py <folder> <name> [<process>...]

It continues the run in ``<folder>/run``, or saves nothing if `name` is ``whole``; with names that begin with ``adopting`` it adopts
what is saved, and ``adopting whole`` saves to a run of its own; with those that begin with ``lossy`` it saves the same without adopting. With
those that begin with ``sharded`` FSDP2 shards the model. It says the number of every step in ``<folder>/progress`` and
leaves its `Outcome` in ``<folder>/<name>-<rank>.pt``.
"""

import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2] / "examples")]

import pytest
import torch
from sharded_huggingface import Sharded
from support.options import grouped
from support.transformers_models import Setup, train
from torch.distributed.tensor import DTensor
from transformers import Trainer, TrainerCallback

from shrinkpoint.callbacks.transformers import CompressedCheckpoint
from shrinkpoint.errors import StateMismatchError

__all__ = ["SETUP"]

SEVERAL = (
    (("ddp_backend", "gloo"), ("ddp_bucket_cap_mb", 0.004), ("ddp_find_unused_parameters", False))
    if "RANK" in os.environ
    else ()
)
"""Buckets of 4 kB, of which the model's gradients fill several; DDP makes them anew only where it looks for no unused parameters."""
SHARDED = Setup(
    model="bert", arguments=(("num_train_epochs", 4), ("eval_strategy", "no"), ("ddp_backend", "gloo"))
)
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


class Sharding(Sharded):  # type: ignore[misc]
    layer = "BertLayer"


class Rectifying(Sharding):
    """Has an optimizer of another class, whose state looks the same."""

    @staticmethod
    def get_optimizer_cls_and_kwargs(*arguments: Any) -> tuple[Any, dict[str, Any]]:
        return torch.optim.RAdam, {"lr": 3e-3}


def whole(value: Any) -> Any:
    """What a state comes to without shards; a collective."""
    if isinstance(value, DTensor):
        return value.full_tensor()
    if isinstance(value, dict):
        return {name: whole(item) for name, item in value.items()}
    return value


def main(folder: str, name: str) -> None:
    torch.set_num_threads(1)
    callbacks: list[Any] = []
    sharded = name.startswith("sharded")
    if name not in ("whole", "sharded whole"):
        run = "undisturbed" if name.endswith("adopting whole") else "run"
        options: dict[str, Any] = {"scheme": "lossless", "busy": "wait"}
        if "adopting" in name:
            options = {"adopt": 8, "max_degradation": 0.5}
        elif "lossy" in name:
            options = {"busy": "wait", "max_degradation": 0.5}
        url, options = f"{folder}/{run}", grouped(every_n_train_steps=5, **options)
        callbacks = [Progress(Path(folder, "progress")), CompressedCheckpoint(url, **options)]
    seed = 3 if name.endswith("whole") else os.getpid()
    kind, setup = (Sharding, SHARDED) if sharded else (Trainer, SETUP)
    if name == "sharded wider":
        with pytest.raises(StateMismatchError, match=r"AdamW, and this one has torch\.optim\.\S*RAdam"):
            train(setup, f"{folder}/output", CompressedCheckpoint(url, **options), trainer_class=Rectifying)
    outcome = train(setup, f"{folder}/output", *callbacks, seed=seed, trainer_class=kind)
    outcome.weights, outcome.optimizer = whole(outcome.weights), whole(outcome.optimizer)
    torch.save(outcome, f"{folder}/{name}-{os.environ.get('RANK', '0')}.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])
