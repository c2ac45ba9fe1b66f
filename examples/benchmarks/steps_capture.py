"""Is it worth capturing gradients layer by layer, as LowDiff+ does? A prototype beside the capture at the optimizer's step.

    OMP_NUM_THREADS=1 python examples/benchmarks/steps_capture.py [--small]

Each gradient is copied when it has been accumulated (``register_post_accumulate_grad_hook``). At the optimizer's step those that were
changed since then, by accumulation, unscaling or clipping, are copied again: torch counts the changes of each tensor. The ways alternate in
one process; printed is the CPU time of the threads within the capture, relative to that of the whole step without it.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from steps_task import Training, config_of, load_text
from torch import Tensor, nn

_WAYS = ("at the step", "layer by layer")


class Capture:
    """Copies of the gradients that the optimizer gets.

    Args:
        training: whose parameters are hooked.
        layerwise: begin during the backward pass.
    """

    def __init__(self, training: Training, *, layerwise: bool) -> None:
        self._parameters = training.parameters
        self._copies = [torch.empty_like(p) for p in self._parameters]
        self._versions: list[tuple[int, int] | None] = [None] * len(self._copies)
        self.again = 0
        """Gradients that were copied at the step."""
        self.seconds = 0.0
        """CPU time so far."""
        hooked = enumerate(self._parameters) if layerwise else ()
        self._handles = [p.register_post_accumulate_grad_hook(self._copier(index)) for index, p in hooked]

    def _copier(self, index: int) -> Callable[[Tensor], None]:
        def copy(parameter: Tensor) -> None:
            started = time.thread_time()
            self._copy(index)
            self.seconds += time.thread_time() - started

        return copy

    def _copy(self, index: int) -> None:
        gradient = self._parameters[index].grad
        assert gradient is not None
        self._copies[index].copy_(gradient)
        self._versions[index] = id(gradient), gradient._version

    def step(self) -> list[Tensor]:
        """Copies of all gradients, right before the optimizer's step."""
        started = time.thread_time()
        for index, parameter in enumerate(self._parameters):
            gradient = parameter.grad
            assert gradient is not None
            if self._versions[index] != (id(gradient), gradient._version):
                self._copy(index)
                self.again += 1
        self._versions = [None] * len(self._copies)
        self.seconds += time.thread_time() - started
        return self._copies

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()


def one(training: Training, way: str, *, batches: int, clip: float | None) -> tuple[float, float]:
    """One step; the capture's CPU time relative to the rest, and the share of gradients copied at the optimizer's step."""
    capture = Capture(training, layerwise=way == _WAYS[1])
    started = time.process_time()
    training.optimizer.zero_grad()
    for _ in range(batches):
        training.accumulate()
    if clip is not None:
        nn.utils.clip_grad_norm_(training.model.parameters(), clip)
    copies = capture.step()
    taken = time.process_time() - started
    for copy, parameter in zip(copies, training.parameters, strict=True):
        assert torch.equal(copy, parameter.grad), way  # type: ignore[arg-type]
    started = time.process_time()
    training.optimizer.step()
    training.scheduler.step()
    taken += time.process_time() - started
    capture.close()
    return capture.seconds / (taken - capture.seconds), capture.again / len(copies)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="a tiny model and few steps, for tests")
    small = parser.parse_args().small
    config = config_of(small)
    text, _ = load_text(config)
    training = Training(text, config)
    print("| training | capture at the step | layer by layer | copied again |")
    print("|---|---:|---:|---:|")
    for name, batches, clip in (
        ("without clipping", 1, None),
        ("clipped", 1, 1.0),
        ("4 batches accumulated", 4, None),
    ):
        found: dict[str, list[tuple[float, float]]] = {way: [] for way in _WAYS}
        for step in range(3 if small else 15):
            for way in _WAYS:
                measured = one(training, way, batches=batches, clip=clip)
                if step:  # the first one warms up
                    found[way].append(measured)
        shares = [statistics.median(share for share, _ in found[way]) for way in _WAYS]
        again = found[_WAYS[1]][-1][1]
        print(f"| {name} | {shares[0]:.2%} | {shares[1]:.2%} | {again:.0%} |", flush=True)


if __name__ == "__main__":
    main()
