"""A report of a save, as tests need one; and where those of a callback are."""

from typing import Any

from shrinkpoint.reports import SaveReport

REPORT = SaveReport(
    step=40,
    seq=3,
    kind="delta",
    scheme="inshrinkerator",
    configuration="8 levels",
    reason="the search chose it",
    bytes=100,
    raw_bytes=2000,
    sections={},
    raw_sections={},
    degradation=0.005,
    resumed={"20": 0.001},
    baseline=2.0,
    evaluations=2,
    blocked_s=0.1,
    search_s=0.2,
    encode_s=0.3,
    write_s=0.4,
    metrics={},
    kept_exactly={},
)


def saver_of(callback: Any) -> Any:
    """The saver of a callback, of any framework: no other test asks a callback for what is inside it."""
    return callback._session.run.saver
