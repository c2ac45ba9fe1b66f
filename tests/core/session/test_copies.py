"""Data parallel training in a plain loop: every process stores a share of the state, and a continued run is the undisturbed one."""

from pathlib import Path

import pytest
import torch
from support.copies import (
    accumulated,
    evaluated,
    evaluates_alone,
    first_alone,
    in_own_folders,
    one_fails,
    swapped,
    told,
    trained,
)
from support.replicas import EVERY
from support.sharded import launch

import shrinkpoint
from shrinkpoint.store.run import RunStore

pytestmark = pytest.mark.filterwarnings("ignore:the run was written by")


def test_three_processes_continue_bit_by_bit(tmp_path: Path) -> None:
    true = launch(trained, 3, tmp_path, str(tmp_path / "whole"), 3 * EVERY)
    assert {began for began, *_ in true} == {0}
    launch(trained, 3, tmp_path, str(tmp_path / "run"), 2 * EVERY)
    rest = launch(trained, 3, tmp_path, str(tmp_path / "run"), 3 * EVERY)
    for (_, whole, _), (began, own, kinds) in zip(true, rest, strict=True):
        assert began == 2 * EVERY
        assert own[0] == {step: noted for step, noted in whole[0].items() if step > began}
        assert own[1:] == whole[1:]
        assert kinds == ["delta"]
    store = RunStore(str(tmp_path / "run"))
    sizes = [part.ref.size for part in store.head(store.manifests()[0].chain[-1]).parts]
    assert len(sizes) == 3
    assert max(sizes) < 0.6 * sum(sizes)


def test_gradients_that_each_process_has_accumulated_go_on(tmp_path: Path) -> None:
    whole = launch(accumulated, 2, tmp_path, str(tmp_path / "whole"), 8)
    launch(accumulated, 2, tmp_path, str(tmp_path / "run"), 6)
    rest = launch(accumulated, 2, tmp_path, str(tmp_path / "run"), 8)
    assert [began for began, _ in rest] == [6, 6]
    assert all(torch.equal(one, other) for (_, one), (_, other) in zip(whole, rest, strict=True))


@pytest.mark.parametrize("ranks", [(3, 2), (2, 3)])
def test_another_number_of_processes_goes_on_from_the_same_weights(
    ranks: tuple[int, int], tmp_path: Path
) -> None:
    first = launch(trained, ranks[0], tmp_path, str(tmp_path / "run"), EVERY)
    _, (noted, *_), _ = first[0]
    answers = launch(trained, ranks[1], tmp_path, str(tmp_path / "run"), EVERY)
    assert [(began, kinds) for began, _, kinds in answers] == [(EVERY, [])] * ranks[1]
    weights = shrinkpoint.load_weights(str(tmp_path / "run"))
    assert set(weights) >= {"head.weight", "table.weight", "body.bias"}
    assert noted.keys() == set(range(1, EVERY + 1))


def test_losses_of_all_processes_decide(tmp_path: Path) -> None:
    answers = launch(evaluated, 2, tmp_path, str(tmp_path / "run"), 2 * EVERY)
    assert answers[0] == answers[1]
    assert [measured for measured, _ in answers[0]] == ["measured"] * 2
    assert all(degradation > 0 for _, degradation in answers[0])


def test_copies_that_have_drifted_apart_are_an_error_on_all(tmp_path: Path) -> None:
    answers = launch(told, 2, tmp_path, str(tmp_path / "run"))
    assert len(set(answers)) == 1
    assert answers[0].startswith(
        "CannotRepresentError: ranks that are not on one device mesh have different values"
    )
    assert "model/head.weight" in answers[0]


def test_folders_that_not_all_processes_see_are_refused(tmp_path: Path) -> None:
    """Each would store its share where no other finds it, and no start after that could read any checkpoint."""
    answers = launch(in_own_folders, 2, tmp_path, str(tmp_path))
    assert all("is another place on rank 1 than on rank 0" in answer for answer in answers)


def test_a_checkpointer_on_the_first_process_alone_is_an_error(tmp_path: Path) -> None:
    first, _ = launch(first_alone, 2, tmp_path, str(tmp_path / "run"))
    assert first.startswith("ConfigError: of a DDP training every process makes a Checkpointer")


def test_a_state_that_one_process_cannot_give_is_an_error_on_all(tmp_path: Path) -> None:
    answers = launch(one_fails, 2, tmp_path, str(tmp_path / "run"))
    assert all("not here" in answer for answer in answers)


def test_weights_that_one_process_has_touched_are_saved_by_none(tmp_path: Path) -> None:
    answers = launch(swapped, 2, tmp_path, str(tmp_path / "run"))
    assert any("the last step, 3, is not saved" in message for message in answers[0])
    assert [manifest.step for manifest in RunStore(str(tmp_path / "run")).manifests()] == [2]


def test_an_evaluation_on_some_processes_alone_is_refused_on_all(tmp_path: Path) -> None:
    answers = launch(evaluates_alone, 2, tmp_path, str(tmp_path / "run"))
    assert all(answer.startswith("ConfigError: evaluate= was given on some processes") for answer in answers)
