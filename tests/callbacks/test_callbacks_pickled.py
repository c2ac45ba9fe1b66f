"""Callbacks reach processes that are spawned, with ``strategy="ddp_spawn"`` or `multiprocessing`, by pickle."""

import copy
import importlib
import os
import pickle
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from shrinkpoint.store.run import RunStore

NAMES = {"lightning": "_session", "composer": "_session", "transformers": "_shrinkpoint_session"}
PROGRAM = """
import sys

from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel

from shrinkpoint.callbacks.lightning import CompressedCheckpoint

if __name__ == "__main__":
    callback = CompressedCheckpoint(sys.argv[1], every_n_train_steps=4)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    spawned = {"strategy": "ddp_spawn", "devices": 2, "accelerator": "cpu"}
    trainer = Trainer(max_steps=int(sys.argv[2]), limit_val_batches=0, callbacks=[callback], **quiet, **spawned)
    trainer.fit(BoringModel())
    print("best", callback.best_model_path)
"""


def made(name: str, url: Path) -> Any:
    if name != "lightning":
        pytest.importorskip(name)
    module = importlib.import_module(f"shrinkpoint.callbacks.{name}")
    return module.CompressedCheckpoint(str(url), scheme="lossless", keep_last=2)


@pytest.mark.parametrize("name", NAMES)
def test_a_pickled_callback_has_the_same_options(tmp_path: Path, name: str) -> None:
    callback = made(name, tmp_path)
    callback.note = "the user's"
    session = getattr(callback, NAMES[name])
    session.run.best.add(3, {})
    for again in (pickle.loads(pickle.dumps(callback)), copy.deepcopy(callback)):
        other = getattr(again, NAMES[name])
        assert type(again) is type(callback)
        assert again.note == "the user's"
        assert other is not session
        assert other.settings.run == session.settings.run
        assert again.best_model_path == f"{tmp_path}#step=3"
        pickle.loads(pickle.dumps(again))  # once more


@pytest.mark.parametrize("name", NAMES)
def test_a_subclass_chooses_what_goes_with_it(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = type(made(name, tmp_path))

    class Counting(kind):  # type: ignore[misc, valid-type]
        def __getstate__(self) -> dict[str, Any]:
            return {name: value for name, value in vars(self).items() if name != "lock"}

    monkeypatch.setattr(sys.modules[__name__], "Counting", Counting, raising=False)
    Counting.__qualname__ = "Counting"
    callback = Counting(str(tmp_path), scheme="lossless")
    callback.lock, callback.note = threading.Lock(), "the user's"
    again = pickle.loads(pickle.dumps(callback))
    assert again.note == "the user's"
    assert not hasattr(again, "lock")


@pytest.mark.parametrize("name", NAMES)
def test_a_callback_that_has_opened_its_run_is_pickled_as_a_fresh_one(tmp_path: Path, name: str) -> None:
    """A loader's workers that are spawned may get the trainer, and with it the callback."""
    callback = made(name, tmp_path)
    getattr(callback, NAMES[name]).run.open()
    other = getattr(pickle.loads(pickle.dumps(callback)), NAMES[name])
    assert other.run._saver is None


def test_a_subclass_with_another_constructor_is_copied(tmp_path: Path) -> None:
    from shrinkpoint.callbacks.lightning import CompressedCheckpoint

    class Own(CompressedCheckpoint):
        def __init__(self, folder: str, number: int) -> None:
            super().__init__(f"{folder}/run-{number}", every_n_train_steps=2)
            self.number = number

    again = copy.deepcopy(Own(str(tmp_path), 7))  # by the same method as pickle
    assert (type(again), again.number, again.dirpath) == (Own, 7, f"{tmp_path}/run-7")
    assert again._session.settings.schedule.every_n_train_steps == 2


def test_a_trainer_uses_what_was_unpickled(tmp_path: Path) -> None:
    from lightning.pytorch import Trainer
    from lightning.pytorch.demos.boring_classes import BoringModel

    for steps in (4, 6):
        callback = pickle.loads(pickle.dumps(made("lightning", tmp_path / "run")))
        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        trainer = Trainer(
            max_steps=steps, limit_val_batches=0, callbacks=[callback], accelerator="cpu", **quiet
        )
        trainer.fit(BoringModel())
        assert callback.last_model_path == f"{tmp_path}/run#step={steps}"
    assert [manifest.step for manifest in RunStore(tmp_path / "run").manifests()] == [6, 4]


def test_a_lightning_trainer_is_copied_while_it_trains(tmp_path: Path) -> None:
    """Copy all callbacks, as a user's callback may; progress bars among them refer to the trainer."""
    from lightning.pytorch import Callback, Trainer
    from lightning.pytorch.demos.boring_classes import BoringModel

    copies: list[Trainer] = []

    class Copying(Callback):
        def on_train_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
            copies.append(copy.deepcopy(trainer))

    callbacks = [made("lightning", tmp_path / "run"), Copying()]
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = Trainer(max_steps=2, limit_val_batches=0, callbacks=callbacks, accelerator="cpu", **quiet)
    trainer.fit(BoringModel())
    [copied] = copies
    copied.save_checkpoint(tmp_path / "copy.ckpt")
    assert copied.global_step == 2
    assert [manifest.step for manifest in RunStore(tmp_path / "run").manifests()] == [2]


@pytest.mark.slow
def test_spawned_processes_train_and_continue(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("PL_", "LOCAL_", "MASTER"))
    }
    for steps in (8, 12):
        done = subprocess.run(
            [sys.executable, str(program), str(tmp_path / "run"), str(steps)],
            env=environment | {"OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=250,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert f"best {tmp_path}/run#step={steps}" in done.stdout
    assert next(manifest.step for manifest in RunStore(tmp_path / "run").manifests()) == 12
