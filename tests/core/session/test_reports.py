"""Which checkpoint is the best, and what loggers are told of each."""

import logging
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.reports import REPORT

from shrinkpoint.engine.retention import Record, keep_best, metrics_of
from shrinkpoint.saver import Saver
from shrinkpoint.session.reports import (
    BestCheckpoints,
    configuration,
    finite,
    log_line,
    numbers,
)


def tracker(monitor: str | None = "loss", mode: str = "min", top_k: int = 1) -> BestCheckpoints:
    return BestCheckpoints(url="memory://run", monitor=monitor, mode=mode, top_k=top_k)  # type: ignore[arg-type]


def after(best: BestCheckpoints, losses: list[float]) -> BestCheckpoints:
    for step, loss in enumerate(losses, 1):
        best.add(step, {"loss": loss})
    return best


@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.parametrize("top_k", [1, 2, 3, -1])
@given(losses=st.lists(st.integers(0, 2), min_size=1, max_size=12))
def test_the_best_is_what_retention_keeps(mode: str, top_k: int, losses: list[int]) -> None:
    best = after(tracker(mode=mode, top_k=top_k), [float(loss) for loss in losses])
    records = [Record(seq=step, step=step, metric=float(loss)) for step, loss in enumerate(losses, 1)]
    count = top_k if top_k > 0 else len(losses)
    kept = keep_best(records, count, mode)  # type: ignore[arg-type]
    assert best.scores.keys() == {f"memory://run#step={step}" for step in kept}
    [newest] = keep_best(records, 1, mode)  # type: ignore[arg-type]
    assert best.best_path == f"memory://run#step={newest}"


def test_a_step_that_was_saved_again_counts_by_its_newest() -> None:
    best = after(tracker(), [1.0, 2.0])
    best.add(1, {"loss": 3.0})
    assert (best.best_path, best.best_score) == ("memory://run#step=1", 3.0)  # of step 2, nothing was kept
    best.add(2, {"loss": 3.0})
    assert best.best_path == "memory://run#step=1"  # of equals, the older


def test_where_none_of_the_best_is_kept_there_is_no_best() -> None:
    best = after(tracker(top_k=0), [1.0, 2.0])
    assert (best.best_path, best.last_path, best.current) == ("", "memory://run#step=2", 2.0)
    assert best.best_score is None


def test_without_a_monitor_the_last_is_the_best() -> None:
    best = after(tracker(monitor=None), [1.0, 2.0])
    assert best.best_path == best.last_path == "memory://run#step=2"
    assert best.best_score is None


def test_a_checkpoint_without_the_metric_is_not_ranked() -> None:
    best = after(tracker(), [1.0])
    best.add(2, {"accuracy": 0.5})
    assert (best.best_path, best.last_path) == ("memory://run#step=1", "memory://run#step=2")
    assert best.current is None


def test_a_metric_that_is_not_finite_is_not_ranked() -> None:
    best = after(tracker(mode="max"), [1.0, math.nan, math.inf])
    assert (best.best_path, best.best_score) == ("memory://run#step=1", 1.0)
    assert best.last_path == "memory://run#step=3"


def test_a_checkpoint_that_is_not_finite_is_not_the_best() -> None:
    best = BestCheckpoints(url="run", monitor="loss", mode="min", top_k=1)
    best.add(1, {"loss": 3.0})
    best.add(2, {"loss": 3.0}, finite=False)  # the loss of the last validation, before it diverged
    assert (best.best_path, best.last_path) == ("run#step=1", "run#step=2")


def test_numbers_of_a_save() -> None:
    values = numbers(REPORT)
    assert all(name.startswith("checkpoint/") for name in values)
    assert (values["checkpoint/ratio"], values["checkpoint/bytes"]) == (20.0, 100.0)
    assert "checkpoint/degradation" in values
    assert "checkpoint/degradation" not in numbers(replace(REPORT, degradation=None))
    assert "checkpoint/degradation_high" not in values
    more = numbers(replace(REPORT, degradation_high=0.007, update_error=0.2, overhead=0.004))
    assert more["checkpoint/degradation_high"] == 0.007
    assert more["checkpoint/update_error"] == 0.2
    assert more["checkpoint/overhead"] == 0.004
    assert "checkpoint/update_length" not in more


def test_what_is_not_finite_is_null_in_a_manifest() -> None:
    told = replace(REPORT, degradation_high=math.inf, resumed_high={"20": math.inf}).to_json()
    assert told["degradation_high"] is None
    assert told["resumed_high"] == {"20": None}
    assert told["measured"] == "measured"
    assert configuration(REPORT) == ("checkpoint/configuration", "8 levels (inshrinkerator)")


def test_one_line_a_save(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        log_line(REPORT)
    assert caplog.messages == [
        "step 40 saved as delta: 100 bytes, 20.0x smaller, 8 levels (the search chose it)"
    ]


def test_finite() -> None:
    assert finite({"a": 1.0, "b": math.nan, "c": math.inf, "d": -math.inf}) == {"a": 1.0}


def test_metrics_come_back_from_a_manifest() -> None:
    saver = Saver("memory://reports/metrics")
    saver.save({"x": 1}, step=1, metrics={"loss": 0.5}, wait=True)
    (manifest,) = saver.store.manifests()
    assert metrics_of(manifest) == {"loss": 0.5}
    assert metrics_of(replace(manifest, meta={})) == {}


@pytest.mark.parametrize(("redundancy", "says"), [(1, True), (0, True), (None, False)])
def test_loggers_are_told_how_many_stores_may_be_lost(
    redundancy: int | None, says: bool, caplog: pytest.LogCaptureFixture
) -> None:
    report = replace(REPORT, parity=1 if says else None, redundancy=redundancy)
    assert numbers(report).get("checkpoint/redundancy") == redundancy
    with caplog.at_level(logging.INFO):
        log_line(report)
    assert any(f"{redundancy}" in line and "store" in line for line in caplog.messages) is says
