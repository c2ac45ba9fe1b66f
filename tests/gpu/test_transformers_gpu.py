"""A training of Hugging Face's Trainer on a GPU that was interrupted and continues by itself equals one that was not, bit by bit.

The continuing process has generators in another state. The model draws its dropout from the GPU's generator.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from support.options import grouped

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from support.transformers_models import Outcome, Setup, assert_continues, train
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import Trainer

from gpu.device import DEVICE, ON_GPU
from shrinkpoint.callbacks.transformers import CompressedCheckpoint
from shrinkpoint.store.run import RunStore

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"
)

HALF = {"fp16": {"fp16": True} if ON_GPU else {"bf16": True}, "bf16": {"bf16": True}, "fp32": {}}
"""A CPU has no training in fp16."""


@dataclass
class Ended:
    """What a training came to, with what is on the device."""

    outcome: Outcome
    scaler: dict[str, Any] | None
    random: list[float]
    devices: dict[str, str]
    """Of each optimizer state's entries."""


class Noted(Trainer):  # type: ignore[misc]
    """Is remembered, for what `train` does not return."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        made.append(self)


made: list[Any] = []


@pytest.fixture(autouse=True)
def _repeatable_attention() -> Iterator[None]:
    made.clear()
    os.environ.pop("ACCELERATE_MIXED_PRECISION", None)  # left by the trainer of the test before
    # what is not deterministic and used all the same shows in the comparisons
    torch.use_deterministic_algorithms(True, warn_only=True)
    with sdpa_kernel(SDPBackend.MATH):
        yield


def arguments(precision: str, optim: str = "adamw_torch_fused", **more: Any) -> Setup:
    given = {"use_cpu": not ON_GPU, "optim": optim, "max_steps": 22, **HALF[precision], **more}
    return Setup(arguments=tuple(given.items()))


def ended(setup: Setup, folder: Path, *callbacks: Any, **more: Any) -> Ended:
    """Train in this process, with another state of the device's generator before each."""
    torch.rand(1 + len(made), device=DEVICE)
    outcome = train(setup, str(folder / "output"), *callbacks, trainer_class=Noted, **more)
    scaler = made[-1].accelerator.scaler
    states = outcome.optimizer["state"].values()
    return Ended(
        outcome,
        None if scaler is None else scaler.state_dict(),
        torch.rand(3, device=DEVICE).tolist(),
        {key: value.device.type for state in states for key, value in state.items()},
    )


def saving(url: str, **options: Any) -> CompressedCheckpoint:
    return CompressedCheckpoint(url, **grouped(**{"scheme": "lossless", "busy": "wait", **options}))


def assert_same_end(whole: Ended, rest: Ended, *, fused: bool = True) -> None:
    assert_continues(whole.outcome, rest.outcome)  # torch.equal raises for tensors on two devices
    assert whole.scaler == rest.scaler
    assert whole.random == rest.random
    expected = {"step": DEVICE if fused else "cpu", "exp_avg": DEVICE, "exp_avg_sq": DEVICE}
    assert whole.devices == rest.devices == expected
    assert all(value.device.type == DEVICE for value in rest.outcome.weights.values())


@pytest.mark.parametrize(
    ("precision", "optim"),
    [
        ("fp16", "adamw_torch_fused"),
        ("bf16", "adamw_torch_fused"),
        ("fp32", "adamw_torch_fused"),
        ("fp16", "adamw_torch"),
    ],
)
def test_continues_bit_by_bit(precision: str, optim: str, tmp_path: Path) -> None:
    """The batches' masks are random too."""
    setup, url = arguments(precision, optim), str(tmp_path / "run")
    whole = ended(setup, tmp_path)
    first = ended(setup, tmp_path, saving(url), crash=7, seed=2)
    assert first.outcome.steps == whole.outcome.steps[:7]  # saving changes nothing
    rest = ended(setup, tmp_path, saving(url), seed=999)
    assert rest.outcome.steps[0][0] == 5
    if ON_GPU and precision == "fp16":
        assert whole.scaler is not None
        assert whole.scaler["scale"] > 0
    assert_same_end(whole, rest, fused=optim.endswith("fused"))


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_adopting_continues_bit_by_bit(precision: str, tmp_path: Path) -> None:
    setup = arguments(precision)

    def adopting(where: str) -> CompressedCheckpoint:
        return CompressedCheckpoint(str(tmp_path / where), adopt=8, max_degradation=0.5)

    whole = ended(setup, tmp_path, adopting("whole"))
    ended(setup, tmp_path, adopting("run"), crash=10, seed=2)
    rest = ended(setup, tmp_path, adopting("run"), seed=999)
    assert rest.outcome.steps[0][0] == 9
    assert_same_end(whole, rest)
    found = RunStore(str(tmp_path / "whole")).manifests()
    assert any(m.meta["adoption"]["planned"] and m.meta["save"]["measured"] == "measured" for m in found)
