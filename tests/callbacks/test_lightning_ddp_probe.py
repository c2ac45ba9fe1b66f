"""What a restore costs after some steps, tried by the first of two processes, which the other does not notice."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.lightning_models import assert_same

PROGRAM = Path(__file__).parents[1] / "support" / "lightning_ddp_probe.py"


@pytest.mark.slow
def test_the_first_process_tries_steps_and_leaves_no_trace(tmp_path: Path) -> None:
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("PL_", "LOCAL_", "MASTER"))
    }
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(tmp_path)],
        env=environment | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stderr

    def result(name: str, rank: int) -> Any:
        return torch.load(tmp_path / f"{name}-{rank}.pt", weights_only=False)

    for name in ("probed", "talking", "unused"):
        for rank in (0, 1):
            plain, saved = result("plain", rank), result(name, rank)
            assert plain["trace"] == saved["trace"]
            assert plain["written"] == saved["written"]
            assert_same(plain["final"], saved["final"])
    assert ["2", "4"] in result("probed", 0)["resumed"]
    assert not any("cannot be taken" in told for told in result("probed", 0)["told"])
    # A step that waits for the other process is refused before it waits, and told once.
    talking = result("talking", 0)
    assert not any(talking["resumed"])
    assert sum("allreduce" in told for told in talking["told"]) == 1, talking["told"]
    # Torch's search for unused parameters would take notice.
    assert not any(result("unused", 0)["resumed"])
