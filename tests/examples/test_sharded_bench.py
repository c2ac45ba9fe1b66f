"""The benchmarks of sharded saving: the bound that a table is quoted for, and that they run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "examples" / "benchmarks"


@pytest.mark.slow
def test_parts_take_hardly_more_bytes_than_one_container(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS.parent))
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import sharded_scale

    states = sharded_scale.snapshots(192, 2)
    alone, four = (sum(size for size, _ in sharded_scale.coded(states, world)) for world in (1, 4))
    assert alone < four <= 1.01 * alone


def test_records_of_many_ranks_are_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS.parent))
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import sharded_scale

    head, manifest = sharded_scale.record_sizes(4096)
    assert head < 2**20
    assert manifest < 2**14


@pytest.mark.slow
def test_ranks_save_and_restore() -> None:
    options = ["--width", "64", "--layers", "2", "--saves", "2", "--ranks", "2", "--copies", "2"]
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "sharded_ranks.py"), *options],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    rows = [line.strip("| ").split(" | ") for line in done.stdout.splitlines() if line.startswith("| ")]
    assert [row[0] for row in rows] == ["save", "1", "2", "save", "1", "2", "ranks", "2", "3", "4"]
