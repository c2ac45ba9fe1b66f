"""What ranks do in the tests of Lightning's trainings with shards: a model, and runs of it that are ended and continued."""

import math
import os
import random
import signal
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import ModelParallelStrategy
from support.lightning_models import QUIET, Points
from support.options import grouped
from support.reports import saver_of
from support.sharded import Toy, batch, die, full_state, warm
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader

from shrinkpoint.callbacks.lightning import CompressedCheckpoint
from shrinkpoint.errors import StoreError
from shrinkpoint.store.local import LocalObjects
from shrinkpoint.store.run import RunStore
from shrinkpoint.store.urls import Stores

warm()
for name in [name for name in os.environ if name.startswith(("PL_", "SLURM_", "NODE_", "MASTER_"))]:
    del os.environ[name]  # as another test may have left them


class Sharded(pl.LightningModule):
    """Shuffled data, dropout and all generators in the loss; with `by_step` nothing but the step's number."""

    optimizer_class: Any = torch.optim.AdamW

    def __init__(self, *, by_step: bool = False, accumulates: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net: Any = Toy() if by_step else nn.Sequential(nn.Linear(8, 21), nn.ReLU(), nn.Linear(21, 1))
        self.by_step = by_step
        self.trace: list[tuple[Any, ...]] = []

    def configure_model(self) -> None:
        if any(hasattr(parameter, "placements") for parameter in self.parameters()):
            return
        if self.device_mesh is None:
            return  # a single device
        mesh, layers = self.device_mesh, self.net.blocks if self.by_step else [self.net[0]]
        if mesh["tensor_parallel"].size() > 1:
            for layer in layers:
                parallelize_module(
                    layer, mesh["tensor_parallel"], {"a": ColwiseParallel(), "b": RowwiseParallel()}
                )
        for layer in layers:
            fully_shard(layer, mesh=mesh["data_parallel"])
        fully_shard(self.net, mesh=mesh["data_parallel"])

    def training_step(self, data: Any, batch_idx: int) -> torch.Tensor:
        at = (self.trainer.current_epoch, batch_idx, self.trainer.global_step)
        if self.by_step:
            tokens, labels = batch(self.trainer.global_step)
            loss = nn.functional.cross_entropy(self.net(tokens).flatten(0, 1), labels.flatten())
            self.trace.append((*at, loss.item()))
        else:
            index, x, y = data
            out = nn.functional.dropout(self.net(x), 0.3)
            loss = (out - y).pow(2).mean() * (1 + 0.01 * random.random())
            self.trace.append((*at, tuple(index.tolist()), loss.item()))
        self.log("train_loss", loss)
        return loss

    def validation_step(self, data: Any, batch_idx: int) -> None:
        _, x, y = data
        self.log("val_loss", (self.net(x) - y).pow(2).mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer_class(self.parameters(), 3e-3)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def train_dataloader(self) -> Any:
        return DataLoader(Points(384 if self.by_step else 64), batch_size=4, shuffle=not self.by_step)

    def val_dataloader(self) -> Any:
        return DataLoader(Points(8), batch_size=4)


def seed(rank: int, number: int) -> None:
    """The samplers' seed is one for all, and each rank draws numbers of its own."""
    pl.seed_everything(number, verbose=False)
    torch.manual_seed(number + rank)
    random.seed(number + rank)


class At(Callback):
    """Does something on this rank right after an optimizer step; placed before the callback that saves."""

    def __init__(self, step: int, action: Callable[[], Any], batch: int | None = None) -> None:
        self.step, self.action, self.batch = step, action, batch

    def on_train_batch_end(self, trainer: pl.Trainer, *arguments: Any) -> None:
        if trainer.global_step == self.step and self.batch in (None, arguments[-1]):
            self.action()


def trained(
    world: int, module: pl.LightningModule, *callbacks: Callback, tensor: int | None = 1, **options: Any
) -> tuple[pl.Trainer, dict[str, torch.Tensor]]:
    """The trainer, and all weights and moments in whole.

    Args:
        world: ranks.
        module: the model.
        callbacks: of the trainer.
        tensor: ranks that share a layer; None for a single device, or DDP.
        options: of the trainer and of ``fit``.
    """
    ckpt_path = options.pop("ckpt_path", None)
    saves = any(isinstance(callback, pl.callbacks.Checkpoint) for callback in callbacks)
    strategy: Any = "auto" if world == 1 else "ddp"
    if tensor is not None:
        strategy = ModelParallelStrategy(data_parallel_size=world // tensor, tensor_parallel_size=tensor)
    trainer = pl.Trainer(
        strategy=strategy,
        devices=world,
        callbacks=list(callbacks),
        **{
            "max_epochs": 3,
            "limit_val_batches": 0,
            "num_sanity_val_steps": 0,
            "enable_checkpointing": saves,
            **QUIET,
            **options,
        },
    )
    trainer.fit(module, ckpt_path=ckpt_path)
    return trainer, full_state(module, trainer.optimizers[0])


def saving(url: str | list[str] | Stores, every: int = 3, **options: Any) -> CompressedCheckpoint:
    given = {"scheme": "lossless", "busy": "wait", "threads": 1, "save_top_k": -1} | options
    return CompressedCheckpoint(url, **grouped(every_n_train_steps=every, **given))


def native(rank: int, world: int, path: str, steps: int) -> Any:
    """Train to a step, from Lightning's own sharded checkpoint, and leave one."""
    module = Sharded(by_step=True)
    ckpt_path = path if Path(path).exists() else None
    trainer, state = trained(world, module, max_steps=steps, ckpt_path=ckpt_path)
    trainer.save_checkpoint(path)
    return [row[2:] for row in module.trace], state


def hop(rank: int, world: int, folder: str, steps: int, last: bool) -> Any:
    """The same with ours, from what is stored; but for the last one it is killed a step later, when the save is committed."""
    url, module = f"{folder}/run", Sharded(by_step=True)

    def end() -> None:
        while max((manifest.step for manifest in RunStore(url).manifests()), default=0) < steps:
            time.sleep(0.01)
        torch.save([row[2:] for row in module.trace][:-1], f"{folder}/trace-{steps}-{rank}.pt")
        die()

    callback = saving(url, key_every=99)
    kill = [] if last else [At(steps + 1, end)]
    _, state = trained(world, module, *kill, callback, max_steps=steps if last else -1)
    return [row[2:] for row in module.trace], state


def whole(rank: int, world: int, accumulate: int = 1) -> Any:
    """A training that nothing interrupts."""
    seed(rank, 1)
    module = Sharded()
    options: Any = {"limit_val_batches": 2, "val_check_interval": 5, "accumulate_grad_batches": accumulate}
    trainer, state = trained(world, module, **options)
    return module.trace, state, counters(trainer)


def adopting(rank: int, world: int, url: str, stop: int | None = None, adopt: bool = True) -> Any:
    """A training that adopts its checkpoints, and is killed at a step when some are committed."""
    seed(rank, 1 if stop is not None else 100)
    module = Sharded()

    def end() -> None:
        first = url if isinstance(url, str) else url[0]
        while not list(Path(first, "commits").glob("[0-9]*.json")):
            time.sleep(0.01)
        die()

    options = {"adopt": True, "guards": False} if adopt else {"guards": False, "probe_steps": 0}
    callback = saving(url, scheme="auto", **options)
    kill = [At(stop, end)] if stop else []
    trainer, state = trained(
        world, module, *kill, callback, max_steps=20, limit_val_batches=2, val_check_interval=5
    )
    return module.trace, state, counters(trainer), reports_of(callback)


def measured(rank: int, world: int, url: str, scheme: str) -> Any:
    """A training whose checkpoints are measured on validation batches, also after steps from them, or exact."""
    seed(rank, 1)
    module = Sharded()
    callback = saving(url, scheme=scheme, search_overhead=math.inf, probe_steps=3)
    trainer, state = trained(world, module, callback, max_steps=9, limit_val_batches=2, val_check_interval=2)
    reports = saver_of(callback).reports()
    said = [
        (report.step, report.measured, report.evaluations > 1, sorted(report.resumed)) for report in reports
    ]
    return module.trace, state, counters(trainer), said


def counters(trainer: pl.Trainer) -> Any:
    rates = [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs]
    return trainer.global_step, trainer.current_epoch, trainer.fit_loop.total_batch_idx, rates


def killed(rank: int, world: int, url: str | list[str], step: int) -> None:
    """Every rank, or what is left of it, ends at a step as by kill -9, some time after a save."""
    seed(rank, 1)
    module = Sharded()

    def end() -> None:
        first = url if isinstance(url, str) else url[0]
        while not list(Path(first, "commits").glob("[0-9]*.json")):
            time.sleep(0.01)
        die()

    trained(world, module, At(step, end), saving(url), limit_val_batches=2, val_check_interval=5)


def rest(rank: int, world: int, url: str | list[str], accumulate: int = 1) -> Any:
    """The training goes on by itself."""
    seed(rank, 100)
    module = Sharded()
    callback = saving(url)
    options: Any = {"limit_val_batches": 2, "val_check_interval": 5, "accumulate_grad_batches": accumulate}
    trainer, state = trained(world, module, callback, **options)
    return module.trace, state, counters(trainer), callback.last_model_path


def signalled(
    rank: int,
    world: int,
    url: str,
    ranks: list[int],
    number: int,
    step: int,
    accumulate: int = 1,
    batch: int | None = None,
) -> Any:
    """Some ranks are asked to end at a step, and at a batch if it is given; how it ended, and the batches before."""
    seed(rank, 1)
    module = Sharded()
    asked = [At(step, lambda: signal.raise_signal(number), batch)] if rank in ranks else []
    options: Any = {"limit_val_batches": 2, "val_check_interval": 5, "accumulate_grad_batches": accumulate}
    try:
        trained(world, module, *asked, saving(url, every=10**6), **options)
    except BaseException as error:  # noqa: BLE001 - compared
        return type(error).__name__, len(module.trace)
    return "nothing", len(module.trace)


def unsaved(rank: int, world: int, url: str) -> Any:
    """The last save fails on one rank; how it ended, and what was said."""

    def end() -> None:
        while not RunStore(url).manifests():
            time.sleep(0.01)
        if rank == 1:
            LocalObjects.put = refuse  # type: ignore[method-assign]
        signal.raise_signal(signal.SIGTERM)

    def refuse(self: LocalObjects, *arguments: Any) -> Any:
        raise StoreError("disk full")

    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        how = told(lambda: trained(world, Sharded(by_step=True), At(4, end), saving(url)))
    return how, [str(warning.message) for warning in shown]


def told(action: Callable[[], Any]) -> str:
    """What it raised, by its class and message."""
    try:
        action()
    except (Exception, SystemExit) as error:  # noqa: BLE001 - compared
        return f"{type(error).__name__}: {error}"
    return "nothing"


def reports_of(callback: CompressedCheckpoint) -> list[tuple[int, str]]:
    return [(report.step, report.kind) for report in saver_of(callback).reports()]


def uses(rank: int, world: int, url: str) -> dict[str, Any]:
    """One run used in several ways by one process after another, and what is refused."""
    seen: dict[str, Any] = {}
    callback = saving(url)
    module = Sharded(by_step=True)
    trainer, state = trained(world, module, callback, max_steps=4)
    trainer.fit_loop.epoch_loop.max_steps = 6
    trainer.fit(module)  # goes on from here, and so does the chain
    seen["reports"] = reports_of(callback)

    fresh, other = Sharded(by_step=True), saving(f"{url}-other")
    trainer, found = trained(world, fresh, other, ckpt_path=f"{url}#step=4", max_steps=4)
    assert all(torch.equal(tensor, found[name]) for name, tensor in state.items())
    fresh = Sharded()
    seen["of another model"] = told(
        lambda: trainer.validate(fresh, fresh.val_dataloader(), ckpt_path=f"{url}#newest", verbose=False)
    )
    fresh = Sharded(by_step=True)
    fresh.validation_step = fresh.training_step  # type: ignore[assignment]
    trainer.validate(fresh, fresh.train_dataloader(), ckpt_path=f"{url}#step=4", verbose=False)
    weights = full_state(fresh, torch.optim.SGD(fresh.parameters()))
    assert all(torch.equal(tensor, state[name]) for name, tensor in weights.items() if "count" not in name)

    both = [saving(url), saving(f"{url}-beside")]
    trained(world, Sharded(by_step=True), *both, max_steps=7)  # the second run is empty, and joins in
    again = [saving(url, every=8), saving(f"{url}-beside", every=9)]
    trained(world, Sharded(by_step=True), *again, max_steps=9)
    seen["two"] = [reports_of(callback) for callback in (*both, *again)]
    anew = saving(url, resume="never")
    trained(world, Sharded(by_step=True), anew, max_steps=2)
    seen["never"] = reports_of(anew)

    logs = saving(f"{url}-step_log", step_log="exact", log_url="/dev/shm/none")
    seen["step_log"] = told(lambda: trained(world, Sharded(by_step=True), logs, max_steps=1))
    stranger = Sharded(by_step=True)
    stranger.net = Toy(rows=5)
    seen["model"] = told(lambda: trained(world, stranger, saving(url), max_steps=9))
    stranger = Sharded(by_step=True)
    stranger.optimizer_class = torch.optim.RAdam
    seen["optimizer"] = told(lambda: trained(world, stranger, saving(url), max_steps=9))
    return seen


class Compare(Callback):
    """Compares what was restored with what a run before left."""

    def __init__(self, path: str) -> None:
        self.path, self.differ = path, ["nothing was compared"]

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        found = full_state(pl_module, trainer.optimizers[0])
        wanted = torch.load(self.path, weights_only=True) if Path(self.path).exists() else found
        assert wanted.keys() == found.keys(), wanted.keys() ^ found.keys()
        self.differ = [name for name in wanted if not torch.equal(wanted[name], found[name])]


def journey(rank: int, world: int, url: str, true: str, tensor: int | None, steps: int, scheme: str) -> Any:
    """Train to a step on another mesh; what differs from the true state, and the saves."""
    compare, module = Compare(true), Sharded(by_step=True)
    callback = saving(url, every=10**6, key_every=99, scheme=scheme)
    _, state = trained(world, module, compare, callback, tensor=tensor, max_steps=steps)
    if rank == 0:
        torch.save(state, true)
    reports = saver_of(callback).reports()
    return compare.differ, [(report.step, report.kind, report.measured) for report in reports]
