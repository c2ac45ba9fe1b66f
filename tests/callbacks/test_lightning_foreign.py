"""What other libraries put into a Lightning training: hyper-parameters of any kind, and weights that bitsandbytes has quantized."""

import dataclasses
import enum
import functools
import warnings
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
import torchmetrics
from support.containers import identical
from support.options import grouped
from torch import nn

from shrinkpoint.callbacks.lightning import CompressedCheckpoint
from shrinkpoint.errors import ConfigError, ShrinkpointWarning
from shrinkpoint.integrations.lightning.io import open_as_ckpt


class Activation(enum.Enum):
    RELU = "relu"


@dataclasses.dataclass
class Sizes:
    width: int
    activation: Activation


class Module(pl.LightningModule):
    def __init__(self, config=None, activation=None, folder=None, sizes=None, loss=None, **more):
        super().__init__()
        self.save_hyperparameters()
        self.layer = nn.Linear(4, 4)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], 0.01)

    def train_dataloader(self):
        return torch.utils.data.DataLoader(
            torch.randn(8, 4, generator=torch.Generator().manual_seed(1)), batch_size=2
        )


class Taking(Module):
    """Its hyper-parameters are one container."""

    def __init__(self, config):
        super().__init__()
        self.save_hyperparameters(config)


class Data(pl.LightningDataModule):
    def __init__(self, transform=None, sizes=None, config=None):
        super().__init__()
        self.save_hyperparameters()

    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.randn(8, 4), batch_size=2)


def fit(url, module, steps=2, datamodule=None, more=None, **options):
    callback = CompressedCheckpoint(
        str(url), **grouped(every_n_train_steps=1, scheme="lossless", busy="wait", **options)
    )
    trainer = pl.Trainer(
        max_steps=steps,
        callbacks=[callback],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        accelerator="cpu",
        use_distributed_sampler=False,
        **(more or {}),
    )
    trainer.fit(module, datamodule=datamodule)
    return trainer


def test_plain_hyperparameters_come_back_as_they_were(tmp_path):
    omegaconf = pytest.importorskip("omegaconf")
    config = omegaconf.OmegaConf.create({"rate": 0.5, "layers": [{"width": 4}, {"width": "${rate}"}]})
    given = {
        "config": {"nested": config, "list": config.layers},
        "activation": Activation.RELU,
        "folder": Path("some/where"),
        "sizes": Sizes(3, Activation.RELU),
    }
    fit(tmp_path, Module(**given), datamodule=Data(sizes=given["sizes"], config=config))
    hparams = Module.load_from_checkpoint(open_as_ckpt(str(tmp_path))).hparams
    assert hparams["activation"] is Activation.RELU
    assert (hparams["sizes"], hparams["folder"]) == (given["sizes"], "some/where")
    assert (type(hparams["config"]["nested"]), hparams["config"]["nested"]) == (omegaconf.DictConfig, config)
    assert type(hparams["config"]["list"]) is omegaconf.ListConfig
    data = Data.load_from_checkpoint(open_as_ckpt(str(tmp_path)))
    assert (data.hparams["sizes"], data.hparams["config"]) == (given["sizes"], config)


def test_hyperparameters_that_are_one_container_come_back_as_such(tmp_path):
    omegaconf = pytest.importorskip("omegaconf")
    config = omegaconf.OmegaConf.create({"rate": 0.5, "again": "${rate}"})
    fit(tmp_path, Taking(config))
    loaded = Taking.load_from_checkpoint(open_as_ckpt(str(tmp_path)))
    assert type(loaded.hparams) is omegaconf.DictConfig
    assert loaded.hparams == config


def test_what_cannot_be_stored_is_left_out_with_one_warning_for_each_owner(tmp_path):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        module = Module(loss=functools.partial(torch.mean), activation=Activation.RELU, hook=nn.Linear(2, 2))
        fit(
            tmp_path,
            module,
            steps=3,
            datamodule=Data(transform=nn.Linear(2, 2), sizes=Sizes(1, Activation.RELU)),
        )
    told = [str(one.message) for one in seen if "cannot be stored without pickle" in str(one.message)]
    assert len(told) == 2
    assert "the hyper-parameters hook, loss are" in told[0]
    assert "data module's hyper-parameters transform are" in told[1]
    assert Module.load_from_checkpoint(open_as_ckpt(str(tmp_path))).hparams["activation"] is Activation.RELU
    loaded = Data.load_from_checkpoint(open_as_ckpt(str(tmp_path)), transform=None)
    assert loaded.hparams["sizes"] == Sizes(1, Activation.RELU)


@pytest.mark.parametrize("more", [{}, {"val_check_interval": 1}, {"accumulate_grad_batches": 2}], ids=str)
def test_a_scheduler_that_follows_each_batch_is_resumed_bit_by_bit(tmp_path, more):
    class Followed(Module):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            self.log("followed", loss + batch_idx)  # which rises
            return loss

        def validation_step(self, batch, batch_idx):
            self.log("held out", self.layer(batch).square().mean())

        def val_dataloader(self):
            return self.train_dataloader()

        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
            given = {"scheduler": scheduler, "interval": "step", "monitor": "followed"}
            return {"optimizer": optimizer, "lr_scheduler": given}

    whole, first, rest = Followed(), Followed(), Followed()
    whole.load_state_dict(first.state_dict())
    fit(tmp_path / "whole", whole, steps=6, more=more)
    fit(tmp_path / "run", first, steps=2, more={"limit_train_batches": 4, **more})
    trainer = fit(tmp_path / "run", rest, steps=6, more=more)
    assert identical(dict(rest.state_dict()), dict(whole.state_dict()))
    assert trainer.optimizers[0].param_groups[0]["lr"] < 0.01


class TwoSteps(torch.optim.SGD):
    """Sharpness-aware minimization, as most write it: climbs by the gradients that are there, and descends by those of the closure."""

    @torch.no_grad()
    def first_step(self):
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                parameter.add_(parameter.grad, alpha=0.05)

    def second_step(self):
        super().step()

    def step(self, closure):
        self.first_step()
        with torch.enable_grad():
            loss = closure()
        self.second_step()
        return loss


@pytest.mark.parametrize("automatic", [True, False])
def test_steps_that_begin_with_the_last_batchs_gradients_are_refused(tmp_path, automatic):
    class Sharp(Module):
        def configure_optimizers(self):
            return TwoSteps(self.parameters(), 0.01)

        def training_step(self, batch, batch_idx):
            if self.automatic_optimization:
                return super().training_step(batch, batch_idx)
            optimizer = self.optimizers()

            def closure():
                optimizer.zero_grad()
                loss = super(Sharp, self).training_step(batch, batch_idx)
                self.manual_backward(loss)
                return loss

            closure()
            optimizer.step(closure)
            return None

    def made(seed):
        torch.manual_seed(seed)
        module = Sharp()
        module.automatic_optimization = automatic
        return module

    if automatic:
        with pytest.raises(ConfigError, match=r"TwoSteps.*of the batch before"):
            fit(tmp_path, made(1))
        return
    whole, resumed = made(1), made(2)
    fit(tmp_path / "whole", whole, steps=6)
    fit(tmp_path / "run", made(1), steps=3)
    fit(tmp_path / "run", resumed, steps=6)
    assert torch.equal(resumed.layer.weight, whole.layer.weight)


class Measured(Module):
    """Its loss depends on a metric that it updates and never resets."""

    def __init__(self):
        super().__init__()
        self.mean, self.seen = torchmetrics.MeanMetric(), torchmetrics.CatMetric()

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.mean.update(loss.detach())
        self.seen.update(loss.detach())
        return loss * (1 + self.mean.compute() + self.seen.compute().sum())


class Lean(Module):
    """Leaves what is frozen out of its checkpoints."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(4, 4).requires_grad_(False)
        nn.init.eye_(self.base.weight)
        nn.init.ones_(self.base.bias)

    def training_step(self, batch, batch_idx):
        return super().training_step(self.base(batch), batch_idx)

    def on_save_checkpoint(self, checkpoint):
        for name in [name for name in checkpoint["state_dict"] if name.startswith("base.")]:
            del checkpoint["state_dict"][name]


class Completing(Lean):
    def on_load_checkpoint(self, checkpoint):
        checkpoint["state_dict"] |= {f"base.{name}": value for name, value in self.base.state_dict().items()}


class Loose(Lean):
    def __init__(self):
        super().__init__()
        self.strict_loading = False


@pytest.mark.parametrize(
    ("kind", "more"),
    [(Measured, {}), (Completing, {}), (Loose, {}), (Module, {"precision": "64-true"})],
)
def test_metrics_lean_checkpoints_and_double_precision_are_resumed_bit_by_bit(tmp_path, kind, more):
    def made(seed):
        torch.manual_seed(seed)
        return kind()

    whole, resumed = made(1), made(2)
    fit(tmp_path / "whole", whole, steps=8, more=more)
    fit(tmp_path / "run", made(1), steps=3, more=more)
    fit(tmp_path / "run", resumed, steps=8, more=more)
    assert torch.equal(resumed.layer.weight, whole.layer.weight)


def test_another_optimizer_within_a_training_is_told(tmp_path):
    class Swapping(Module):
        def on_train_batch_start(self, batch, batch_idx):
            if batch_idx == 2:
                self.trainer.strategy.optimizers = [torch.optim.SGD(self.parameters(), 0.01)]

    with pytest.warns(ShrinkpointWarning, match="the optimizers are SGD now, and were AdamW"):
        fit(tmp_path, Swapping(), steps=4)
