"""The bench of the coders' speed: that it has a row for each way to store a state, and that threads lose no work."""

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
        *("torch.save", "zstd -3", "auto", "lossless"),
        *("threads", "auto: saving", "auto: reading", "lossless: saving", "lossless: reading"),
    ]
    for _, *efficiencies in rows[-4:]:
        assert all(0 < float(cell.split()[0]) <= 1 for cell in efficiencies)
