"""Ranks that fail or die, damage, and wrong input: that save or load alone fails, on every rank, with a clear error."""

import pickle
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.dcp_programs import attempt, by_checkpointer, failing, killed, loads, refusals
from support.sharded import launch
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan

import shrinkpoint
from shrinkpoint.dcp import StorageReader, StorageWriter
from shrinkpoint.engine.compaction import rebase
from shrinkpoint.errors import ChainError
from shrinkpoint.store.run import RunStore


def test_a_rank_that_fails_costs_one_save(tmp_path: Path) -> None:
    url, true = str(tmp_path / "run"), str(tmp_path / "true.pt")
    answers = launch(failing, 2, tmp_path, url, true)
    assert answers[0][1] == [(1, "base"), (3, "base"), (4, "delta")]
    for told, _ in answers:
        assert told == ["nothing", "CheckpointException: 1: StoreError: disk full", "nothing", "nothing"]
    assert launch(loads, 1, tmp_path, url, true, "plain") == [4]


@pytest.mark.parametrize(
    ("victim", "point", "left"),
    [
        (1, "before-put", 2),
        pytest.param(1, "after-put", 2, marks=pytest.mark.slow),
        pytest.param(0, "before-manifest", 2, marks=pytest.mark.slow),
        pytest.param(0, "after-manifest", 3, marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_dies_costs_the_save_under_way(
    victim: int, point: str, left: int, tmp_path: Path
) -> None:
    url = str(tmp_path / "run")
    launch(killed, 2, tmp_path, url, victim, point, killed=True)
    assert [manifest.step for manifest in RunStore(url).manifests()] == list(range(left, 0, -1))
    assert shrinkpoint.load(url)["step"] == left


def test_wrong_input_is_told_on_every_rank(tmp_path: Path) -> None:
    for told in launch(refusals, 2, tmp_path, str(tmp_path / "run")):
        assert told["first"] == "nothing"
        assert "s3:/bucket/run" in told["url"]
        assert told["id"].startswith("ConfigError: checkpoint_id='newest' must be the step or end with it")
        assert (
            "CannotRepresentError: odd is a support.dcp_programs.Odd: it cannot be stored without pickle"
            in told["object"]
        )
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
    with pytest.warns(match="that this training does not continue"):
        save(StorageWriter(run, threads=1, keep_last=1), {"w": torch.ones(2)}, 1)
    assert [manifest.step for manifest in RunStore(run).manifests()] == [1, 0]


def test_ranks_that_find_different_checkpoints_are_told(alone: tuple[StorageWriter, Path]) -> None:
    writer, run = alone
    plans = []
    for step in range(2):
        save(writer, {"w": torch.ones(2)}, step)
        reader = StorageReader(run)
        plans.append(reader.prepare_local_plan(LoadPlan([])))
    with pytest.raises(
        ChainError, match=r"different newest checkpoints in .*, of steps \[0, 1\]: something still saves"
    ):
        reader.prepare_global_plan(plans)
    assert reader.prepare_global_plan(plans[1:]) == plans[1:]


def test_a_save_that_overlaps_another_is_refused(
    alone: tuple[StorageWriter, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, _ = alone

    def meanwhile(*arguments: object, **options: object) -> None:
        writer.reset(2)
        writer.prepare_local_plan(SavePlan([]))

    monkeypatch.setattr("shrinkpoint.dcp.writer.store_part", meanwhile)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        told = attempt(lambda: dcp.save({"w": torch.ones(2)}, storage_writer=writer, checkpoint_id=1))
    assert "ConfigError: step 1 is still being saved" in told


def test_a_pickled_writer_goes_on_where_the_process_left_off(alone: tuple[StorageWriter, Path]) -> None:
    """As in torch's own process for saves, which gets one with every save."""
    writer, run = alone
    for step in range(3):
        save(pickle.loads(pickle.dumps(writer)), {"w": torch.arange(5000.0) + step}, step)
    assert [manifest.kind for manifest in RunStore(run).manifests()] == ["delta", "delta", "base"]
    assert [report.step for report in writer.reports] == [0, 1, 2]


def test_upkeep_knows_the_pairs_runs(alone: tuple[StorageWriter, Path]) -> None:
    writer, run = alone
    for step in range(3):
        save(writer, {"model": {"w": torch.arange(9.0) + step}, "n": step}, step)
    store = RunStore(run)
    rebased = rebase(store, store.manifests()[0])
    assert rebased.source.step == 2
    store.writer().collect([2], grace_s=0)
    state = {"model": {"w": torch.zeros(9)}, "n": 0}
    assert load(state, run) == "nothing"
    assert state["n"] == 2
