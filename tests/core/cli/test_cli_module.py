"""The command line without its script."""

import subprocess
import sys
from pathlib import Path


def test_it_is_run_as_a_module_too(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "shrinkpoint", "ls", "none"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "there is no run at" in done.stderr
