"""A Composer run that logs its steps continues, bit by bit, from a later batch than its last checkpoint's."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from support.options import grouped

pytest.importorskip("composer")

import torch
from composer import Callback
from support.composer_models import ALGORITHMS, Crash, Outcome, Setup, assert_continues, fit
from support.reports import saver_of

import shrinkpoint
from shrinkpoint.callbacks.composer import CompressedCheckpoint
from shrinkpoint.errors import ShrinkpointWarning
from shrinkpoint.steps.options import StepLog

CASES = {
    "plain": Setup(),
    "decoupled": Setup(optimizer="DecoupledAdamW", scheduler="cosine"),
    "clipping": Setup(algorithms="LabelSmoothing, GradientClipping"),
    "microbatches": Setup(microbatch=3),
    "schedule by epochs": Setup(scheduler="every epoch", optimizer="SGD"),
}


@cache
def whole(name: str) -> Outcome:
    torch.set_num_threads(1)
    return fit(setup=CASES[name])


def saving(folder: Path, **options: Any) -> CompressedCheckpoint:
    return CompressedCheckpoint(
        f"{folder}/run",
        **grouped(
            **{
                "save_interval": "10ba",
                "scheme": "lossless",
                "busy": "wait",
                "step_log": StepLog(segment_steps=2, overhead=None),
                "log_url": f"{folder}/log",
                **options,
            }
        ),
    )


@pytest.mark.parametrize("name", CASES)
def test_continues_bit_by_bit_from_the_log(name: str, tmp_path: Path) -> None:
    fit(saving(tmp_path), Crash(25), setup=CASES[name])
    rest = fit(saving(tmp_path), setup=CASES[name], seed=999)
    assert 20 < rest.trace[0][2] <= 25
    assert_continues(whole(name), rest)


def test_an_average_ends_the_log_and_not_the_training(tmp_path: Path) -> None:
    assert "EMA" in ALGORITHMS
    setup = Setup(algorithms="EMA", width=30000, duration="2ep")
    with pytest.warns(ShrinkpointWarning, match="the step log is off"):
        assert fit(saving(tmp_path), setup=setup).finished


def test_a_small_log(tmp_path: Path) -> None:
    log = StepLog(kind="small", segment_steps=1, overhead=None)
    callback = saving(tmp_path, step_log=log, log_url=None)

    class Unhurried(Callback):  # type: ignore[misc]
        """What is logged does not depend on the machine's speed."""

        def batch_start(self, state: Any, logger: Any) -> None:
            saver_of(callback).flush()

    fit(callback, Unhurried(), setup=Setup(width=400))
    found = shrinkpoint.load_weights(f"{tmp_path}/run#step=31")
    base = shrinkpoint.load_weights(f"{tmp_path}/run#step=30")
    assert found.keys() == base.keys()
    assert not torch.equal(found["net.0.weight"], base["net.0.weight"])
