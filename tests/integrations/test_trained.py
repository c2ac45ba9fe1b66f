"""What optimizers train beside the model, what is frozen, and what was replaced, in each framework: as in tests/core/session/test_trained.py."""

import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from shrinkpoint.config import Advanced
from shrinkpoint.errors import ConfigError, ShrinkpointError, ShrinkpointWarning, StateMismatchError

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


# ---- Lightning


def _lightning(url, *, until, callbacks=(), change_at=None, crash_at=None, **module):
    import lightning.pytorch as pl

    from shrinkpoint.callbacks.lightning import CompressedCheckpoint

    class Heads(pl.LightningModule):
        def __init__(self, *, beside=False, freezes=None):
            super().__init__()
            torch.manual_seed(0)
            self.backbone = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Tanh())
            self.head = nn.Linear(6, 2)
            self.heads = [nn.Linear(6, 2) for _ in range(2)] if beside else []  # a list registers no module
            self.freezes, self.losses = freezes, []

        def on_train_start(self):
            if self.freezes is not None:
                self.backbone.requires_grad_(False)

        def on_train_epoch_start(self):
            if self.freezes is not None and self.current_epoch == self.freezes:
                self.backbone.requires_grad_(True)
                self.optimizers().add_param_group({"params": self.backbone.parameters(), "lr": 0.02})

        def training_step(self, batch, batch_idx):
            if self.global_step == crash_at:
                raise Crashed
            if self.global_step == change_at:
                self.head = nn.Linear(6, 2)
            x, y = batch
            out = self.backbone(x)
            loss = nn.functional.cross_entropy(self.head(out), y.long())
            for head in self.heads:
                loss = loss + head(out).square().mean()
            self.losses.append(float(loss))
            return loss

        def configure_optimizers(self):
            named = self.head.parameters() if self.freezes is not None else self.parameters()
            trained = [p for p in named if p.requires_grad]
            return torch.optim.AdamW([*trained, *(p for head in self.heads for p in head.parameters())], 0.01)

    model = Heads(**module)
    saving = CompressedCheckpoint(
        url, every_n_train_steps=2, scheme="lossless", advanced=Advanced(busy="wait")
    )
    trainer = pl.Trainer(**QUIET, max_steps=until, callbacks=[saving, *callbacks])
    try:
        trainer.fit(model, DataLoader(Points(), batch_size=4, shuffle=True))
    except Crashed:
        assert crash_at is not None
    parts = [model, *model.heads]
    return [value for part in parts for value in part.state_dict().values()], model.losses


def _same(one, other):
    return len(one) == len(other) and all(torch.equal(*pair) for pair in zip(one, other, strict=True))


def test_lightning_heads_that_no_module_has_go_on_bit_by_bit(tmp_path):
    values, losses = _lightning(tmp_path / "whole", until=9, beside=True)
    _lightning(tmp_path / "parts", until=9, beside=True, crash_at=5)
    again, rest = _lightning(tmp_path / "parts", until=9, beside=True)
    assert rest == losses[4:]
    assert _same(again, values)


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


def test_lightning_a_new_head_is_an_error(tmp_path):
    with pytest.raises(StateMismatchError, match=r"head\.weight, head\.bias, which the model has no more"):
        _lightning(tmp_path, until=9, change_at=4)


# ---- Hugging Face's Trainer


def _transformers(folder, *, until, crash_at=None, change_at=None, unfreeze_at=None, beside=True):
    transformers = pytest.importorskip("transformers")
    from shrinkpoint.callbacks.transformers import CompressedCheckpoint

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.embed, self.body = nn.Linear(5, 6), nn.Linear(6, 6)
            self.embed.requires_grad_(unfreeze_at is None)

    class Loss(nn.Module):
        """As sentence-transformers' SoftmaxLoss: its classifier is no part of the model."""

        def __init__(self):
            super().__init__()
            torch.manual_seed(1)
            self.classifier = nn.Linear(6, 2)

        def forward(self, out, labels):
            return nn.functional.cross_entropy(self.classifier(out), labels)

    losses, loss = [], Loss()

    class Training(transformers.Trainer):
        def create_optimizer(self):
            more = loss.parameters() if beside else []
            self.optimizer = torch.optim.AdamW([*self.model.parameters(), *more], 0.01)
            return self.optimizer

        def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
            if self.state.global_step == crash_at:
                raise Crashed
            if self.state.global_step == change_at:
                model.body = nn.Linear(6, 6)
            if self.state.global_step == unfreeze_at:
                model.embed.requires_grad_(True)
            found = loss(model.body(model.embed(inputs["x"])), inputs["labels"])
            losses.append(float(found))
            return found

    class Rows(Dataset):
        def __len__(self):
            return 12

        def __getitem__(self, index):
            x, y = Points()[index]
            return {"x": x, "labels": y.long()}

    model = Net()
    arguments = transformers.TrainingArguments(
        output_dir=str(folder) + "-out",
        max_steps=until,
        per_device_train_batch_size=4,
        save_strategy="steps",
        save_steps=2,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        remove_unused_columns=False,
        warmup_steps=2,
    )
    saving = CompressedCheckpoint(str(folder), scheme="lossless", advanced=Advanced(busy="wait"))
    trainer = Training(model, arguments, train_dataset=Rows(), callbacks=[saving])
    try:
        trainer.train()
    except Crashed:
        assert crash_at is not None
    return [*model.state_dict().values(), *loss.state_dict().values()], losses


def test_transformers_weights_of_a_loss_go_on_bit_by_bit(tmp_path):
    values, losses = _transformers(tmp_path / "whole", until=9)
    _transformers(tmp_path / "parts", until=9, crash_at=5)
    again, rest = _transformers(tmp_path / "parts", until=9)
    assert rest == losses[4:]
    assert _same(again, values)


def test_transformers_unfreezing_by_step_goes_on(tmp_path):
    values, losses = _transformers(tmp_path / "whole", until=9, unfreeze_at=3)
    _transformers(tmp_path / "parts", until=9, unfreeze_at=3, crash_at=5)
    (again, rest), _ = _told(
        lambda: _transformers(tmp_path / "parts", until=9, unfreeze_at=3), "requires_grad of embed.weight"
    )
    assert rest == losses[4:]
    assert _same(again, values)


def test_transformers_a_part_of_the_model_that_was_replaced_is_an_error(tmp_path):
    with pytest.raises(StateMismatchError, match=r"body\.weight, body\.bias, which the model has no more"):
        _transformers(tmp_path / "run", until=9, change_at=3)


# ---- Composer


def _composer(folder, *, until, crash_at=None, change_at=None, unfreeze_at=None, beside=False):
    composer = pytest.importorskip("composer")
    from shrinkpoint.callbacks.composer import CompressedCheckpoint

    losses = []

    class Net(composer.ComposerModel):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.embed, self.body = nn.Linear(5, 6), nn.Linear(6, 2)
            self.embed.requires_grad_(unfreeze_at is None)
            self.others = [nn.Linear(6, 2)]

        def forward(self, batch):
            return self.body(self.embed(batch[0]))

        def loss(self, outputs, batch):
            found = nn.functional.cross_entropy(outputs, batch[1].long())
            losses.append(float(found))
            return found

    class Events(composer.Callback):
        def batch_start(self, state, logger):
            batch = int(state.timestamp.batch)
            if batch == crash_at:
                raise Crashed
            if batch == change_at:
                state.model.body = nn.Linear(6, 2)
            if batch == unfreeze_at:
                state.model.embed.requires_grad_(True)

    model = Net()
    trained = [*model.parameters(), *(model.others[0].parameters() if beside else ())]
    trainer = composer.Trainer(
        model=model,
        train_dataloader=DataLoader(Points(), batch_size=4),
        optimizers=torch.optim.AdamW(trained, 0.01),
        max_duration=f"{until}ba",
        callbacks=[
            CompressedCheckpoint(
                str(folder), save_interval="2ba", scheme="lossless", advanced=Advanced(busy="wait")
            ),
            Events(),
        ],
        device="cpu",
        progress_bar=False,
        seed=1,
    )
    try:
        trainer.fit()
    except Crashed:
        assert crash_at is not None
    finally:
        trainer.close()
    return list(model.state_dict().values()), losses


def test_composer_unfreezing_by_step_goes_on(tmp_path):
    values, losses = _composer(tmp_path / "whole", until=9, unfreeze_at=3)
    _composer(tmp_path / "parts", until=9, unfreeze_at=3, crash_at=5)
    (again, rest), _ = _told(
        lambda: _composer(tmp_path / "parts", until=9, unfreeze_at=3), "requires_grad of embed.weight"
    )
    assert rest == losses[4:]
    assert _same(again, values)


def test_composer_what_it_cannot_name_is_refused_before_the_first_step(tmp_path):
    with pytest.raises(ConfigError, match="2 parameters that are not in the model"):
        _composer(tmp_path, until=4, beside=True)


def test_composer_a_part_of_the_model_that_was_replaced_is_an_error(tmp_path):
    with pytest.raises(ShrinkpointError, match=r"body\.weight, body\.bias, which the model has no more"):
        _composer(tmp_path, until=9, change_at=3)
