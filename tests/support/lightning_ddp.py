"""A program for the tests: trains with some processes, whole, then interrupted, then continued.

Usage: lightning_ddp.py <folder> <plain|stateful> [error|log|adopt|no-adopt] [processes] [hook]

Each process of each run leaves ``<folder>/<run>-<rank>.pt``. With more than two processes the interrupted run is continued
once more, as ``control``, with DDP's buckets left as they are at first; with a communication hook (of `HOOKS`), with the hook's state
left so.
"""

import contextlib
import shutil
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy
from support.lightning_models import Crash, Outcome, Points, Setup, Tiny, fit
from support.options import grouped
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power
from torch.multiprocessing import ProcessRaisedException
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from shrinkpoint.callbacks.lightning import CompressedCheckpoint
from shrinkpoint.session import session
from shrinkpoint.steps.options import StepLog


class Distributed(Tiny):
    def train_dataloader(self) -> Any:
        if not self.setup_.stateful:
            return DataLoader(
                Points(64), batch_size=8, shuffle=True
            )  # Lightning puts in its distributed sampler
        sampler = StatefulDistributedSampler(
            Points(64), self.trainer.world_size, self.trainer.global_rank, shuffle=True
        )
        return StatefulDataLoader(Points(64), batch_size=8, sampler=sampler)


def largest(gradient: torch.Tensor) -> torch.Tensor:
    """A hundredth of the elements, and zeros."""
    kept = torch.zeros_like(gradient)
    where = gradient.abs().topk(max(1, len(gradient) // 100)).indices
    kept[where] = gradient[where]
    return kept


def mean(bucket: dist.GradBucket, sent: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    done = dist.all_reduce(sent.div_(dist.get_world_size()), async_op=True).get_future()
    return done.then(lambda future: future.value()[0])


def top(state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """LowDiff's compressor: what a process does not send is forgotten."""
    return mean(bucket, largest(bucket.buffer()))


def top_with_feedback(
    state: dict[int, torch.Tensor], bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """What a process does not send is added to its next gradient."""
    gradient, index = bucket.buffer(), bucket.index()
    if index in state and len(state[index]) == len(gradient):  # DDP makes other buckets after the first step
        gradient = gradient + state[index]
    sent = largest(gradient)
    state[index] = gradient - sent
    return mean(bucket, sent)


def hidden() -> Any:
    errors: dict[int, torch.Tensor] = {}

    def top_with_hidden_feedback(state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        return top_with_feedback(errors, bucket)

    return None, top_with_hidden_feedback


HOOKS = {
    "top": lambda: (None, top),
    "feedback": lambda: ({}, top_with_feedback),
    "PowerSGD": lambda: (
        power.PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=1),
        power.powerSGD_hook,
    ),
    "hidden": hidden,
}


class Compress(Callback):
    """Registers a communication hook when DDP exists; Lightning does so on GPUs only."""

    def __init__(self, hook: str) -> None:
        self.hook = hook

    def on_fit_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        trainer.strategy.model.register_comm_hook(*HOOKS[self.hook]())


class Leave(Callback):
    """Writes down what a process has seen; the process itself ends with the run."""

    def __init__(self, folder: str, name: str) -> None:
        self.start = f"{folder}/{name}"

    def on_fit_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        final = Outcome(module=pl_module, trainer=trainer).final()
        best = getattr(trainer.checkpoint_callback, "best_model_path", None)
        torch.save(
            {"trace": pl_module.trace, "final": final, "best": best}, f"{self.start}-{trainer.global_rank}.pt"
        )


def train(
    folder: str, loader: str, name: str, *callbacks: Callback, processes: int = 2, hook: str = ""
) -> None:
    """With several buckets for a tiny model. Not under PowerSGD, which waits for one collective inside the callback of another: with
    gloo's two threads, two buckets at once wait for ever, with torch alone."""
    seed = 1 if name in ("whole", "first") else 999
    pl.seed_everything(seed, verbose=False)
    fit(
        *([Compress(hook)] if hook else []),
        *callbacks,
        Leave(folder, name),
        module=Distributed(Setup(stateful=loader == "stateful", width=400 if hook else 16)),
        seed=seed,
        max_epochs=3,
        strategy=DDPStrategy(start_method="fork", bucket_cap_mb=25 if hook == "PowerSGD" else 0.0003),
        devices=processes,
        num_sanity_val_steps=0,
    )


class FirstCrashes(Crash):
    """The others wait in their next collective: the launcher ends all at the first error, and would cut off the log that the first one writes."""

    def on_train_batch_end(self, trainer: pl.Trainer, *arguments: Any) -> None:
        if trainer.global_rank == 0:
            super().on_train_batch_end(trainer, *arguments)


def first(folder: str, loader: str, how: str, processes: int = 2, hook: str = "") -> None:
    crash = FirstCrashes(8) if how == "log" else Crash(8)  # a save that is measured needs all
    train(folder, loader, "first", saving(folder, how), crash, processes=processes, hook=hook)


def saving(folder: str, how: str, run: str = "run") -> CompressedCheckpoint:
    every, log = 3, {}
    if how == "log":
        log = {"step_log": StepLog(segment_steps=1, overhead=None), "log_url": f"{folder}/log"}
    if how in ("adopt", "no-adopt"):
        adopting = {"adopt": 8} if how == "adopt" else {}
        return CompressedCheckpoint(
            f"{folder}/{run}",
            **grouped(every_n_train_steps=every, max_degradation=0.5, busy="wait", **adopting),
        )
    return CompressedCheckpoint(
        f"{folder}/{run}", **grouped(every_n_train_steps=every, scheme="lossless", busy="wait", **log)
    )


def main(folder: str, loader: str, how: str = "error", processes: str = "2", hook: str = "") -> None:
    torch.set_num_threads(1)
    count = int(processes)
    if how in ("adopt", "no-adopt"):  # which saves, for it trains from what is stored
        train(folder, loader, "whole", saving(folder, how, "undisturbed"), processes=count)
    else:
        train(folder, loader, "whole", processes=count, hook=hook)
    with contextlib.suppress(ProcessRaisedException):
        first(folder, loader, how, count, hook)
    if how == "no-adopt":  # the newest is exact: training ended before it was measured
        for newer in sorted(Path(folder, "run", "commits").glob("*.json"))[1:]:
            newer.unlink()
    shutil.copytree(f"{folder}/run", f"{folder}/copy")
    train(folder, loader, "rest", saving(folder, how), processes=count, hook=hook)
    if hook:
        session.restore_hook_states = lambda model, stored: None
        train(folder, loader, "control", saving(folder, "error", "copy"), processes=count, hook=hook)
        return
    if count > 2 and how == "error":
        session.restore_buckets = lambda model, buckets: None
        train(folder, loader, "control", saving(folder, how, "copy"), processes=count)


if __name__ == "__main__":
    main(*sys.argv[1:])
