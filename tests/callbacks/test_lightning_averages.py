"""Averages of Lightning's own callbacks: where they stand in a checkpoint, how they are coded, and that runs go on with them."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import safetensors.torch
import torch
from lightning.pytorch import callbacks
from support.lightning_models import Setup, fit
from support.reports import saver_of
from torch.optim.swa_utils import get_ema_avg_fn

from shrinkpoint.callbacks.lightning import CompressedCheckpoint
from shrinkpoint.config import Advanced
from shrinkpoint.engine.address import Address
from shrinkpoint.integrations.lightning.io import load_checkpoint
from shrinkpoint.io.export import export
from shrinkpoint.saver import Saver
from shrinkpoint.state.training import Role

pytestmark = pytest.mark.skipif(
    not hasattr(callbacks, "WeightAveraging"), reason="Lightning has WeightAveraging since 2.6"
)

MATRIX = "net.0.weight"


def averaging() -> Any:
    return callbacks.WeightAveraging(avg_fn=get_ema_avg_fn(0.9))


def weight_of(module: pl.LightningModule) -> torch.Tensor:
    return module.state_dict()[MATRIX].clone()


class Noting(callbacks.Callback):
    """The weights that are trained, and their average, after each step."""

    def __init__(self, average: Any) -> None:
        self.average = average
        self.seen: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        average = self.average._average_model.module
        self.seen[trainer.global_step] = weight_of(pl_module), weight_of(average)


def test_an_average_in_the_models_place_is_an_average_and_the_model_beside_it_the_model(
    tmp_path: Path,
) -> None:
    average = averaging()
    noting = Noting(average)
    url = str(tmp_path / "run")
    saving = CompressedCheckpoint(url, every_n_train_steps=8, save_top_k=-1, advanced=Advanced(busy="wait"))
    fit(average, noting, saving, setup=Setup(width=512))
    reports = saver_of(saving).reports()
    assert [report.measured for report in reports] == ["measured"] * len(reports)
    manifest = next(m for m in Saver(url).store.manifests() if m.step == 24)
    restored = Saver(url).restore(manifest)
    assert restored is not None
    specs, tensors = restored.state.specs, restored.state.tensors
    names = f"current_model_state/{MATRIX}", f"state_dict/{MATRIX}"
    assert [specs[name].tag.role for name in names] == [Role.WEIGHT, Role.AVERAGE]
    for name, true, before in zip(names, noting.seen[24], noting.seen[16], strict=True):
        noise, moved = ((x - true).square().mean().sqrt() for x in (tensors[name], before))
        assert 0 < noise < moved
    report = next(report for report in reports if report.step == 24)
    assert report.sections["average"] < report.raw_sections["average"] / 3
    first = reports[0]
    assert (
        first.sections["average"] < first.raw_sections["average"] / 2
    )  # its movement is known from the start
    export(restored.state, tmp_path / "model.safetensors")
    taken = safetensors.torch.load_file(tmp_path / "model.safetensors")
    assert torch.equal(taken[MATRIX], tensors[names[1]])
    assert "net.1.running_mean" in taken


def test_steps_are_tried_from_the_weights_and_not_from_their_average(tmp_path: Path) -> None:
    average = averaging()
    url = str(tmp_path / "run")
    saving = CompressedCheckpoint(
        url,
        every_n_train_steps=8,
        save_top_k=-1,
        advanced=Advanced(busy="wait", probe_steps=3, search_overhead=1000.0),
    )
    plain = fit(
        averaging(), CompressedCheckpoint(str(tmp_path / "plain"), scheme="lossless", every_n_train_steps=8)
    )
    probed = fit(average, saving)
    assert probed.trace == plain.trace
    assert any(report.resumed for report in saver_of(saving).reports())
    checkpoint = load_checkpoint(Address(url=url), Saver(url))
    assert set(checkpoint["current_model_state"]) == set(checkpoint["state_dict"])


def test_swas_copy_in_its_callbacks_state_is_an_average_once_it_moves(tmp_path: Path) -> None:
    url = str(tmp_path / "run")
    swa = callbacks.StochasticWeightAveraging(swa_lrs=1e-3, swa_epoch_start=1)
    saving = CompressedCheckpoint(url, every_n_train_steps=8, save_top_k=-1, advanced=Advanced(busy="wait"))
    fit(swa, saving, setup=Setup(width=512), max_epochs=8)
    reports = saver_of(saving).reports()
    late = [r for r in reports if "average" in r.sections and r.step >= 40]
    assert late
    assert min(r.sections["average"] / r.raw_sections["average"] for r in late) < 0.34
