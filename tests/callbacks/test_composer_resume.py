"""A run that was interrupted and continues by itself equals one that was not, bit by bit.

The continuing run has another seed; the uninterrupted one never sees our callback.
"""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from support.options import grouped

pytest.importorskip("composer")

from support.composer_cases import CASES, NEVER, UNREAD
from support.composer_data import BATCH, LENGTH
from support.composer_models import Crash, Outcome, Setup, assert_continues, fit
from support.matrices import by_values, some_fast

from shrinkpoint.callbacks.composer import CompressedCheckpoint

pytestmark = pytest.mark.filterwarnings("error::shrinkpoint.errors.ShrinkpointWarning")


def saving(url: str, interval: Any, **more: Any) -> CompressedCheckpoint:
    return CompressedCheckpoint(
        f"memory://composer-resume/{url}",
        **grouped(save_interval=interval, scheme="lossless", busy="wait", **more),
    )


@cache
def uninterrupted(setup: Setup) -> Outcome:
    torch.set_num_threads(1)
    return fit(setup=setup)


@pytest.mark.parametrize("name", by_values(CASES, list(CASES)[::3]))
def test_continues_bit_by_bit(name: str) -> None:
    case = CASES[name]
    whole = uninterrupted(case.setup)
    url = f"{list(CASES).index(name)}"
    for number, crash in enumerate(case.crashes):
        first = fit(saving(url, case.interval), crash, setup=case.setup, seed=1 + 100 * number)
        assert not first.finished
    rest = fit(saving(url, case.interval), setup=case.setup, seed=999)
    assert rest.trace[0][2] == case.resumes_at
    assert_continues(whole, rest)
    if case.setup.data in UNREAD and rest.trace[0][1] and not case.setup.fits:
        assert rest.reads == whole.reads - BATCH * (case.resumes_at - 1)


def test_data_that_are_drawn_when_they_are_first_read_are_the_same() -> None:
    setup = Setup(data="drawn when first read", duration="3ep")
    fit(saving("drawn", "3ba"), Crash(14), setup=setup)
    rest = fit(saving("drawn", "3ba"), setup=setup, seed=999)
    assert rest.trace[0][2] == 12
    assert_continues(uninterrupted(setup), rest)


def test_reads_the_batches_before_where_workers_draw_random_numbers() -> None:
    name = "2 workers, augmentation - later epoch"
    whole, case = uninterrupted(CASES[name].setup), CASES[name]
    fit(saving("reading", case.interval), *case.crashes, setup=case.setup)
    rest = fit(saving("reading", case.interval), setup=case.setup, seed=999)
    assert rest.reads >= whole.reads - 2 * LENGTH * BATCH  # the whole of the epoch that it continues
    assert_continues(whole, rest)


@pytest.mark.parametrize(("end", "data"), [("2ep", "shuffle"), ("11ba", "shuffle"), ("2ep", "2 workers")])
def test_a_longer_run_continues_a_finished_one(end: str, data: str) -> None:
    setup = Setup(data=data, duration="3ep")
    url = f"longer/{end}/{data}".replace(" ", "-")
    assert fit(saving(url, NEVER), setup=replace(setup, duration=end)).finished
    rest = fit(saving(url, NEVER), setup=setup, seed=999)
    assert rest.trace[0][2] == {"2ep": 16, "11ba": 11}[end]
    assert_continues(uninterrupted(setup), rest)


def test_a_crash_between_two_calls_of_fit() -> None:
    """The second fit() draws one batch of each past epoch, which a new process does from generators of its own."""
    setup = Setup(fits=("2ep", "4ep"))
    fit(saving("between", "1ep"), Crash(18), setup=setup)
    rest = fit(saving("between", "1ep"), setup=setup, seed=999)
    assert rest.trace[0][2] == 16
    once = uninterrupted(Setup(fits=("4ep",)))
    assert_continues(once, rest)  # as if there had been one call


LONGER = {
    "batches, mid epoch": ("10ba", "20ba", "7ba", Setup(eval_interval=None), 10),
    "batches, mid epoch, evaluation": ("10ba", "20ba", "7ba", Setup(), 10),
    "batches, saved by epochs": ("10ba", "20ba", "1ep", Setup(eval_interval=None), 10),
    "batches, end of an epoch": ("16ba", "24ba", "7ba", Setup(eval_interval=None), 16),
    "epochs": ("2ep", "4ep", "7ba", Setup(eval_interval=None), 16),
    "epochs, scheduler by epochs": (
        "2ep",
        "4ep",
        "7ba",
        Setup(eval_interval=None, scheduler="every epoch"),
        16,
    ),
    "epochs, saved by epochs": ("2ep", "4ep", "1ep", Setup(), 16),
}


@pytest.mark.parametrize(
    "name", some_fast(LONGER, ["batches, mid epoch, evaluation", "epochs, saved by epochs"])
)
@pytest.mark.filterwarnings("ignore:.*is complete:shrinkpoint.errors.ShrinkpointWarning")
def test_trains_longer_as_in_one_go(name: str) -> None:
    torch.set_num_threads(1)
    short, long, interval, setup, batches = LONGER[name]
    url = f"longer-{list(LONGER).index(name)}"
    whole = fit(setup=replace(setup, duration=long))
    first = fit(saving(url, interval), setup=replace(setup, duration=short))
    assert first.finished
    rest = fit(saving(url, interval), setup=replace(setup, duration=long), seed=999)
    assert rest.trace[0][2] == batches
    assert_continues(whole, rest)
