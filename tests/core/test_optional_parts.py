"""A training that saves by default, on one store and without a step log, imports none of the optional parts."""

import subprocess
import sys

import pytest

_OPTIONAL = ("shrinkpoint.steps", "shrinkpoint.store.striped", "shrinkpoint.dcp", "shrinkpoint.entropy.lstm")

_IMPORT = "import shrinkpoint"

_LOOP = """
import torch, shrinkpoint
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.AdamW(model.parameters())
with shrinkpoint.Checkpointer("run", model, optimizer, every=2) as checkpointer:
    for step in range(checkpointer.resume(), 4):
        model(torch.randn(3, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        checkpointer.step(step + 1)
assert checkpointer.saver.reports()
assert shrinkpoint.Checkpointer("run", model, optimizer, every=2).resume() == 4
assert shrinkpoint.load_weights("run")
"""

_LIGHTNING = """
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from shrinkpoint.callbacks.lightning import CompressedCheckpoint
for steps in (4, 8):
    callback = CompressedCheckpoint("run", every_n_train_steps=2)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    Trainer(max_steps=steps, limit_val_batches=0, callbacks=[callback], accelerator="cpu", **quiet).fit(BoringModel())
    assert callback.last_model_path == f"run#step={steps}"
"""


@pytest.mark.parametrize("program", [_IMPORT, _LOOP, _LIGHTNING], ids=["import", "loop", "lightning"])
def test_a_default_save_imports_no_optional_part(program, tmp_path):
    look = f"\nimport sys; print(sorted(m for m in sys.modules if m.startswith({_OPTIONAL})))"
    done = subprocess.run(
        [sys.executable, "-c", program + look], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"
