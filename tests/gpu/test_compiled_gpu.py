"""Models that torch.compile has compiled, and steps in a CUDA graph."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.containers import identical
from support.options import grouped
from torch.nn import functional

import shrinkpoint
from gpu.device import DEVICE, ON_GPU
from gpu.test_resume_gpu import _on_host
from gpu.test_snapshot_gpu import needs_streams
from gpu.training import Net

pytestmark = [
    pytest.mark.filterwarnings(
        "error::shrinkpoint.errors.ShrinkpointWarning",
        "ignore:(training waits for|there is no way to evaluate):shrinkpoint.errors.ShrinkpointWarning",
    ),
    pytest.mark.skipif(not ON_GPU, reason="compiling for a CPU needs a C compiler"),
]


def _batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(64, (8, 17), generator=torch.Generator().manual_seed(seed)).to(DEVICE)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].flatten().contiguous()


class Compiled:
    """A training whose model is compiled."""

    def __init__(self, mode: str, url: Path | None, **options: Any) -> None:
        torch.manual_seed(3)
        self.model = Net(matrices=True).to(DEVICE)
        self.compiled = torch.compile(self.model, mode=mode)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, fused=True)
        self.checkpointer: Any = None
        if url is not None:
            options = {"scheme": "lossless", "every": 2, "busy": "wait", **options}
            self.checkpointer = shrinkpoint.Checkpointer(
                str(url), self.compiled, self.optimizer, **grouped(**options)
            )

    def run(self, begin: int, end: int) -> list[float]:
        losses = []
        for step in range(begin, end):
            inputs, targets = _batch(step)
            self.optimizer.zero_grad()
            loss = functional.cross_entropy(self.compiled(inputs).flatten(0, 1), targets)
            loss.backward()
            self.optimizer.step()
            losses.append(loss.item())
            if self.checkpointer is not None:
                self.checkpointer.step(step + 1)
        return losses


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("options", [{}, {"scheme": "auto", "adopt": 4}], ids=["lossless", "adopted"])
def test_a_compiled_model_is_resumed(tmp_path: Path, mode: str, options: dict[str, Any]) -> None:
    whole = Compiled(mode, tmp_path / "whole", **options)
    expected = whole.run(0, 9)
    first = Compiled(mode, tmp_path / "parts", **options)
    losses = first.run(0, 5)[:4]
    first.checkpointer.close()
    second = Compiled(mode, tmp_path / "parts", **options)
    assert second.checkpointer.resume() == 4
    losses += second.run(4, 9)
    assert losses == expected
    assert identical(_on_host(dict(second.model.state_dict())), _on_host(dict(whole.model.state_dict())))
    for training in (whole, second):
        training.checkpointer.close()


class Graphed:
    """A training whose whole step is one CUDA graph, captured after the resume."""

    def __init__(self, url: Path, **options: Any) -> None:
        torch.manual_seed(3)
        self.model = Net(matrices=True).to(DEVICE)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=torch.tensor(1e-2, device=DEVICE), capturable=True
        )
        options = {"scheme": "lossless", "every": 2, "busy": "wait", **options}
        self.checkpointer = shrinkpoint.Checkpointer(
            str(url), self.model, self.optimizer, **grouped(**options)
        )
        self.inputs, self.targets = _batch(0)
        self.graph: Any = None

    def _step(self) -> torch.Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        loss = functional.cross_entropy(self.model(self.inputs).flatten(0, 1), self.targets)
        loss.backward()
        self.optimizer.step()
        return loss

    def capture(self) -> None:
        """Three steps before it, as torch asks for."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self._step()
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.loss = self._step()

    def run(self, begin: int, end: int) -> list[float]:
        losses = []
        for step in range(begin, end):
            inputs, targets = _batch(step)
            self.inputs.copy_(inputs)
            self.targets.copy_(targets)
            self.graph.replay()
            losses.append(self.loss.item())
            self.checkpointer.step(step + 1)
        return losses


@needs_streams
@pytest.mark.parametrize("options", [{}, {"scheme": "auto", "adopt": 9}], ids=["lossless", "adopted"])
def test_a_captured_training_goes_on_from_its_checkpoint(tmp_path: Path, options: dict[str, Any]) -> None:
    """What it saves between replays is the state, and what it adopts is what the next replay begins with."""
    training = Graphed(tmp_path, **options)
    training.capture()
    training.run(0, 6)
    training.checkpointer.flush()
    expected = _on_host(dict(training.model.state_dict()))
    fresh = Graphed(tmp_path, **options)
    assert fresh.checkpointer.resume() == 6
    assert identical(_on_host(dict(fresh.model.state_dict())), expected)
    assert identical(_on_host(fresh.optimizer.state_dict()), _on_host(training.optimizer.state_dict()))
    for one in (training, fresh):
        one.checkpointer.close()
