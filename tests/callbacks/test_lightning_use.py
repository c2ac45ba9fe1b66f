"""Evaluating and loading from a run in a fresh process: ``"last"``, ``"best"`` and `load_from_checkpoint`."""

import copy
import inspect
import re
import warnings
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.callbacks import ModelCheckpoint
from support.containers import identical
from support.lightning_models import QUIET, Crash, Tiny, fit
from support.options import grouped

from shrinkpoint.callbacks.composer import CompressedCheckpoint as ForComposer
from shrinkpoint.callbacks.lightning import CompressedCheckpoint, load_from_checkpoint
from shrinkpoint.callbacks.transformers import CompressedCheckpoint as ForTransformers
from shrinkpoint.checkpointer import Checkpointer
from shrinkpoint.coding import decode
from shrinkpoint.config import SaverConfig
from shrinkpoint.errors import ConfigError, NoCheckpointError
from shrinkpoint.saver import Saver

Make = Callable[..., CompressedCheckpoint]


@pytest.fixture(name="saving")
def _saving(request: pytest.FixtureRequest) -> Make:
    """Makes callbacks that save to one run in memory, of this test's own."""
    torch.set_num_threads(1)
    url = f"memory://use/{request.node.name}".replace("[", "-").replace("]", "")

    def make(**options: Any) -> CompressedCheckpoint:
        fixed = {"scheme": "lossless", "busy": "wait", "every_n_epochs": 1, "save_top_k": -1}
        return CompressedCheckpoint(url, **grouped(**{**fixed, **options}))

    return make


def weights_at(callback: CompressedCheckpoint, step: int) -> dict[str, Any]:
    found = Saver(callback.dirpath).restore(step)
    assert found is not None
    return dict(found.state.to_object()["state_dict"])


def evaluated(method: str, word: str, *callbacks: Any) -> tuple[Tiny, pl.Trainer]:
    """An untrained model after an evaluation by a fresh trainer."""
    module = Tiny()
    if method == "predict":
        module.predict_step = lambda batch, batch_idx: module.net(batch[1])  # type: ignore[method-assign]
    if method == "test":
        module.test_step = module.validation_step  # type: ignore[assignment]
    trainer = pl.Trainer(callbacks=list(callbacks), **QUIET)
    getattr(trainer, method)(module, module.val_dataloader(), ckpt_path=word)
    return module, trainer


@pytest.mark.parametrize("method", ["validate", "test", "predict"])
def test_last_is_the_newest_of_the_run(saving: Make, method: str) -> None:
    fit(saving(), max_epochs=2)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*there is no last checkpoint available")
        module, _ = evaluated(method, "last", saving())
    assert identical(dict(module.state_dict()), weights_at(saving(), 16))


def test_best_is_the_best_by_the_monitored_metric(saving: Make) -> None:
    outcome = fit(saving(monitor="val_loss"), max_epochs=6)
    losses = {step: loss for _, step, loss in outcome.module.validations}
    best = min(reversed(losses), key=losses.__getitem__)
    module, trainer = evaluated("validate", "best", saving(monitor="val_loss"))
    assert identical(dict(module.state_dict()), weights_at(saving(), best))
    assert trainer.callback_metrics["val_loss"].item() == pytest.approx(losses[best])


def test_best_of_several_callbacks_is_the_first_ones_with_a_warning(saving: Make) -> None:
    fit(saving(monitor="val_loss"), max_epochs=2)
    with pytest.warns(UserWarning, match="multiple `ModelCheckpoint` callbacks"):
        _, trainer = evaluated("validate", "best", saving(monitor="val_loss"), ModelCheckpoint())
    assert str(trainer.ckpt_path).startswith(str(saving().dirpath))


def test_best_without_a_metric_says_what_to_give(saving: Make) -> None:
    fit(saving(), max_epochs=1)
    with pytest.raises(
        ConfigError, match=r'which checkpoint of .* give CompressedCheckpoint a monitor=.*"last"'
    ):
        evaluated("validate", "best", saving())
    with pytest.raises(NoCheckpointError, match=r"none of the 1 .* metric 'acc'; they have .*val_loss"):
        evaluated("validate", "best", saving(monitor="acc"))


def test_an_empty_run_is_told_and_no_untrained_model_evaluated(saving: Make) -> None:
    with pytest.raises(NoCheckpointError, match="contains no checkpoint"):
        evaluated("validate", "last", saving())
    with pytest.raises(NoCheckpointError, match="contains no checkpoint"):
        evaluated("validate", "best", saving(monitor="val_loss"))


def test_fit_with_last_starts_and_continues_with_one_command(saving: Make) -> None:
    assert (
        fit(saving(every_n_epochs=None, every_n_train_steps=5), Crash(7), ckpt_path="last").trace[0][2] == 0
    )
    again = saving(every_n_epochs=None, every_n_train_steps=5, resume="never")
    assert fit(again, Crash(9), ckpt_path="last").trace[0][2] == 5


def test_other_trainers_are_left_alone(saving: Make, tmp_path: Path) -> None:
    saving()
    ordinary = ModelCheckpoint(tmp_path, save_last=True)
    trained = fit(ordinary, max_epochs=1)
    module, _ = evaluated("validate", "last", ModelCheckpoint(tmp_path))
    assert identical(dict(module.state_dict()), trained.final()["weights"])


@pytest.mark.parametrize("method", ["validate", "test", "predict"])
def test_a_trainer_without_the_callback_reads_addresses(saving: Make, method: str) -> None:
    fit(saving(), max_epochs=3)
    module, _ = evaluated(method, f"{saving().dirpath}#step=16")
    assert identical(dict(module.state_dict()), weights_at(saving(), 16))


def test_a_plugin_of_the_users_keeps_its_attributes(saving: Make) -> None:
    class Plugin(TorchCheckpointIO):
        bucket = "mine"

    trainer = pl.Trainer(callbacks=[saving()], plugins=[Plugin()], max_steps=1, **QUIET)
    trainer.fit(Tiny())
    for each in (trainer, copy.deepcopy(trainer)):
        plugin: Any = each.strategy.checkpoint_io
        assert plugin.bucket == "mine"


def test_a_fit_without_the_callback_says_what_is_not_restored(saving: Make) -> None:
    fit(saving(), max_epochs=2)
    trainer = pl.Trainer(max_epochs=3, enable_checkpointing=False, **QUIET)
    with pytest.warns(UserWarning, match="continued without CompressedCheckpoint: the place in the data"):
        trainer.fit(Tiny(), ckpt_path=f"{saving().dirpath}#newest")
    assert (trainer.current_epoch, trainer.global_step) == (3, 24)


class Sized(Tiny):
    def __init__(self, width: int, rate: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net[0] = torch.nn.Linear(8, width)
        self.net[1] = torch.nn.BatchNorm1d(width)
        self.net[4] = torch.nn.Linear(width, 1)


def test_a_module_is_loaded_without_its_optimizers_state(
    saving: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    callback = saving()
    fit(callback, module=Sized(12), max_epochs=2)
    seen: list[str] = []
    original = decode.for_codec
    monkeypatch.setattr(
        decode,
        "for_codec",
        lambda context, codec, spec: seen.append(spec.name) or original(context, codec, spec),
    )
    for url in (callback.dirpath, f"{callback.dirpath}#newest", f"{callback.dirpath}#step=16"):
        seen.clear()
        module = load_from_checkpoint(Sized, url, rate=0.5)
        assert (module.hparams["width"], module.hparams["rate"]) == (12, 0.5)
        assert not any("exp_avg" in name and "exp_avg_sq" not in name for name in seen)
    assert identical(dict(module.state_dict()), weights_at(saving(), 16))
    with pytest.raises(NoCheckpointError, match="no checkpoint of step 3; there are 8, 16"):
        load_from_checkpoint(Sized, f"{callback.dirpath}#step=3")


def test_lightnings_own_method_takes_addresses(saving: Make, tmp_path: Path) -> None:
    callback = saving()
    fit(callback, module=Sized(12), max_epochs=2)
    for which in ("newest", "step=16", "seq=1"):
        module = Sized.load_from_checkpoint(f"{callback.dirpath}#{which}", rate=0.5)
        assert (module.hparams["width"], module.hparams["rate"]) == (12, 0.5)
        assert identical(dict(module.state_dict()), weights_at(saving(), 16))
    asked: list[str] = []
    Sized.load_from_checkpoint(
        f"{callback.dirpath}#newest",
        map_location=lambda storage, place: asked.append(place) or storage,
        weights_only=True,
    )
    assert set(asked) == {"cpu"}
    with pytest.raises(NoCheckpointError, match="no checkpoint of step 3; there are 8, 16"):
        Sized.load_from_checkpoint(f"{callback.dirpath}#step=3")
    # a file is what it was, whatever its name
    file = tmp_path / "file#newest"
    version = {"pytorch-lightning_version": pl.__version__}
    torch.save({"state_dict": Sized(5).state_dict(), "hyper_parameters": {"width": 5}, **version}, file)
    assert Sized.load_from_checkpoint(file).hparams["width"] == 5
    with pytest.raises(FileNotFoundError):
        Sized.load_from_checkpoint(tmp_path / "nothing.ckpt")


@pytest.mark.parametrize(
    "kind",
    [CompressedCheckpoint, ForComposer, ForTransformers],
    ids=["lightning", "composer", "transformers"],
)
def test_every_option_is_an_ordinary_documented_argument(kind: type) -> None:
    parameters = inspect.signature(kind).parameters
    assert not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    assert len(parameters) <= 15
    config = SaverConfig()
    for name in {field.name for field in fields(SaverConfig)} & parameters.keys():
        assert parameters[name].default == getattr(config, name), name
    documented, common = inspect.getdoc(kind) or "", inspect.getdoc(Checkpointer) or ""
    shared = re.findall(r"`(\w+)`", documented.partition("are those of")[0].rpartition("\n\n")[2])
    for name, parameter in parameters.items():
        assert f"\n    {name}: " in (common if name in shared else documented), name
        assert parameter.annotation is not inspect.Parameter.empty, name
