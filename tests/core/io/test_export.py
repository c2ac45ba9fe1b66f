"""Ordinary files out of restored states: what torch's safe loader, Lightning and safetensors read."""

import os
import resource
import stat
from argparse import Namespace
from collections import OrderedDict, namedtuple
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from lightning.pytorch.utilities.migration import pl_legacy_patch
from support.cli_runs import Model
from support.containers import identical
from support.states import states

import shrinkpoint.io.export as export_module
from shrinkpoint.errors import CannotRepresentError, ConfigError, StoreError
from shrinkpoint.io.export import export, model_tensors, to_loadable
from shrinkpoint.state.roles import describe_training
from shrinkpoint.state.training import TrainingState


def training(model: torch.nn.Module | None = None) -> tuple[Any, TrainingState]:
    model = model or Model()
    state = {
        "state_dict": model.state_dict(),
        "optimizer_states": [],
        "epoch": 3,
        "ema": {"x": torch.ones(2)},
    }
    describe = describe_training(model, [], model_path=("state_dict",), optimizers_path=("optimizer_states",))
    return state, TrainingState.capture(state, describe)


def test_a_ckpt_holds_the_state_as_it_was(tmp_path: Path) -> None:
    state, captured = training()
    done = export(captured, tmp_path / "a.ckpt")
    loaded = torch.load(tmp_path / "a.ckpt", weights_only=True)
    assert identical(loaded, state)
    weights = loaded["state_dict"]
    assert weights["head.weight"].data_ptr() == weights["embedding.weight"].data_ptr()
    assert done.notes == ()
    assert done.bytes == (tmp_path / "a.ckpt").stat().st_size
    assert os.listdir(tmp_path) == ["a.ckpt"]


def test_types_that_the_safe_loader_refuses_become_their_plain_kin(tmp_path: Path) -> None:
    state = {
        "scalar": np.float32(1.5),
        "flag": np.bool_(True),
        "array": np.arange(6, dtype=np.int16).reshape(2, 3),
        "args": Namespace(lr=np.float64(0.1), tags={"a"}),
        "frozen": frozenset({1, 2}),
        "nothing": b"",
        "kept": OrderedDict(
            a=(1, torch.Size([2])), b=[None, 1 + 2j, b"x", torch.float16, torch.device("cpu")]
        ),
        "inf": float("inf"),
        "point": namedtuple("Point", "x y")(1, 2),
        "timer": timedelta(days=1, microseconds=500000),
        "timers": [timedelta(days=1, microseconds=500000)],
        np.int64(7): "key",
    }
    done = export(TrainingState.capture(state), tmp_path / "a.pt")
    loaded = torch.load(tmp_path / "a.pt", weights_only=True)
    assert type(loaded["scalar"]) is float
    assert loaded["scalar"] == 1.5
    assert loaded["flag"] is True
    assert torch.equal(loaded["array"], torch.arange(6, dtype=torch.int16).reshape(2, 3))
    assert loaded["args"] == {"lr": 0.1, "tags": {"a"}}
    assert loaded["frozen"] == {1, 2}
    assert loaded["nothing"] == b""
    assert identical(loaded["kept"], state["kept"])
    assert loaded["inf"] == float("inf")
    assert identical(loaded["point"], (1, 2))
    assert "timer" not in loaded
    assert loaded["timers"] == [86400.5]
    assert loaded[7] == "key"
    told = "\n".join(done.notes)
    for place in ("scalar", "flag", "array", "args/lr", "frozen", "nothing", "timer"):
        assert place in told


@pytest.mark.parametrize("value", [np.datetime64("2024-01-02"), {frozenset({1}): 2}, {b""}, 1 << 5000])
def test_what_has_no_plain_kin_is_refused_by_name(tmp_path: Path, value: object) -> None:
    state = TrainingState.capture({"callbacks": {"timer": [value]}})
    with pytest.raises(CannotRepresentError, match="callbacks/timer/0"):
        export(state, tmp_path / "a.ckpt")
    assert os.listdir(tmp_path) == []


@settings(deadline=None, max_examples=150)
@given(states)
def test_any_state_loads_safely_or_is_refused(tmp_path_factory: pytest.TempPathFactory, state: Any) -> None:
    path = tmp_path_factory.mktemp("export") / "a.ckpt"
    captured = TrainingState.capture(state)
    try:
        value, notes = to_loadable(captured.to_object())
        export(captured, path)
    except CannotRepresentError:
        assert not path.exists()
        return
    loaded = torch.load(path, weights_only=True)
    if not notes:
        assert identical(loaded, value) or "nan" in repr(value)


def test_lightning_loads_the_export_of_its_own_checkpoint(tmp_path: Path) -> None:
    class Tiny(pl.LightningModule):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.layer = torch.nn.Linear(width, 1)

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            return self.layer(batch).pow(2).mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters())

        def train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(torch.randn(8, 4), batch_size=2)

    module = Tiny(4)
    quiet: dict[str, Any] = {
        "accelerator": "cpu",
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "default_root_dir": tmp_path,
    }
    trainer = pl.Trainer(max_steps=2, **quiet)
    trainer.fit(module)
    trainer.save_checkpoint(tmp_path / "theirs.ckpt")
    with pl_legacy_patch():
        theirs = torch.load(tmp_path / "theirs.ckpt", weights_only=False)
    theirs["hyper_parameters"] = dict(theirs["hyper_parameters"])
    export(TrainingState.capture(theirs), tmp_path / "ours.ckpt")

    again = Tiny.load_from_checkpoint(tmp_path / "ours.ckpt", weights_only=True)
    assert again.hparams.width == 4
    assert torch.equal(again.layer.weight, module.layer.weight)
    resumed = pl.Trainer(max_steps=4, **quiet)
    resumed.fit(Tiny(4), ckpt_path=tmp_path / "ours.ckpt", weights_only=True)
    assert resumed.global_step == 4


def test_safetensors_hold_weights_and_buffers_under_the_models_names(tmp_path: Path) -> None:
    model = Model()
    _, captured = training(model)
    done = export(captured, tmp_path / "a.safetensors")
    loaded = safetensors.torch.load_file(tmp_path / "a.safetensors")
    assert set(loaded) == set(model.state_dict()) - {"head.weight"}
    assert done.tensors == len(loaded)
    assert "head.weight" in done.notes[0]
    other = Model()
    assert safetensors.torch.load_model(other, tmp_path / "a.safetensors") == (set(), [])
    assert all(
        torch.equal(a, b)
        for a, b in zip(model.state_dict().values(), other.state_dict().values(), strict=True)
    )


def test_two_models_keep_their_folders() -> None:
    nets = {"generator": {"w": torch.ones(2)}, "critic": {"w": torch.zeros(3)}}
    model = torch.nn.ModuleDict({"generator": torch.nn.Module(), "critic": torch.nn.Module()})
    model["generator"].w = torch.nn.Parameter(torch.ones(2))
    model["critic"].w = torch.nn.Parameter(torch.zeros(3))
    describe = describe_training(model, [], model_path=(), optimizers_path=("optimizers",))
    tensors, aliases = model_tensors(TrainingState.capture(nets, describe))
    assert set(tensors) == {"generator.w", "critic.w"}
    assert aliases == {}


@pytest.mark.parametrize(
    "wrap", [lambda d: d, lambda d: {"model": d, "step": 1}, lambda d: {"state_dict": d}]
)
def test_states_without_roles_are_read_by_their_layout(wrap: Any) -> None:
    weights = {"a.weight": torch.ones(2), "b.weight": torch.zeros(3)}
    tensors, _ = model_tensors(TrainingState.capture(wrap(weights)))
    assert set(tensors) == set(weights)


def test_a_state_without_any_model_is_refused() -> None:
    with pytest.raises(CannotRepresentError, match=r"\.ckpt"):
        model_tensors(TrainingState.capture({"optimizer": {"x": torch.ones(2)}, "step": 1}))


def test_a_file_is_replaced_only_when_asked(tmp_path: Path) -> None:
    _, captured = training()
    target = tmp_path / "a.ckpt"
    target.write_bytes(b"precious")
    with pytest.raises(ConfigError, match="--force"):
        export(captured, target)
    assert target.read_bytes() == b"precious"
    export(captured, target, force=True)
    assert torch.load(target, weights_only=True)["epoch"] == 3


def test_a_file_that_appears_meanwhile_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, captured = training()
    target = tmp_path / "a.ckpt"
    checked = export_module.check_target

    def then_another_writes(*args: Any, **options: Any) -> Path:
        path = checked(*args, **options)
        target.write_bytes(b"precious")
        return path

    monkeypatch.setattr(export_module, "check_target", then_another_writes)
    with pytest.raises(ConfigError, match="exists already"):
        export(captured, target)
    assert target.read_bytes() == b"precious"
    assert os.listdir(tmp_path) == ["a.ckpt"]


@pytest.mark.parametrize(
    ("name", "why"),
    [("a.bin", r"\.safetensors"), ("s3://bucket/a.ckpt", "local file"), ("missing/a.ckpt", "does not exist")],
)
def test_targets_that_cannot_work_are_refused_first(tmp_path: Path, name: str, why: str) -> None:
    _, captured = training()
    with pytest.raises(ConfigError, match=why):
        export(captured, name if "://" in name else tmp_path / name)


def test_a_failed_write_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(value: object, path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    _, captured = training()
    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(StoreError, match="No space left"):
        export(captured, tmp_path / "a.ckpt")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("name", "why"), [("a.ckpt", "bytes are free there"), ("a.safetensors", "File too large")]
)
def test_a_full_disk_is_not_mistaken_for_a_state_that_cannot_be_written(
    tmp_path: Path, name: str, why: str
) -> None:
    _, captured = training(torch.nn.Linear(100, 100))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))
    try:
        with pytest.raises(StoreError, match=rf"cannot write {tmp_path / name}: .*{why}"):
            export(captured, tmp_path / name)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert os.listdir(tmp_path) == []


def test_the_file_gets_the_users_permissions(tmp_path: Path) -> None:
    _, captured = training()
    (tmp_path / "plain").write_bytes(b"")
    for name in ("a.ckpt", "a.safetensors"):
        export(captured, tmp_path / name)
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == stat.S_IMODE(
            (tmp_path / "plain").stat().st_mode
        )
