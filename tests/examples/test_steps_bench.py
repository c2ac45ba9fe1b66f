"""The bench of the step logs: that it runs, and prints every table."""

import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[2] / "examples" / "benchmarks" / "steps.py"


@pytest.mark.slow
def test_every_experiment_has_its_table(tmp_path: Path) -> None:
    arguments = ("--small", "--blocks", "1", "--seeds", "1", "--before", "30", "--log", str(tmp_path))
    done = subprocess.run(
        [sys.executable, str(BENCH), *arguments], check=True, capture_output=True, text=True
    )
    found = done.stdout
    for title in ("Experiment 1", "Experiment 4", "Experiment 7, table III", "Experiment 3", "Table I"):
        assert title in found
    for method in ("torch.save", "CheckFreq", "naive DC", "LowDiff", "step_log='exact'", "step_log='small'"):
        assert method in found
    assert "paper's f*, b*" in found
    recovery = found.partition("Experiment 5")[2].partition("Experiment 3")[0]
    rows = [line.split("|") for line in recovery.splitlines() if line.startswith("|")]
    assert [row[1].strip() for row in rows[-5:]] == ["5", "10", "20", "50", "48"]
    assert "| exact gradients, step by step | 32.00 |  | 0.0%" in found
    assert found.count("| small, 6.5 x rms |") == found.count("| LowDiff, top 1.0% |") == 2
