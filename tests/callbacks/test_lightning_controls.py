"""Controls of the bound through Lightning's callback, with default options: what must be caught is."""

import copy
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from support.lightning_models import QUIET
from support.options import grouped
from support.training import TinyMLP
from torch.utils.data import DataLoader

import shrinkpoint.schemes.auto.first_moments as centroid_moments
from shrinkpoint.callbacks.lightning import CompressedCheckpoint
from shrinkpoint.errors import ShrinkpointWarning
from shrinkpoint.saver import Saver
from shrinkpoint.schemes.auto.options import AutoOptions


class Regression(pl.LightningModule):
    """A batch is the number by which the model makes its data."""

    def __init__(self, *, blind: bool = False) -> None:
        super().__init__()
        self.net = TinyMLP()
        self.measured = [
            copy.deepcopy(self.net) if blind else self.net
        ]  # in a list it is no part of the module
        self.weights: dict[int, dict[str, torch.Tensor]] = {}

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if torch.is_grad_enabled():
            copies = {name: value.clone() for name, value in self.net.state_dict().items()}
            self.weights.setdefault(self.trainer.global_step, copies)
        return self.net.loss(int(batch))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.measured[0].loss(int(batch)))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.net.parameters(), lr=1e-3)

    def train_dataloader(self) -> Any:
        return DataLoader(range(31))  # type: ignore[arg-type]

    def val_dataloader(self) -> Any:
        return DataLoader(range(10_000, 10_004))  # type: ignore[arg-type]


def saves(folder: Path, module: Regression | None = None, **options: Any) -> list[dict[str, Any]]:
    """What is told of the checkpoints of 10, 20 and 30 steps of a training."""
    pl.seed_everything(1, verbose=False)
    callback = CompressedCheckpoint(str(folder), **grouped(every_n_train_steps=10, busy="wait", **options))
    trainer = pl.Trainer(max_epochs=1, callbacks=[callback], **QUIET)
    trainer.fit(module or Regression())
    found = reversed(Saver(str(folder)).store.manifests())
    told: list[dict[str, Any]] = [manifest.meta["save"] for manifest in found]  # type: ignore[misc]
    assert [report["step"] for report in told] == [10, 20, 30, 31]
    return told[:3]


def check_noise(folder: Path, module: Regression) -> None:
    """Restored weights differ from the true ones, and by less than training has moved them in ten steps."""
    for step in (10, 20, 30):
        found = Saver(str(folder)).restore(step)
        assert found is not None
        restored = found.state.to_object()["state_dict"]
        true, earlier = module.weights[step], module.weights[step - 10]
        for name, value in true.items():
            noise, moved = ((x - value).square().mean() for x in (restored[f"net.{name}"], earlier[name]))
            assert 0 <= noise <= 1.5 * moved
        assert not torch.equal(restored["net.inner.weight"], true["inner.weight"])


def test_by_default_noise_stays_below_movement_and_updates_are_no_longer(tmp_path: Path) -> None:
    module = Regression()
    for report in saves(tmp_path, module):
        assert (report["scheme"], report["measured"]) == ("auto", "measured")
        assert report["update_length"] <= 1.05
        assert report["update_error"] <= 1
    check_noise(tmp_path, module)


def test_forced_wide_weights_are_stored_exactly(tmp_path: Path) -> None:
    told = saves(tmp_path, scheme=AutoOptions(weight_scale=64))
    assert [report["scheme"] for report in told] == ["lossless"] * 3


def test_a_validation_of_another_copy_is_blind_and_forced_wide_weights_are_refused_all_the_same(
    tmp_path: Path,
) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        told = saves(tmp_path, Regression(blind=True), scheme=AutoOptions(weight_scale=64))
    assert all(
        "what training has moved it by since the last checkpoint" in report["reason"] for report in told
    )
    messages = [str(warning.message) for warning in caught if warning.category is ShrinkpointWarning]
    assert sum("does not see the weights" in message for message in messages) == 1


def test_a_validation_of_another_copy_leaves_noise_below_movement(tmp_path: Path) -> None:
    module = Regression(blind=True)
    with pytest.warns(ShrinkpointWarning, match="does not see the weights"):
        told = saves(tmp_path, module)
    assert [(report["scheme"], report["measured"]) for report in told] == [("auto", "blind")] * 3
    check_noise(tmp_path, module)


def test_moments_replaced_by_noise_of_their_own_size_are_stored_exactly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    true = centroid_moments._Quantized.values

    def replaced(self: Any) -> Any:
        value = torch.from_numpy(true(self))
        flips = torch.rand(value.shape, generator=torch.Generator().manual_seed(3)) < 0.5
        return torch.where(flips, -value, value).numpy()

    monkeypatch.setattr(centroid_moments._Quantized, "values", replaced)
    for report in saves(tmp_path):
        assert report["configuration"].endswith("exact moments")
        assert "as far from the truth as zeros are" in report["reason"]
