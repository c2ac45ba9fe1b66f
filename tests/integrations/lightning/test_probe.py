"""Measuring the loss in mid-training leaves no trace."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torchmetrics
from lightning.pytorch.callbacks import Callback
from support.lightning_models import Tiny, adapter_of, assert_same, fit

from shrinkpoint.errors import ConfigError
from shrinkpoint.session.probe import LossProbe


class Metered(Tiny):
    """Has a torchmetrics object, random validation, and what else could leak."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = torchmetrics.MeanMetric()
        self.kept = torchmetrics.CatMetric()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        _, x, y = batch
        noise = 1e-3 * torch.rand(1).item()
        loss = (self.net(x) - y).pow(2).mean() + noise
        self.mean.update(loss)
        self.kept.update(loss)
        self.log("val_loss", loss)


class Probing(Callback):
    def __init__(self, *, probes: bool = True) -> None:
        self.adapter = adapter_of(None)
        self.probe = LossProbe(self.adapter) if probes else None
        self.losses: list[tuple[tuple[float, ...], ...]] = []
        self.metrics: list[Any] = []

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self.probe is not None:
            self.probe.kept.see_training(batch)

    def on_validation_batch_start(
        self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if self.probe is not None:
            self.probe.kept.see_validation(batch, batch_idx)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        self.metrics.append((pl_module.mean.compute().item(), str(pl_module.kept.compute())))
        if self.probe is None:
            return
        live = {name: value.detach().clone() for name, value in pl_module.named_parameters()}
        zero = {name: torch.zeros_like(value) for name, value in live.items()}
        self.adapter.trainer = trainer
        evaluate = self.probe.evaluation()
        self.losses.append((evaluate({}), evaluate(live), evaluate(zero)))


@pytest.mark.parametrize(
    "options", [{}, {"num_sanity_val_steps": 0, "limit_val_batches": 0, "monitor": None}]
)
def test_leaves_no_trace(options: dict[str, Any]) -> None:
    without, probed = Probing(probes=False), Probing()
    pl.seed_everything(1, verbose=False)
    plain = fit(without, module=Metered(), max_epochs=2, **options)
    pl.seed_everything(1, verbose=False)
    other = fit(probed, module=Metered(), max_epochs=2, **options)
    assert plain.trace == other.trace
    assert_same(plain.final(), other.final())
    assert str(without.metrics) == str(probed.metrics)
    assert len(probed.losses) == 16
    assert all(live == same != zero for live, same, zero in probed.losses)
    assert {len(live) for live, _, _ in probed.losses} <= {1, 2}


def test_prefers_the_monitored_metric() -> None:
    class Two(Tiny):
        def validation_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            self.log_dict({"val_loss": torch.tensor(1.0), "perplexity": torch.tensor(2.0)})
            return torch.tensor(3.0)

    class Silent(Tiny):
        def validation_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return torch.tensor(3.0)

    class Mute(Tiny):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("accuracy", torch.tensor(0.5))

    batch = (torch.zeros(2), torch.zeros(2, 8), torch.zeros(2, 1))

    def measured(module: Tiny, metric: str | None) -> float:
        trainer = fit(module=module, max_epochs=1, limit_val_batches=0, monitor=None).trainer
        probe = LossProbe(adapter_of(trainer, monitor=metric))
        probe.kept.see_validation(batch)
        [loss] = probe.evaluation()({})
        return loss

    assert [measured(Two(), metric) for metric in ("perplexity", None, "missing")] == [2.0, 1.0, 1.0]
    assert measured(Silent(), None) == 3.0
    with pytest.raises(ConfigError, match="logged \\['accuracy'\\]"):
        measured(Mute(), None)


def test_a_step_that_gathers_is_refused_where_the_other_processes_do_not_take_part(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Gathering(Tiny):
        def validation_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            available.append(self.mean.distributed_available_fn())
            return self.all_gather(torch.tensor(3.0)).mean()

    available: list[bool] = []
    module = Gathering()
    module.mean = torchmetrics.MeanMetric()
    trainer = fit(module=module, max_epochs=1, limit_val_batches=0, monitor=None).trainer
    module.mean.distributed_available_fn = lambda: True
    probe = LossProbe(adapter_of(trainer))
    probe.kept.see_validation((torch.zeros(2), torch.zeros(2, 8), torch.zeros(2, 1)))
    monkeypatch.setattr(type(trainer), "world_size", 2)
    with pytest.raises(ConfigError, match="all_gather"):
        probe.evaluation()({})
    assert available == [False]
    assert module.mean.distributed_available_fn()
    assert "all_gather" not in vars(module)


def test_needs_batches() -> None:
    outcome = fit(max_epochs=1)
    with pytest.raises(ConfigError, match="no batch"):
        LossProbe(adapter_of(outcome.trainer)).evaluation()({})
