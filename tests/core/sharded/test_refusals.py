"""What is not supported is refused by name, on every rank; parts that do not belong together, and two jobs on one run."""

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from support.sharded import launch
from support.sharded_programs import saves
from support.sharded_refusals import first_job, newest_of, second_job, unrepresentable

import shrinkpoint
from shrinkpoint.errors import ConfigError
from shrinkpoint.store.run import RunStore


def test_deepspeed_and_fsdp1_are_refused_by_name(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    engine = type("DeepSpeedEngine", (torch.nn.Module,), {"__module__": "deepspeed.runtime.engine"})()
    zero = type("DeepSpeedZeroOptimizer", (), {"__module__": "deepspeed.runtime.zero.stage_1_and_2"})()
    for given in ((engine, optimizer), (model, zero)):
        with pytest.raises(ConfigError, match="DeepSpeed's, whose state no state_dict shows in whole"):
            shrinkpoint.Checkpointer(tmp_path / "run", *given)
    flat = type("FullyShardedDataParallel", (torch.nn.Module,), {})()
    with pytest.raises(ConfigError, match=r"FullyShardedDataParallel \(FSDP1\), whose flat parameters"):
        shrinkpoint.Checkpointer(tmp_path / "run", flat, optimizer)
    model.weight.ds_id = 0  # as in ZeRO's third stage, whose engine has wrapped it
    with pytest.raises(ConfigError, match="DeepSpeed"):
        shrinkpoint.Checkpointer(tmp_path / "run", model, optimizer)
    assert not (tmp_path / "run").exists()


def test_what_one_rank_cannot_represent_is_refused_on_all(tmp_path: Path) -> None:
    url = str(tmp_path / "run")
    for seen in launch(unrepresentable, 2, tmp_path, url):
        assert seen["first step"].startswith("CannotRepresentError")
        assert "odd" in seen["first step"]
        assert (
            "the ranks' shards of model/scale do not make up a tensor of shape (3,): some overlap"
            in seen["mesh"]
        )
        assert seen["mesh"].startswith("CannotRepresentError")
        assert seen["subclass"].startswith("CannotRepresentError")
        assert "of which it is not known which box of a tensor each rank holds" in seen["subclass"]
        assert seen["metrics"].startswith("ConfigError")
        assert "metrics['loss']=a Tensor must be one number" in seen["metrics"]
        assert seen["afterwards"] == [(1, "base"), (4, "delta")]
    assert shrinkpoint.load(url)["step"] == 4


def test_a_part_of_another_run_or_another_save_is_noticed_by_all_ranks(tmp_path: Path) -> None:
    urls = [str(tmp_path / name) for name in ("run", "save")]
    launch(saves, 2, tmp_path, urls[0], str(tmp_path / "log"), None, 3)
    launch(saves, 2, tmp_path, str(tmp_path / "stranger"), str(tmp_path / "log of another"), None, 3)
    shutil.copytree(urls[0], urls[1])

    def part(url: str, step: int) -> Path:
        store = RunStore(url)
        manifest = next(one for one in store.manifests() if one.step == step)
        return Path(url) / store.head(manifest.chain[-1]).parts[1].ref.key

    shutil.copy(part(str(tmp_path / "stranger"), 3), part(urls[0], 3))
    shutil.copy(part(urls[1], 2), part(urls[1], 3))
    for found in launch(newest_of, 2, tmp_path, urls):
        assert found == [(2, {2.0})] * 2


def test_the_second_of_two_jobs_on_one_run_ends_the_first_on_all_its_ranks(tmp_path: Path) -> None:
    url, flags = str(tmp_path / "run"), str(tmp_path / "flag")
    (tmp_path / "first").mkdir()
    (tmp_path / "second").mkdir()
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(launch, first_job, 2, tmp_path / "first", url, flags)
        second = pool.submit(launch, second_job, 2, tmp_path / "second", url, flags)
        assert second.result() == [(1, [(2, "delta"), (3, "delta")])] * 2
        for steps, error in first.result():
            assert steps == [1]
            assert error.startswith("FencedError")
    assert [manifest.step for manifest in RunStore(url).manifests()] == [3, 2, 1]
