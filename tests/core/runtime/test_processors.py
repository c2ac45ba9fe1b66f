import os

import pytest

from shrinkpoint.config import SaverConfig
from shrinkpoint.runtime import threads as module
from shrinkpoint.runtime.threads import processors


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("max 100000\n", 8),
        ("400000 100000\n", 4),
        ("250000 100000\n", 3),  # a part of one is one
        ("1000 100000\n", 1),
        ("6400000 100000\n", 8),
        ("100000 0\n", 8),
        ("", 8),
        (None, 8),
    ],
)
def test_a_containers_limit_counts(tmp_path, monkeypatch, written, expected):
    place = tmp_path / "cpu.max"
    if written is not None:
        place.write_text(written)
    monkeypatch.setattr(module, "_QUOTA", place)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    assert processors() == expected
    assert SaverConfig().encoder_threads == max(1, expected // 2)
    assert SaverConfig().waiting_threads == expected


def test_a_system_without_affinity(monkeypatch, tmp_path):
    monkeypatch.setattr(module, "_QUOTA", tmp_path / "none")
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    assert processors() == 3
