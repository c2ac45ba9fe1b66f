"""What ranks hold under one name is stored once: only where it is proved to be the same; and what lacks memory fails on all ranks."""

from pathlib import Path

import pytest
from support.sharded import launch
from support.sharded_stages import plain_weights, stages, tensor_parallel, without_memory

from shrinkpoint.store.run import RunStore


def test_stages_that_use_one_name_for_different_tensors_are_refused(tmp_path: Path) -> None:
    """Before, one stage's weights were stored, and those of the other were lost without a word."""
    url = str(tmp_path / "run")
    for seen in launch(stages, 2, tmp_path, url):
        refused = (
            "CannotRepresentError: ranks that are not on one device mesh have different values under one name"
        )
        assert seen["different"].startswith(refused)
        assert "model/layer.bias" in seen["different"]
        assert seen["equal at first"] == "nothing"
        assert seen["different later"].startswith(refused)
        assert (seen["copies 1"], seen["copies 2"]) == ("nothing", "nothing")
        assert seen["reports"] == [(1, "base"), (2, "delta")]
        assert seen["numbered"].startswith("CannotRepresentError: optimizers/0/state/0/exp_avg is")
        assert "of layer0.weight on one rank and" in seen["numbered"]
    assert [manifest.step for manifest in RunStore(url + "-other").manifests()] == []
    assert [manifest.step for manifest in RunStore(url + "-alike").manifests()] == [1]


def test_a_plain_weight_that_differs_between_ranks_is_refused(tmp_path: Path) -> None:
    for seen in launch(plain_weights, 2, tmp_path, str(tmp_path / "run")):
        assert seen.startswith("CannotRepresentError: ranks that are not on one device mesh")
        assert "model/alone.bias, model/alone.weight" in seen


@pytest.mark.slow
def test_tensor_parallelism_has_copies_on_disjoint_meshes(tmp_path: Path) -> None:
    for unproven, reports in launch(tensor_parallel, 4, tmp_path, str(tmp_path / "run")):
        assert unproven > 0
        assert reports == [(1, "base"), (2, "delta")]


def test_too_little_memory_on_one_rank_costs_the_save_on_all(tmp_path: Path) -> None:
    """Before, the other ranks waited for ever in the exchange."""
    first, second = launch(without_memory, 2, tmp_path, str(tmp_path / "run"))
    for seen in (first, second):
        assert seen["accepted"] == [True, False, True]
        assert seen["reports"] == [(1, "base"), (3, "base")]
        assert seen["restored"].startswith("StoreError:")
        assert "too little memory" in seen["restored"]
        assert seen["again"] == 3
    [text] = first["shown"]
    assert "saving step 2 to" in text
    assert "on rank 1: too little host memory for a copy of what this rank stores" in text
