"""A step log of a run on S3: where it may be, and what is refused there."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.s3 import S3Server, moto_server, new_bucket, storage_options
from support.small_log import SmallLogTraining
from support.stepped import Training

import shrinkpoint
from shrinkpoint.errors import ConfigError
from shrinkpoint.steps.options import StepLog
from shrinkpoint.store.connect import open_objects


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with moto_server() as running:
        yield running


@pytest.fixture
def run(server: S3Server) -> dict[str, Any]:
    return {"url": f"s3://{new_bucket(server)}/run", "storage_options": storage_options(server)}


def objects(run: dict[str, Any], prefix: str) -> list[str]:
    return [info.key for info in open_objects(run["url"], run["storage_options"]).list(prefix)]


def test_an_exact_log_without_a_folder_is_refused_with_its_bytes_per_hour(run: dict[str, Any]) -> None:
    training = Training()
    size = sum(p.nbytes for p in training.model.parameters())
    with pytest.raises(ConfigError, match=r"GB per hour.*StepLog\(url=.*/dev/shm/steps") as refused:
        training.log(run["url"], None, step_log="exact", storage_options=run["storage_options"])
    assert f"{size / 1e6:.3g} MB; at one step per second, that is {3600 * size / 1e9:.3g} GB per hour" in str(
        refused.value
    )
    assert objects(run, "") == []  # nothing was written before


@pytest.mark.parametrize("below", ["", "/log"])
def test_a_log_within_the_run(run: dict[str, Any], below: str) -> None:
    with pytest.raises(ConfigError, match="is within the run s3://"):
        Training().log(run["url"], run["url"] + below, storage_options=run["storage_options"])


@pytest.mark.slow
def test_an_exact_log_beside_the_run(run: dict[str, Any], server: S3Server) -> None:
    options = {"storage_options": run["storage_options"]}
    log = StepLog(segment_steps=1, overhead=None, **options)
    url = f"s3://{new_bucket(server)}/log"
    training = Training().log(run["url"], url, step_log=log, **options)
    training.checkpointer.resume()
    training.run(0, 8)
    training.crash()
    again = Training().log(run["url"], url, step_log=log, **options)
    assert again.checkpointer.resume() == 8
    assert again.digest == training.digest
    again.crash()


@pytest.mark.slow
def test_a_small_log_in_the_run(run: dict[str, Any]) -> None:
    training = SmallLogTraining(**run).run(0, 15)
    training.leave()
    assert training.log.off is None
    assert len(objects(run, "steps/")) > 2
    found = shrinkpoint.load_weights(f"{run['url']}#step=15", storage_options=run["storage_options"])
    assert torch.equal(found["1.running_mean"], training.truth[15]["1.running_mean"])
