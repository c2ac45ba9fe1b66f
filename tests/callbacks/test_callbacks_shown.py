"""What people see of saves: the numbers in loggers, and the progress bars."""

import csv
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from shrinkpoint.config import Advanced
from shrinkpoint.store.writer import RunWriter

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"
)

STEPS = 4
WAITING: Any = {"scheme": "lossless", "advanced": Advanced(busy="wait")}


def with_lightning(folder: Path, options: Any, **more: Any) -> None:
    from lightning.pytorch import Trainer
    from lightning.pytorch.demos.boring_classes import BoringModel

    from shrinkpoint.callbacks.lightning import CompressedCheckpoint

    callback = CompressedCheckpoint(str(folder / "run"), every_n_train_steps=2, **options)
    given = {"logger": False, "enable_model_summary": False, "limit_val_batches": 0, **more}
    callbacks = [*given.pop("callbacks", []), callback]
    trainer = Trainer(accelerator="cpu", max_steps=STEPS, callbacks=callbacks, **given)
    trainer.fit(BoringModel())


def with_transformers(folder: Path, options: Any, callbacks: Any, **more: Any) -> None:
    from support.transformers_models import Setup, train

    from shrinkpoint.callbacks.transformers import CompressedCheckpoint

    given = {"max_steps": STEPS, "save_steps": 2, "eval_strategy": "no", **more}
    callback = CompressedCheckpoint(str(folder / "run"), **options)
    train(Setup(arguments=tuple(given.items())), str(folder), *callbacks, callback)


def logged_by_lightning(folder: Path) -> dict[str, float]:
    from lightning.pytorch.loggers import CSVLogger

    logger = CSVLogger(folder, version=0)
    with_lightning(folder, WAITING, logger=logger, enable_progress_bar=False)
    with open(Path(logger.log_dir) / "metrics.csv", newline="") as file:
        last = [row for row in csv.DictReader(file) if row["checkpoint/ratio"]][-1]
    return {
        name: float(value)
        for name, value in last.items()
        if name.startswith("checkpoint/") and name != "checkpoint/configuration"
    }


def logged_by_transformers(folder: Path) -> dict[str, float]:
    from transformers import TrainerCallback

    got: dict[str, float] = {}

    class Board(TrainerCallback):  # type: ignore[misc]
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **more: Any) -> None:
            got.update({name: value for name, value in logs.items() if "/" in name})

    Board.__module__ = "transformers.integrations.board"
    with_transformers(folder, WAITING, [Board()])
    return got


def logged_by_composer(folder: Path) -> dict[str, float]:
    from composer import Trainer
    from composer.loggers import InMemoryLogger
    from composer.models import ComposerClassifier

    from shrinkpoint.callbacks.composer import CompressedCheckpoint

    model = ComposerClassifier(torch.nn.Linear(8, 2), num_classes=2)
    logger = InMemoryLogger()
    trainer = Trainer(
        model=model,
        train_dataloader=DataLoader(TensorDataset(torch.randn(32, 8), torch.arange(32) % 2), batch_size=8),
        optimizers=torch.optim.AdamW(model.parameters()),
        max_duration=f"{STEPS}ba",
        callbacks=[CompressedCheckpoint(str(folder / "run"), save_interval="2ba", **WAITING)],
        loggers=[logger],
        device="cpu",
        progress_bar=False,
    )
    trainer.fit()
    trainer.close()
    return {
        name: float(values[-1][1]) for name, values in logger.data.items() if name.startswith("checkpoint/")
    }


NAMES = {
    f"checkpoint/{name}"
    for name in (
        "step",
        "ratio",
        "bytes",
        "blocked_s",
        "search_s",
        "write_s",
        "overhead",
        "degradation",
        "cost",
    )
} | {"checkpoint/degradation_high", "checkpoint/cost_high", "checkpoint/cost_delay"}


@pytest.mark.parametrize(
    ("framework", "logged"),
    [
        ("lightning", logged_by_lightning),
        ("transformers", logged_by_transformers),
        ("composer", logged_by_composer),
    ],
)
def test_loggers_of_all_frameworks_get_the_same_names(
    framework: str, logged: Callable[[Path], dict[str, float]], tmp_path: Path
) -> None:
    pytest.importorskip(framework)
    got = logged(tmp_path)
    assert got.keys() == NAMES
    assert (got["checkpoint/step"], got["checkpoint/degradation"]) == (STEPS, 0)


def shown_by_lightning(folder: Path, note: Callable[[int, Any], None]) -> None:
    from lightning.pytorch.callbacks import TQDMProgressBar

    class Bar(TQDMProgressBar):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            super().on_train_batch_end(trainer, *args)
            note(trainer.global_step, self.train_progress_bar.postfix)

    bar = Bar()
    with_lightning(folder, {"scheme": "lossless"}, callbacks=[bar])
    assert "get_metrics" not in vars(bar)


def shown_by_transformers(folder: Path, note: Callable[[int, Any], None]) -> None:
    from transformers.trainer_callback import ProgressCallback

    class Bar(ProgressCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, *rest: Any, **more: Any) -> None:
            super().on_step_end(args, state, *rest, **more)
            note(state.global_step, self.training_bar.postfix)

    with_transformers(folder, {"scheme": "lossless"}, [Bar()])


@pytest.mark.parametrize("quiet", [False, True])
@pytest.mark.parametrize(
    ("framework", "shown"), [("lightning", shown_by_lightning), ("transformers", shown_by_transformers)]
)
def test_the_progress_bar_says_that_a_save_is_being_written_unless_asked_to_be_quiet(
    framework: str,
    shown: Callable[[Path, Callable[[int, Any], None]], None],
    quiet: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip(framework)
    if quiet:
        monkeypatch.setenv("SHRINKPOINT_QUIET", "1")
    written, commit = threading.Event(), RunWriter.commit

    def late(*args: Any, **more: Any) -> Any:
        written.wait()
        return commit(*args, **more)

    monkeypatch.setattr(RunWriter, "commit", late)
    seen: dict[int, str] = {}

    def note(step: int, text: Any) -> None:
        seen[step] = text or ""
        if step == STEPS:
            written.set()

    try:
        shown(tmp_path, note)
    finally:
        written.set()
    assert "saving" not in seen[2]
    assert ("saving" in seen[STEPS] and "step 2" in seen[STEPS]) != quiet
