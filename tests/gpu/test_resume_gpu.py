"""A training on a GPU that is resumed is the undisturbed one, bit for bit, under every optimizer of torch.optim."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.containers import identical

import shrinkpoint
from gpu.device import DEVICE, ON_GPU
from gpu.test_snapshot_gpu import needs_streams, no_synchronization
from gpu.training import CASES, Training, devices

pytestmark = pytest.mark.filterwarnings(
    "error::shrinkpoint.errors.ShrinkpointWarning",
    "ignore:This instance was constructed with capturable",
    "ignore:(training waits for|there is no way to evaluate):shrinkpoint.errors.ShrinkpointWarning",
)


def _compare(resumed: Training, whole: Training) -> None:
    """Bit by bit, and on the devices where torch's own ``load_state_dict`` puts the same state."""
    assert identical(_on_host(resumed.everything()), _on_host(whole.everything()))
    state = whole.optimizer.state_dict()
    whole.optimizer.load_state_dict(
        _on_host(state)
    )  # NAdam's numbers move to the GPU, and ASGD's to the host
    assert devices(resumed.everything()) == devices(whole.everything())


def _on_host(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {name: _on_host(item) for name, item in value.items()}
    return [_on_host(item) for item in value] if isinstance(value, list) else value


def _resumed(url: Path, *case: str, **options: Any) -> tuple[Training, list[float]]:
    """Interrupted after step 5, and resumed from the checkpoint of step 4."""
    first = Training(*case)
    first.at(url, evaluate=first.evaluate, **options)
    losses = first.run(0, 5)[:4]
    first.checkpointer.close()
    torch.rand(3, device=DEVICE)
    second = Training(*case)
    second.at(url, evaluate=second.evaluate, **options)
    assert second.checkpointer.resume() == 4
    losses += second.run(4, 9)
    second.checkpointer.close()
    return second, losses


@pytest.mark.parametrize(("optimizer", "implementation"), CASES)
def test_lossless(tmp_path: Path, optimizer: str, implementation: str) -> None:
    whole = Training(optimizer, implementation)
    expected = whole.run(0, 9)
    resumed, losses = _resumed(tmp_path, optimizer, implementation)
    assert losses == expected
    _compare(resumed, whole)


@pytest.mark.parametrize("precision", ["fp16", "bf16", "pure-bf16"])
@pytest.mark.parametrize("implementation", ["foreach", "fused"])
def test_lossless_in_half_precision(tmp_path: Path, precision: str, implementation: str) -> None:
    whole = Training("AdamW", implementation, precision)
    expected = whole.run(0, 9)
    resumed, losses = _resumed(tmp_path, "AdamW", implementation, precision)
    assert losses == expected
    _compare(resumed, whole)


@pytest.mark.parametrize(
    ("optimizer", "implementation", "precision"),
    [
        ("AdamW", "fused", "fp32"),
        ("AdamW", "capturable" if ON_GPU else "foreach", "fp32"),
        ("AdamW", "fused", "fp16"),
        ("AdamW", "foreach", "pure-bf16"),
        ("SGD", "foreach", "bf16"),
        ("RMSprop", "foreach", "fp32"),
        *([("Muon", "only", "fp32")] if hasattr(torch.optim, "Muon") else []),
    ],
)
def test_adopted(tmp_path: Path, optimizer: str, implementation: str, precision: str) -> None:
    options = {"scheme": "auto", "adopt": 4, "every": 2}
    whole = Training(optimizer, implementation, precision)
    whole.at(tmp_path / "whole", evaluate=whole.evaluate, **options)
    expected = whole.run(0, 9)
    whole.checkpointer.close()
    resumed, losses = _resumed(tmp_path / "parts", optimizer, implementation, precision, **options)
    assert losses == expected
    _compare(resumed, whole)
    undisturbed = Training(optimizer, implementation, precision)
    assert undisturbed.run(0, 9) != expected, "adoption has changed something: the control"


@pytest.mark.parametrize("implementation", ["foreach", "fused", *(["capturable"] if ON_GPU else [])])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_measured_with_steps_from_a_restore(tmp_path: Path, implementation: str, precision: str) -> None:
    """Evaluations and probes leave no trace in the training."""
    whole = Training("AdamW", implementation, precision)
    expected = whole.run(0, 9)
    measured = Training("AdamW", implementation, precision)
    measured.at(
        tmp_path,
        scheme="auto",
        evaluate=measured.evaluate,
        train_loss=measured.train_loss,
        search_overhead=float("inf"),
    )
    losses = []
    for step in range(9):
        losses.append(measured.step(step))
        measured.checkpointer.step(step + 1)
        measured.checkpointer.flush()
    measured.checkpointer.close()
    assert losses == expected
    _compare(measured, whole)
    reports = measured.checkpointer.reports()
    assert all(report.baseline is not None for report in reports)
    assert any(report.resumed for report in reports)


def test_a_checkpoint_of_a_gpu_is_one_for_a_cpu_and_back(tmp_path: Path) -> None:
    first = Training("AdamW", "foreach").at(tmp_path)
    first.run(0, 4)
    first.checkpointer.close()
    model = Training("AdamW", "foreach").model.cpu()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
    with shrinkpoint.Checkpointer(str(tmp_path), model, optimizer, scheme="lossless") as there:
        assert there.resume() == 4
        assert identical(dict(model.state_dict()), _on_host(dict(first.model.state_dict())))
        assert set(devices(optimizer.state_dict()).values()) == {"cpu"}
        there.save(6, wait=True)
    back = Training("AdamW", "fused").at(tmp_path)
    assert back.checkpointer.resume() == 6
    assert identical(_on_host(dict(back.model.state_dict())), _on_host(dict(first.model.state_dict())))
    back.step(6)
    back.checkpointer.close()


@needs_streams
@pytest.mark.parametrize("scheme", ["lossless", "auto"])
@pytest.mark.parametrize("implementation", ["foreach", "fused", "capturable"])
def test_a_save_does_not_make_the_host_wait_for_the_gpu(
    tmp_path: Path, scheme: str, implementation: str
) -> None:
    training = Training("AdamW", implementation).at(tmp_path, scheme=scheme)
    training.run(0, 6)
    training.step(6)
    training.checkpointer.step(7)
    training.step(7)
    with no_synchronization():
        training.checkpointer.step(8)
    training.checkpointer.close()
    assert [report.step for report in training.checkpointer.reports()] == [2, 4, 6, 8]


@needs_streams
def test_a_save_takes_no_memory_of_the_gpu(tmp_path: Path) -> None:
    training = Training().at(tmp_path, scheme="auto")
    training.run(0, 4)
    training.step(4)
    training.step(5)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    training.checkpointer.step(6)
    training.checkpointer.flush()
    assert torch.cuda.max_memory_allocated() - before <= 4 * 64 * 64 * 9  # one tensor that is not contiguous
    assert torch.cuda.memory_allocated() == before
    training.checkpointer.close()
