"""A report of a save, as tests need one."""

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
