"""Layers that Lightning's own means freeze and unfreeze, with parameters that are added to the optimizer, go on so."""

import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from shrinkpoint.config import Advanced
from shrinkpoint.errors import ShrinkpointWarning

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.filterwarnings("default::shrinkpoint.errors.ShrinkpointWarning"),
]

QUIET = {
    "accelerator": "cpu",
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
}


class Points(Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, index):
        x = torch.sin(torch.arange(5.0) * (index + 1))
        return x, x.sum() > 0


class Crashed(Exception):
    pass


def _told(action, *expected):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ShrinkpointWarning)
        result = action()
    found = [str(one.message) for one in caught if issubclass(one.category, ShrinkpointWarning)]
    for part in expected:
        assert any(part in message for message in found), (part, found)
    return result, found


def _lightning(url, *, until, callbacks=(), crash_at=None, freezes=None):
    import lightning.pytorch as pl

    from shrinkpoint.callbacks.lightning import CompressedCheckpoint

    class Heads(pl.LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.backbone = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Tanh())
            self.head = nn.Linear(6, 2)
            self.losses = []

        def on_train_start(self):
            if freezes is not None:
                self.backbone.requires_grad_(False)

        def on_train_epoch_start(self):
            if self.current_epoch == freezes:
                self.backbone.requires_grad_(True)
                self.optimizers().add_param_group({"params": self.backbone.parameters(), "lr": 0.02})

        def training_step(self, batch, batch_idx):
            if self.global_step == crash_at:
                raise Crashed
            x, y = batch
            loss = nn.functional.cross_entropy(self.head(self.backbone(x)), y.long())
            self.losses.append(float(loss))
            return loss

        def configure_optimizers(self):
            named = self.head.parameters() if freezes is not None else self.parameters()
            return torch.optim.AdamW([p for p in named if p.requires_grad], 0.01)

    model = Heads()
    saving = CompressedCheckpoint(
        url, every_n_train_steps=2, scheme="lossless", advanced=Advanced(busy="wait")
    )
    trainer = pl.Trainer(**QUIET, max_steps=until, callbacks=[saving, *callbacks])
    try:
        trainer.fit(model, DataLoader(Points(), batch_size=4, shuffle=True))
    except Crashed:
        assert crash_at is not None
    return list(model.state_dict().values()), model.losses


def _same(one, other):
    return len(one) == len(other) and all(torch.equal(*pair) for pair in zip(one, other, strict=True))


@pytest.mark.parametrize("crash_at", [5, 7, 9])
@pytest.mark.parametrize("train_bn", [True, False])
def test_lightning_finetuning_goes_on_unfrozen(tmp_path, crash_at, train_bn):
    from lightning.pytorch.callbacks import BaseFinetuning

    class Unfreeze(BaseFinetuning):
        def freeze_before_training(self, pl_module):
            self.freeze(pl_module.backbone, train_bn=train_bn)

        def finetune_function(self, pl_module, epoch, optimizer):
            if epoch == 2:
                self.unfreeze_and_add_param_group(pl_module.backbone, optimizer, train_bn=train_bn)

    def fit(folder, **more):
        return _lightning(folder, until=12, callbacks=[Unfreeze()], **more)

    values, losses = fit(tmp_path / "whole")
    fit(tmp_path / "parts", crash_at=crash_at)
    (again, rest), _ = _told(lambda: fit(tmp_path / "parts"), *(["requires_grad"] if crash_at == 9 else []))
    assert rest == losses[crash_at // 2 * 2 :]
    assert _same(again, values)


@pytest.mark.parametrize("crash_at", [3, 5, 8])
def test_lightning_own_unfreezing_goes_on(tmp_path, crash_at):
    values, losses = _lightning(tmp_path / "whole", until=9, freezes=1)
    _lightning(tmp_path / "parts", until=9, freezes=1, crash_at=crash_at)
    again, rest = _lightning(tmp_path / "parts", until=9, freezes=1)
    assert rest == losses[crash_at // 2 * 2 :]
    assert _same(again, values)
