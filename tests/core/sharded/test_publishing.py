"""What the first rank makes of all ranks' reports."""

from typing import Any

import pytest

from shrinkpoint.sharded.publishing import _report


def part(**more: Any) -> dict[str, Any]:
    return {
        "kind": "base",
        "scheme": "auto",
        "configuration": "scale=1",
        "reason": "measured",
        "bytes": 10,
        "raw_bytes": 100,
        "sections": {"weight": 10},
        "raw_sections": {"weight": 100},
        "measured": None,
        "is_exact": False,
        "not_finite": None,
        "encode_s": 0.1,
        "write_s": 0.1,
        "kept_exactly": {},
        "exact": [],
        **more,
    }


def test_next_updates_are_those_of_the_rank_that_loses_most() -> None:
    parts = [part(untried=None, updates=[0.1, 1.02, 0.4]), part(untried=None, updates=[0.3, 0.98, 0.2])]
    report = _report(parts, 1, {}, 0.0)
    assert (report.update_error, report.update_length, report.lost_steps) == (0.3, 0.98, 0.4)
    assert report.reason == "measured"


@pytest.mark.parametrize(("known", "ranks"), [(None, "all ranks"), ([0.1, 1.0, 0.4], "rank 1")])
def test_a_report_says_on_which_ranks_no_update_was_tried(known: list[float] | None, ranks: str) -> None:
    first = part(untried=None if known else "it steps nothing", updates=known)
    report = _report([first, part(untried="it steps nothing", updates=None)], 1, {}, 0.0)
    assert report.reason == (
        f"measured; what a restore does to the next updates was not tried on {ranks}: it steps nothing"
    )
    assert report.lost_steps == (None if known is None else 0.4)


def test_parts_that_are_exact_say_nothing_of_updates() -> None:
    report = _report([part(is_exact=True), part(is_exact=True)], 1, {}, 0.0)
    assert report.measured == "exact"
    assert report.update_error is None
