"""Logs of a GPU's steps: the exact one replays them bit for bit, the small one is near them."""

from pathlib import Path

import pytest
import torch

import shrinkpoint
from gpu.device import DEVICE, ON_GPU
from gpu.test_resume_gpu import _compare
from gpu.test_snapshot_gpu import needs_streams, no_synchronization
from gpu.training import CASES, Training

pytestmark = pytest.mark.filterwarnings(
    "error::shrinkpoint.errors.ShrinkpointWarning", "ignore:This instance was constructed with capturable"
)


def _logged(training: Training, folder: Path, kind: str = "exact", **options: object) -> Training:
    log = shrinkpoint.StepLog(kind=kind, segment_steps=2, **options)
    return training.at(folder / "run", every=5, step_log=log, log_url=str(folder / "log"))


def _crash(training: Training) -> None:
    training.checkpointer.step_log.flush()
    if hasattr(training.checkpointer.step_log.log, "_recorder"):
        training.checkpointer.step_log.log._recorder.close()
    training.checkpointer.saver.close()


def _replayed(folder: Path, *case: str) -> None:
    whole = Training(*case)
    expected = whole.run(0, 12)
    first = _logged(Training(*case), folder)
    losses = first.run(0, 9)
    _crash(first)
    torch.rand(3, device=DEVICE)
    second = _logged(Training(*case), folder)
    assert second.checkpointer.resume() == 9, "of which 6 to 9 are replayed"
    assert losses + second.run(9, 12) == expected
    _compare(second, whole)
    second.checkpointer.close()


@pytest.mark.parametrize(("optimizer", "implementation"), CASES)
def test_steps_are_replayed(tmp_path: Path, optimizer: str, implementation: str) -> None:
    _replayed(tmp_path, optimizer, implementation)


@pytest.mark.parametrize("precision", ["fp16", "bf16", "pure-bf16"])
@pytest.mark.parametrize("implementation", ["foreach", "fused"])
def test_steps_in_half_precision_are_replayed(tmp_path: Path, precision: str, implementation: str) -> None:
    _replayed(tmp_path, "AdamW", implementation, precision)


def test_a_step_that_overflowed_is_replayed(tmp_path: Path) -> None:
    """The scaler skips it, and halves its scale."""
    if not ON_GPU:
        pytest.skip("a gradient scaler is the GPU's")

    def overflowing() -> Training:
        training = Training("AdamW", "fused", "fp16")
        training.scaler = torch.amp.GradScaler(DEVICE, init_scale=2.0**40, growth_interval=3)
        training.stateful = {"scaler": training.scaler}
        return training

    whole = overflowing()
    expected = whole.run(0, 12)
    first = _logged(overflowing(), tmp_path)
    losses = first.run(0, 9)
    assert first.scaler.get_scale() < 2.0**40
    _crash(first)
    second = _logged(overflowing(), tmp_path)
    assert second.checkpointer.resume() == 9
    assert losses + second.run(9, 12) == expected
    _compare(second, whole)
    second.checkpointer.close()


@needs_streams
def test_a_logged_step_does_not_make_the_host_wait_for_the_gpu(tmp_path: Path) -> None:
    training = _logged(Training("AdamW", "fused"), tmp_path)
    training.run(0, 5)
    training.checkpointer.step_log.flush()
    training.optimizer.zero_grad()
    training.loss(5).backward()
    with no_synchronization():
        training.optimizer.step()
    training.checkpointer.step(6)
    training.checkpointer.close()
