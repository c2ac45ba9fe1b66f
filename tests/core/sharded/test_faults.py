"""Ranks that die, fail, are late, or were given other things: never a mixed or lost checkpoint, and never a hang."""

import shutil
import warnings
from pathlib import Path

import pytest
from support.matrices import some_fast
from support.sharded import launch
from support.sharded_kills import EVERYWHERE, acknowledged, check
from support.sharded_programs import failures, in_three_stores, newest_of_damaged, refusals, saves

import shrinkpoint
from shrinkpoint.store.run import RunStore


def test_a_store_that_fails_for_one_rank_is_told_of_all(tmp_path: Path) -> None:
    """Each rank has its own opinion of several stores; the report has the worst, and the checkpoint outlives one loss."""
    urls = [str(tmp_path / name) for name in "abc"]
    told = launch(in_three_stores, 2, tmp_path, urls)
    assert told == [[(1, 1), (2, 0), (3, 0)]] * 2
    shutil.rmtree(urls[2])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state = shrinkpoint.load(urls)
    assert state["step"] == 3
    assert {number for tensor in state["model"].values() for number in tensor.flatten().tolist()} == {3.0}


def kill_and_resume(tmp_path: Path, rank: int, point: str, world: int = 2) -> None:
    url, log = str(tmp_path / "run"), tmp_path / "acknowledged"
    launch(saves, world, tmp_path, url, str(log), (rank, point, 3), 4, killed=True)
    stored = check(url, log)
    # a part that is stored and reported counts, though its rank is gone
    either = rank > 0 and point == "after-post"
    assert stored in ((2, 3) if either else (3,) if point in ("after-manifest", "after-commit") else (2,))
    assert acknowledged(log) == 2
    told = launch(saves, 3 - world + 1, tmp_path, url, str(log), None, 2)
    assert told[0] == [stored + 1, stored + 2]
    assert check(url, log) == stored + 2


@pytest.mark.parametrize(("rank", "point"), some_fast(EVERYWHERE, [(0, "before-manifest")]))
def test_a_rank_that_is_killed_loses_no_acknowledged_save(tmp_path: Path, rank: int, point: str) -> None:
    kill_and_resume(tmp_path, rank, point)


def test_a_rank_that_fails_or_is_late_costs_one_save(tmp_path: Path) -> None:
    told = launch(failures, 3, tmp_path, str(tmp_path / "run"))
    kinds = [(1, "base"), (3, "base"), (5, "base"), (6, "delta"), (7, "delta")]
    assert [reports for reports, _ in told] == [kinds] * 3
    shown = "\n".join(told[0][1])
    assert "saving step 2 to" in shown
    assert "rank 2: StoreError: disk full" in shown
    assert "rank 1: it has sent nothing within 1 s" in shown
    assert shrinkpoint.load(tmp_path / "run")["step"] == 7


def test_what_cannot_work_is_refused_on_every_rank(tmp_path: Path) -> None:
    first, second = launch(refusals, 2, tmp_path, str(tmp_path / "run"))
    for told in (first, second):
        assert told["url"].startswith("ConfigError: rank 0 was given url=")
        assert told["scheme"].startswith("ConfigError: rank 0 was given key_every=3, and rank 1 key_every=4")
        assert told["step_log"].startswith(
            "ConfigError: step_log= needs one process, or a DistributedDataParallel"
        )
        assert told["step"].startswith("ConfigError: the ranks are at different steps, 2 to 3")
        assert told["object"].startswith("CannotRepresentError")
        assert "stateful/odd/value is a builtins.function" in told["object"]
        assert told["fenced"].startswith("FencedError")
        assert told["model"].startswith("StateMismatchError")
        assert "head.weight is (5, 16) here and (7, 16) there" in told["model"]
        assert "missing in the checkpoint: further" in told["a further buffer"]
        assert told["step that is not there"].startswith("NoCheckpointError")
    assert first["rights"] == "StoreError: on rank 1: read-only"
    assert second["rights"] == "StoreError: read-only"


def test_a_damaged_part_sends_all_ranks_to_the_same_older_checkpoint(tmp_path: Path) -> None:
    url = str(tmp_path / "run")
    launch(saves, 2, tmp_path, url, str(tmp_path / "log"), None, 3)
    store = RunStore(url)
    newest = store.manifests()[0]
    part = tmp_path / "run" / store.head(newest.chain[-1]).parts[1].ref.key
    data = bytearray(part.read_bytes())
    data[-1] ^= 1
    part.write_bytes(bytes(data))
    assert launch(newest_of_damaged, 3, tmp_path, url) == [(2, {2.0})] * 3
    with pytest.warns(match="passed over"):
        assert shrinkpoint.load(url)["step"] == 2
