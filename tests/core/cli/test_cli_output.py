"""How a restore's cost is shown."""

import pytest

from shrinkpoint.cli.output import adopted_text, degradation_text, interval_text


@pytest.mark.parametrize(
    ("mean", "high", "text"),
    [
        (0.0007, 0.0012, "+0.07% (<0.12%)"),
        (-0.0002, 0.0004, "-0.02% (<0.04%)"),
        (0.0, 0.0, "+0.00%"),
        (0.0007, None, "+0.07%"),
        (None, None, "-"),
        ("0.1", None, "-"),
    ],
)
def test_a_rise_with_its_upper_end(mean: object, high: object, text: str) -> None:
    assert interval_text(mean, high) == text


@pytest.mark.parametrize(
    ("measured", "text"),
    [
        ("measured", "+0.07% (<0.12%)"),
        ("unmeasured", "unmeasured"),
        ("blind", "blind"),
        (None, "+0.07% (<0.12%)"),
    ],
)
def test_why_there_is_none(measured: str | None, text: str) -> None:
    noted = {"measured": measured, "degradation": 0.0007, "degradation_high": 0.0012}
    assert degradation_text(noted) == text
    if measured != "unmeasured" and measured != "blind":
        assert degradation_text({**noted, "cost_delay": 0.0009}) == "+0.07% (<0.21%)"


def noted(**more: object) -> dict[str, object]:
    """A checkpoint that its training has gone on from."""
    known = {"measured": "measured", "degradation": 0.0007, "degradation_high": 0.0012, "adopted": True}
    return {**known, "adopt_s": 1.26, **more}


def test_a_restore_of_what_was_adopted_is_exact() -> None:
    assert degradation_text(noted()) == "exact"
    assert degradation_text(noted(measured="unmeasured", degradation=None)) == "exact"
    assert degradation_text(noted(adopted=None)) == "+0.07% (<0.12%)"
    assert degradation_text(noted(not_finite="NaN in model/w")) == "-"


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({}, "adopted in 1.3 s, for +0.07% (<0.12%)"),
        ({"adopt_s": None}, "adopted, for +0.07% (<0.12%)"),
        ({"measured": "exact", "degradation": 0.0}, "adopted in 1.3 s, for nothing"),
        (
            {"measured": "unmeasured", "degradation": None},
            "adopted in 1.3 s, for an unknown part of the loss",
        ),
        ({"adopted": False, "measured": "exact"}, "not planned: exact"),
        ({"adopted": None}, None),
    ],
)
def test_what_was_adopted(more: dict[str, object], text: str | None) -> None:
    assert adopted_text(noted(**more)) == text
