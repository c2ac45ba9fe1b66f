"""The bench of the coders' speed: that it has a row for each way to store a state."""

import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parents[2] / "examples" / "benchmarks"


def test_every_table_has_its_rows() -> None:
    command = [
        sys.executable,
        str(BENCHMARKS / "auto_speed.py"),
        "--width",
        "32",
        "--matrices",
        "2",
        "--small",
        "3",
    ]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    rows = [line.strip("|").split("|") for line in printed.splitlines() if line.startswith("| ")]
    assert [row[0].strip() for row in rows if row[0].strip()] == [
        *("auto", "lossless"),
        *("torch.save", "torch.distributed.checkpoint", "zstd -3", "auto", "lossless"),
    ]
    assert all(float(cell) > 0 for row in rows[-2:] for cell in row[1:6])
