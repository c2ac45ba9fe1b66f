"""Training with the callback is training without it, bit by bit, however much is measured and searched meanwhile."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from support.options import grouped

pytest.importorskip("composer")

from composer.core import Callback, State
from composer.loggers import Logger
from support.composer_models import Outcome, Setup, assert_same, fit
from support.matrices import by_values
from support.reports import saver_of

from shrinkpoint.callbacks.composer import CompressedCheckpoint
from shrinkpoint.reports import SaveReport

WIDE = 256  # smaller matrices are kept exactly, and there is nothing to search

SETUPS = {
    "shuffle": Setup(eval_interval="1ba"),
    "EMA": Setup(algorithms="EMA", eval_interval="1ba"),
    "SWA, StepLR": Setup(algorithms="SWA", scheduler="every epoch"),
    "LabelSmoothing, GradientClipping": Setup(algorithms="LabelSmoothing, GradientClipping"),
    "MixUp": Setup(algorithms="MixUp", eval_interval="1ba"),
    "GhostBatchNorm": Setup(algorithms="GhostBatchNorm"),
    "augmentation, SGD, microbatches": Setup(
        data="shuffle, augmentation", optimizer="SGD", microbatch=3, eval_interval="1ba"
    ),
    "never evaluates": Setup(data="shuffle, augmentation", eval_interval=None),
    "never evaluates, EMA, microbatches": Setup(algorithms="EMA", microbatch=4, eval_interval=None),
    "metric in the loss": Setup(metered=True, eval_interval="1ba"),
    "sampler with a generator": Setup(data="sampler with a generator"),
    "sampler of the global generator": Setup(data="sampler of the global generator, one by one"),
    "2 workers, augmentation": Setup(data="2 workers, augmentation", duration="3ep"),
    "2 persistent workers, augmentation": Setup(data="2 persistent workers, augmentation", duration="3ep"),
    "StreamingDataset, augmentation": Setup(data="StreamingDataset, augmentation"),
    "IterableDataset": Setup(data="IterableDataset", duration="29ba"),
    "IterableDataset with state": Setup(data="IterableDataset with state", duration="29ba"),
    "StatefulDataLoader": Setup(data="StatefulDataLoader"),
    "two calls of fit()": Setup(fits=("11ba", "30ba"), data="shuffle, augmentation"),
}


FAST = (
    "EMA",
    "LabelSmoothing, GradientClipping",
    "augmentation, SGD, microbatches",
    "never evaluates",
    "sampler of the global generator",
    "StreamingDataset, augmentation",
    "IterableDataset",
    "two calls of fit()",
)
"""Those that the fast suite tries."""


@cache
def alone(name: str) -> Outcome:
    torch.set_num_threads(1)
    return fit(setup=replace(SETUPS[name], width=WIDE))


class Reports(Callback):  # type: ignore[misc]
    """Keeps what has been told about the saves of the last call of fit()."""

    def __init__(self, saving: CompressedCheckpoint) -> None:
        self._saving = saving
        self.told: list[SaveReport] = []

    def fit_end(self, state: State, logger: Logger) -> None:
        self.told = saver_of(self._saving).reports()


def with_callback(name: str, **options: Any) -> tuple[Outcome, list[SaveReport]]:
    url = f"memory://neutral/{list(SETUPS).index(name)}/{len(str(options))}"
    saving = CompressedCheckpoint(url, **grouped(**options))
    reports = Reports(saving)
    outcome = fit(saving, reports, setup=replace(SETUPS[name], width=WIDE))
    return outcome, reports.told


def assert_equal(one: Outcome, other: Outcome) -> None:
    assert one.finished
    assert other.finished
    assert one.trace == other.trace
    assert one.evaluations == other.evaluations
    assert one.reads == other.reads
    assert_same(one.final, other.final)


@pytest.mark.parametrize("name", by_values(SETUPS, FAST))
def test_measuring_and_searching_is_invisible(name: str) -> None:
    outcome, reports = with_callback(
        name, save_interval="2ba", scheme="inshrinkerator", busy="wait", max_degradation=0.05, key_every=3
    )
    assert len(reports) > 10
    assert sum(report.evaluations for report in reports) > 10
    assert any(report.kind == "delta" for report in reports)
    assert_equal(alone(name), outcome)


@pytest.mark.parametrize("name", ["EMA", "never evaluates", "2 workers, augmentation"])
def test_saving_all_the_time_is_invisible(name: str) -> None:
    outcome, reports = with_callback(name, save_interval="1ba", scheme="lossless", busy="skip")
    assert reports
    assert_equal(alone(name), outcome)
