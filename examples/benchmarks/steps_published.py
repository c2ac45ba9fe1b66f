"""LowDiff as published (arXiv 2509.04084), for comparison: top-k gradients, batches of sums, and its best intervals.

Its compressor keeps the largest 1 % of each tensor's gradient, without error feedback. A recovery replays these through the
optimizer; the published parallel recovery sums the gradients of a batch and makes one step, which is right for plain SGD and
not for Adam, whose moments need each gradient.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from steps_task import Training
from torch import Tensor

__all__ = ["TopK", "corrected_optimum", "paper_optimum", "paper_waste", "replay", "replay_summed"]

_PAIR_BYTES = 8  # a value and an index of 32 bits each


class TopK:
    """The largest share of a gradient's elements.

    Args:
        share: rho of the paper.
        feedback: add what a record leaves out to the next one, in the log only; the paper does not.
    """

    def __init__(self, share: float, *, feedback: bool) -> None:
        self._share, self._feedback = share, feedback
        self._left: dict[int, Tensor] = {}
        self.bytes = 0
        """Of all records so far."""

    def record(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """The gradients that a reader of the record gets."""
        return [self._kept(index, gradient) for index, gradient in enumerate(gradients)]

    def _kept(self, index: int, gradient: Tensor) -> Tensor:
        flat = gradient.reshape(-1).clone()
        if self._feedback and index in self._left:
            flat += self._left[index]
        count = max(1, int(self._share * flat.numel()))
        places = flat.abs().topk(count).indices
        kept = torch.zeros_like(flat)
        kept[places] = flat[places]
        if self._feedback:
            self._left[index] = flat - kept
        self.bytes += count * _PAIR_BYTES
        return kept.reshape(gradient.shape)


def replay(training: Training, records: Sequence[Sequence[Tensor]]) -> None:
    """One step of the optimizer for each record."""
    for record in records:
        _step(training, record)


def replay_summed(training: Training, records: Sequence[Sequence[Tensor]], batch: int) -> None:
    """The published parallel recovery: one step for the sum of each `batch` records."""
    for start in range(0, len(records), batch):
        together = records[start : start + batch]
        _step(training, [torch.stack(parts).sum(0) for parts in zip(*together, strict=True)])
        for _ in together[1:]:
            training.scheduler.step()


def _step(training: Training, gradients: Sequence[Tensor]) -> None:
    for parameter, gradient in zip(training.parameters, gradients, strict=True):
        parameter.grad = gradient.clone()
    training.optimizer.step()
    training.scheduler.step()


def paper_optimum(*, size: float, bandwidth: float, mtbf: float, merge: float) -> tuple[float, float]:
    """Equation 10: the best frequency of full checkpoints, per second, and seconds of training in a batch.

    Args:
        size: bytes of a full checkpoint.
        bandwidth: of its writing, bytes per second; training is taken to wait for it.
        mtbf: mean time between failures.
        merge: seconds to merge one batch at a recovery.
    """
    batch = (2 * size * merge * mtbf / bandwidth) ** (1 / 3)
    return merge / batch**2, batch


def paper_waste(
    frequency: float, batch: float, *, size: float, bandwidth: float, mtbf: float, merge: float, load: float
) -> float:
    """Equation 8, for each second of training: `load` is the time to read a full checkpoint."""
    lost = batch / 2 + load + merge / 2 * (1 / (frequency * batch) - 1)
    return lost / mtbf + size / bandwidth * frequency


def corrected_optimum(
    *, stall: float, mtbf: float, replay_ratio: float, write_stall: float
) -> tuple[float, float]:
    """The same where a save stalls training for `stall` and each step is replayed: seconds between full checkpoints, and
    seconds of training in a segment whose write stalls for `write_stall`."""
    return math.sqrt(2 * mtbf * stall / replay_ratio), math.sqrt(2 * mtbf * write_stall)
