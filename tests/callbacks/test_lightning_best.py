"""Which checkpoint is the best, when it is saved, and what of it is stored: as of Lightning's `ModelCheckpoint`, beside it."""

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from support.lightning_models import QUIET, Crash
from support.options import grouped
from torch.utils.data import DataLoader
from typer.testing import CliRunner

import shrinkpoint
from shrinkpoint.callbacks.lightning import CompressedCheckpoint
from shrinkpoint.cli.app import app
from shrinkpoint.errors import ConfigError, NoCheckpointError, ShrinkpointWarning


class Scripted(pl.LightningModule):
    """Its metrics follow a script by step, whatever it learns."""

    def __init__(self, losses: Mapping[int, float], *, batches: int = 4) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
        self.register_buffer("epochs", torch.zeros(1))
        self.losses = losses
        self.batches = batches
        self.steps = 0

    def at(self, step: int) -> float:
        return self.losses.get(step, 9.0 + step / 100)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.steps += 1
        self.log("train_loss", self.at(self.global_step + 1), on_step=False, on_epoch=True)
        self.log("step_loss", self.at(self.global_step + 1), on_step=True, on_epoch=False)
        loss: torch.Tensor = self.layer(batch).square().mean()
        return loss

    def on_train_epoch_end(self) -> None:
        self.epochs += 1
        self.log("end_loss", self.at(self.global_step))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.at(self.global_step))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> Any:
        return DataLoader(torch.ones(self.batches, 2))

    def val_dataloader(self) -> Any:
        return DataLoader(torch.ones(1, 2))


def saving(url: Path | str, **options: Any) -> CompressedCheckpoint:
    return CompressedCheckpoint(
        str(url), **grouped(**{"scheme": "lossless", "busy": "wait", "grace_s": 0, **options})
    )


def fit(module: Scripted, *callbacks: Any, ckpt_path: str | None = None, **options: Any) -> pl.Trainer:
    defaults = {"max_epochs": 4, "enable_checkpointing": True, "num_sanity_val_steps": 0}
    trainer = pl.Trainer(callbacks=list(callbacks), **{**QUIET, **defaults, **options})
    try:
        trainer.fit(module, ckpt_path=ckpt_path)
    except RuntimeError as error:
        if str(error) != "preempted":
            raise
    return trainer


def kept(url: Path | str) -> list[int]:
    """The steps of the run's checkpoints, as the command line tells them."""
    listed = CliRunner().invoke(app, ["ls", str(url), "--json"])
    assert listed.exit_code == 0, listed.output
    import json

    found = json.loads(listed.stdout)
    return sorted(row["step"] for row in (found["checkpoints"] if isinstance(found, dict) else found))


def step_of(path: str) -> int:
    return int(path.rpartition("step=")[2].removesuffix(".ckpt"))


SPIKE = {10: 5.0, 20: 3.0, 30: 100.0, 40: 4.0, 50: 100.0, 60: 3.0}


def test_a_metric_belongs_to_the_weights_it_was_measured_on(tmp_path: Path) -> None:
    """Step 30 is saved between two validations: neither it nor step 60, which is no better, displaces step 20."""
    options: dict[str, Any] = {"every_n_train_steps": 10, "monitor": "val_loss", "keep_last": 1}
    rule = {"val_check_interval": 20, "check_val_every_n_epoch": None, "max_epochs": 1}
    callback = saving(tmp_path / "run", **options)
    fit(Scripted(SPIKE, batches=60), callback, **rule)
    assert step_of(callback.best_model_path) == 20
    assert [step_of(path) for path in callback.best_k_models] == [20]
    assert kept(tmp_path / "run") == [20, 60]


def test_after_a_resume_an_older_metric_does_not_count_either(tmp_path: Path) -> None:
    options: dict[str, Any] = {"every_n_train_steps": 10, "monitor": "val_loss", "keep_last": 9}
    rule = {"val_check_interval": 20, "check_val_every_n_epoch": None, "max_epochs": 1}
    fit(Scripted(SPIKE, batches=60), saving(tmp_path / "run", **options), Crash(38), **rule)
    callback = saving(tmp_path / "run", **{**options, "save_top_k": 3})
    fit(Scripted(SPIKE, batches=60), callback, **rule)
    assert step_of(callback.best_model_path) == 20
    assert sorted(step_of(path) for path in callback.best_k_models) == [20, 40, 60]


def test_a_resumed_run_has_its_best_before_any_hook_of_the_fit(tmp_path: Path) -> None:
    class Sees(pl.Callback):
        def on_fit_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
            assert isinstance(trainer.checkpoint_callback, CompressedCheckpoint)
            self.best = step_of(trainer.checkpoint_callback.best_model_path)

    options: dict[str, Any] = {"every_n_train_steps": 10, "monitor": "val_loss", "keep_last": 9}
    rule = {"val_check_interval": 20, "check_val_every_n_epoch": None, "max_epochs": 1}
    fit(Scripted(SPIKE, batches=60), saving(tmp_path / "run", **options), Crash(38), **rule)
    sees = Sees()
    fit(Scripted(SPIKE, batches=60), saving(tmp_path / "run", **options), sees, **rule)
    assert sees.best == 20


def test_a_metric_that_is_logged_now_and_then_belongs_to_its_step(tmp_path: Path) -> None:
    class Seldom(Scripted):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            if self.global_step == 1:
                self.log("seldom", 1.0, on_step=True, on_epoch=False)
            return super().training_step(batch, batch_idx)

    callback = saving(tmp_path / "run", every_n_train_steps=1, monitor="seldom", keep_last=1)
    fit(Seldom({}), callback, max_epochs=1)
    assert step_of(callback.best_model_path) == 2
    assert kept(tmp_path / "run") == [2, 4]


def test_saves_that_fall_on_no_validation_are_made_up_for(tmp_path: Path) -> None:
    """Else nothing were ever ranked."""
    callback = saving(tmp_path / "run", every_n_train_steps=7, monitor="val_loss", save_top_k=-1)
    rule = {"val_check_interval": 10, "check_val_every_n_epoch": None, "max_epochs": 1}
    fit(Scripted({10: 2.0, 20: 1.0}, batches=25), callback, **rule)
    assert step_of(callback.best_model_path) == 20
    assert kept(tmp_path / "run") == [7, 10, 14, 20, 21, 25]


def test_validations_between_two_steps_are_ranked(tmp_path: Path) -> None:
    """Gradients are half accumulated there; a resume goes on exactly."""
    rule = {"accumulate_grad_batches": 3, "val_check_interval": 5, "max_epochs": 1}
    for name, options in {"planned": {"every_n_train_steps": 2}, "default": {}}.items():
        options = {"monitor": "val_loss", "keep_last": 9, **options}

        def module() -> Scripted:
            torch.manual_seed(1)
            return Scripted({1: 0.5, 3: 0.4}, batches=12)

        callback, whole = saving(tmp_path / name, **options), module()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ShrinkpointWarning)
            fit(whole, callback, **rule)
            assert step_of(callback.best_model_path) == 3
            resumed = module()
            fit(
                resumed,
                saving(f"{tmp_path / name}-2", **options),
                ckpt_path=f"{tmp_path / name}#best",
                **rule,
            )
        assert resumed.steps == 2
        assert torch.equal(resumed.layer.weight, whole.layer.weight)


def test_the_paths_are_known_after_an_error(tmp_path: Path) -> None:
    class Failing(Scripted):
        def on_train_epoch_start(self) -> None:
            if self.current_epoch == 2:
                raise RuntimeError("preempted")

    callback = saving(tmp_path / "run", monitor="val_loss")
    fit(Failing({4: 2.0, 8: 1.0}), callback)
    assert (step_of(callback.best_model_path), step_of(callback.last_model_path)) == (8, 8)


WHERE: list[dict[str, Any]] = [
    {},
    {"val_check_interval": 0.5},
    {"check_val_every_n_epoch": 2},
    {"val_check_interval": 3, "check_val_every_n_epoch": None},
    {"limit_val_batches": 0},
]
WHEN: list[dict[str, Any]] = [
    {},
    {"every_n_epochs": 2},
    {"every_n_train_steps": 2},
]
LOSSES = {1: 7.0, 2: 0.5, 3: 2.5, 4: 1.1, 6: 0.4, 8: 3.0, 10: 0.6, 12: 0.9, 14: 5.0, 16: 0.8}
MONITORS = {"val_loss": "min", "train_loss": "max", "end_loss": "min", "epoch": "min", "step": "max"}


@pytest.mark.parametrize("when", WHEN, ids=str)
@pytest.mark.parametrize("where", WHERE, ids=str)
def test_what_model_checkpoint_ranks_is_ranked_alike(
    where: dict[str, Any], when: dict[str, Any], tmp_path: Path
) -> None:
    """It ranks old metrics again where it saves between two measurements: these are left out."""
    validated: set[int] = set()

    class Watched(Scripted):
        def on_validation_start(self) -> None:
            validated.add(self.global_step)

    module = Watched(LOSSES)

    def truth(monitor: str, trainer: pl.Trainer) -> float | None:
        step = trainer.global_step
        if monitor in ("epoch", "step"):
            return float(trainer.current_epoch if monitor == "epoch" else step)
        if monitor == "train_loss":
            return None if step % 4 else sum(module.at(step - back) for back in range(4)) / 4
        return module.at(step) if (step in validated if monitor == "val_loss" else step % 4 == 0) else None

    class Theirs(ModelCheckpoint):
        def __init__(self, monitor: str, mode: Any) -> None:
            super().__init__(
                tmp_path / f"{monitor}-{mode}", "{step}", monitor, mode=mode, save_top_k=-1, **when
            )
            self.ranked: dict[int, float] = {}

        def _save_topk_checkpoint(self, trainer: Any, monitor_candidates: Any) -> None:
            if self.monitor not in monitor_candidates:
                return  # it raises an error where a validation came before the monitor
            true = truth(str(self.monitor), trainer)
            moved = self._defer_save_until_validation and self.monitor != "val_loss"  # to a later step
            if (
                true is not None
                and not moved
                and float(monitor_candidates[self.monitor]) == pytest.approx(true)
            ):
                self.ranked[trainer.global_step] = true
            super()._save_topk_checkpoint(trainer, monitor_candidates)

    pairs = []
    for monitor, mode in MONITORS.items():
        url = f"memory://best/{tmp_path.name}/{monitor}"
        pairs.append((Theirs(monitor, mode), saving(url, monitor=monitor, mode=mode, save_top_k=-1, **when)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ShrinkpointWarning)
        fit(module, *(callback for pair in pairs for callback in pair), **where)
    for theirs, ours in pairs:
        scores = {step_of(path): float(score) for path, score in ours.best_k_models.items()}
        where_at = f"{theirs.monitor} {theirs.mode}"
        assert theirs.ranked.keys() <= scores.keys(), where_at
        for step, score in theirs.ranked.items():
            assert scores[step] == pytest.approx(score), where_at
        if scores and theirs.ranked.keys() == scores.keys():
            best = (min if theirs.mode == "min" else max)(scores, key=lambda step: scores[step])
            assert step_of(ours.best_model_path) == best, where_at
            assert step_of(theirs.best_model_path) == best or theirs.best_model_score != ours.best_model_score


@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.parametrize("top", [1, 2, 3])
def test_what_model_checkpoint_removes_is_removed(top: int, mode: str, tmp_path: Path) -> None:
    """Beside the newest, which always stays; of metrics that are NaN none is ranked."""
    nan = float("nan")
    module = Scripted({4: nan, 8: 7.0, 12: 0.5, 16: 2.5, 20: nan, 24: 1.1, 28: 0.4, 32: 7.0, 36: 3.0})
    rule: Any = {"monitor": "val_loss", "mode": mode, "save_top_k": top}
    theirs = ModelCheckpoint(tmp_path / "theirs", "{step}", **rule)
    ours = saving(tmp_path / "ours", keep_last=1, **rule)
    fit(module, theirs, ours, max_epochs=9)
    best = sorted(map(step_of, theirs.best_k_models))
    assert sorted(map(step_of, ours.best_k_models)) == best
    assert kept(tmp_path / "ours") == sorted({*best, 36})
    assert step_of(ours.best_model_path) == step_of(theirs.best_model_path)


def test_there_is_no_best_of_none_that_are_kept(tmp_path: Path) -> None:
    module, callback = Scripted({4: 1.0}), saving(tmp_path / "run", monitor="val_loss", save_top_k=0)
    trainer = fit(module, callback, max_epochs=2)
    assert (callback.best_model_path, step_of(callback.last_model_path)) == ("", 8)
    with pytest.raises(ConfigError, match="ranks none"):
        trainer.validate(module, ckpt_path="best")


def test_what_the_hook_at_an_epochs_end_changes_is_stored(tmp_path: Path) -> None:
    callback = saving(tmp_path / "run", every_n_epochs=1)
    fit(Scripted({}), callback, max_epochs=2)
    for step, epochs in ((4, 1.0), (8, 2.0)):
        assert shrinkpoint.load_weights(f"{tmp_path / 'run'}#step={step}")["epochs"].item() == epochs


def test_a_finished_epoch_is_over_where_epochs_have_become_longer(tmp_path: Path) -> None:
    fit(Scripted({}, batches=4), saving(tmp_path / "run"), max_epochs=1)
    longer = Scripted({}, batches=8)
    trainer = fit(longer, saving(tmp_path / "run"), max_epochs=2)
    assert (longer.steps, trainer.global_step) == (8, 12)


def test_a_finished_run_says_so_and_knows_its_paths(tmp_path: Path) -> None:
    options = {"monitor": "val_loss", "keep_last": 1}
    fit(Scripted({4: 1.0}), saving(tmp_path / "run", **options), max_epochs=2)
    again, module = saving(tmp_path / "run", **options), Scripted({})
    with pytest.warns(ShrinkpointWarning, match=r"is complete: it ended at step 8\. Raise max_epochs"):
        fit(module, again, max_epochs=2)
    assert module.steps == 0
    assert (step_of(again.last_model_path), step_of(again.best_model_path)) == (8, 4)


def test_a_run_that_early_stopping_ended_stays_ended(tmp_path: Path) -> None:
    """Its state is of after the decision, which is not made again; an address goes on all the same."""

    def stopping() -> EarlyStopping:
        return EarlyStopping("val_loss", patience=1)

    fit(Scripted({4: 1.0}), saving(tmp_path / "run"), stopping())
    assert kept(tmp_path / "run") == [4, 8]
    again, callback = Scripted({}), saving(tmp_path / "run")
    with pytest.warns(
        ShrinkpointWarning, match="is complete: it ended at step 8. EarlyStopping has ended it"
    ):
        fit(again, callback, stopping())
    assert (again.steps, step_of(callback.last_model_path)) == (0, 8)
    for more, path in (([], None), ([stopping()], f"{tmp_path / 'run'}#step=8")):
        on = Scripted({})
        fit(on, saving(tmp_path / "run"), *more, ckpt_path=path, max_epochs=3)
        assert on.steps == 4


def test_a_resume_is_announced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit(Scripted({}), saving(tmp_path / "run"), max_epochs=1)
    capsys.readouterr()
    fit(Scripted({}), saving(tmp_path / "run"), max_epochs=2)
    assert f"continuing {tmp_path / 'run'} from step 4" in capsys.readouterr().err


def test_the_best_is_an_address(tmp_path: Path) -> None:
    url, losses = tmp_path / "run", {4: 3.0, 8: 1.0, 12: 2.0}
    fit(Scripted(losses), saving(url, monitor="val_loss"), max_epochs=3)
    best, there = shrinkpoint.load_weights(f"{url}#best"), shrinkpoint.load_weights(f"{url}#step=8")
    assert all(torch.equal(best[name], there[name]) for name in there)
    assert shrinkpoint.load(f"{url}#best")["global_step"] == 8
    module = Scripted({})
    trainer = fit(module, saving(url, monitor="val_loss"), ckpt_path=f"{url}#best", max_epochs=3)
    assert (module.steps, trainer.global_step) == (4, 12)
    for path in ("best", f"{url}#best"):
        checked = Scripted({})
        pl.Trainer(callbacks=[saving(url, monitor="val_loss")], **QUIET).validate(checked, ckpt_path=path)
        assert torch.equal(checked.epochs, there["epochs"])


def test_the_best_needs_a_monitor(tmp_path: Path) -> None:
    fit(Scripted({}), saving(tmp_path / "run"), max_epochs=1)
    with pytest.raises(NoCheckpointError, match="none was saved with a monitor="):
        shrinkpoint.load_weights(f"{tmp_path / 'run'}#best")
