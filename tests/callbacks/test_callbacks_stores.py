"""The callbacks on several stores: an interrupted run continues bit by bit, as on one, while a store is gone."""

import importlib
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.lightning_models import Crash, Tiny, assert_continues, assert_same, fit
from support.options import grouped

import shrinkpoint
from shrinkpoint.callbacks.lightning import CompressedCheckpoint, load_from_checkpoint
from shrinkpoint.errors import ConfigError, NoCheckpointError, ShrinkpointWarning
from shrinkpoint.store.run import RunStore
from shrinkpoint.store.urls import Stores, url_text

SAVING: dict[str, Any] = {"scheme": "lossless", "busy": "wait"}


@pytest.fixture(autouse=True)
def _one_device() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ShrinkpointWarning)
        yield


@pytest.fixture(params=["one", "three", "two and a tier"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    """What a callback is given of where to save."""
    if request.param == "one":
        return {"url": str(tmp_path / "a")}
    if request.param == "three":
        return {"url": Stores([str(tmp_path / name) for name in "abc"], parity=1)}
    two = [str(tmp_path / name) for name in "ab"]
    return {"url": Stores(two, parity=0, near=str(tmp_path / "near"))}


def lose_one(place: dict[str, Any]) -> None:
    url = place["url"]
    if isinstance(url, Stores) and url.parity:
        shutil.rmtree(url.urls[1])


def text(place: dict[str, Any]) -> str:
    return url_text(place["url"])


def stored(place: dict[str, Any]) -> list[int]:
    return [manifest.step for manifest in RunStore(place["url"]).manifests()]


def test_lightning(place: dict[str, Any], tmp_path: Path) -> None:
    torch.set_num_threads(1)
    saving = {**SAVING, **place, "every_n_train_steps": 5, "save_top_k": -1}
    whole = fit(seed=1)
    first = CompressedCheckpoint(**grouped(**saving))
    fit(first, Crash(13), seed=1)
    assert stored(place) == [10, 5]
    lose_one(place)
    again = CompressedCheckpoint(**grouped(**saving))
    part = fit(again, seed=9)
    assert part.trace[0][2] == 10
    assert_continues(whole, part)
    assert stored(place)[-2:] == [10, 5]
    # one checkpoint, wherever Lightning takes a path
    explicit = fit(
        CompressedCheckpoint(**grouped(resume="never", **saving)), ckpt_path=f"{text(place)}#step=5", seed=9
    )
    assert explicit.trace[0][2] == 5
    # and for use
    address = f"{text(place)}#step=10"
    module = load_from_checkpoint(Tiny, address)
    weights = shrinkpoint.load_weights(address)
    assert_same(dict(module.state_dict()), weights)
    assert_same(shrinkpoint.load(address)["state_dict"], weights)
    if isinstance(place["url"], Stores):
        *others, last = place["url"].urls
        assert_same(shrinkpoint.load_weights([*others, f"{last}#step=10"]), weights)
        assert shrinkpoint.load(place["url"])["global_step"] == explicit.trainer.global_step


def test_transformers(place: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from support import transformers_models

    from shrinkpoint.callbacks.transformers import CompressedCheckpoint as ForTransformers

    setup, output = transformers_models.Setup(), str(tmp_path / "out")
    whole = transformers_models.train(setup, output)
    saving = {**SAVING, **place}
    transformers_models.train(setup, output, ForTransformers(**grouped(**saving)), crash=10)
    lose_one(place)
    rest = transformers_models.train(setup, output, ForTransformers(**grouped(**saving)), seed=9)
    assert rest.steps[0][0] == 9
    transformers_models.assert_continues(whole, rest)
    callback = ForTransformers(**grouped(**saving), resume="never", save_top_k=-1)
    chosen = transformers_models.train(setup, output, callback, resume=f"{text(place)}#newest", seed=9)
    assert not chosen.steps or chosen.steps[0][0] > 9


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"url": "/a", "parity": 1}, r"give url=shrinkpoint.Stores\(..., parity=...\)"),
        ({"url": []}, "names no store"),
        ({"url": 7}, "must be a string"),
        ({"url": ["/a", "/b#step=1"]}, "without '#'"),
        ({"url": "/a", "storage_options": [{}]}, "must be a dict"),
        ({"url": ["/a", "/b"], "storage_options": "x"}, "must be a dict"),
        ({"url": "/a", "near": 7}, r"give url=shrinkpoint.Stores\(..., near=...\)"),
    ],
)
@pytest.mark.parametrize("framework", ["lightning", "composer", "transformers"])
def test_what_cannot_work(framework: str, options: dict[str, Any], message: str) -> None:
    pytest.importorskip(framework)
    callback = importlib.import_module(f"shrinkpoint.callbacks.{framework}").CompressedCheckpoint
    with pytest.raises(ConfigError, match=message):
        callback(**options)


@pytest.mark.parametrize(
    ("urls", "more", "message"),
    [
        ("/a", {"parity": 1}, "parity=1 with one URL"),
        (["/a"], {"parity": 1}, "parity=1 with one URL"),
        (["/a", "/b"], {"parity": 3}, "parity=3"),
        (["/a", "/b"], {"parity": True}, "parity=True"),
        ("/a", {"near": 7}, "near must be a folder"),
        ("/a", {"near": "/b", "near_keep": 0}, "near_keep"),
        ("/a", {"nera": "/b"}, r"no option 'nera' \(did you mean near"),
    ],
)
def test_what_stores_cannot_be(urls: Any, more: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Stores(urls, **more)


def test_the_best_of_several_is_addressed(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    urls = [str(tmp_path / name) for name in "abc"]
    callback = CompressedCheckpoint(
        urls, **grouped(every_n_epochs=1, monitor="val_loss", save_top_k=1, **SAVING)
    )
    fit(callback, seed=1, max_epochs=3)
    assert callback.best_model_path.startswith(",".join(urls) + "#step=")
    shutil.rmtree(urls[0])
    again = CompressedCheckpoint(
        urls, **grouped(every_n_epochs=1, monitor="val_loss", save_top_k=1, **SAVING)
    )
    fit(again, seed=1, max_epochs=4, ckpt_path="best")
    with pytest.raises(NoCheckpointError, match="no checkpoint of step 3"):
        shrinkpoint.load_weights(f"{','.join(urls)}#step=3")
