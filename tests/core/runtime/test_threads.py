"""A save that a program makes when it ends already (`atexit`), when no thread can be started any more."""

import subprocess
import sys
from pathlib import Path

import pytest

from shrinkpoint.store.run import RunStore

PROGRAM = """
import atexit
import sys
import threading

import torch
import shrinkpoint

if sys.argv[3] == "none":  # as from Python 3.12 on
    start = threading.Thread.start

    def refused(thread):
        if not threading.main_thread().is_alive():
            raise RuntimeError("can't create new thread at interpreter shutdown")
        start(thread)

    threading.Thread.start = refused
torch.manual_seed(0)
model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)])
optimizer = torch.optim.AdamW(model.parameters())
data = torch.randn(32, 64)


def loss():
    return (model(data) - data).square().mean()


config = {"scheme": sys.argv[2], "evaluate": lambda: loss().item(), "advanced": shrinkpoint.Advanced(threads=4)}
checkpointer = shrinkpoint.Checkpointer(sys.argv[1], model, optimizer, every=5, **config)
atexit.register(checkpointer.close)
for step in range(checkpointer.resume() + 1, 9):
    optimizer.zero_grad()
    loss().backward()
    optimizer.step()
    checkpointer.step(step)
    checkpointer.flush()
"""


@pytest.mark.parametrize("scheme", ["lossless", "auto"])
@pytest.mark.parametrize("threads", ["few", "none"])
def test_the_last_step_is_saved_at_exit(tmp_path: Path, scheme: str, threads: str) -> None:
    program = tmp_path / "train.py"
    program.write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, program, tmp_path / "run", scheme, threads],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "failed" not in done.stderr
    assert sorted(manifest.step for manifest in RunStore(str(tmp_path / "run")).manifests()) == [5, 8]
