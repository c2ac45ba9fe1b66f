"""Data parallel training in a plain loop that adopts its checkpoints is the undisturbed one after a kill, bit for bit."""

import signal
from pathlib import Path

from support.replicas import EVERY, asked_to_end, corrupted, differing, journey
from support.sharded import launch

from shrinkpoint.store.run import RunStore


def test_three_killed_processes_continue_bit_by_bit(tmp_path: Path) -> None:
    true = launch(journey, 3, tmp_path, str(tmp_path / "whole"))
    assert len({str(noted) for _, noted in true}) == 3  # each has its own batches
    assert len({noted[step][1] for _, noted in true for step in [max(noted)]}) == 1  # and the same weights
    launch(journey, 3, tmp_path, str(tmp_path / "run"), 2 * EVERY + 2, killed=True)
    for (_, whole), (began, rest) in zip(
        true, launch(journey, 3, tmp_path, str(tmp_path / "run")), strict=True
    ):
        assert began == 2 * EVERY
        assert rest == {step: whole[step] for step in whole if step > began}
    saves = [manifest.meta["save"] for manifest in RunStore(str(tmp_path / "whole")).manifests()]
    assert [save["measured"] for save in saves] == ["measured"] * len(saves)
    assert all(save["degradation"] > 0 and save["configuration"] != "exact" for save in saves)
    *deltas, base = saves  # which holds what is each process's own, in a file of each
    assert all(save["raw_bytes"] > 4 * save["bytes"] for save in deltas)
    assert base["raw_bytes"] > 2.5 * base["bytes"]


def test_without_adoption_they_differ(tmp_path: Path) -> None:
    """The negative control: the same saves, restored in the same way, but the training has gone on from its own values."""
    true = launch(journey, 3, tmp_path, str(tmp_path / "whole"), None, False)
    launch(journey, 3, tmp_path, str(tmp_path / "run"), 2 * EVERY + 2, False, killed=True)
    for (_, whole), (began, rest) in zip(
        true, launch(journey, 3, tmp_path, str(tmp_path / "run"), None, False), strict=True
    ):
        assert began == 2 * EVERY
        assert rest[max(rest)][1] != whole[max(rest)][1]


def test_a_process_that_holds_something_else_is_an_error_on_all(tmp_path: Path) -> None:
    answers = launch(corrupted, 3, tmp_path, str(tmp_path / "run"))
    assert len(set(answers)) == 1
    assert answers[0].startswith("StateMismatchError: rank 1 does not have the values of '")


def test_a_signal_to_one_process_ends_all_after_an_exact_save(tmp_path: Path) -> None:
    first, second = launch(asked_to_end, 2, tmp_path, str(tmp_path / "run"))
    assert first == second
    assert first.startswith(f"exit {128 + signal.SIGTERM} at ")
    newest = RunStore(str(tmp_path / "run")).manifests()[0]
    assert newest.step == int(first.split()[-1])
    assert newest.meta["adoption"]["planned"] == (newest.step % EVERY == 0)


def test_processes_that_were_given_different_options(tmp_path: Path) -> None:
    answers = launch(differing, 2, tmp_path, str(tmp_path / "run"))
    assert all("rank 1 adopt=6: every rank must give the same" in answer for answer in answers)
