"""Ranks that fail or die, damage, and wrong input: that save or load alone fails, on every rank, with a clear error."""

import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.dcp_programs import attempt, by_checkpointer, failing, killed, loads, refusals
from support.sharded import launch

import shrinkpoint
from shrinkpoint.dcp import StorageReader, StorageWriter
from shrinkpoint.store.run import RunStore


def test_a_rank_that_fails_costs_one_save(tmp_path: Path) -> None:
    url, true = str(tmp_path / "run"), str(tmp_path / "true.pt")
    answers = launch(failing, 2, tmp_path, url, true)
    assert answers[0][1] == [(1, "base"), (3, "base"), (4, "delta")]
    for told, _ in answers:
        assert told == ["nothing", "CheckpointException: 1: StoreError: disk full", "nothing", "nothing"]
    assert launch(loads, 1, tmp_path, url, true, "plain") == [4]


@pytest.mark.parametrize("before", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_rank_that_dies_costs_the_save_under_way(before: bool, tmp_path: Path) -> None:
    url = str(tmp_path / "run")
    launch(killed, 2, tmp_path, url, before, killed=True)
    assert [manifest.step for manifest in RunStore(url).manifests()] == [2, 1]
    assert shrinkpoint.load(url)["step"] == 2


def test_wrong_input_is_told_on_every_rank(tmp_path: Path) -> None:
    for told in launch(refusals, 2, tmp_path, str(tmp_path / "run")):
        assert told["first"] == "nothing"
        assert told["scheme"].startswith(
            "ConfigError: scheme='auto' is not for torch.distributed.checkpoint's storage"
        )
        assert "s3:/bucket/run" in told["url"]
        assert told["id"].startswith("ConfigError: checkpoint_id='newest' must be the step or end with it")
        assert "CannotRepresentError: odd cannot be stored without pickle" in told["object"]
        assert "dcp_programs.Odd" in told["object"]
        assert "there is no run at" in told["no run"]
        assert "has no checkpoint of step 7; there are 1" in told["no step"]
        assert told["two steps"].startswith("ConfigError: checkpoint_id='step-2' and ")
        assert "Missing key in checkpoint state_dict: model.further" in told["missing"]
        assert "0: " in told["shape"]
        assert "model.scale" in told["shape"]
        assert "FencedError" in told["another job"]


def test_a_checkpointers_run_is_read_and_the_other_way_round_refused(tmp_path: Path) -> None:
    for told in launch(by_checkpointer, 2, tmp_path, str(tmp_path / "run"), str(tmp_path / "other")):
        assert told.startswith("StateMismatchError")
        assert "not by a Checkpointer: resume it there, or take its weights with" in told


@pytest.fixture
def alone(tmp_path: Path) -> tuple[StorageWriter, Path]:
    return StorageWriter(tmp_path / "run", threads=1), tmp_path / "run"


def save(writer: StorageWriter, state: dict, step: int) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.save(state, storage_writer=writer, checkpoint_id=step)


def load(state: dict, url: object) -> str:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        return attempt(lambda: dcp.load(state, storage_reader=StorageReader(str(url))))


def test_damage_is_named_by_its_file(alone: tuple[StorageWriter, Path]) -> None:
    writer, run = alone
    for step in range(2):
        save(writer, {"model": {"w": torch.arange(9.0) + step}, "more": 1}, step)
    store = RunStore(run)
    newest = store.manifests()[0]
    part = store.head(newest.chain[-1]).parts[1].ref.key
    data = bytearray((run / part).read_bytes())
    data[-1] ^= 1
    (run / part).write_bytes(bytes(data))
    state = {"model": {"w": torch.zeros(9)}}
    told = load(state, run)
    assert "CorruptionError" in told
    assert part in told
    assert torch.equal(state["model"]["w"], torch.zeros(9))
    assert load(state, f"{run}#step=0") == "nothing"
    (run / part).unlink()
    assert f"{part}, which checkpoint 1 needs, is missing" in load(state, run)


def test_states_of_other_forms_come_back(alone: tuple[StorageWriter, Path]) -> None:
    """Flat, with optimizer state by flat names, further dtypes; and a single process."""
    writer, run = alone
    state = {
        "tok.weight": torch.randn(70, 64),
        "scale": torch.ones(3, dtype=torch.bfloat16),
        "steps": torch.tensor(3),
        "transposed": torch.randn(5, 4).t(),
        "complex": torch.randn(3, dtype=torch.complex64).conj(),
        "optimizer": {"state.tok.weight.exp_avg": torch.randn(70, 64), "param_groups.tok.weight.lr": 0.1},
        "numbers": {"7": {"x": 1}, "y": [{"z": torch.ones(2)}, 5]},
        "bytes": b"\x80\x04N.",
    }
    for step in range(2):
        state["tok.weight"] += 1e-3
        save(writer, state, step)
    assert [report.kind for report in writer.reports] == ["base", "delta"]
    found = {
        key: torch.zeros_like(value) if torch.is_tensor(value) else value for key, value in state.items()
    } | {
        "optimizer": {"state.tok.weight.exp_avg": torch.zeros(70, 64), "param_groups.tok.weight.lr": 0.0},
        "numbers": {"7": {"x": 0}, "y": [{"z": torch.zeros(2)}, 0]},
        "bytes": b"",
    }
    assert load(found, run) == "nothing"
    for key, value in state.items():
        assert torch.equal(found[key], value) if torch.is_tensor(value) else True
    assert found["numbers"]["y"][0]["z"].sum() == 2
    assert (found["numbers"]["7"]["x"], found["numbers"]["y"][1], found["bytes"]) == (1, 5, b"\x80\x04N.")
    moment = "state.tok.weight.exp_avg"
    assert torch.equal(found["optimizer"][moment], state["optimizer"][moment])
    weights = shrinkpoint.load_weights(run)
    assert weights.keys() == {"tok.weight", "scale", "steps", "transposed", "complex"}
    assert torch.equal(weights["tok.weight"], state["tok.weight"])


def test_steps_are_counted_where_none_is_given(alone: tuple[StorageWriter, Path]) -> None:
    writer, run = alone
    for _ in range(3):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.save({"w": torch.ones(2)}, storage_writer=writer)
    assert [manifest.step for manifest in RunStore(run).manifests()] == [2, 1, 0]


def test_a_run_that_was_not_loaded_is_said_to_stay(alone: tuple[StorageWriter, Path]) -> None:
    writer, run = alone
    save(writer, {"w": torch.ones(2)}, 0)
    with pytest.warns(match="that this training has not loaded"):
        save(StorageWriter(run, threads=1, keep_last=1), {"w": torch.ones(2)}, 1)
    assert [manifest.step for manifest in RunStore(run).manifests()] == [1, 0]
