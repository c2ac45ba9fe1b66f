"""What the first rank makes of all ranks' reports."""

from typing import Any

import pytest

from shrinkpoint.engine.reporting import merged
from shrinkpoint.reports import SaveReport
from shrinkpoint.schemes.exactness import ExactPart


def part(**more: Any) -> SaveReport:
    fields = {
        "step": 1,
        "seq": -1,
        "kind": "base",
        "scheme": "auto",
        "configuration": "scale=1",
        "reason": "measured",
        "bytes": 10,
        "raw_bytes": 100,
        "sections": {"weight": 10},
        "raw_sections": {"weight": 100},
        "degradation": None,
        "measured": "unmeasured",
        "resumed": {},
        "baseline": None,
        "evaluations": 0,
        "blocked_s": 0.0,
        "search_s": 0.0,
        "encode_s": 0.1,
        "write_s": 0.1,
        "metrics": {},
        "kept_exactly": {},
    }
    return SaveReport(**{**fields, **more})


UPDATES = {"update_error": 0.1, "update_length": 1.02, "lost_steps": 0.4}


def test_bytes_are_added_and_times_are_the_longest() -> None:
    moments = ExactPart(role="exp_avg", code="moment", tensors=1, bytes=4, raw_bytes=8)
    first = part(exact=(moments,), not_finite="w", kept_exactly={"a": "why"})
    second = part(
        exact=(moments,), sections={"weight": 5, "exp_avg": 4}, encode_s=0.3, kept_exactly={"b": "why"}
    )
    report = merged([first, second], [None, None])
    assert (report.bytes, report.raw_bytes, report.encode_s) == (20, 200, 0.3)
    assert report.sections == {"weight": 15, "exp_avg": 4}
    assert report.exact == (ExactPart(role="exp_avg", code="moment", tensors=2, bytes=8, raw_bytes=16),)
    assert report.not_finite == "rank 0: w"
    assert report.kept_exactly == {"a": "why", "b": "why"}


def test_next_updates_are_those_of_the_rank_that_loses_most() -> None:
    second = part(update_error=0.3, update_length=0.98, lost_steps=0.2)
    report = merged([part(**UPDATES), second], [None, None])
    assert (report.update_error, report.update_length, report.lost_steps) == (0.3, 0.98, 0.4)
    assert report.reason == "measured"


@pytest.mark.parametrize("known", [False, True])
def test_a_report_says_on_which_ranks_no_update_was_tried(known: bool) -> None:
    why = "it steps nothing"
    report = merged([part(**UPDATES) if known else part(), part()], [None if known else why, why])
    ranks = "rank 1" if known else "all ranks"
    assert (
        report.reason == f"measured; what a restore does to the next updates was not tried on {ranks}: {why}"
    )
    assert report.lost_steps == (0.4 if known else None)


def test_settings_are_those_of_a_rank_that_is_not_exact() -> None:
    exact = part(scheme="lossless", measured="exact", degradation=0.0)
    assert merged([exact, part()], [None, None]).scheme == "auto"
    assert merged([exact, exact], [None, None]).measured == "exact"
