"""The bench of optimizers runs as its readers would run it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "benchmarks" / "optimizers.py"


@pytest.mark.slow
@pytest.mark.long
def test_a_row_for_each_optimizer_that_is_asked_for(tmp_path):
    page = tmp_path / "optimizers.md"
    command = [
        sys.executable,
        str(SCRIPT),
        "--quick",
        "--only",
        "Adagrad;AdamW, bfloat16",
        "--out",
        str(page),
    ]
    done = subprocess.run(
        command, capture_output=True, check=False, text=True, timeout=240, env=os.environ.copy()
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for text in (done.stdout, page.read_text()):
        rows = [line.split("|")[1].strip() for line in text.splitlines() if line.startswith("| A")]
        assert rows == ["Adagrad", "AdamW, bfloat16"]
