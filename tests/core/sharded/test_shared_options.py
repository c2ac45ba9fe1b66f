"""What one process can, several can: copies on the node, weights alone, a scratch folder, a deadline, a movement from the start."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.sharded import launch
from support.shared_options import begun, ended_at_a_signal, on_this_node, scratched, weighed

import shrinkpoint
from shrinkpoint.engine.retention import is_weights_only
from shrinkpoint.sharded.layout import owned_gradients, owners_of
from shrinkpoint.state.training import Role, Tag, TensorSpec
from shrinkpoint.store.run import RunStore

KINDS = pytest.mark.parametrize("kind", ["copies", "fsdp"])


@KINDS
def test_a_restart_reads_the_copies_of_all_parts(tmp_path: Path, kind: str) -> None:
    for copies, exactly, began, same in launch(on_this_node, 2, tmp_path, str(tmp_path), kind):
        assert copies == [5, 4]
        assert exactly
        assert began == 5
        assert same


@KINDS
def test_older_checkpoints_of_several_ranks_become_weights(tmp_path: Path, kind: str) -> None:
    url = str(tmp_path / "run")
    for began, same, moments, _ in launch(weighed, 2, tmp_path, url, kind, 1):
        assert (began, same) == (4, True)
        assert moments > 0
    manifests = RunStore(url).manifests()
    assert [manifest.step for manifest in manifests] == [5, 4, 3, 2, 1]
    assert [is_weights_only(manifest.meta) for manifest in manifests] == [False, True, True, True, True]
    assert [manifest.has_parts for manifest in manifests] == [True, False, False, False, False]
    state = shrinkpoint.load(f"{url}#step=2")
    assert len(state["model"]) == 18
    assert state["optimizers"][0]["state"] == {}
    assert state["optimizers"][0]["param_groups"]


@KINDS
def test_an_optimizer_that_is_never_stored(tmp_path: Path, kind: str) -> None:
    url = str(tmp_path / "run")
    answers = launch(weighed, 2, tmp_path, url, kind, 0)
    for began, same, moments, _ in answers:
        assert (began, same, moments) == (4, True, 0)
    assert any("optimizer state was not stored: it starts anew" in line for line in answers[0][-1])
    assert all(is_weights_only(manifest.meta) for manifest in RunStore(url).manifests())


@KINDS
@pytest.mark.parametrize("scheme", ["auto", "lossless"])
def test_what_is_not_needed_waits_on_a_disk(tmp_path: Path, kind: str, scheme: str) -> None:
    for same, reports, others in launch(scratched, 2, tmp_path, str(tmp_path), kind, scheme):
        assert same
        assert reports == others == [(4, "delta"), (5, "delta")]


@KINDS
def test_a_save_at_a_signal_has_a_deadline(tmp_path: Path, kind: str) -> None:
    url = str(tmp_path / "run")
    answers = launch(ended_at_a_signal, 2, tmp_path, url, kind)
    for reports, _, began, same in answers:
        assert reports == [(1, "base"), (2, "delta"), (3, "base")]
        assert (began, same) == (3, True)
    assert any("is made without the optimizer's state" in line for line in answers[0][1])
    assert is_weights_only(RunStore(url).manifests()[0].meta)


@pytest.mark.parametrize(("kind", "optimizer"), [("copies", "adamw"), ("copies", "sgd"), ("fsdp", "adamw")])
def test_movement_is_counted_from_the_start(tmp_path: Path, kind: str, optimizer: str) -> None:
    answers = launch(begun, 2, tmp_path, str(tmp_path / "run"), kind, optimizer)
    first = {name: rms for told, _ in answers for name, rms in told[0][1].items()}
    _, moved = answers[0]
    assert first.keys() == {
        f"model/{name.removeprefix('model.')}" for name in moved if name.startswith("model.")
    } - {"model/count"}
    assert all(told[0][0] == 2 for told, _ in answers)
    assert all(
        (rms > 0) == (moved[f"model.{name.removeprefix('model/')}"] > 0) for name, rms in first.items()
    )
    assert all(told[1] is not None and set(told[1][1].values()) == {0.0} for told, _ in answers)


def test_each_rank_has_the_gradients_of_what_it_owns() -> None:
    tag = Tag(role=Role.WEIGHT, parameter="w")
    spec = TensorSpec(name="model/w", dtype=torch.float32, shape=(6, 2), tag=tag)
    moment = replace(spec, name="optimizers/0/state/0/exp_avg", tag=replace(tag, role=Role.EXP_AVG))
    owners = owners_of({one.name: one for one in (spec, moment)}, 2, limit=4)
    whole = torch.arange(12.0).reshape(6, 2)
    found = [owned_gradients(owners, rank, {"w": whole, "other": whole}) for rank in (0, 1)]
    assert {**found[0], **found[1]}.keys() == {"w@0", "w@1", "w@2"}
    assert not found[0].keys() & found[1].keys()
    assert torch.equal(torch.cat([{**found[0], **found[1]}[f"w@{at}"] for at in range(3)]), whole)
