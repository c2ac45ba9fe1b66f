"""Composer's FSDP2 with sharded states on several processes, ended and continued, on as many and on other numbers of ranks."""

import shutil
import signal
from pathlib import Path

import pytest
import torch

pytest.importorskip("composer")

from support.composer_models import assert_continues, assert_same
from support.sharded import launch
from support.sharded_composer import (
    adopting,
    hop,
    journey,
    killed,
    measured,
    native,
    rest,
    signalled,
    unsaved,
    uses,
    whole,
)

from shrinkpoint.store.run import RunStore


@pytest.mark.slow
@pytest.mark.long
def test_the_trajectory_is_that_of_composers_own_sharded_checkpoints(tmp_path: Path) -> None:
    """2 -> 3 -> 2 ranks, killed in the middle of an epoch: each loss, and at the end all weights and moments, bit by bit."""
    for world, steps in ((2, 3), (3, 6), (2, 9)):
        own = launch(native, world, tmp_path, str(tmp_path / "native"), steps)
        ours = launch(hop, world, tmp_path, str(tmp_path), steps, steps == 9, killed=steps < 9)
        for rank, (losses, state) in enumerate(own):
            assert [step for step, *_ in losses] == [steps - 3, steps - 2, steps - 1]
            if steps < 9:
                assert torch.load(tmp_path / f"trace-{steps}-{rank}.pt") == losses
            else:
                assert ours[rank][0] == losses
                assert_same(ours[rank][1] | {"rng": None}, state | {"rng": None})
    manifests = RunStore(tmp_path / "run").manifests()
    assert [(manifest.step, manifest.kind) for manifest in manifests] == [
        (9, "delta"),
        (6, "delta"),
        (3, "base"),
    ]
    assert [ref.parts for ref in manifests[0].chain] == [2, 3, 2]


@pytest.mark.slow
@pytest.mark.long
def test_killed_ranks_continue_from_several_stores_of_which_one_is_lost(tmp_path: Path) -> None:
    urls = [str(tmp_path / name) for name in "abc"]
    undisturbed = launch(whole, 2, tmp_path)
    launch(killed, 2, tmp_path, urls, 7, killed=True)
    shutil.rmtree(urls[1])
    for before, (after, last) in zip(undisturbed, launch(rest, 2, tmp_path, urls), strict=True):
        assert after.trace[0][2] in (3, 6)
        assert_continues(before, after)
        assert last == f"{','.join(urls)}#step=16"


@pytest.mark.slow
def test_killed_ranks_that_adopt_continue_bit_by_bit(tmp_path: Path) -> None:
    """With lossy checkpoints, which the training itself goes on from; without adoption it would differ."""
    for adopt in (True, False):
        url = str(tmp_path / f"run-{adopt}")
        undisturbed = launch(adopting, 2, tmp_path, f"{url}-whole", 0, adopt)
        launch(adopting, 2, tmp_path, url, 7, adopt, killed=True)
        for before, after in zip(undisturbed, launch(adopting, 2, tmp_path, url, None, adopt), strict=True):
            assert after.trace[0][2] in (3, 6)
            if adopt:
                assert_continues(before, after)
            else:
                with pytest.raises(AssertionError):
                    assert_same(before.final["model"], after.final["model"])
    last, *manifests = RunStore(tmp_path / "run-True").manifests()  # newest first
    assert last.step == 16  # between two saves
    assert all(manifest.meta["adoption"]["planned"] for manifest in manifests)
    assert not any(manifest.meta["save"]["measured"] == "exact" for manifest in manifests)


@pytest.mark.slow
def test_measurements_and_trial_steps_leave_no_trace(tmp_path: Path) -> None:
    lossy = launch(measured, 2, tmp_path, str(tmp_path / "auto"), "auto")
    exact = launch(measured, 2, tmp_path, str(tmp_path / "lossless"), "lossless")
    for (found, reports), (wanted, others) in zip(lossy, exact, strict=True):
        assert_same(found.trace, wanted.trace)
        assert_same(found.final, wanted.final)
        assert {steps == ["2", "3"] for how, steps in reports if how == "measured"} == {True}
        assert {how for how, _ in others} == {"exact"}


@pytest.mark.slow
@pytest.mark.long
def test_a_last_save_that_fails_names_the_newest_checkpoint(tmp_path: Path) -> None:
    url = str(tmp_path / "run")
    first, second = launch(unsaved, 2, tmp_path, url)
    for how, _ in (first, second):
        assert how.startswith(f"SaveFailedError: the last save to {url} failed")
        assert how.endswith(f"the newest checkpoint is {url}#step=3")


@pytest.mark.slow
@pytest.mark.long
def test_without_their_own_positions_the_ranks_go_on_otherwise(tmp_path: Path) -> None:
    """The negative control of the test before."""
    url = str(tmp_path / "run")
    launch(killed, 2, tmp_path, url, 7, killed=True)
    undisturbed, (first, second) = launch(whole, 2, tmp_path), launch(rest, 2, tmp_path, url, "none", True)
    for before, (after, _) in zip(undisturbed, (first, second), strict=True):
        with pytest.raises(AssertionError):
            assert_continues(before, after)


@pytest.mark.slow
def test_averages_continue_bit_by_bit_after_a_ctrl_c(tmp_path: Path) -> None:
    """Which all ranks get; the averages are shards too."""
    url = str(tmp_path / "run")
    undisturbed = launch(whole, 2, tmp_path, "EMA")
    told = launch(signalled, 2, tmp_path, url, [0, 1], int(signal.SIGINT), 6, "EMA")
    assert told == [(f"exit {128 + signal.SIGINT}", f"{url}#step=6")] * 2
    for before, (after, _) in zip(undisturbed, launch(rest, 2, tmp_path, url, "EMA"), strict=True):
        assert after.trace[0][2] == 6
        assert_continues(before, after)


@pytest.mark.slow
def test_fits_and_refusals(tmp_path: Path) -> None:
    """A second fit goes on with the chain; what cannot work is refused by name."""
    for rank, seen in enumerate(launch(uses, 2, tmp_path, str(tmp_path / "run"))):
        saves = [(3, "base", "exact"), *((step, "delta", "exact") for step in (4, 6, 7))]
        assert seen["reports"] == saves
        assert seen["never"] == [(2, "base", "exact")]
        assert seen["step_log"].startswith("ConfigError: step_log= is not supported for sharded models")
        assert "net.0.weight is (20, 8) here and (16, 8) there" in seen["model"]
        assert len(seen["beside"]) == (1 if rank == 0 else 0)
        assert "contains a run with Adam, and this one has SGD" in seen["optimizer"]


@pytest.mark.slow
def test_one_run_with_ddp_with_full_states_and_on_a_single_device(tmp_path: Path) -> None:
    url, true, steps = str(tmp_path / "run"), str(tmp_path / "true.pt"), 0
    for world, kind in (
        (2, "sharded"),
        (2, "none"),
        (3, "sharded"),
        (1, "none"),
        (2, "full"),
        (2, "sharded"),
    ):
        steps += 2
        told = launch(journey, world, tmp_path, url, true, kind, steps, "lossless")
        assert [differ for differ, *_ in told] == [""] * world
        saved = "delta" if steps > 2 else "base"
        assert told[0][1] == [(steps, saved, "exact")]
        known = not any("random numbers and the order of samples will differ" in text for text in told[0][2])
        assert known == (steps in (2, 12))  # full states have all ranks' positions
    assert [ref.parts for ref in RunStore(url).manifests()[0].chain] == [2, 2, 3, 0, 0, 2]


@pytest.mark.slow
@pytest.mark.long
def test_auto_is_measured_on_other_numbers_of_ranks_too(tmp_path: Path) -> None:
    url = str(tmp_path / "run")
    for world, steps in ((2, 3), (3, 6)):
        told = launch(journey, world, tmp_path, url, str(tmp_path / f"{steps}.pt"), "sharded", steps, "auto")
        for _, saves, said in told:
            assert saves == [(steps, "base" if steps == 3 else "delta", "measured")]
            assert not any("measured" in text for text in said)
