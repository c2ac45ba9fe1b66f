"""`try`: what it says of a checkpoint, and that it writes nothing."""

from pathlib import Path

import pytest
import torch
from support.cli_runs import run, run_json
from support.ordinary import loop_files, transformers_folders
from torch import nn

from shrinkpoint.schemes.catalogue import SCHEMES


def test_it_says_how_small_every_scheme_makes_a_checkpoint_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = loop_files(tmp_path / "old", 2, nn.Sequential(nn.Linear(8, 256), nn.Linear(256, 256)))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    alone = run_json("try", str(files[0]))
    both = run_json("try", *map(str, files))
    assert list((tmp_path / "here").iterdir()) == []
    assert sorted((tmp_path / "old").iterdir()) == files
    assert {name.partition(",")[0] for name in both["schemes"]} == set(SCHEMES)
    assert (alone["kind"], alone["steps"], alone["no_tensors"]) == ("torch.save", [10], ["epoch"])
    assert both["steps"] == [10, 20]
    lossless, auto = both["schemes"]["lossless"], both["schemes"]["auto, usual"]
    assert (lossless["weights"], lossless["moments"]) == (0, 0)
    assert 0 < auto["weights"] < 0.1
    assert 0 < auto["moments"] < 0.6
    assert auto["base"][0] < 0.3
    assert auto["delta"][0] < auto["base"][0]
    assert alone["schemes"]["auto, usual"]["delta"] is None
    text = run("try", str(files[0])).stdout
    assert "name a later one" in text
    assert "epoch" in text


def test_what_it_says_of_lossless_is_what_an_import_takes(tmp_path: Path) -> None:
    [file] = loop_files(tmp_path / "old", 1)
    tried = run_json("try", str(file))
    run("import", str(file), str(tmp_path / "run"))
    stored = run_json("ls", str(tmp_path / "run"))["checkpoints"][0]
    assert tried["all_of_it"]
    assert tried["schemes"]["lossless"]["base"][0] * tried["state_bytes"] == pytest.approx(
        stored["bytes"], rel=0.1
    )


def test_of_a_large_checkpoint_a_sample_is_coded(tmp_path: Path) -> None:
    torch.manual_seed(0)
    state = {f"layers.{index}.weight": torch.randn(1000, 512) for index in range(12)}
    torch.save({"model": state, "step": 5}, tmp_path / "large.pt")
    said = run_json("try", str(tmp_path / "large.pt"))
    assert not said["all_of_it"]
    mean, low, high = said["schemes"]["lossless"]["base"]
    assert 0.8 < low <= mean <= high < 1
    assert "a sample of it was coded" in run("try", str(tmp_path / "large.pt")).stdout


def test_what_is_not_recognised_is_named(tmp_path: Path) -> None:
    weight = nn.Parameter(torch.randn(64, 64))
    entry = {"exp_avg": torch.randn(64, 64), "momentum_of_another_kind": torch.randn(64, 64)}
    strange = {"state": {0: entry}, "param_groups": [{"lr": 1.0, "params": [0]}]}
    state = {"model": {"weight": weight.detach()}, "optimizer": strange, "cache": torch.randn(100, 10)}
    torch.save(state, tmp_path / "one-3.pt")
    reasons = {part["reason"]: part for part in run_json("try", str(tmp_path / "one-3.pt"))["exact"]}
    assert any(
        "does not say which optimizer" in reason and part["tensors"] == 2 for reason, part in reasons.items()
    )
    assert any(
        "not known to be a weight" in reason and part["such_as"] == "cache"
        for reason, part in reasons.items()
    )


def test_weights_in_another_order_than_the_optimizers_are_known(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    found = run_json("try", str(transformers_folders(tmp_path, lora=False)[0]))
    assert not [part for part in found["exact"] if "not trained" in part["reason"]]


def test_a_folder_with_an_adapter_and_two_trainings(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    folders = transformers_folders(tmp_path / "lora", lora=True)
    found = run_json("try", *map(str, folders))
    assert (found["kind"], found["steps"]) == ("Hugging Face", [4, 8])
    assert "config.json" in " ".join(found["no_tensors"])
    assert "name the earlier one first" in run("try", *map(str, reversed(folders)), code=2).stderr
    [other] = loop_files(tmp_path / "other", 1)
    assert "two checkpoints of one training" in run("try", str(folders[0]), str(other), code=1).stderr
