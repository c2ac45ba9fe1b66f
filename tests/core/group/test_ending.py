"""SIGTERM and Ctrl-C: all ranks save the same step and end, also where one alone was asked; nobody waits for ever."""

from pathlib import Path

import pytest
import torch
from support.sharded import launch
from support.sharded_programs import asked_to_end, unanswered, unsaved_end

from shrinkpoint.store.run import RunStore


@pytest.mark.parametrize(
    "asked",
    [{1: 4}, pytest.param({0: 4, 1: 6, 2: 5}, marks=pytest.mark.slow)],
    ids=["one", "all"],
)
def test_ranks_that_are_asked_to_end_save_the_same_step(tmp_path: Path, asked: dict[int, int]) -> None:
    url = str(tmp_path / "run")
    ended = launch(asked_to_end, 3, tmp_path, url, asked)
    how, step, state = ended[0]
    assert how == "SystemExit: 143"
    assert 4 <= step <= 6  # a rank may be a step ahead of the one that is asked
    assert [other[:2] for other in ended] == [(how, step)] * 3
    assert [manifest.step for manifest in RunStore(url).manifests()] == [step]
    _, resumed, restored = launch(asked_to_end, 2, tmp_path, url, {})[0]
    assert resumed == step
    assert all(torch.equal(restored[name], tensor) for name, tensor in state.items())


def test_a_rank_that_does_not_answer_is_named_after_a_while(tmp_path: Path) -> None:
    first, second = launch(unanswered, 2, tmp_path)
    assert first == "StoreError: rank 1 has not answered within 1 s"
    assert second is None


def test_a_last_save_that_fails_names_the_newest_checkpoint(tmp_path: Path) -> None:
    told = launch(unsaved_end, 2, tmp_path, str(tmp_path / "run"))
    for how, shown in told:
        assert how == "143"
        assert any(
            "could not be saved" in line and "newest checkpoint is of step 2" in line for line in shown
        )
