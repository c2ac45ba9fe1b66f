"""Lightning's ModelParallelStrategy on several processes, ended and continued, on as many and on other numbers of ranks."""

import shutil
import signal
from pathlib import Path

import pytest
import torch
from support.lightning_models import assert_same
from support.sharded import launch
from support.sharded_lightning import (
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
def test_the_trajectory_is_that_of_lightnings_own_sharded_checkpoints(tmp_path: Path) -> None:
    """2 -> 3 -> 2 ranks, killed in the middle of an epoch: each loss, and at the end all weights and moments, bit by bit."""
    for world, steps in ((2, 3), (3, 6), (2, 9)):
        own = launch(native, world, tmp_path, str(tmp_path / "native"), steps)
        ours = launch(hop, world, tmp_path, str(tmp_path), steps, steps == 9, killed=steps < 9)
        for rank, (losses, state) in enumerate(own):
            assert [step for step, _ in losses] == [steps - 3, steps - 2, steps - 1]
            if steps < 9:
                assert torch.load(tmp_path / f"trace-{steps}-{rank}.pt") == losses
            else:
                assert ours[rank][0] == losses
                assert_same(ours[rank][1], state)
    manifests = RunStore(tmp_path / "run").manifests()
    assert [(manifest.step, manifest.kind) for manifest in manifests] == [
        (9, "delta"),
        (6, "delta"),
        (3, "base"),
    ]
    assert [ref.parts for ref in manifests[0].chain] == [2, 3, 2]
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["native", "run"]


@pytest.mark.slow
@pytest.mark.long
def test_killed_ranks_continue_from_several_stores_of_which_one_is_lost(tmp_path: Path) -> None:
    urls = [str(tmp_path / name) for name in "abc"]
    undisturbed = launch(whole, 2, tmp_path)
    launch(killed, 2, tmp_path, urls, 7, killed=True)
    shutil.rmtree(urls[1])
    continued = launch(rest, 2, tmp_path, urls)
    for before, (trace, state, counts, last) in zip(undisturbed, continued, strict=True):
        assert trace[0][2] in (3, 6)
        assert_same(trace, before[0][trace[0][2] :])
        assert_same((state, counts), before[1:])
        assert last == f"{','.join(urls)}#step=24"


def test_killed_ranks_that_adopt_continue_bit_by_bit(tmp_path: Path) -> None:
    """With lossy checkpoints, which the training itself goes on from; without adoption it would differ."""
    url = str(tmp_path / "run")
    undisturbed = launch(adopting, 2, tmp_path, f"{url}-whole", 0)
    launch(adopting, 2, tmp_path, url, 8, killed=True)
    continued = launch(adopting, 2, tmp_path, url)
    for before, (trace, state, counts, reports) in zip(undisturbed, continued, strict=True):
        step = trace[0][2]
        assert step in (3, 6)
        assert_same(trace, before[0][step:])
        assert_same((state, counts), before[1:3])
        assert [at for at, _ in reports] == [*range(step + 3, 20, 3), 20]
    manifests = RunStore(url).manifests()
    assert {m.step for m in manifests if not m.meta["adoption"]["planned"]} == {20}, (
        "the last steps are saved exactly"
    )
    assert {m.step for m in manifests if m.meta["save"]["measured"] == "exact"} == {20}


@pytest.mark.slow
def test_measurements_leave_no_trace(tmp_path: Path) -> None:
    """On validation batches, which draw no random numbers; shuffling, dropout and all generators go on as without."""
    lossy = launch(measured, 2, tmp_path, str(tmp_path / "auto"), "auto")
    exact = launch(measured, 2, tmp_path, str(tmp_path / "lossless"), "lossless")
    for found, wanted in zip(lossy, exact, strict=True):
        assert_same(found[:3], wanted[:3])
        assert found[3] == [(step, "measured", True, ["2", "3"]) for step in (3, 6, 9)]
        assert wanted[3] == [(step, "exact", False, []) for step in (3, 6, 9)]


@pytest.mark.slow
@pytest.mark.long
def test_without_adoption_they_differ(tmp_path: Path) -> None:
    url = str(tmp_path / "run")
    undisturbed = launch(adopting, 2, tmp_path, f"{url}-whole", 0, False)
    launch(adopting, 2, tmp_path, url, 8, False, killed=True)
    continued = launch(adopting, 2, tmp_path, url, None, False)
    with pytest.raises(AssertionError):
        assert_same(continued[0][1], undisturbed[0][1])


@pytest.mark.slow
def test_a_last_save_that_fails_names_the_newest_checkpoint(tmp_path: Path) -> None:
    url = str(tmp_path / "run")
    first, second = launch(unsaved, 2, tmp_path, url)
    assert (first[0], second[0]) == ("SIGTERMException: ",) * 2
    text = f"training ends at step 4, which could not be saved: the newest checkpoint is {url}#step=3"
    assert text in first[1]


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_ctrl_c_to_all_ranks_is_continued_bit_by_bit(tmp_path: Path, accumulate: int) -> None:
    """After any batch: the gradients that are accumulated are there again."""
    url, batches = str(tmp_path / "run"), 4 if accumulate == 1 else 5
    step = batches // accumulate
    told = launch(signalled, 2, tmp_path, url, [0, 1], int(signal.SIGINT), step, accumulate, batches - 1)
    assert told == [("SystemExit", batches)] * 2  # by which Lightning answers a KeyboardInterrupt
    assert [manifest.step for manifest in RunStore(url).manifests()] == [step]
    undisturbed = launch(whole, 2, tmp_path, accumulate)
    continued = launch(rest, 2, tmp_path, url, accumulate)
    for before, (trace, state, counts, _) in zip(undisturbed, continued, strict=True):
        assert_same(trace, before[0][batches:])
        assert_same((state, counts), before[1:])


def test_fits_evaluations_and_refusals(tmp_path: Path) -> None:
    """A second fit goes on with the chain; a checkpoint of another run is read; what cannot work is refused by name."""
    first, second = launch(uses, 2, tmp_path, str(tmp_path / "run"))
    for told in (first, second):
        assert told["reports"] == [(3, "base"), (4, "delta"), (6, "delta")]
        joined = [[(7, "delta")], [(7, "base")], [(8, "delta"), (9, "delta")], [(9, "base")]]
        assert told["two"] == joined
        assert told["never"] == [(2, "base")]
        assert told["of another model"].startswith("StateMismatchError")
        assert told["step_log"].startswith("ConfigError: step_log= is not supported for sharded models")
        assert told["model"].startswith("StateMismatchError")
        assert "net.head.weight is (5, 16) here and (7, 16) there" in told["model"]
        assert "a run with torch.optim.AdamW, and this one has torch.optim.RAdam" in told["optimizer"]


@pytest.mark.slow
def test_one_run_on_other_meshes_with_ddp_and_on_a_single_device(tmp_path: Path) -> None:
    url, true, steps = str(tmp_path / "run"), str(tmp_path / "true.pt"), 0
    for world, tensor in ((2, 1), (4, 2), (2, None), (3, 1), (1, None)):
        steps += 2
        told = launch(journey, world, tmp_path, url, true, tensor, steps, "lossless")
        kind = "delta" if steps > 2 else "base"
        assert [differ for differ, _ in told] == [[]] * world
        assert told[0][1] == [(steps, kind, "exact")]
    assert [ref.parts for ref in RunStore(url).manifests()[0].chain] == [2, 4, 2, 3, 0]


@pytest.mark.slow
@pytest.mark.long
def test_auto_is_measured_on_other_numbers_of_ranks_too(tmp_path: Path) -> None:
    url = str(tmp_path / "run")
    for world, steps in ((2, 3), (3, 6)):
        told = launch(journey, world, tmp_path, url, str(tmp_path / f"{steps}.pt"), 1, steps, "auto")
        assert told == [([], [(steps, "base" if steps == 3 else "delta", "measured")])] * world
