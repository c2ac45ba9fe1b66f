"""The bench of adoption: its cells are continued, and its table has a row for each training and number of saves."""

import csv
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "benchmarks" / "adopt.py"


def printed(cache: Path, *arguments: str) -> list[str]:
    command = [sys.executable, str(SCRIPT), "--quick", "--only", "matrix-factorization", "--saves", "3"]
    done = subprocess.run(
        [*command, "--cache", str(cache), *arguments], check=True, capture_output=True, text=True
    )
    return done.stdout.splitlines()


@pytest.mark.slow
def test_a_row_from_three_runs_that_are_measured_once(tmp_path: Path) -> None:
    cache = tmp_path / "cells.csv"
    lines = printed(cache)
    assert len(lines) == 3, lines
    with cache.open(newline="") as file:
        plain, without, adopting = csv.DictReader(file)
    assert [cell["way"] for cell in (plain, without, adopting)] == ["undisturbed", "without", "with"]
    assert plain["final"] == without["final"] != adopting["final"]
    assert float(adopting["adopt_s"]) > 0 == float(without["adopt_s"])
    columns = [text.strip() for text in lines[2].strip("|").split("|")]
    assert columns[1].startswith(f"{adopting['count']}, ")
    assert float(columns[5]) == round(100 * (float(adopting["final"]) / float(plain["final"]) - 1), 2)
    assert printed(cache, "--table") == printed(cache) == lines
    assert len(cache.read_text().splitlines()) == 4
