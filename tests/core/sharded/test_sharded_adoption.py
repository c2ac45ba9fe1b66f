"""A sharded training that adopts its checkpoints is the undisturbed one after any crash, bit for bit."""

import itertools
import random
from pathlib import Path
from typing import Any

import pytest
from support.sharded import launch
from support.sharded_adopting import (
    EVERY,
    STEPS,
    behind_a_kill,
    continued,
    corrupted,
    failing,
    from_an_exact_save,
    measured,
    refused,
    until_killed,
)

from shrinkpoint.store.run import RunStore


@pytest.fixture(scope="module", name="played")
def _played(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    folder = tmp_path_factory.mktemp("adopting")
    return folder, launch(continued, 2, folder, str(folder), "fsdp", [EVERY + 1, 4 * EVERY + 2])


def assert_continues(answers: list[Any], began: list[int]) -> None:
    for digests, parts, _ in answers:
        assert [start for start, _ in parts] == began
        for _, part in parts:
            assert part
            assert part == {step: digests[step] for step in part}


def test_resumed_training_is_the_undisturbed_one(played: tuple[Path, list[Any]]) -> None:
    folder, answers = played
    assert_continues(answers, [0, EVERY, 4 * EVERY])
    planned = [step for step in range(1, STEPS + 1) if step % EVERY == 0]
    for _, _, reports in answers:
        assert [step for step, *_ in reports] == planned
        assert [kind for _, kind, *_ in reports] == ["base", "delta", "delta", "delta", "base", "delta"]
        assert all(measured == "unmeasured" and seconds > 0 for _, _, measured, seconds, _ in reports)
        assert min(ratio for *_, ratio in reports[1:4]) > 3
    manifests = RunStore(str(folder / "run")).manifests()[::-1]
    assert [manifest.meta["adoption"]["count"] for manifest in manifests] == list(range(1, len(planned) + 1))
    weights = [manifest.meta["save"]["sections"]["weight"] for manifest in manifests]
    assert max(weights[1:4]) < 0.7 * weights[0]  # deltas build on what was adopted before


def test_measured_saves_are_continued_bit_by_bit(tmp_path: Path) -> None:
    answers = launch(measured, 2, tmp_path, str(tmp_path))
    for began, true, rest, reports in answers:
        assert began == 2 * EVERY
        assert rest == {step: digest for step, digest in true.items() if step > began}
        assert [how for how, _ in reports] == ["measured"] * len(reports)
    assert answers[0][-1] == answers[1][-1]


@pytest.mark.slow
def test_without_adoption_it_differs(tmp_path: Path) -> None:
    digests, parts, _ = launch(continued, 2, tmp_path, str(tmp_path), "fsdp", [2 * EVERY], False)[0]
    assert parts[-1][1][STEPS] != digests[STEPS]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "world"), [pytest.param("fsdp", 3, marks=pytest.mark.long), ("tp", 4), ("bf16", 2)]
)
def test_other_meshes(tmp_path: Path, kind: str, world: int) -> None:
    stops = [2 * EVERY + 1, 3 * EVERY]
    assert_continues(
        launch(continued, world, tmp_path, str(tmp_path), kind, stops), [0, 2 * EVERY, 3 * EVERY]
    )


def test_failed_saves_change_nothing(tmp_path: Path, played: tuple[Path, list[Any]]) -> None:
    true = played[1][0][0]
    for digests, again, rest, shown in launch(failing, 2, tmp_path, str(tmp_path)):
        assert digests == {step: true[step] for step in digests}
        assert again == 5 * EVERY
        assert rest == {step: true[step] for step in rest}
        assert rest[STEPS]
        assert any("the disk is full" in line for line in shown) or not shown
    steps = [manifest.step for manifest in RunStore(str(tmp_path / "run")).manifests()]
    assert not {2 * EVERY, 3 * EVERY} & set(steps)


@pytest.mark.parametrize(
    "at", [2 * EVERY + 1, pytest.param(2 * EVERY, marks=[pytest.mark.slow, pytest.mark.long])]
)
def test_continued_from_a_save_that_was_not_planned(
    tmp_path: Path, played: tuple[Path, list[Any]], at: int
) -> None:
    true = played[1][0][0]
    for reached, rest in launch(from_an_exact_save, 2, tmp_path, str(tmp_path), at):
        assert reached == at
        assert rest == {step: true[step] for step in rest}
        assert rest[STEPS]


@pytest.mark.slow
@pytest.mark.parametrize("point", ["after-post", "before-manifest", "after-manifest"])
def test_killed_between_adopting_and_committing(
    tmp_path: Path, played: tuple[Path, list[Any]], point: str
) -> None:
    true = played[1][0][0]
    launch(behind_a_kill, 2, tmp_path, str(tmp_path), point, killed=True)
    for began, rest in launch(behind_a_kill, 2, tmp_path, str(tmp_path), None):
        assert began == (2 * EVERY if point == "after-manifest" else EVERY)
        assert rest == {step: true[step] for step in rest}
        assert rest[STEPS]


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(0)  # bounded by its trials
def test_killed_at_random_moments(
    tmp_path: Path, played: tuple[Path, list[Any]], pytestconfig: pytest.Config
) -> None:
    """A random rank each time, until the training has come to its end; and then another one."""
    true, chance, kills, again = played[1][0][0], random.Random(0), 0, 0
    wanted = pytestconfig.getoption("--kills") or 6
    for run in itertools.count():
        folder, ended = tmp_path / str(run), False
        folder.mkdir()
        while not ended and kills < wanted:
            after_s = chance.uniform(0.3, 6.0)
            noted = str(folder / "noted")
            answers = launch(until_killed, 2, folder, str(folder), noted, killed=True, kill_after_s=after_s)
            ended = all(answers)
            kills += not ended
        for rank in range(2):
            lines = [line.split() for line in Path(f"{folder}/noted-{rank}").read_text().splitlines()]
            again += len(lines) - len({step for step, _ in lines})
            assert all(true[int(step)] == digest for step, digest in lines)
        if kills >= wanted:
            break
    print(f"{kills} kills of a rank; {again} steps were made again, all of them alike")
    assert again > 0


def test_a_rank_that_holds_something_else_is_an_error_on_all(tmp_path: Path) -> None:
    answers = launch(corrupted, 2, tmp_path, str(tmp_path))
    assert len(set(answers)) == 1
    assert answers[0].startswith("StateMismatchError: rank 1 does not have the values of 'model/")
    assert not RunStore(str(tmp_path / "run")).manifests()


def test_ranks_that_were_given_different_numbers(tmp_path: Path) -> None:
    for answer in launch(refused, 2, tmp_path, str(tmp_path)):
        assert "adopt=6" in answer
        assert answer.startswith("ConfigError")
