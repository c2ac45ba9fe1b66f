"""How far the weights that a small log gives are from the training's, and those of gradient logs as published.

LowDiff's compressor (arXiv 2509.04084) keeps the largest 1 % of each tensor's gradient, without error feedback. A recovery replays
these through the optimizer; the published parallel recovery sums the gradients of a batch and makes one step, which is right for plain
SGD and not for Adam, whose moments need each gradient.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from common import TextTraining, show
from gpt import GPTConfig
from torch import Tensor

from shrinkpoint.steps.options import StepLog
from shrinkpoint.steps.segment import TensorTable
from shrinkpoint.steps.updates import Layout, ReadersWeights, UpdateSizes

AFTER = (5, 20, 50)
DEFAULT = StepLog.quantization_step
STEPS = (2.0, 4.0, DEFAULT, 8.0, 16.0, 32.0)
SHARES = (0.001, 0.01, 0.1)
BATCHES = (1, 2, 4, 8, 20)
_SMALL = f"small, {DEFAULT:g} x rms"
_SAME = f"LowDiff, top k of as many bytes as {_SMALL}"


_PAIR_BYTES = 8  # a value and an index of 32 bits each


class TopK:
    """The largest share of a gradient's elements, rho of the paper.

    With feedback, what a record leaves out is added to the next one, in the log only; the paper does not.
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


def replay(training: TextTraining, records: Sequence[Sequence[Tensor]], batch: int = 1) -> None:
    """One step of the optimizer for each record; or for the sum of each `batch` of them, the published parallel recovery."""
    for start in range(0, len(records), batch):
        together = records[start : start + batch]
        _step(training, [torch.stack(parts).sum(0) for parts in zip(*together, strict=True)])
        for _ in together[1:]:
            training.scheduler.step()


def _step(training: TextTraining, gradients: Sequence[Tensor]) -> None:
    for parameter, gradient in zip(training.parameters, gradients, strict=True):
        parameter.grad = gradient.clone()
    training.optimizer.step()
    training.scheduler.step()


@dataclass
class Row:
    """One log's figures."""

    name: str
    bits: float
    errors: dict[int, float]
    rise: float
    nanoseconds: float | None = None
    first_bits: float | None = None


@dataclass
class Course:
    """Some steps of a training, each with its gradients and weights."""

    base: dict[str, Any]
    start: list[Tensor]
    gradients: list[list[Tensor]]
    weights: list[list[Tensor]]
    end: dict[str, Any]
    training: TextTraining
    true: float | None = None
    """The held-out loss at the end."""

    def error(self, step: int, weights: Sequence[Tensor]) -> float:
        """Of the movement since the base."""
        true = self.weights[step - 1]
        wrong = sum(float((a - b).double().square().sum()) for a, b in zip(weights, true, strict=True))
        moved = sum(float((a - b).double().square().sum()) for a, b in zip(self.start, true, strict=True))
        return (wrong / moved) ** 0.5

    def rise(self, weights: Sequence[Tensor]) -> float:
        """Of the held-out loss, relative, with other weights at the end."""
        self.training.load(self.end)
        if self.true is None:
            self.true = self.training.loss()
        self.training.put(weights)
        return self.training.loss() / self.true - 1


def course(config: GPTConfig, seed: int, beta2: float, before: int) -> Course:
    """Train `before` steps to the base, and then as many as are compared."""
    training = TextTraining(config, seed=seed, beta2=beta2)
    for _ in range(before):
        training.step()
    base, start = training.state(), training.weights()
    gradients, weights = [], []
    for _ in range(max(AFTER)):
        training.backward()
        gradients.append([p.grad.detach().clone() for p in training.parameters if p.grad is not None])
        training.optimizer.step()
        training.scheduler.step()
        weights.append(training.weights())
    return Course(base, start, gradients, weights, training.state(), training)


def small(found: Course, quantization_step: float, off: float = 0.0) -> Row:
    """Our log of weight updates; `off`: the error of a lossy base, in root mean squares of the first update."""
    named = {str(index): tensor for index, tensor in enumerate(found.start)}
    layout = Layout.of(named)
    generator = torch.Generator().manual_seed(3)
    base = {
        name: t
        + off
        * (found.weights[0][int(name)] - t).square().mean().sqrt()
        * torch.randn(t.shape, generator=generator)
        for name, t in named.items()
    }
    reader, sizes = ReadersWeights(layout, base), UpdateSizes(layout, quantization_step)
    sizes.note(0, sizes.sample(named))
    count, spent, taken, first, errors = sum(t.numel() for t in found.start), 0, 0.0, 0.0, {}
    for step, weights in enumerate(found.weights, start=1):
        table, live = TensorTable(), {str(index): tensor for index, tensor in enumerate(weights)}
        started = time.thread_time()
        reader.encode(step, live, lambda arrays, step=step: sizes.scales(step, arrays), table)
        taken += time.thread_time() - started
        spent += sum(len(part) for part in table.parts)
        first = first or 8 * spent / count
        if step in AFTER:
            errors[step] = found.error(step, _ordered(reader))
    done = len(found.weights)
    name = f"small, {quantization_step:g} x rms" + (f", base off by {off:g}" if off else "")
    bits, seconds = 8 * spent / count / done, 1e9 * taken / count / done
    return Row(name, bits, errors, found.rise(_ordered(reader)), seconds, first)


def _ordered(reader: ReadersWeights) -> list[Tensor]:
    tensors = reader.tensors()
    return [tensors[str(index)] for index in range(len(tensors))]


def published(found: Course, share: float, *, feedback: bool, name: str | None = None) -> Row:
    """A log of top-k gradients, replayed step by step."""
    log = TopK(share, feedback=feedback)
    records = [log.record(gradients) for gradients in found.gradients]
    errors, done = {}, 0
    found.training.load(found.base)
    for after in AFTER:
        replay(found.training, records[done:after])
        done = after
        errors[after] = found.error(after, found.training.weights())
    weights = found.training.weights()
    name = name or f"LowDiff, top {share:.1%}" + (", with error feedback" if feedback else "")
    bits = 8 * log.bytes / found.training.count / len(records)
    return Row(name, bits, errors, found.rise(weights))


def summed(found: Course, batch: int) -> Row:
    """Exact gradients, recovered by the published batches of sums."""
    steps = max(AFTER) // batch * batch
    found.training.load(found.base)
    replay(found.training, found.gradients[:steps], batch)
    weights = found.training.weights()
    name = "exact gradients, step by step" if batch == 1 else f"exact gradients, summed by {batch}"
    return Row(name, 32.0, {steps: found.error(steps, weights)}, float("nan"))


def stale(found: Course) -> Row:
    """No log: the base."""
    return Row("no log", 0.0, dict.fromkeys(AFTER, 1.0), found.rise(found.start))


def rows_of(found: Course) -> list[Row]:
    """Every log on one course."""
    ours = [small(found, step) for step in STEPS]
    same = ours[STEPS.index(DEFAULT)].bits / 64  # a value and an index take 64 bits
    return [
        stale(found),
        *ours,
        small(found, DEFAULT, off=10.0),
        *(published(found, share, feedback=False) for share in SHARES),
        published(found, 0.01, feedback=True),
        published(found, same, feedback=False, name=_SAME),
        *(summed(found, batch) for batch in BATCHES),
    ]


def report(config: GPTConfig, *, seeds: int, before: int) -> None:
    """Print the table; medians over the seeds, with the range of the last error."""
    for beta2 in (0.95, 0.999):
        every = [rows_of(course(config, seed, beta2, before)) for seed in range(1, seeds + 1)]
        headings = "log | bits per element and step | ns per element | weight error after 5, 20, 50 steps | loss at 50"
        lines = [_line(rows) for rows in zip(*every, strict=True)]
        show(headings, lines, f"beta2 {beta2}, {seeds} seeds, base after {before} steps")


def _line(rows: Sequence[Row]) -> list[str]:
    middle = statistics.median
    errors = ", ".join(f"{middle([row.errors[at] for row in rows]):.1%}" for at in sorted(rows[0].errors))
    last = [row.errors[max(row.errors)] for row in rows]
    times = [row.nanoseconds for row in rows if row.nanoseconds is not None]
    rise = middle([row.rise for row in rows])
    first = rows[0].first_bits
    note = f" (first {first:.2f})" if first is not None and "off" in rows[0].name else ""
    bits, spread = f"{middle([row.bits for row in rows]):.2f}{note}", f"({min(last):.1%} to {max(last):.1%})"
    nanoseconds = f"{middle(times):.1f}" if times else ""
    return [rows[0].name, bits, nanoseconds, f"{errors} {spread}", "" if rise != rise else f"{rise:+.2%}"]
