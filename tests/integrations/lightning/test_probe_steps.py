"""Steps from a saved state, taken and taken back in the midst of a Lightning run, leave no trace in it."""

import copy
import warnings
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torchmetrics
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CSVLogger
from support.lightning_models import Setup, Tiny, adapter_of, assert_same, fit
from support.options import grouped
from support.reports import saver_of
from torch.amp.grad_scaler import GradScaler

from shrinkpoint.callbacks.lightning import CompressedCheckpoint
from shrinkpoint.errors import ShrinkpointWarning
from shrinkpoint.session.probe import LossProbe, StepProbe, scale_of

MARKS = (1, 3)
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


class Leaky(Tiny):
    """Keeps what its steps gave, as Lightning's manual advises, fills a metric, and writes to a logger itself."""

    def __init__(self, setup: Setup | None = None) -> None:
        super().__init__(setup)
        self.outputs: list[torch.Tensor] = []
        self.means: list[float] = []
        self.metric = torchmetrics.MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.outputs.append(loss.detach())
        self.metric(loss.detach())
        self.log("mean", self.metric, on_epoch=True)
        if self.logger is not None:
            self.logger.log_metrics({"own": loss.item()}, step=len(self.trace))
        return loss

    def on_train_epoch_end(self) -> None:
        self.means.append(float(torch.stack(self.outputs).mean()))
        self.outputs.clear()


class Stepping(Callback):
    """Goes on from a checkpoint of some batches before, again and again."""

    def __init__(self, *, steps: int = 4, every: int = 3) -> None:
        self.adapter = adapter_of(None)
        self.probe = LossProbe(self.adapter)
        self.steps = StepProbe(self.probe, steps=steps)
        self.every = every
        self.losses: list[list[float]] = []
        self.offered: list[bool] = []

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self.adapter.trainer = trainer
        self.steps.starts()

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.probe.kept.see_training(batch)
        self.steps.recent.see(batch, first=batch_idx % trainer.accumulate_grad_batches == 0)

    def on_validation_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, *_: Any) -> None:
        self.probe.kept.see_validation(batch)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        self._try(trainer, pl_module)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        if not trainer.sanity_checking:
            self._try(trainer, pl_module, always=True)

    def _try(self, trainer: pl.Trainer, module: Any, *, always: bool = False) -> None:
        if trainer.global_step % self.every and not always:
            return
        optimizers = [optimizer.state_dict() for optimizer in trainer.optimizers]
        checkpoint = copy.deepcopy({"state_dict": module.state_dict(), "optimizer_states": optimizers})
        resumed = self.steps.resumed()
        self.offered.append(resumed is not None)
        if resumed is not None:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                losses = list(resumed(checkpoint, MARKS))
            assert losses == resumed(checkpoint, MARKS)
            self.losses.append(losses)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"setup": Setup(optimizer=torch.optim.SGD), "accumulate_grad_batches": 3, "gradient_clip_val": 0.1},
        {"precision": "bf16-mixed", "val_check_interval": 5},
        {"num_sanity_val_steps": 0, "limit_val_batches": 0, "monitor": None},
    ],
    ids=["plain", "accumulating", "bf16", "no validation"],
)
def test_leaves_no_trace(options: dict[str, Any], tmp_path: Any) -> None:
    def run(*callbacks: Callback) -> Any:
        pl.seed_everything(1, verbose=False)
        given = {**options}
        module = Leaky(given.pop("setup", None))
        logger = CSVLogger(tmp_path, name=str(len(callbacks)))
        outcome = fit(*callbacks, module=module, max_epochs=2, **given, logger=logger, log_every_n_steps=1)
        return outcome, logger.experiment.metrics

    (plain, logged), stepping = run(), Stepping()
    probed, also_logged = run(stepping)
    assert plain.trace == probed.trace
    assert plain.module.means == probed.module.means
    assert plain.module.validations == probed.module.validations
    assert_same(plain.final(), probed.final())
    assert_same(plain.trainer.callback_metrics, probed.trainer.callback_metrics)
    assert logged == also_logged
    assert len(stepping.losses) > 3
    assert all(len(set(losses)) == len(MARKS) for losses in stepping.losses)


class Manual(Tiny):
    automatic_optimization = False

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


class OwnStep(Tiny):
    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)


@pytest.mark.parametrize("module_class", [Manual, OwnStep])
def test_offers_nothing_where_a_step_is_not_simple(module_class: type[Tiny]) -> None:
    stepping = Stepping()
    pl.seed_everything(1, verbose=False)
    fit(stepping, module=module_class(), max_epochs=1)
    assert stepping.offered
    assert not any(stepping.offered)


def test_offers_nothing_without_batches() -> None:
    stepping = Stepping(steps=0)
    fit(stepping, max_epochs=1)
    assert not any(stepping.offered)


@pytest.mark.filterwarnings("error::shrinkpoint.errors.ShrinkpointWarning")
def test_a_real_run_is_measured_after_resumed_steps_and_does_not_notice() -> None:
    setup = Setup(width=512)

    def saving(url: str, **options: Any) -> CompressedCheckpoint:
        return CompressedCheckpoint(f"memory://lightning-steps/{url}", **grouped(**{**PROBED, **options}))

    plain = fit(setup=setup, max_epochs=2)
    callback = saving("on")
    probed = fit(callback, setup=setup, max_epochs=2)
    assert plain.trace == probed.trace
    assert_same(plain.final(), probed.final())
    reports = saver_of(callback).reports()
    assert {"2", "4"} in [set(report.resumed) for report in reports], reports
    off = saving("off", probe_steps=0)
    fit(off, setup=setup, max_epochs=1)
    assert not any(report.resumed for report in saver_of(off).reports())


class Failing(Tiny):
    """Its step works as long as it is training's own."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if "log" in vars(self):
            raise RuntimeError("not with me")
        return super().training_step(batch, batch_idx)


def test_a_step_that_fails_is_told_once_and_harms_nothing() -> None:
    callback = CompressedCheckpoint("memory://lightning-steps/failing", **grouped(**PROBED))
    setup = Setup(width=512)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pl.seed_everything(1, verbose=False)
        probed = fit(callback, module=Failing(setup), max_epochs=2)
    told = [str(w.message) for w in caught if w.category is ShrinkpointWarning]
    assert [message for message in told if "not with me" in message] == told[:1]
    assert len(told) == 1
    pl.seed_everything(1, verbose=False)
    assert fit(module=Failing(setup), max_epochs=2).trace == probed.trace


def test_losses_are_scaled_as_in_training() -> None:
    """The scaler itself stays as it is."""
    for scaler, scale in (
        (None, 1.0),
        (GradScaler("cpu", init_scale=8.0), 8.0),
        (GradScaler("cpu", enabled=False), 1.0),
    ):
        trainer: Any = SimpleNamespace(precision_plugin=SimpleNamespace(scaler=scaler))
        assert scale_of(trainer.precision_plugin.scaler) == scale
