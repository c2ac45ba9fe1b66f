"""A real LightningCLI makes the callback from a YAML file, and the same command continues the run."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("jsonargparse")

import torch
import yaml
from lightning.pytorch.cli import LightningCLI
from support.lightning_models import Crash, Tiny

from shrinkpoint.callbacks.lightning import CompressedCheckpoint
from shrinkpoint.store.urls import Stores


class Small(Tiny):
    def __init__(self, rate: float = 0.1) -> None:
        super().__init__()
        self.rate = rate


def config(folder: Path, advanced: dict[str, Any] | None = None, **options: Any) -> str:
    callback = {
        "class_path": "shrinkpoint.callbacks.lightning.CompressedCheckpoint",
        "init_args": {
            "url": str(folder / "run"),
            "every_n_train_steps": 5,
            "advanced": {"busy": "wait", **(advanced or {})},
            **options,
        },
    }
    trainer = {
        "accelerator": "cpu",
        "max_epochs": 2,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "logger": {
            "class_path": "lightning.pytorch.loggers.CSVLogger",
            "init_args": {"save_dir": str(folder)},
        },
        "callbacks": [callback],
    }
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump({"trainer": trainer}))
    return str(path)


def run(*arguments: str, crash: int | None = None) -> LightningCLI:
    torch.set_num_threads(1)
    defaults = {"callbacks": [Crash(crash)]} if crash is not None else {}
    return LightningCLI(Small, args=[*arguments], trainer_defaults=defaults, seed_everything_default=1)


def test_the_same_command_continues_the_run(tmp_path: Path) -> None:
    command = (
        "fit",
        "--config",
        config(tmp_path, scheme="lossless", max_degradation=0.02, advanced={"keep_every": 10}),
    )
    with pytest.raises(RuntimeError, match="preempted"):
        run(*command, crash=7)
    again = run(*command)
    assert again.model.trace[0][2] == 5
    [callback] = [c for c in again.trainer.callbacks if isinstance(c, CompressedCheckpoint)]
    assert callback._session.settings.run.saver.max_degradation == 0.02
    assert callback._session.settings.run.saver.keep_every == 10
    evaluated = run("validate", "--config", command[2], "--ckpt_path", "last")
    assert torch.equal(evaluated.model.net[0].weight, again.model.net[0].weight.cpu())


def test_options_of_a_scheme_stand_in_the_file(tmp_path: Path) -> None:
    path = config(tmp_path, scheme={"name": "excp", "alpha": 1e-4}, train_time_interval=None)
    made = LightningCLI(Small, args=["--config", path], run=False)
    [callback] = [c for c in made.trainer.callbacks if isinstance(c, CompressedCheckpoint)]
    assert callback._session.settings.run.saver.options.alpha == 1e-4


@pytest.mark.parametrize(
    "form", [dict, lambda fields: {"class_path": "shrinkpoint.Stores", "init_args": fields}]
)
def test_several_stores_stand_in_the_file(tmp_path: Path, form: Any) -> None:
    folders = [str(tmp_path / name) for name in "abc"]
    path = config(tmp_path, url=form({"urls": folders, "parity": 2}))
    made = LightningCLI(Small, args=["--config", path], run=False)
    [callback] = [c for c in made.trainer.callbacks if isinstance(c, CompressedCheckpoint)]
    assert callback._session.settings.run.stores == Stores(folders, parity=2)


def test_a_mistyped_option_is_refused_by_the_command_line(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        LightningCLI(Small, args=["--config", config(tmp_path, shceme="lossless")], run=False)
