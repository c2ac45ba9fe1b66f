"""`import`, and `export` of what was imported: checkpoints of real frameworks, and what is no checkpoint."""

import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import time
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from support.cli_runs import run, run_json
from support.ordinary import Net, composer_files, lightning_files, loop_files, transformers_folders
from torch import nn

import shrinkpoint


def same(one: Any, other: Any) -> bool:
    """Types, order of keys, dtypes, shapes and bits."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def steps(url: Path) -> list[int]:
    return [checkpoint["step"] for checkpoint in run_json("ls", str(url))["checkpoints"]]


def test_lightning_files_come_back_key_by_key_and_the_run_is_continued(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    files, url = lightning_files(tmp_path / "old"), tmp_path / "run"
    before = {file: file.read_bytes() for file in files}
    done = run("import", str(tmp_path / "old" / "*.ckpt"), str(url))
    said = done.stdout
    assert "left out: _metadata" in done.stderr
    assert "imported 3 checkpoints" in said
    assert "the originals may be deleted" in said
    assert {file: file.read_bytes() for file in files} == before
    assert steps(url) == [30, 20, 10]
    for file, step in zip(files, (10, 20, 30), strict=True):
        out = tmp_path / f"{step}.ckpt"
        run("export", f"{url}#step={step}", str(out))
        assert same(*(torch.load(each, weights_only=True) for each in (file, out)))
    roles = {tensor["role"] for tensor in run_json("show", str(url))["tensors"]}
    assert {"weight", "buffer", "exp_avg", "exp_avg_sq"} <= roles
    weights = shrinkpoint.load_weights(str(url))
    assert list(weights) == list(torch.load(files[-1], weights_only=True)["state_dict"])


def test_lightnings_callback_continues_an_imported_run(tmp_path: Path) -> None:
    pl = pytest.importorskip("lightning.pytorch")
    from support.lightning_models import QUIET, Points
    from torch.utils.data import DataLoader

    from shrinkpoint.callbacks.lightning import CompressedCheckpoint

    class Module(pl.LightningModule):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def on_train_start(self) -> None:
            begun.append((self.trainer.global_step, self.net[0].weight.detach().clone()))

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            return (self.net(batch[1]) - batch[2]).square().mean()

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), 1e-3)
            return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]

    files, url = lightning_files(tmp_path / "old"), tmp_path / "run"
    run("import", *map(str, files), str(url))
    begun: list[Any] = []
    callback = CompressedCheckpoint(str(url), every_n_train_steps=10, scheme="lossless")
    pl.Trainer(max_steps=40, callbacks=[callback], **QUIET).fit(Module(), DataLoader(Points(80), 8))
    [(step, weight)] = begun
    assert step == 30
    assert torch.equal(weight, torch.load(files[-1], weights_only=True)["state_dict"]["net.0.weight"])
    assert steps(url) == [40, 30, 20, 10]


@pytest.mark.parametrize("lora", [False, True])
def test_folders_of_the_trainer_come_back_file_by_file(tmp_path: Path, lora: bool) -> None:
    pytest.importorskip("transformers")
    folders, url = transformers_folders(tmp_path / "old", lora=lora), tmp_path / "run"
    run("import", str(tmp_path / "old" / "checkpoint-*"), str(url))
    assert steps(url) == [8, 4]
    for folder in folders:
        out = tmp_path / folder.name
        run("export", f"{url}#step={folder.name.removeprefix('checkpoint-')}", str(out))
        names = sorted(file.name for file in folder.iterdir())
        assert sorted(file.name for file in out.iterdir()) == names
        for name in names:
            one, other = folder / name, out / name
            if name.endswith(".safetensors"):
                assert same(*map(load_file, (one, other)))
            elif name.endswith((".pt", ".pth")):
                assert same(*(torch.load(each, weights_only=False) for each in (one, other)))
            else:
                assert one.read_bytes() == other.read_bytes()
    assert "exists" in run("export", str(url), str(tmp_path / folders[0].name), code=2).stderr


def test_composers_files_come_back_as_they_were(tmp_path: Path) -> None:
    pytest.importorskip("composer")
    files, url = composer_files(tmp_path / "old"), tmp_path / "run"
    run("import", str(tmp_path / "old" / "ep*.pt"), str(url))
    assert steps(url) == [8, 4]
    run("export", f"{url}#step=4", str(tmp_path / "out.pt"))
    one, other = (torch.load(each, weights_only=False) for each in (files[0], tmp_path / "out.pt"))
    version = one["state"]["metadata"].pop("torch_version")  # a class of torch's own
    assert other["state"]["metadata"].pop("torch_version") == str(version)
    assert same(one, other)


def test_safetensors_and_distributed_checkpoints(tmp_path: Path) -> None:
    state = {"model": Net().state_dict(), "step": 7, "name": "run"}
    save_file(state["model"], tmp_path / "model-5.safetensors")
    dcp.save(state, checkpoint_id=tmp_path / "sharded")
    run("import", str(tmp_path / "model-5.safetensors"), str(tmp_path / "one"))
    run("import", str(tmp_path / "sharded"), str(tmp_path / "two"))
    assert same(shrinkpoint.load(f"{tmp_path / 'one'}#step=5"), load_file(tmp_path / "model-5.safetensors"))
    found = shrinkpoint.load(f"{tmp_path / 'two'}#step=7")
    assert (found["step"], found["name"]) == (7, "run")
    assert same(dict(found["model"]), dict(state["model"]))  # type: ignore[call-overload]


def test_lossy_imports_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loop_files(tmp_path / "old", net=nn.Sequential(nn.Linear(8, 128), nn.Linear(128, 128)))
    (tmp_path / "held_out.py").write_text(
        "import torch\nfrom torch import nn\n"
        "net = nn.Sequential(nn.Linear(8, 128), nn.Linear(128, 128))\n"
        "data = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))\n"
        "def loss(weights):\n"
        "    net.load_state_dict(weights)\n"
        "    return [float((1 + net(one)).square().mean().detach()) for one in data.split(8)]\n"
    )
    monkeypatch.chdir(tmp_path)
    words = ["import", "old/*.pt", "run", "--scheme", "auto", "--evaluate", "held_out:loss"]
    said = run(*words).stdout
    assert "rounded" in said
    assert "may be deleted" not in said
    newest = run_json("ls", "run")["checkpoints"][0]
    assert newest["measured"] == "measured"
    assert newest["ratio"] > 3
    assert shrinkpoint.load("run")["epoch"] == 1
    assert "4 checkpoints already stored" in run(*words).stdout
    assert "no module:function" in run(*words[:-1], "held_out:los", code=2).stderr


# ---- what cannot be one run


def test_two_of_one_step_are_refused_by_name(tmp_path: Path) -> None:
    files = loop_files(tmp_path / "old", 2)
    torch.save(torch.load(files[1], weights_only=True) | {"epoch": 2}, tmp_path / "old" / "last-step=20.pt")
    said = run("import", str(tmp_path / "old" / "*.pt"), str(tmp_path / "run"), code=2).stderr
    assert "last-step=20.pt" in said
    assert "model-step=20.pt" in said
    assert not (tmp_path / "run").exists()


def test_a_copy_of_a_checkpoint_counts_once(tmp_path: Path) -> None:
    files = loop_files(tmp_path / "old", 2)
    shutil.copy(files[1], tmp_path / "old" / "last-step=20.pt")
    (tmp_path / "old" / "link-step=10.pt").symlink_to(files[0])
    done = run("import", str(tmp_path / "old" / "*step=*.pt"), str(tmp_path / "run"))
    assert "imported 2 checkpoints" in done.stdout
    assert "model-step=20.pt is the same as last-step=20.pt" in done.stderr


def test_two_models_are_refused_by_name(tmp_path: Path) -> None:
    loop_files(tmp_path / "old", 2)
    other = tmp_path / "old" / "other-30.pt"
    torch.save({"model": nn.Linear(8, 3).state_dict()}, other)
    said = run("import", str(tmp_path / "old" / "*.pt"), str(tmp_path / "run"), code=1).stderr
    assert "other-30.pt is of another model" in said
    assert not (tmp_path / "run").exists()


def test_a_step_is_needed_and_an_older_one_does_not_come_after_a_newer(tmp_path: Path) -> None:
    files = loop_files(tmp_path / "old", 3)
    nameless = tmp_path / "model.pt"
    shutil.copy(files[0], nameless)
    assert "has no step" in run("import", str(nameless), str(tmp_path / "run"), code=2).stderr
    run("import", str(files[1]), str(tmp_path / "run"))
    assert "older than the newest" in run("import", *map(str, files), str(tmp_path / "run"), code=2).stderr
    run("import", *map(str, files[1:]), str(tmp_path / "run"))
    assert steps(tmp_path / "run") == [30, 20]


def test_a_run_with_another_checkpoint_of_a_step_is_refused(tmp_path: Path) -> None:
    one, url = loop_files(tmp_path / "old", 1)[0], tmp_path / "run"
    run("import", str(one), str(url))
    state = torch.load(one, weights_only=True)
    state["model"]["0.bias"][3] += 1e-7
    torch.save(state, one)
    said = run("import", str(one), str(url), code=1).stderr
    assert "another checkpoint of step 10" in said
    assert "model/0.bias" in said


# ---- what is no checkpoint


class Executes:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("command", ["import", "try"])
@pytest.mark.parametrize("where", ["torch.save", "pickle", "folder", "distributed", "distributed value"])
def test_pickles_that_execute_code_are_refused_unread(tmp_path: Path, where: str, command: str) -> None:
    executed, old = tmp_path / "executed", tmp_path / "old-5.pt"
    bad = Executes(executed)
    if where == "torch.save":
        torch.save({"model": Net().state_dict(), "more": bad}, old)
    elif where == "pickle":
        old.write_bytes(pickle.dumps({"more": bad}, protocol=2))
    elif where == "folder":
        old.mkdir()
        torch.save({"more": bad}, old / "optimizer.pt")
    else:
        dcp.save({"model": Net().state_dict(), "more": bad if "value" in where else 1}, checkpoint_id=old)
        if where == "distributed":
            (old / ".metadata").write_bytes(pickle.dumps(bad))
    target = [str(tmp_path / "run")] if command == "import" else []
    said = run(command, str(old), *target, code=1).stderr
    assert "mkdir" in said
    assert "Do not load it" in said or where == "distributed"
    assert not executed.exists()
    assert not (tmp_path / "run").exists()


def test_a_class_that_may_be_harmless_can_be_allowed(tmp_path: Path) -> None:
    torch.save({"more": Fraction(1, 3)}, tmp_path / "old-5.pt")
    said = run("try", str(tmp_path / "old-5.pt"), code=1).stderr
    assert "fractions.Fraction" in said
    assert "add_safe_globals" in said


@pytest.mark.parametrize("command", ["import", "try"])
def test_a_pickle_of_a_newer_protocol_is_refused_unread(tmp_path: Path, command: str) -> None:
    (tmp_path / "old-5.pt").write_bytes(pickle.dumps({"more": Executes(tmp_path / "executed")}, protocol=4))
    target = [str(tmp_path / "run")] if command == "import" else []
    said = run(command, str(tmp_path / "old-5.pt"), *target, code=1).stderr
    assert "a pickle that torch.save has not written" in said
    assert "weights_only" not in said
    assert not (tmp_path / "executed").exists()


def test_cut_and_strange_files_are_named(tmp_path: Path) -> None:
    url = str(tmp_path / "run")
    [whole] = loop_files(tmp_path / "old", 1)
    data = whole.read_bytes()
    cut = tmp_path / "cut-1.pt"
    for size in (0, 1, 100, len(data) // 2, len(data) - 1):
        cut.write_bytes(data[:size])
        assert "cut-1.pt is damaged" in run("import", str(cut), url, code=1).stderr, size
    save_file(Net().state_dict(), tmp_path / "cut-2.safetensors")
    (tmp_path / "cut-2.safetensors").write_bytes((tmp_path / "cut-2.safetensors").read_bytes()[:99])
    assert (
        "cut-2.safetensors is damaged"
        in run("import", str(tmp_path / "cut-2.safetensors"), url, code=1).stderr
    )
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").write_bytes(b"...")
    assert "cat.jpg" in run("import", str(tmp_path / "photos"), url, code=1).stderr
    assert "nothing matches" in run("import", str(tmp_path / "none*"), url, code=1).stderr
    assert not Path(url).exists()


# ---- interrupted


def begun(files: Path, url: Path, number: int) -> subprocess.Popen[bytes]:
    """An import in a process of its own that has committed so many more."""
    number += len(list(url.glob("commits/*")))
    words = [sys.executable, "-m", "shrinkpoint", "import", f"{files}/*.pt", str(url)]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    while process.poll() is None and len(list(url.glob("commits/*"))) < number:
        time.sleep(0.02)
    assert process.poll() is None
    return process


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_an_interrupted_import_is_continued(tmp_path: Path, how: signal.Signals) -> None:
    files, url = loop_files(tmp_path / "old", 16), tmp_path / "run"
    for more in random.choices(range(1, 6), k=2):
        print(f"interrupted after {more} commits more")
        process = begun(tmp_path / "old", url, more)
        process.send_signal(how)
        _, said = process.communicate()
        if how == signal.SIGINT:
            assert process.returncode == 130
            assert b"the same command continues" in said
    done = run_json("import", str(tmp_path / "old" / "*.pt"), str(url))
    assert done["present"] == list(range(10, 10 * len(done["present"]) + 10, 10))
    assert len(done["present"]) >= 2
    assert done["present"] + done["imported"] == list(range(10, 170, 10))
    assert run_json("verify", str(url), "--all")["sound"] == 16
    assert same(shrinkpoint.load(f"{url}#step=150"), torch.load(files[14], weights_only=True))
