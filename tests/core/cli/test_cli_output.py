"""How a restore's cost is shown."""

import pytest

from shrinkpoint.cli.output import degradation_text, interval_text


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
        assert degradation_text({**noted, "cost_high": 0.0021}) == "+0.07% (<0.21%)"
