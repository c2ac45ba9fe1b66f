"""Measuring by the user's own steps leaves no trace in what these steps write down."""

import csv
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CSVLogger
from support.lightning_models import Setup, Tiny, assert_same, fit
from support.traces import CALLS, Traces

from shrinkpoint.callbacks.lightning import CompressedCheckpoint
from shrinkpoint.config import Advanced


class Noting(Callback):
    def __init__(self) -> None:
        self.traces, self.noted = Traces(), [0.0]

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        pl_module.shown.append(str(sorted(trainer.callback_metrics.items())))


class Recording(Tiny):
    """Lightning's documented idiom, and everything else that a step may do."""

    def __init__(self) -> None:
        super().__init__(Setup(width=128))
        self.validation_step_outputs: list[torch.Tensor] = []
        self.lengths: list[int] = []
        self.shown: list[str] = []
        self.traces = Traces()

    def _leave(self, loss: torch.Tensor) -> None:
        value = round(loss.item(), 3)
        self.traces.touch(value)
        noting = next(callback for callback in self.trainer.callbacks if isinstance(callback, Noting))
        noting.traces.touch(value)
        noting.noted = [*noting.noted, value]
        self.trainer.noted = [*getattr(self.trainer, "noted", []), value]  # type: ignore[attr-defined]
        if self.logger is not None:
            self.logger.experiment.log_metrics({"by_hand": value})

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self._leave(loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        _, x, y = batch
        loss = (self.net(x) - y).pow(2).mean()
        self.validation_step_outputs.append(loss)
        self._leave(loss)

    def on_validation_epoch_end(self) -> None:
        self.lengths.append(len(self.validation_step_outputs))
        self.log("val_loss", torch.stack(self.validation_step_outputs).mean())
        self.validation_step_outputs.clear()


@pytest.mark.parametrize(
    "options", [{}, {"limit_val_batches": 0, "monitor": None}], ids=["validation", "training"]
)
def test_what_steps_write_down_is_as_without_the_callback(tmp_path: Path, options: dict[str, Any]) -> None:
    def trained(name: str, *callbacks: Callback) -> tuple[Any, ...]:
        CALLS.clear()
        noting = Noting()
        logger = CSVLogger(tmp_path, name, version="")
        module = Recording()
        outcome = fit(
            noting, *callbacks, module=module, max_epochs=3, logger=logger, log_every_n_steps=1, **options
        )
        seen = [
            *(module.traces.seen(), noting.traces.seen(), str(noting.noted), str(outcome.trainer.noted)),  # type: ignore[attr-defined]
            *(str(module.lengths), str(module.shown), str(module.trace), str(module.validations)),
        ]
        rows = [
            {key: value for key, value in row.items() if not key.startswith("checkpoint/")}
            for row in logger.experiment.metrics
        ]
        return seen, str([row for row in rows if len(row) > 1]), outcome.final(), len(CALLS)

    torch.manual_seed(1)
    plain = trained("plain")
    torch.manual_seed(1)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "the quality of checkpoints")
        saved = trained(
            "saved",
            CompressedCheckpoint(
                str(tmp_path / "run"), every_n_train_steps=5, advanced=Advanced(busy="wait")
            ),
        )
    assert saved[3] > plain[3]  # it was measured
    assert plain[0] == saved[0]
    assert plain[1] == saved[1]
    assert_same(plain[2], saved[2])


class Steering(Tiny):
    """Its steps warm the learning rate up by themselves, and count by a schedule."""

    def __init__(self) -> None:
        super().__init__(Setup(width=128))
        self.rates: list[Any] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.trainer.optimizers[0].param_groups[0]["lr"] *= 0.9
        self.trainer.optimizers[0].param_groups[0].setdefault("seen", []).append(batch_idx)
        self.trainer.lr_scheduler_configs[0].scheduler.last_epoch += 1
        self.rates.append(str(self.trainer.optimizers[0].param_groups[0]["lr"]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters())
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2)]


def test_rates_that_steps_change_are_as_without_the_callback(tmp_path: Path) -> None:
    def trained(*callbacks: Callback) -> list[Any]:
        torch.manual_seed(1)
        module = Steering()
        trainer = fit(*callbacks, module=module, max_epochs=3).trainer
        config = trainer.lr_scheduler_configs[0]
        return [module.rates, config.scheduler.state_dict(), trainer.optimizers[0].param_groups[0]["seen"]]

    saving = CompressedCheckpoint(
        str(tmp_path / "run"), every_n_train_steps=5, advanced=Advanced(busy="wait")
    )
    assert trained(saving) == trained()


class Knowing(Tiny):
    """Keeps a logger of its own accord."""

    def setup(self, stage: str) -> None:
        self.known = self.trainer.logger

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.known.log_metrics({"by_hand": 1.0})  # type: ignore[union-attr]


def test_a_logger_that_the_module_keeps_gets_nothing(tmp_path: Path) -> None:
    def logged(name: str, *callbacks: Callback) -> int:
        torch.manual_seed(1)
        logger = CSVLogger(tmp_path, name, version="")
        fit(*callbacks, module=Knowing(Setup(width=128)), max_epochs=2, logger=logger)
        with (tmp_path / name / "metrics.csv").open() as file:
            return sum(row["by_hand"] == "1.0" for row in csv.DictReader(file))

    plain = logged("plain")
    saving = CompressedCheckpoint(
        str(tmp_path / "run"), every_n_train_steps=5, advanced=Advanced(busy="wait")
    )
    assert plain > 0
    assert logged("saved", saving) == plain
