"""A program for the tests: two processes train together, first alone, then with checkpoints that are tried by training on.

Usage: lightning_ddp_probe.py <folder>

Each process of each run leaves ``<folder>/<run>-<rank>.pt``.
"""

import sys
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy
from support.lightning_ddp import Distributed
from support.lightning_models import Outcome, Setup, fit
from support.options import grouped
from support.reports import saver_of
from support.traces import Traces

from shrinkpoint.callbacks.lightning import CompressedCheckpoint

PROBED: dict[str, Any] = {
    "scheme": "inshrinkerator",
    "guards": False,  # its noise is far wider than movement: all would be exact, and nothing would be tried
    "busy": "wait",
    "every_n_train_steps": 4,
    "max_degradation": 0.9,
    "restore_budget": 1,
    "search_overhead": float("inf"),
    "probe_steps": 4,
}


class Writing(Distributed):
    """Writes down what its steps give, by Lightning's documented idiom and otherwise."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.outputs, self.lengths = [0.0], list[int]()

    def setup(self, stage: str) -> None:
        self.traces = Traces()  # after the fork: the counter in shared memory is of one process

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.traces.touch(round(loss.item(), 3))
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.outputs.append(float(batch_idx))

    def on_validation_epoch_end(self) -> None:
        self.lengths.append(len(self.outputs))
        self.outputs.clear()


class Talking(Writing):
    """Asks the other process in every step."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        total = loss.detach().clone()
        dist.all_reduce(total)
        return loss


class Leave(Callback):
    """Writes down what a process has seen; the process itself ends with the run."""

    def __init__(
        self, start: str, saving: CompressedCheckpoint | None, caught: list[warnings.WarningMessage]
    ):
        self._start, self._saving, self._caught = start, saving, caught

    def on_fit_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        final = Outcome(module=pl_module, trainer=trainer).final()
        first = self._saving is not None and trainer.global_rank == 0
        reports = saver_of(self._saving).reports() if self._saving and first else []
        told = [str(each.message) for each in self._caught]
        resumed = [sorted(report.resumed) for report in reports]
        written = f"{pl_module.lengths} {pl_module.traces.seen()}"
        seen = {
            "written": written,
            "trace": pl_module.trace,
            "final": final,
            "resumed": resumed,
            "told": told,
        }
        torch.save(seen, f"{self._start}-{trainer.global_rank}.pt")


def train(folder: str, name: str, module: type[Distributed], *, saved: bool, unused: bool = False) -> None:
    saving = CompressedCheckpoint(f"{folder}/run-{name}", **grouped(**PROBED)) if saved else None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pl.seed_everything(1, verbose=False)
        fit(
            *([saving] if saving is not None else []),
            Leave(f"{folder}/{name}", saving, caught),
            module=module(Setup(width=512)),
            max_epochs=3,
            strategy=DDPStrategy(start_method="fork", find_unused_parameters=unused),
            devices=2,
            num_sanity_val_steps=0,
        )


def main(folder: str) -> None:
    torch.set_num_threads(1)
    train(folder, "plain", Writing, saved=False)
    train(folder, "probed", Writing, saved=True)
    train(folder, "talking", Talking, saved=True)
    train(folder, "unused", Writing, saved=True, unused=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
