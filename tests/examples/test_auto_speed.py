"""The bench of the default scheme's speed: that all stages it names are there, and that it prints each phase."""

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "examples" / "benchmarks"


@pytest.mark.skipif(sys.platform != "linux", reason="it reads the process's memory from /proc")
def test_every_phase_and_its_stages_are_printed() -> None:
    sizes = ["--layers", "1", "--width", "64", "--tokens", "512", "--threads", "1"]
    sizes += ["--least-share", "0"]  # which stages are large in a tiny model depends on the machine's load
    command = [sys.executable, str(BENCHMARKS / "auto_speed.py"), *sizes]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    for phase in ("encode base", "encode delta", "decode base", "decode chain"):
        assert f"  {phase}" in printed
    for stage in (
        "second moment",
        "first moment, levels",
        "weights, points",
        "entropy coding of weights",
        "digests",
    ):
        assert f"      {stage} " in printed
