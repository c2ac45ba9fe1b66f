"""The bench of layer-wise capture runs, and checks its own copies."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "benchmarks" / "steps_capture.py"


@pytest.mark.slow
def test_it_prints_its_table() -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--small"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    rows = [line.split("|")[1:-1] for line in done.stdout.splitlines() if "%" in line]
    again = {row[0].strip(): row[3].strip() for row in rows}
    assert again == {"without clipping": "0%", "clipped": "100%", "4 batches accumulated": "0%"}
