"""Saves and loads of `torch.distributed.checkpoint` by real ranks: exact on any number of them, deltas where items stay."""

import io
import json
import pickletools
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from packaging.version import Version
from safetensors.torch import load_file
from support.dcp_programs import loads, resumed, saves
from support.sharded import launch
from typer.testing import CliRunner

import shrinkpoint
from shrinkpoint.cli.app import app
from shrinkpoint.container.reader import ContainerReader
from shrinkpoint.dcp import StorageReader, StorageWriter
from shrinkpoint.store.run import RunStore

CHAIN = [(1, "base"), (2, "delta"), (3, "delta")]
CACHES = Version(torch.__version__) >= Version("2.7")


def save_three(folder: Path, world: int = 2, *arguments: Any) -> tuple[str, str]:
    url, true = str(folder / "run"), str(folder / "true.pt")
    told = launch(saves, world, folder, url, true, *arguments)
    assert told[0] == CHAIN
    return url, true


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A run of 2 ranks: a base and two deltas."""
    return save_three(tmp_path_factory.mktemp("made"))


def test_any_number_of_ranks_loads_what_two_saved(made: tuple[str, str], tmp_path: Path) -> None:
    assert launch(loads, 3, tmp_path, *made) == [3, 3, 3]


@pytest.mark.slow
def test_several_stores_of_which_one_is_lost_between_saves(tmp_path: Path) -> None:
    urls, true = [str(tmp_path / name) for name in "abc"], str(tmp_path / "true.pt")
    assert launch(saves, 2, tmp_path, urls, true)[0] == CHAIN
    shutil.rmtree(urls[1])
    assert launch(loads, 2, tmp_path, urls, true) == [3, 3]
    assert [step for step, _ in launch(resumed, 2, tmp_path, urls, true)[0]] == [4, 5, 6]
    assert launch(loads, 2, tmp_path, urls, true) == [6, 6]
    assert [manifest.step for manifest in RunStore(urls).manifests()] == [6, 5]


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_file_in_the_state_comes_back(tmp_path: Path) -> None:
    writer = StorageWriter(str(tmp_path / "run"), threads=1)
    for step, content in ((1, b"abc"), (2, bytes(range(256)) * 99)):
        dcp.save({"w": torch.ones(3), "file": io.BytesIO(content)}, storage_writer=writer, checkpoint_id=step)
    state = {"w": torch.zeros(3), "file": io.BytesIO()}
    dcp.load(state, storage_reader=StorageReader(str(tmp_path / "run")))
    assert state["file"].getvalue() == bytes(range(256)) * 99


def test_one_process_loads_plain_tensors_without_ranks(made: tuple[str, str]) -> None:
    true = torch.load(made[1], weights_only=True)
    state = {"model": {"emb.weight": torch.zeros(21, 16)}, "step": 0}
    dcp.load(state, storage_reader=StorageReader(made[0]))
    assert torch.equal(state["model"]["emb.weight"], true["model.emb.weight"])
    dcp.load(state, storage_reader=StorageReader(made[0] + "#step=2"))
    assert state["step"] == 2
    assert not torch.equal(state["model"]["emb.weight"], true["model.emb.weight"])
    dcp.load(state, storage_reader=StorageReader(made[0]), checkpoint_id="somewhere/step-1")
    assert state["step"] == 1


def shrink(*arguments: object) -> Any:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_the_command_line_reads_what_ranks_saved(made: tuple[str, str], tmp_path: Path) -> None:
    url, true = made[0], torch.load(made[1], weights_only=True)
    assert [c["step"] for c in shrink("ls", url, "--json")["checkpoints"]] == [3, 2, 1]
    assert shrink("verify", url, "--all", "--json")["damaged"] == 0
    shown = {tensor["name"]: tensor["role"] for tensor in shrink("show", url, "--json")["tensors"]}
    assert shown["model/emb.weight@11,0"] == "weight"
    assert shown["optim/state/emb.weight/exp_avg@0,0"] == "exp_avg"
    shrink("export", url, tmp_path / "model.safetensors", "--json")
    weights = load_file(tmp_path / "model.safetensors")
    assert weights.keys() == {name[6:] for name in true if name.startswith("model.")}
    assert all(torch.equal(weights[name], true[f"model.{name}"]) for name in weights)
    loaded = shrinkpoint.load_weights(url, names=["scale"])
    assert torch.equal(loaded["scale"], true["model.scale"])
    state = shrinkpoint.load(url)
    assert state["note"]["$"] == {"deep": [{"a": 1}]}
    assert state["nothing"].shape == (0, 3)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_nothing_that_is_stored_is_a_pickle(made: tuple[str, str]) -> None:
    assert pickles_in(b"--" + pickled() + b"--")  # the search finds one
    files = [path for path in Path(made[0]).rglob("*") if path.is_file()]
    assert len(files) > 12
    for path in files:
        data = path.read_bytes()
        if path.suffix == ".shrink" and data.startswith(b"\x89SHR"):
            reader = ContainerReader(lambda at, n, data=data: data[at : at + n], len(data))
            data += repr(reader.header).encode()
        assert not pickles_in(data), path
        assert b"PK\x03\x04" not in data, path


def pickled() -> bytes:
    data = io.BytesIO()
    torch.save({"lr": (1, 2)}, data, _use_new_zipfile_serialization=False)
    return data.getvalue()


def pickles_in(data: bytes) -> bool:
    """Whether a pickle of more than a few opcodes begins anywhere."""
    at = data.find(b"\x80")
    while at >= 0:
        if data[at + 1 : at + 2] in (b"\x02", b"\x03", b"\x04", b"\x05"):
            try:
                if len(list(pickletools.genops(data[at:]))) > 4:
                    return True
            except Exception:  # noqa: BLE001 - no pickle
                pass
        at = data.find(b"\x80", at + 1)
    return False


def test_a_rank_reads_the_parts_that_it_needs(made: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    fetch, ranged = RunStore.fetch_blob, RunStore.fetch_range
    monkeypatch.setattr(RunStore, "fetch_blob", lambda s, ref, m: read.append(ref.key) or fetch(s, ref, m))
    monkeypatch.setattr(
        RunStore, "fetch_range", lambda s, ref, *a, **how: read.append(ref.key) or ranged(s, ref, *a, **how)
    )
    store = RunStore(made[0])
    newest = store.manifests()[0]
    state = {"counts": [torch.tensor(0), torch.zeros(3, dtype=torch.int64)]}
    dcp.load(state, storage_reader=StorageReader(made[0]))
    assert state["counts"][0] == 3
    parts = [[part.ref.key for part in store.head(ref).parts] for ref in newest.chain]
    used = {numbers.index(key) for numbers in parts for key in numbers if key in read}
    assert 0 in used
    assert len(used) == 2  # the table's, and that of the one rank which torch had write them


@pytest.mark.parametrize(
    "mode", ["thread", pytest.param("cached", marks=pytest.mark.skipif(not CACHES, reason="torch 2.7"))]
)
def test_saves_in_the_background_and_with_cached_plans_are_deltas(mode: str, tmp_path: Path) -> None:
    url, true = save_three(tmp_path, 2, "fsdp", mode)
    assert launch(loads, 1, tmp_path, url, true, "plain") == [3]


def test_a_training_goes_on_and_keeps_a_number_of_checkpoints(tmp_path: Path) -> None:
    url, true = save_three(tmp_path)
    told = launch(resumed, 3, tmp_path, url, true)
    assert told[0] == [(4, "base"), (5, "delta"), (6, "delta")]
    assert [manifest.step for manifest in RunStore(url).manifests()] == [6, 5]


@pytest.mark.slow
def test_another_process_saves(tmp_path: Path) -> None:
    pytest.importorskip("torch.distributed.checkpoint._async_process_executor")
    url, true = str(tmp_path / "run"), str(tmp_path / "true.pt")
    launch(saves, 2, tmp_path, url, true, "fsdp", "process")
    assert [(m.step, m.kind) for m in RunStore(url).manifests()[::-1]] == CHAIN
    assert launch(loads, 3, tmp_path, url, true) == [3, 3, 3]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["hsdp", "tp"])
def test_other_meshes(kind: str, tmp_path: Path) -> None:
    url, true = save_three(tmp_path, 4, kind)
    assert launch(loads, 2, tmp_path, url, true) == [3, 3]
    assert launch(loads, 1, tmp_path, url, true, "plain") == [3]
    assert launch(loads, 4, tmp_path, url, true, "tp" if kind == "hsdp" else "hsdp") == [3] * 4
    shrinkpoint.load_weights(url)
