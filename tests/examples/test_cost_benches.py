"""The benches of memory and of launches: that they run, and print a line for each case."""

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "examples" / "benchmarks"


def printed(script: str, *arguments: str) -> list[str]:
    command = [sys.executable, str(BENCHMARKS / script), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()


@pytest.mark.slow
@pytest.mark.long
def test_memory_has_a_line_for_each_save_and_one_of_what_is_fixed() -> None:
    lines = printed(
        "memory.py",
        "--width",
        "64",
        "--layers",
        "1",
        "--vocabulary",
        "300",
        "--schemes",
        "lossless",
        "--resumed",
    )
    assert lines[0].split() == ["scheme", "save", "ratio", "peak", "after", "blocked"]
    assert [line.split()[:2] for line in lines[1:4]] == [
        ["lossless", kind] for kind in ("base", "delta", "delta")
    ]
    assert "coders and libraries" in lines[4]


def test_launches_have_a_line_for_each_save() -> None:
    lines = printed("launches.py", "--width", "64", "--layers", "1", "--saves", "2", "--only", "lossless")
    rows = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")][1:]
    assert [row[:2] for row in rows] == [
        ["a thread that needs no lock", "1"],
        ["torch.save in a thread", "1"],
        ["shrinkpoint, lossless", "1"],
        ["shrinkpoint, lossless", "2"],
    ]
    for _, _, _, usual, slower, *longest in rows:
        assert float(usual) > 0
        assert float(slower.rstrip("%")) > -100
        assert all(float(one) > 0 for one in longest)
