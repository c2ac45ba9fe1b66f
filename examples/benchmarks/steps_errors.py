"""How far the weights that a small log gives are from the training's, and those of published gradient logs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from steps_published import TopK, replay, replay_summed
from steps_task import GPTConfig, Training
from torch import Tensor

from shrinkpoint.steps.layout import Layout, UpdateSizes
from shrinkpoint.steps.options import StepLog
from shrinkpoint.steps.record import TensorTable
from shrinkpoint.steps.updates import ReadersWeights, encode_updates

AFTER = (5, 20, 50)
DEFAULT = StepLog.quantization_step
STEPS = (2.0, 4.0, DEFAULT, 8.0, 16.0, 32.0)
SHARES = (0.001, 0.01, 0.1)
BATCHES = (1, 2, 4, 8, 20)
_SMALL = f"small, {DEFAULT:g} x rms"
_SAME = f"LowDiff, top k of as many bytes as {_SMALL}"


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
    training: Training
    batches: list[Tensor]
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
            self.true = self.training.loss(self.batches)
        self.training.put(weights)
        return self.training.loss(self.batches) / self.true - 1


def course(
    text: Tensor, batches: list[Tensor], config: GPTConfig, seed: int, beta2: float, before: int
) -> Course:
    """Train `before` steps to the base, and then as many as are compared."""
    training = Training(text, config, seed=seed, beta2=beta2)
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
    return Course(base, start, gradients, weights, training.state(), training, batches)


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
        encode_updates(reader, step, live, lambda arrays, step=step: sizes.scales(step, arrays), table)
        taken += time.thread_time() - started
        spent += sum(len(part) for part in table.parts)
        first = first or 8 * spent / count
        if step in AFTER:
            errors[step] = found.error(step, _ordered(reader))
    done = len(found.weights)
    name = f"small, {quantization_step:g} x rms" + (f", base off by {off:g}" if off else "")
    return Row(
        name,
        8 * spent / count / done,
        errors,
        found.rise(_ordered(reader)),
        1e9 * taken / count / done,
        first,
    )


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
    replay_summed(found.training, found.gradients[:steps], batch)
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


def report(
    text: Tensor, batches: list[Tensor], config: GPTConfig, *, seeds: int, before: int
) -> dict[str, list[Row]]:
    """Print the table; medians over the seeds, with the range of the last error."""
    found: dict[str, list[Row]] = {}
    for beta2 in (0.95, 0.999):
        every = [rows_of(course(text, batches, config, seed, beta2, before)) for seed in range(1, seeds + 1)]
        print(f"\nbeta2 {beta2}, {seeds} seeds, base after {before} steps\n")
        print(
            "| log | bits per element and step | ns per element | weight error after 5, 20, 50 steps | loss at 50 |"
        )
        print("|---|---:|---:|---|---:|")
        for rows in zip(*every, strict=True):
            print(_line(rows))
            found.setdefault(rows[0].name, []).extend(rows)
    _verdict(found)
    return found


def _line(rows: Sequence[Row]) -> str:
    middle = statistics.median
    errors = ", ".join(f"{middle([row.errors[at] for row in rows]):.1%}" for at in sorted(rows[0].errors))
    last = [row.errors[max(row.errors)] for row in rows]
    times = [row.nanoseconds for row in rows if row.nanoseconds is not None]
    rise = middle([row.rise for row in rows])
    first = rows[0].first_bits
    note = f" (first {first:.2f})" if first is not None and "off" in rows[0].name else ""
    return (
        f"| {rows[0].name} | {middle([row.bits for row in rows]):.2f}{note} | {f'{middle(times):.1f}' if times else ''} |"
        f" {errors} ({min(last):.1%} to {max(last):.1%}) | {'' if rise != rise else f'{rise:+.2%}'} |"
    )


def _verdict(found: dict[str, list[Row]]) -> None:
    ours, after = found[_SMALL], max(AFTER)
    for name in ("LowDiff, top 1.0%", _SAME):
        theirs = found[name]
        ratios = [t.errors[after] / o.errors[after] for o, t in zip(ours, theirs, strict=True)]
        print(
            f"\n{name}, {statistics.median(row.bits for row in theirs):.2f} bits: its weight error after {after} steps is"
            f" {min(ratios):.1f} to {max(ratios):.1f} times that of the small log with"
            f" {statistics.median(row.bits for row in ours):.2f} bits (at most {max(row.bits for row in ours):.2f})"
        )
