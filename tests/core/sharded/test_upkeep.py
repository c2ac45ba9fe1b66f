"""The command line on a run that several ranks wrote, without torch.distributed."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.sharded import launch
from support.sharded_programs import saves
from typer.testing import CliRunner

import shrinkpoint
from shrinkpoint.cli.app import app
from shrinkpoint.store.run import RunStore


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 2 ranks: a base and four deltas."""
    folder = tmp_path_factory.mktemp("made")
    launch(saves, 2, folder, str(folder / "run"), str(folder / "log"), None, 5)
    return folder / "run"


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    import shutil

    return Path(shutil.copytree(made, tmp_path / "run"))


def shrink(*arguments: object) -> Any:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout) if "--json" in arguments else result.stdout


def test_listing_and_showing_count_the_parts(run: Path) -> None:
    listed = shrink("ls", run, "--json")
    assert [(c["step"], c["kind"], c["parts"], c["damage"]) for c in listed["checkpoints"]] == [
        (5, "delta", 2, None),
        (4, "delta", 2, None),
        (3, "delta", 2, None),
        (2, "delta", 2, None),
        (1, "base", 2, None),
    ]
    assert listed["unlisted_containers"] == 0
    on_disk = sum(path.stat().st_size for path in (run / "data").iterdir())
    assert listed["stored_bytes"] == on_disk
    shown = shrink("show", run, "--json")
    own = RunStore(run).manifests()[0].chain[-1]
    assert shown["bytes"] == own.total
    assert shown["state_digest"] == RunStore(run).manifests()[0].state_digest
    assert {"model/scale", "optimizers/0/state/0/exp_avg"} <= {t["name"] for t in shown["tensors"]}


def test_verify_finds_a_missing_part(run: Path) -> None:
    assert shrink("verify", run, "--all", "--json")["damaged"] == 0
    store = RunStore(run)
    newest = store.manifests()[0]
    (run / store.head(newest.chain[-1]).parts[0].ref.key).unlink()
    result = CliRunner().invoke(app, ["verify", str(run), "--all", "--json"])
    assert result.exit_code == 1
    assert json.loads(result.stdout)["damaged"] == 1
    assert "is missing" in shrink("ls", run, "--json")["checkpoints"][0]["damage"]


def test_export_writes_one_file(run: Path, tmp_path: Path) -> None:
    shrink("export", run, tmp_path / "model.safetensors")
    weights = load_file(tmp_path / "model.safetensors")
    assert len(weights) == 18
    assert all(bool((tensor == 5).all()) for tensor in weights.values())


def test_compaction_makes_one_container_of_all_parts(run: Path) -> None:
    before = shrinkpoint.load(run)
    shrink("compact", run, "--step", 5, "--yes")
    newest = RunStore(run).manifests()[0]
    assert (newest.kind, newest.step, newest.has_parts) == ("base", 5, False)
    after = shrinkpoint.load(run)
    assert all(torch.equal(before["model"][name], after["model"][name]) for name in before["model"])


def test_pruning_removes_parts_with_their_heads(run: Path) -> None:
    report = shrink("prune", run, "--keep-last", 1, "--yes", "--grace", 0, "--json")
    assert report["done"]
    store = RunStore(run)
    [newest] = store.manifests()
    assert newest.step == 5
    left = {f"data/{path.name}" for path in (run / "data").iterdir()}
    assert left == {ref.key for ref in store.refs(newest)}
    assert shrinkpoint.load(run)["step"] == 5
