"""Two processes on a CPU, interrupted and continued."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.lightning_models import assert_same

PROGRAM = Path(__file__).parents[1] / "support" / "lightning_ddp.py"


@pytest.mark.parametrize(("loader", "how"), [("plain", "error"), ("stateful", "error"), ("plain", "sigterm")])
def test_two_processes_continue_bit_by_bit(tmp_path: Path, loader: str, how: str) -> None:
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("PL_", "LOCAL_", "MASTER"))
    }
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(tmp_path), loader, how],
        env=environment | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr

    def result(name: str, rank: int) -> Any:
        return torch.load(tmp_path / f"{name}-{rank}.pt", weights_only=False)

    step = result("rest", 0)["trace"][0][2]
    assert step in ((8,) if how == "sigterm" else (3, 6))  # the launcher may kill the save of step 6
    for rank in (0, 1):
        whole, rest = result("whole", rank), result("rest", rank)
        assert whole["trace"][step:] == rest["trace"]
        assert_same(whole["final"], rest["final"])
        assert rest["best"] == f"{tmp_path}/run#step=12"
    assert result("whole", 0)["trace"] != result("whole", 1)["trace"]
