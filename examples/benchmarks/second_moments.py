"""Ways to restore Adam's second moment: bits, what they do to the next updates, and to the loss some steps later. Prints a table.

    python examples/benchmarks/second_moments.py [--only gpt,recommender] [--seeds 2] [--at 6] [--quick]

Trainings of the bench of the bound are taken to a checkpoint, the one in the middle unless another is named, of which the moments alone are restored. Second
moments are a row times a column; that times a residual in levels of so many octaves; every element to a share of itself; or
exact. `auto` takes the first or, with levels of half an octave, the last but one. First moments are coded as they are, or such that they make up for what second ones have lost
(`auto`). For the columns of updates their levels are so fine that nothing else is lost.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]

from bound_curve import _losses
from bound_training import Kind
from moments import Middle, middle_of, trainings

from shrinkpoint.entropy.lanes.coder import encode_matrix
from shrinkpoint.entropy.lanes.trellis import row_width
from shrinkpoint.optimizers.updates import Updates, compare_updates
from shrinkpoint.schemes.auto.first_moments import CentroidFirstMomentCodec
from shrinkpoint.schemes.auto.log_levels import LogLevelsCodec
from shrinkpoint.schemes.auto.scheme import Auto
from shrinkpoint.schemes.auto.second_moments import FactoredSecondMomentCodec
from shrinkpoint.schemes.base import Context
from shrinkpoint.schemes.codec_io import matrix_shape
from shrinkpoint.state.training import Role, TensorSpec, TrainingState

TRAININGS = ("gpt", "recommender", "forecasting", "fine-tuning")
MARKS, QUICK_MARKS = (5, 10, 20, 40), (1, 2)
_FINE = 0.05  # step of first moments, of which 0.001 of the update's square remains
_FARTHEST = 9  # levels of a residual

Coded = tuple[Tensor, int]
"""What a reader gets, and its bytes."""
Way = Callable[[Tensor, Tensor, TensorSpec], Coded]
"""Codes a second moment; the second tensor is the first one."""


def factored(second: Tensor, first: Tensor, spec: TensorSpec) -> Coded:
    """A row times a column."""
    coded = FactoredSecondMomentCodec(first_moment=first).encode(second, spec, Context())
    return coded.value, coded.encoded.nbytes


def by_element(sixteenths: int) -> Way:
    """Levels of so many sixteenths of an octave, with dither."""

    def code(second: Tensor, first: Tensor, spec: TensorSpec) -> Coded:
        coded = LogLevelsCodec(step=sixteenths, divides=True).encode(second, spec, Context())
        return coded.value, coded.encoded.nbytes

    return code


def exactly(second: Tensor, first: Tensor, spec: TensorSpec) -> Coded:
    """Bytes are not counted."""
    return second, 0


def with_residual(octaves: float) -> Way:
    """A row times a column times a power of two: the nearest level, which stands for what keeps its updates' length."""

    def code(second: Tensor, first: Tensor, spec: TensorSpec) -> Coded:
        product, size = factored(second, first, spec)
        quotient = (second.double() / product.double().clamp(min=1e-45)).reshape(-1).numpy()
        used = quotient > 0
        away = np.log2(quotient, where=used, out=np.zeros_like(quotient))
        levels = np.clip(np.rint(away / octaves), -_FARTHEST, _FARTHEST).astype(np.int64)
        factors = np.ones_like(quotient)
        for level in np.unique(levels):
            factors[levels == level] = quotient[used & (levels == level)].mean()
        width = row_width(*matrix_shape(spec.shape))
        size += len(encode_matrix(levels.astype(np.int16), None, width=width, predictable=True))
        return (product.double() * torch.from_numpy(factors).reshape(product.shape)).float(), size

    return code


WAYS: Mapping[str, tuple[Way, bool]] = {
    "row x column; first moments as they are": (factored, False),
    "row x column": (factored, True),
    "and a residual, 2 octaves": (with_residual(2), True),
    "and a residual, 1 octave": (with_residual(1), True),
    "each to a share of itself, 1 octave": (by_element(16), True),
    "each to a share of itself, half an octave": (by_element(8), True),
    "exact": (exactly, True),
}
"""How second moments are restored, and whether first ones make up for what is lost."""


@dataclass(frozen=True, kw_only=True)
class _Found:
    bits: tuple[float, float]
    """Per element, of second and of first moments."""
    updates: Updates
    rises: Sequence[float]
    """Of the loss at the marks, as shares of the undisturbed one."""

    @property
    def numbers(self) -> list[float]:
        found = self.updates
        shares = (found.error, found.length, found.later_error, found.later_length)
        return [*self.bits, *shares, *(100 * rise for rise in self.rises)]


def measure(middle: Middle, marks: Sequence[int]) -> Iterator[_Found]:
    """All ways, in order."""
    undisturbed = _losses(middle, {}, marks)
    for way, follows in WAYS.values():
        restored, bits = _restored(middle, way, follows, None)
        fine, _ = _restored(middle, way, follows, _FINE)
        state = middle.state
        tried = TrainingState(state.tree, {**state.tensors, **fine}, state.specs)
        parameters = {spec.tag.parameter for spec in state.specs.values() if spec.tag.parameter is not None}
        updates = compare_updates(state, tried, middle.kinds, parameters=parameters)
        if isinstance(updates, str):
            raise TypeError(f"updates of {middle.training.optimizers} cannot be tried: {updates}")
        losses = _losses(middle, restored, marks)
        rises = [loss / other - 1 for loss, other in zip(losses, undisturbed, strict=True)]
        yield _Found(bits=bits, updates=updates, rises=rises)


def _restored(
    middle: Middle, way: Way, follows: bool, step: float | None
) -> tuple[dict[str, Tensor], tuple[float, float]]:
    """The moments that have a second one, and bits per element."""
    state, found, sizes, elements = middle.state, dict[str, Tensor](), [0, 0], 0
    for name, make in Auto(save_context=middle.save_context).codecs(state).items():
        codec = make() if state.specs[name].tag.role is Role.EXP_AVG else None
        if not isinstance(codec, CentroidFirstMomentCodec) or codec.second_moment is None:
            continue
        second = next(n for n, tensor in state.tensors.items() if tensor is codec.second_moment)
        value, size = way(codec.second_moment, state.tensors[name], state.specs[second])
        told = codec if follows else replace(codec, second_moment=None)
        coded = replace(told, step=step).encode(
            state.tensors[name], state.specs[name], Context(siblings={Role.EXP_AVG_SQ.value: value})
        )
        found |= {second: value, name: coded.value}
        sizes = [sizes[0] + size, sizes[1] + coded.encoded.nbytes]
        elements += value.numel()
    return found, (8 * sizes[0] / elements, 8 * sizes[1] / elements)


def table(kind: Kind, marks: Sequence[int], seeds: Sequence[Sequence[_Found]]) -> str:
    """Markdown, of the means of the seeds."""
    head = [
        "second moments",
        "bits of v",
        "bits of m",
        "update: error",
        "length",
        "ten updates: error",
        "length",
    ]
    head += [f"loss after {mark} steps, %" for mark in marks]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for label, found in zip(WAYS, zip(*seeds, strict=True), strict=True):
        rows = np.array([each.numbers for each in found])
        cells = [f"{mean:.2f}" for mean in rows.mean(axis=0)[:6]]
        cells += [f"{m:+.3f} ({low:+.3f} to {high:+.3f})" for m, low, high in _spans(rows[:, 6:])]
        lines.append(f"| {label} | " + " | ".join(cells) + " |")
    return f"### {kind.title} ({kind.name})\n\n" + "\n".join(lines) + "\n"


def _spans(rows: np.ndarray) -> Iterator[tuple[float, float, float]]:
    yield from zip(rows.mean(axis=0), rows.min(axis=0), rows.max(axis=0), strict=True)


def main(given: Sequence[str] | None = None) -> None:
    """Measure and print, training by training."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", type=trainings, default=",".join(TRAININGS))
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument(
        "--at", type=int, choices=range(1, Kind.SAVES + 1), default=6, help="which checkpoint"
    )
    parser.add_argument("--quick", action="store_true", help="tiny models: whether it runs, no results")
    arguments = parser.parse_args(given)
    torch.set_num_threads(1)
    marks = QUICK_MARKS if arguments.quick else MARKS
    for kind in arguments.only:
        seeds = range(1, arguments.seeds + 1)
        middles = (middle_of(kind, seed, arguments.quick, arguments.at - 1) for seed in seeds)
        print(table(kind, marks, [list(measure(middle, marks)) for middle in middles]), flush=True)


if __name__ == "__main__":
    main()
