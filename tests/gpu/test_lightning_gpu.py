"""A Lightning training on a GPU that was interrupted and continues by itself equals one that was not, bit by bit.

The continuing trainer has a module and generators of its own, with another seed. The module draws its dropout from the GPU's generator.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from support.options import grouped

pl = pytest.importorskip("lightning.pytorch")

from lightning.pytorch.plugins import MixedPrecision
from torch.utils.data import DataLoader, TensorDataset

from gpu.device import DEVICE, ON_GPU
from shrinkpoint.callbacks.lightning import CompressedCheckpoint
from shrinkpoint.steps.options import StepLog
from shrinkpoint.store.run import RunStore

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"
)

STEPS = 30
"""Of a whole training; its epochs have 8."""


class Net(pl.LightningModule):  # type: ignore[misc, name-defined]
    """Batch norm, dropout, and losses that are noted: what is restored wrongly shows."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.fused = fused
        self.net = torch.nn.Sequential(
            torch.nn.Linear(16, 128),
            torch.nn.BatchNorm1d(128),
            torch.nn.ReLU(),
            torch.nn.Dropout(0.5),
            torch.nn.Linear(128, 128),
            torch.nn.ReLU(),
            torch.nn.Linear(128, 4),
        )
        self.trace: list[tuple[int, float]] = []
        self.places: dict[str, set[str]] = {}

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        loss = torch.nn.functional.mse_loss(self.net(x).float(), y)
        if torch.is_grad_enabled() and self.training:
            self.trace.append((self.trainer.global_step, loss.item()))
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val_loss", torch.nn.functional.mse_loss(self.net(x).float(), y))

    def on_train_end(self) -> None:
        """Notes where the tensors are: Lightning takes them all to the host afterwards."""
        states = self.optimizers(use_pl_optimizer=False).state.values()
        self.places = {"weights": {p.device.type for p in self.parameters()}}
        for key in ("step", "exp_avg", "exp_avg_sq"):
            self.places[key] = {state[key].device.type for state in states}

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3, fused=self.fused)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def points(count: int, seed: int) -> TensorDataset:
    """Samples of a fixed map."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 16, generator=generator)
    return TensorDataset(x, torch.stack([x[:, i] * x[:, i + 1] for i in range(4)], dim=1))


class Crash(pl.Callback):  # type: ignore[misc, name-defined]
    """An error right after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self.step:
            raise RuntimeError("preempted")


@dataclass(frozen=True, kw_only=True)
class Case:
    """How the training is made."""

    fused: bool = False
    precision: str = "32-true"
    scaler: Callable[[], Any] | None = None


def skipping_scaler() -> Any:
    """A scaler whose first steps are skipped, and whose scale grows during the training."""
    return torch.amp.GradScaler(DEVICE, init_scale=2.0**60, backoff_factor=2.0**-12, growth_interval=4)


def plain_scaler() -> Any:
    """What ``precision="16-mixed"`` makes by itself on a GPU."""
    return torch.amp.GradScaler(DEVICE)


CASES = {
    "fp32": Case(),
    "fp32, fused": Case(fused=True),
    "fp16": Case(precision="16-mixed", scaler=None if ON_GPU else plain_scaler),
    "fp16, skipped steps": Case(precision="16-mixed", scaler=skipping_scaler),
    "fp16, skipped steps, fused": Case(precision="16-mixed", scaler=skipping_scaler, fused=True),
    "bf16": Case(precision="bf16-mixed"),
}


@dataclass
class Outcome:
    """What a training came to."""

    trace: list[tuple[int, float]]
    state: dict[str, Any]
    places: dict[str, set[str]]


def fit(case: Case, *callbacks: Any, steps: int = STEPS, seed: int = 1) -> Outcome:
    """Train; a `Crash` is the end of it, and no error."""
    pl.seed_everything(seed, verbose=False)
    module = Net(case.fused)
    given: dict[str, Any] = {"precision": case.precision}
    if case.scaler is not None:
        given = {"plugins": MixedPrecision("16-mixed", DEVICE, case.scaler())}
    trainer = pl.Trainer(
        accelerator="gpu" if ON_GPU else "cpu",
        devices=1,
        max_steps=steps,
        max_epochs=-1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=bool(callbacks),
        callbacks=list(callbacks),
        **given,
    )
    train = DataLoader(points(64, 0), batch_size=8, shuffle=True, pin_memory=ON_GPU)
    try:
        trainer.fit(module, train, DataLoader(points(256, 1), batch_size=64))
    except RuntimeError as error:
        if str(error) != "preempted":
            raise
    [optimizer] = trainer.optimizers
    return Outcome(
        trace=module.trace,
        places=module.places,
        state={
            "weights": {name: value.detach().clone() for name, value in module.state_dict().items()},
            "moments": {
                index: dict(optimizer.state[p]) for index, p in enumerate(optimizer.param_groups[0]["params"])
            },
            "groups": [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups],
            "scaler": trainer.precision_plugin.state_dict(),
            "schedulers": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
            "random": [torch.rand(3, device=DEVICE), torch.rand(3)],
        },
    )


def assert_same(one: Any, other: Any, where: str = "") -> None:
    """Equality of nested data; of tensors bit by bit, and on one device."""
    if isinstance(one, torch.Tensor):
        assert one.device == other.device, (where, one.device, other.device)
        assert one.dtype == other.dtype, where
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


def assert_continues(whole: Outcome, rest: Outcome, case: Case) -> None:
    """`rest` is the end of `whole`; and its tensors are where such a training has them."""
    first = rest.trace[0][0]
    assert first > 0
    # a step that a scaler skips counts for Lightning, so that numbers of steps are those of batches
    assert [row for row in whole.trace if row[0] >= first] == rest.trace
    assert_same(whole.state, rest.state)
    moments = {key: {DEVICE} for key in ("weights", "exp_avg", "exp_avg_sq")}
    assert rest.places == whole.places == {**moments, "step": {DEVICE if case.fused else "cpu"}}


@cache
def undisturbed(name: str) -> Outcome:
    """The training that never sees our callback."""
    return fit(CASES[name])


def saving(url: str, **options: Any) -> CompressedCheckpoint:
    given = {
        "every_n_train_steps": 5,
    }
    if not options.get("adopt"):
        given |= {"busy": "wait"}
    return CompressedCheckpoint(url, **grouped(**given | options))


@pytest.mark.parametrize("name", CASES)
def test_lossless_continues_bit_by_bit(name: str, tmp_path: Path) -> None:
    case, url = CASES[name], str(tmp_path / "run")
    interrupted = fit(case, saving(url, scheme="lossless"), Crash(13))
    assert interrupted.trace == undisturbed(name).trace[:13]  # saving changes nothing
    rest = fit(case, saving(url, scheme="lossless"), seed=999)
    assert rest.trace[0][0] == 10
    assert_continues(undisturbed(name), rest, case)


@pytest.mark.parametrize("name", ["fp32, fused", "fp16, skipped steps", "bf16"])
def test_adopting_continues_bit_by_bit(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    adopting = {"adopt": 8, "max_degradation": 0.5}
    whole = fit(case, saving(str(tmp_path / "whole"), **adopting))
    url = str(tmp_path / "run")
    fit(case, saving(url, **adopting), Crash(18))
    rest = fit(case, saving(url, **adopting), seed=999)
    assert rest.trace[0][0] == 15
    assert_continues(whole, rest, case)
    assert whole.state["random"][0].tolist() == undisturbed(name).state["random"][0].tolist()
    found = RunStore(str(tmp_path / "whole")).manifests()
    assert any(manifest.meta["save"]["measured"] == "measured" for manifest in found)


@pytest.mark.parametrize(
    "name", ["fp32", "fp32, fused", "fp16", "fp16, skipped steps", "fp16, skipped steps, fused", "bf16"]
)
def test_the_step_log_continues_bit_by_bit(name: str, tmp_path: Path) -> None:
    case = CASES[name]

    def logging() -> CompressedCheckpoint:
        return saving(
            str(tmp_path / "run"),
            every_n_train_steps=10,
            scheme="lossless",
            step_log=StepLog(segment_steps=2, overhead=None),
            log_url=str(tmp_path / "log"),
        )

    interrupted = fit(case, logging(), Crash(17))
    assert interrupted.trace == undisturbed(name).trace[:17]
    rest = fit(case, logging(), seed=999)
    assert 10 < rest.trace[0][0] <= 17
    assert_continues(undisturbed(name), rest, case)
