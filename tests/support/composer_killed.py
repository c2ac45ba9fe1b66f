"""A program for the tests: trains and saves until it is killed or has finished, in a process of its own.

Usage: composer_killed.py <folder> <seed> <save_interval>

It continues the run in ``<folder>/run``, says the number of every batch in ``<folder>/progress`` and leaves its `Outcome`
in ``<folder>/outcome.pt``.
"""

import sys
import time
import warnings
from pathlib import Path
from typing import Any

from shrinkpoint.config import Advanced

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from composer import Callback
from support.composer_models import Setup, fit

from shrinkpoint.callbacks.composer import CompressedCheckpoint

__all__ = ["SETUP"]

SETUP = Setup(data="shuffle, augmentation", algorithms="EMA", optimizer="DecoupledAdamW", duration="12ep")
"""What is trained: 96 batches."""

_PAUSE_S = 0.02  # after each batch, or it would have finished before it is killed


class Progress(Callback):  # type: ignore[misc]
    """Tells, a line each, which batches have been trained on."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def batch_end(self, state: Any, logger: Any) -> None:
        with self._path.open("a") as file:
            print(int(state.timestamp.batch), file=file)
        time.sleep(_PAUSE_S)


def main(folder: str, seed: str, interval: str) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    saving = CompressedCheckpoint(
        f"{folder}/run", save_interval=interval, scheme="lossless", advanced=Advanced(busy="wait")
    )
    outcome = fit(Progress(Path(folder, "progress")), saving, setup=SETUP, seed=int(seed))
    torch.save(outcome, f"{folder}/outcome.pt")
    sys.exit(outcome.status)


if __name__ == "__main__":
    main(*sys.argv[1:])
