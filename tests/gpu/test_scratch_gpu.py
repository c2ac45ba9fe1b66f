"""`scratch_folder` where snapshots are in pinned memory: planes and weights are on the disk, and the files are the same."""

from pathlib import Path

import pytest
import torch

from gpu.device import DEVICE
from shrinkpoint.checkpointer import Checkpointer
from shrinkpoint.config import Advanced
from shrinkpoint.saver import Saver
from shrinkpoint.state import scratch
from shrinkpoint.state.scratch import DiskTensor


def saved(folder: Path, scheme: str, scratch_folder: Path | None) -> list[bytes]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Tanh(), torch.nn.Linear(128, 64)).to(
        DEVICE
    )
    optimizer = torch.optim.AdamW(model.parameters())
    inputs = torch.randn(16, 64, generator=torch.Generator().manual_seed(1)).to(DEVICE)

    def loss() -> torch.Tensor:
        return (model(inputs) - inputs.roll(1, 0)).square().mean()

    def evaluate() -> float:
        with torch.no_grad():
            return float(loss())

    checkpointer = Checkpointer(
        str(folder),
        model,
        optimizer,
        scheme=scheme,
        evaluate=evaluate,
        advanced=Advanced(scratch_folder=scratch_folder),
    )
    checkpointer.resume()
    for step in (1, 2, 3):
        for _ in range(5):
            optimizer.zero_grad()
            loss().backward()
            optimizer.step()
        checkpointer.save(step, wait=True)
    noted = checkpointer.saver._background.movement._before
    assert any(isinstance(tensor, DiskTensor) for tensor in noted.values()) == bool(noted and scratch_folder)
    assert [report.kind for report in checkpointer.reports()] == ["base", "delta", "delta"]
    checkpointer.close()
    files = sorted((folder / "data").rglob("*"), key=lambda file: file.name)
    return [file.read_bytes() for file in files if file.is_file()]


@pytest.mark.parametrize("scheme", ["auto", "lossless"])
def test_the_files_are_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheme: str) -> None:
    monkeypatch.setattr(scratch, "_LEAST", 64)
    (tmp_path / "disk").mkdir()
    without = saved(tmp_path / "without", scheme, None)
    assert saved(tmp_path / "with", scheme, tmp_path / "disk") == without
    restored = Saver(str(tmp_path / "with")).restore()
    assert restored is not None
    assert restored.manifest.step == 3
