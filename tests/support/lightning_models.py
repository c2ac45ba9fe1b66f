"""A tiny Lightning module whose every draw shows, and runs of it that are interrupted and continued."""

import random
import signal
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler
from torchdata.stateful_dataloader import StatefulDataLoader

from shrinkpoint.integrations.lightning.adapter import LightningAdapter, Settings

QUIET: Mapping[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


class Points(Dataset[Any]):
    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(count, 8, generator=generator)
        self.y = torch.randn(count, 1, generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor, torch.Tensor]:
        return index, self.x[index], self.y[index]


class Stream(IterableDataset[Any]):
    """As many points as `Points`, in a shuffled order, and without a length."""

    def __init__(self, count: int) -> None:
        self.points = Points(count)

    def __iter__(self) -> Any:
        return (self.points[i] for i in torch.randperm(len(self.points)).tolist())


@dataclass(kw_only=True)
class Setup:
    """How a module gets its data and its learning rates."""

    stateful: bool = False
    workers: int = 0
    stream: bool = False
    generator: bool = False
    sampler: bool = False
    plateau: str | None = None
    optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW
    width: int = 16
    train_points: int = 64


class Shuffled(Sampler[int]):
    """Shuffles by a generator of its own, of Python's, and by how often it has done so."""

    def __init__(self) -> None:
        self.random, self.times = random.Random(5), 0

    def __len__(self) -> int:
        return Setup.train_points

    def __iter__(self) -> Iterator[int]:
        order = list(range(len(self)))
        self.random.shuffle(order)
        self.times += 1
        return iter(order[self.times :] + order[: self.times])


class Tiny(pl.LightningModule):
    """Batch norm, dropout and all three global generators in the loss: whatever is restored wrongly changes the trace."""

    def __init__(self, setup: Setup | None = None) -> None:
        super().__init__()
        self.setup_ = setup or Setup()
        width = self.setup_.width
        self.net = torch.nn.Sequential(
            torch.nn.Linear(8, width),
            torch.nn.BatchNorm1d(width),
            torch.nn.ReLU(),
            torch.nn.Dropout(0.5),
            torch.nn.Linear(width, 1),
        )
        self.trace: list[tuple[Any, ...]] = []
        self.validations: list[tuple[Any, ...]] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        index, x, y = batch
        loss = (self.net(x) - y).pow(2).mean() + 0.01 * random.random() + 0.01 * np.random.rand()
        if torch.is_grad_enabled():
            rate = self.trainer.optimizers[0].param_groups[0]["lr"]
            at = (self.trainer.current_epoch, batch_idx, self.trainer.global_step)
            self.trace.append((*at, tuple(index.tolist()), loss.item(), rate))
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        _, x, y = batch
        self.log("val_loss", (self.net(x) - y).pow(2).mean())

    def on_validation_end(self) -> None:
        if not self.trainer.sanity_checking:
            loss = self.trainer.callback_metrics["val_loss"].item()
            self.validations.append((self.trainer.current_epoch, self.trainer.global_step, loss))

    def configure_optimizers(self) -> Any:
        optimizer = self.setup_.optimizer(self.parameters(), lr=1e-2)
        if self.setup_.plateau is not None:
            scheduler: Any = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
            config = {"scheduler": scheduler, "interval": "epoch", "monitor": self.setup_.plateau}
        else:
            config = {
                "scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97),
                "interval": "step",
            }
        return {"optimizer": optimizer, "lr_scheduler": config}

    def train_dataloader(self) -> Any:
        kind: Any = StatefulDataLoader if self.setup_.stateful else DataLoader
        more: dict[str, Any] = {"num_workers": self.setup_.workers}
        if self.setup_.generator:
            more["generator"] = torch.Generator().manual_seed(7)
        if self.setup_.sampler:
            return kind(Points(self.setup_.train_points), batch_size=8, sampler=Shuffled(), **more)
        if self.setup_.stream:
            return kind(Stream(self.setup_.train_points), batch_size=8, **more)
        return kind(Points(self.setup_.train_points), batch_size=8, shuffle=True, **more)

    def val_dataloader(self) -> Any:
        return DataLoader(Points(16), batch_size=8)


class Crash(Callback):
    """Ends the process's work right after an optimizer step, as an error or as a SIGTERM would."""

    def __init__(
        self,
        step: int,
        *,
        sigterm: bool = False,
        batch: int | None = None,
        number: signal.Signals = signal.SIGTERM,
    ) -> None:
        self.step = step
        self.sigterm = sigterm
        self.batch = batch
        self.number = number

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == self.step and self.batch in (None, batch_idx):
            if not self.sigterm:
                raise RuntimeError("preempted")
            signal.raise_signal(self.number)


class PlainState(Callback):
    """A callback with a state of its own, which must come back."""

    def __init__(self) -> None:
        self.batches = 0

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        self.batches += 1

    def state_dict(self) -> dict[str, int]:
        return {"batches": self.batches}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.batches = state_dict["batches"]


@dataclass(kw_only=True)
class Outcome:
    """All that two equal runs must have in common."""

    module: Tiny
    trainer: pl.Trainer
    callbacks: list[Callback] = field(default_factory=list)

    @property
    def trace(self) -> list[tuple[Any, ...]]:
        return self.module.trace

    def final(self) -> dict[str, Any]:
        stopping = [callback for callback in self.callbacks if isinstance(callback, EarlyStopping)]
        plain = [callback for callback in self.callbacks if isinstance(callback, PlainState)]
        return {
            "weights": {name: value.clone() for name, value in self.module.state_dict().items()},
            "optimizers": [optimizer.state_dict() for optimizer in self.trainer.optimizers],
            "schedulers": [config.scheduler.state_dict() for config in self.trainer.lr_scheduler_configs],
            "stopping": [callback.state_dict() for callback in stopping],
            "plain": [callback.state_dict() for callback in plain],
            "logger_step": self.trainer.fit_loop.epoch_loop._batches_that_stepped,
            "counters": (
                self.trainer.global_step,
                self.trainer.current_epoch,
                self.trainer.fit_loop.total_batch_idx,
            ),
        }


def fit(
    *callbacks: Callback,
    setup: Setup | None = None,
    seed: int = 1,
    monitor: str | None = "val_loss",
    ckpt_path: str | None = None,
    module: Tiny | None = None,
    **options: Any,
) -> Outcome:
    """Train a `Tiny`; an interruption by `Crash` is the end of the run and no error."""
    pl.seed_everything(seed, verbose=False)
    module = module or Tiny(setup)
    stopping = [EarlyStopping(monitor, patience=1000)] if monitor is not None else []
    every = [*callbacks, PlainState(), *stopping]
    has_checkpoint = any(isinstance(callback, pl.callbacks.Checkpoint) for callback in callbacks)
    defaults = {"max_epochs": 4, "enable_checkpointing": has_checkpoint, **QUIET}
    trainer = pl.Trainer(callbacks=every, **{**defaults, **options})
    try:
        trainer.fit(module, ckpt_path=ckpt_path)
    except (RuntimeError, SystemExit, BaseException) as error:
        # Lightning exits with 1 after a Ctrl-C
        expected = type(error).__name__ == "SIGTERMException" or str(error) in ("preempted", "1")
        if not expected:
            raise
    return Outcome(module=module, trainer=trainer, callbacks=every)


def adapter_of(trainer: Any, monitor: str | None = None) -> LightningAdapter:
    """What a session would ask of a trainer, which may be set later."""
    schedule = dict.fromkeys(("every_n_train_steps", "every_n_epochs", "train_time_interval"))
    adapter = LightningAdapter(Settings.build(url="memory://none", monitor=monitor, **schedule))
    adapter.trainer = trainer
    return adapter


def assert_same(one: Any, other: Any, where: str = "") -> None:
    """Equality of nested data, bit by bit for tensors."""
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other), where
    elif isinstance(one, Mapping):
        assert one.keys() == other.keys(), where
        for key in one:
            assert_same(one[key], other[key], f"{where}/{key}")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), where
        for index, (left, right) in enumerate(zip(one, other, strict=True)):
            assert_same(left, right, f"{where}/{index}")
    else:
        assert one == other, (where, one, other)


def assert_continues(whole: Outcome, part: Outcome) -> None:
    """`part` is the end of `whole`: the same batches and losses from its start on, and the same final state."""
    first = [index for index, row in enumerate(whole.trace) if row[:3] == part.trace[0][:3]]
    assert first, (whole.trace[-1], part.trace[:1])
    assert whole.trace[first[0] :] == part.trace
    assert whole.module.validations[-len(part.module.validations) :] == part.module.validations
    assert_same(whole.final(), part.final())
