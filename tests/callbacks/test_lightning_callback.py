"""What the callback promises beside exact resumption: addresses, refusals, failures, logs, and leaving others alone."""

import csv
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.tuner import Tuner
from support.containers import identical
from support.lightning_models import QUIET, Crash, Setup, Tiny, assert_same, fit
from support.options import grouped
from support.reports import saver_of

from shrinkpoint.callbacks.lightning import CompressedCheckpoint
from shrinkpoint.config import Advanced
from shrinkpoint.engine.address import Address
from shrinkpoint.engine.compaction import compact, rebase
from shrinkpoint.engine.request import SaveRequest
from shrinkpoint.errors import (
    ConfigError,
    NoCheckpointError,
    ShrinkpointWarning,
    StateMismatchError,
)
from shrinkpoint.integrations.lightning import position as loaders
from shrinkpoint.integrations.lightning import resume as lightning_resume
from shrinkpoint.integrations.lightning.io import load_checkpoint, open_as_ckpt
from shrinkpoint.saver import Saver

Make = Callable[..., CompressedCheckpoint]


@pytest.fixture(name="saving")
def _saving(request: pytest.FixtureRequest) -> Make:
    """Makes callbacks that save to one run in memory, of this test's own."""
    torch.set_num_threads(1)
    url = f"memory://callback/{request.node.name}".replace("[", "-").replace("]", "")

    def make(**options: Any) -> CompressedCheckpoint:
        return CompressedCheckpoint(
            url, **grouped(**{"scheme": "lossless", "busy": "wait", "every_n_train_steps": 5, **options})
        )

    return make


def steps(callback: CompressedCheckpoint) -> list[int]:
    return sorted(manifest.step for manifest in Saver(callback.dirpath).store.manifests())


def test_saves_by_schedule_and_at_the_end(saving: Make) -> None:
    callback = saving(save_top_k=-1)
    fit(callback)
    assert steps(callback) == [5, 10, 15, 20, 25, 30, 32]
    assert callback.last_model_path == callback.best_model_path == f"{callback.dirpath}#step=32"


def test_train_time_interval(saving: Make) -> None:
    callback = saving(every_n_train_steps=None, train_time_interval=timedelta(microseconds=1), save_top_k=-1)
    fit(callback, max_epochs=1)
    assert steps(callback) == [1, 2, 3, 4, 5, 6, 7, 8]


def test_what_is_not_continued_stays(saving: Make) -> None:
    fit(saving(keep_last=2), Crash(24))
    assert steps(saving()) == [15, 20]
    with pytest.warns(ShrinkpointWarning, match=r"2 checkpoints, the newest of step 20.*resume='must'"):
        fit(saving(resume="never", keep_last=1), Crash(14))
    assert steps(saving()) == [10, 15, 20]
    fit(saving(keep_last=1), Crash(19))
    assert steps(saving()) == [15, 15, 20]


class Diverges(pl.Callback):
    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        if trainer.global_step == 12:
            with torch.no_grad():
                pl_module.net[0].weight.fill_(float("nan"))


def test_a_diverged_training_displaces_no_sound_checkpoint_and_says_where_to_go_on(saving: Make) -> None:
    with pytest.warns(ShrinkpointWarning, match="step 15 is not finite"):
        fit(saving(keep_last=2), Diverges())  # EarlyStopping ends it after step 16
    assert steps(saving()) == [5, 10, 15, 16]
    with pytest.warns(ShrinkpointWarning, match=r"step 16 .* is not finite.*fit\(ckpt_path='.*#step=10'\)"):
        fit(saving(), Crash(18))


def test_explicit_path_wins(saving: Make, tmp_path: Path) -> None:
    callback = saving(save_top_k=-1)
    fit(callback, ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=3, save_top_k=-1))
    assert fit(saving(), Crash(12), ckpt_path=f"{callback.dirpath}#step=10").trace[0][2] == 10
    assert fit(saving(), Crash(8), ckpt_path=str(tmp_path / "step=6.ckpt")).trace[0][2] == 6
    with pytest.raises(NoCheckpointError, match=r"has no checkpoint of step 11; there are 5, 10"):
        fit(saving(), ckpt_path=f"{callback.dirpath}#step=11")


def test_other_stages_take_addresses(saving: Make) -> None:
    callback = saving(save_top_k=-1, monitor="val_loss")
    outcome = fit(callback)
    trainer, module = outcome.trainer, outcome.module
    final = {name: value.clone() for name, value in module.state_dict().items()}
    trainer.validate(module, ckpt_path=f"{callback.dirpath}#step=10", verbose=False)
    assert not torch.equal(module.net[0].weight, final["net.0.weight"])
    trainer.validate(module, ckpt_path=f"{callback.dirpath}#newest", verbose=False)
    assert_same(dict(module.state_dict()), final)
    trainer.validate(module, ckpt_path="best", verbose=False)
    other = pl.Trainer(callbacks=[saving()], **QUIET)
    other.validate(Tiny(), ckpt_path=callback.best_model_path, verbose=False)


def test_an_evaluation_of_an_old_checkpoint_does_not_become_what_saves_go_on_from(saving: Make) -> None:
    callback = saving(save_top_k=-1)
    outcome = fit(callback)
    background = saver_of(callback)._background
    adopted: list[object] = []
    background.continue_from = lambda *args: adopted.append(args)
    outcome.trainer.validate(outcome.module, ckpt_path=f"{callback.dirpath}#step=10", verbose=False)
    outcome.trainer.validate(outcome.module, ckpt_path=f"{callback.dirpath}#newest", verbose=False)
    assert adopted == []


def test_load_from_checkpoint(saving: Make) -> None:
    callback = saving()
    outcome = fit(callback)
    loaded = Tiny.load_from_checkpoint(open_as_ckpt(callback.dirpath), weights_only=False)
    assert_same(dict(loaded.state_dict()), dict(outcome.module.state_dict()))


def test_ordinary_checkpoints_stay_ordinary(saving: Make, tmp_path: Path) -> None:
    fit(saving(), ModelCheckpoint(tmp_path, save_last=True, every_n_train_steps=3))
    loaded = torch.load(tmp_path / "last.ckpt", weights_only=True)
    assert "shrinkpoint" not in loaded


def test_two_callbacks_on_one_run_are_refused(saving: Make) -> None:
    with pytest.raises(ConfigError, match="two CompressedCheckpoint"):
        fit(saving(), saving())


def test_two_callbacks_on_two_runs(saving: Make) -> None:
    def other() -> CompressedCheckpoint:
        return CompressedCheckpoint(
            "memory://callback/two-b",
            every_n_train_steps=3,
            scheme="lossless",
            advanced=Advanced(busy="wait"),
        )

    whole = fit()
    fit(saving(), other(), Crash(14))
    rest = fit(other(), saving(), seed=999)
    assert whole.trace[12:] == rest.trace
    assert_same(whole.final()["weights"], rest.final()["weights"])


def test_sharded_strategies_are_refused(saving: Make) -> None:
    class FSDPStrategy(SingleDeviceStrategy):
        pass

    with pytest.raises(ConfigError, match="shards the model"):
        fit(saving(), strategy=FSDPStrategy("cpu"))


def test_another_models_run_is_not_saved_to(saving: Make, tmp_path: Path) -> None:
    fit(saving(), Crash(6))
    before, path = steps(saving()), str(tmp_path / "own.ckpt")
    fit(setup=Setup(width=8)).trainer.save_checkpoint(path)
    with pytest.raises(StateMismatchError, match="another model's run"):
        fit(saving(), setup=Setup(width=8), ckpt_path=path, max_epochs=5)
    assert steps(saving()) == before


def test_a_compacted_checkpoint_keeps_its_place(saving: Make) -> None:
    callback = saving(every_n_train_steps=4, save_top_k=-1)
    fit(callback, max_epochs=1)
    store = Saver(callback.dirpath).store
    older = next(manifest for manifest in store.manifests() if manifest.kind == "delta")
    fit(saving(resume="never", every_n_train_steps=4, save_top_k=-1), max_epochs=1)
    compact(store, rebase(store, older))
    again = next(manifest for manifest in store.manifests() if manifest.step == older.step)
    saver = Saver(callback.dirpath)
    loaded = load_checkpoint(Address(url=callback.dirpath, step=older.step), saver)
    assert again.replaces is None
    assert identical(loaded, Saver(callback.dirpath).restore(again).state.to_object())
    resumed = saving(every_n_train_steps=4, save_top_k=-1)
    fit(resumed, max_epochs=1)
    assert resumed.last_model_path.endswith(f"#step={store.manifests()[0].step}")


def test_fast_dev_run_touches_nothing(saving: Make) -> None:
    callback = saving()
    fit(callback, fast_dev_run=True, monitor=None)
    assert not Saver(callback.dirpath).store.exists()


def test_tuner_neither_resumes_nor_saves(saving: Make) -> None:
    class Tunable(Tiny):
        lr = 1e-2

    fit(saving(), Crash(6), module=Tunable())
    module = Tunable()
    callback = saving(every_n_train_steps=1)
    trainer = pl.Trainer(callbacks=[callback], max_epochs=4, **QUIET)
    before = steps(callback)
    Tuner(trainer).lr_find(module, num_training=4, update_attr=False)
    assert steps(callback) == before
    module.trace.clear()
    trainer.fit(module)
    assert module.trace[0][2] == 5


def test_a_second_fit_goes_on(saving: Make) -> None:
    outcome = fit(saving(), max_epochs=1)
    outcome.trainer.fit_loop.max_epochs = 2
    outcome.trainer.fit(outcome.module)
    assert [row[2] for row in outcome.trace] == list(range(16))


def test_loggers_get_the_saves_and_keep_their_own(saving: Make, tmp_path: Path) -> None:
    def logged(name: str, *callbacks: Any) -> list[dict[str, str]]:
        logger = CSVLogger(tmp_path, name=name, version=0)
        fit(*callbacks, logger=logger, log_every_n_steps=1)
        with open(tmp_path / name / "version_0" / "metrics.csv", newline="") as file:
            return list(csv.DictReader(file))

    without, rows = logged("without"), logged("with", saving(save_top_k=-1))
    ours = [row for row in rows if row["checkpoint/ratio"]]
    assert [int(row["step"]) for row in ours] == [5, 10, 15, 20, 25, 30, 32]
    assert all(float(row["checkpoint/bytes"]) > 0 and float(row["checkpoint/blocked_s"]) >= 0 for row in ours)
    assert {row["checkpoint/configuration"] for row in ours} == {"exact (lossless)"}
    assert {row["checkpoint/degradation"] for row in ours} == {"0.0"}
    theirs = [
        {name: row[name] for name in without[0]} for row in rows if row["train_loss"] or row["val_loss"]
    ]
    assert theirs == [row for row in without if row["train_loss"] or row["val_loss"]]


def test_saving_is_invisible_to_training(saving: Make) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", ShrinkpointWarning)
        wide = Setup(width=2048)
        plain = fit(setup=wide)
        saved = fit(saving(scheme="inshrinkerator", save_top_k=-1, every_n_train_steps=4), setup=wide)
    assert plain.trace == saved.trace
    assert_same(plain.final(), saved.final())
    callback = next(c for c in saved.callbacks if isinstance(c, CompressedCheckpoint))
    reports = saver_of(callback).reports()
    assert [report.step for report in reports] == [4, 8, 12, 16, 20, 24, 28, 32]
    assert [report.reason for report in reports if not report.evaluations] == []


def test_gradients_are_averaged_where_the_optimizer_does_not(saving: Make) -> None:
    given: list[Any] = []
    callback = saving(scheme="inshrinkerator", every_n_train_steps=4)

    class Watch(pl.Callback):
        def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            saver = saver_of(callback)
            accept = saver.accept

            def watched(request: SaveRequest) -> Any:
                given.append(request.gradients)
                return accept(request)

            saver.accept = watched  # type: ignore[method-assign]

    outcome = fit(callback, Watch(), setup=Setup(width=512, optimizer=torch.optim.SGD), max_epochs=1)
    names = dict(outcome.module.named_parameters()).keys()
    assert [gradients.keys() for gradients in given] == [names, names]
    given.clear()
    callback = saving(scheme="inshrinkerator", every_n_train_steps=4, resume="never")
    fit(callback, Watch(), setup=Setup(width=512), max_epochs=1)
    assert given == [None, None]


def test_without_lightnings_private_names_it_warns(saving: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    fit(saving(), Crash(6))
    monkeypatch.setattr(loaders, "_PRIVATE", ("_no_longer_there",))
    with pytest.warns(UserWarning, match="no fit_loop._no_longer_there: the order of samples may differ"):
        rest = fit(saving(), Crash(13), seed=999, setup=Setup(stateful=True))
    assert rest.trace[0][2] == 5


def test_where_lightning_cannot_be_made_to_resume_it_says_so(
    saving: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    fit(saving(), Crash(6))
    monkeypatch.setattr(lightning_resume, "_HOOK", "no_longer_there")
    with pytest.warns(UserWarning, match="give fit"):
        assert fit(saving(), Crash(7)).trace[0][2] == 0
    with pytest.raises(ConfigError, match="give fit"):
        fit(saving(resume="must"))


class WithSteps(Tiny):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 5)]


def test_another_scheduler_is_warned_of(saving: Make) -> None:
    fit(saving(), Crash(6))
    trainer = pl.Trainer(callbacks=[saving()], max_steps=13, **QUIET)
    with pytest.warns(
        ShrinkpointWarning, match=r"scheduler 0 was torch.*ExponentialLR and is torch.*StepLR here"
    ):
        trainer.fit(WithSteps())
