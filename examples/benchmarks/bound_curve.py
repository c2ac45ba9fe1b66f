"""What a restore costs over the steps after it, by weights and by moments. Prints a table and writes docs/bound_curve.svg.

    python examples/benchmarks/bound_curve.py [--only gpt,gpt-lion] [--seeds 2] [--out FILE] [--quick]

Trainings of the bench of the bound go on from a checkpoint in the middle, on the same batches: undisturbed; with the weights
that `auto` restores at half of its greatest scale; with its moments alone; and with both. Every path with noise in its
weights is gone twice, the second time with the error's sign changed, and the mean counts: what is left is no luck of a
first order.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported

import argparse
import copy
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

import torch
from torch import Tensor

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]

from bound_training import Kind, Training
from moments import Middle, middle_of, trainings
from schemes_picture import FAINT, GRID, INK

from shrinkpoint.coding.encode import restored_values
from shrinkpoint.schemes.auto.scheme import Auto
from shrinkpoint.state.training import Role, TrainingState

OUT = Path(__file__).resolve().parents[2] / "docs" / "bound_curve.svg"
TRAININGS = ("gpt", "recommender", "fine-tuning", "gpt-lion")
SCALE = 0.5
MARKS, QUICK_MARKS = (0, 1, 2, 5, 10, 20, 40), (0, 1, 2)
WORDS = "Same batches on all paths. Bold: mean of the seeds; thin: each seed. Steps on a logarithmic scale."
PATHS = {"weights": "#0b69a3", "moments": "#e67e00", "both": "#1f2933"}
"""What is restored, and its colour; everything else is true."""

_WEIGHTS = (Role.WEIGHT, Role.MASTER)
_MOMENTS = (Role.EXP_AVG, Role.EXP_AVG_SQ)

Rises = Mapping[str, Sequence[float]]
"""By path, the rise of the loss at each mark, as a share of the undisturbed one."""


@dataclass(frozen=True, kw_only=True)
class Curves:
    """Of one training."""

    kind: Kind
    step: int
    """Of the checkpoint."""
    marks: Sequence[int]
    seeds: Sequence[Rises]

    def mean(self, path: str) -> list[float]:
        """Over all seeds."""
        return _means([seed[path] for seed in self.seeds])


def _means(rows: Sequence[Sequence[float]]) -> list[float]:
    return [sum(column) / len(rows) for column in zip(*rows, strict=True)]


def measure(kind: Kind, seeds: int, quick: bool) -> Curves:
    """Of all seeds from 1 on."""
    marks = QUICK_MARKS if quick else MARKS
    middles = (middle_of(kind, seed + 1, quick) for seed in range(seeds))
    found = [(middle.save_context.step, _rises(middle, marks)) for middle in middles]
    return Curves(kind=kind, step=found[0][0], marks=marks, seeds=[rises for _, rises in found])


def _rises(middle: Middle, marks: Sequence[int]) -> Rises:
    restored = restored_values(middle.state, Auto(save_context=middle.save_context, scale=SCALE), None)
    weights, moments = (_of(middle.state, restored, roles) for roles in (_WEIGHTS, _MOMENTS))
    mirrored = {name: 2 * middle.state.tensors[name] - value for name, value in weights.items()}
    paths: dict[str, list[Mapping[str, Tensor]]] = {
        "weights": [weights, mirrored],
        "moments": [moments],
        "both": [{**weights, **moments}, {**mirrored, **moments}],
    }
    undisturbed = _losses(middle, {}, marks)
    losses = {path: _means([_losses(middle, each, marks) for each in paths[path]]) for path in paths}
    return {p: [mean / loss - 1 for mean, loss in zip(losses[p], undisturbed, strict=True)] for p in paths}


def _of(state: TrainingState, values: Mapping[str, Tensor], roles: Sequence[Role]) -> dict[str, Tensor]:
    """The tensors of such roles that are not what they were."""
    wanted = (name for name, spec in state.specs.items() if spec.tag.role in roles)
    return {name: values[name] for name in wanted if not torch.equal(values[name], state.tensors[name])}


def _losses(middle: Middle, changed: Mapping[str, Tensor], marks: Sequence[int]) -> list[float]:
    """The loss on the truth's batches, so many steps after the checkpoint, of which some tensors are others."""
    training, state = middle.training, middle.state
    _load(training, TrainingState(state.tree, {**state.tensors, **changed}, state.specs))
    losses, done = [], 0
    for mark in marks:
        for index in range(done, mark):
            training.step(middle.save_context.step + index)
        losses.append(training.final())
        done = mark
    return losses


def _load(training: Training, state: TrainingState) -> None:
    """Put everything where the state has it; copies, for training goes on in place."""
    saved = copy.deepcopy(state.to_object())
    assert isinstance(saved, dict)
    training.model.load_state_dict(saved["model"])
    for optimizer, own in zip(training.optimizers, saved["optimizers"], strict=True):
        optimizer.load_state_dict(own)
    for name, each in training.saved.items():
        each.load_state_dict(saved["stateful"][name])


def table(found: Sequence[Curves]) -> str:
    """Markdown: rises in percent, the mean of all seeds and the least and greatest."""
    marks = found[0].marks
    head = f"| training | restored | {' | '.join(f'after {mark}' for mark in marks)} |"
    lines = [head, "|---" * (len(marks) + 2) + "|"]
    for curves in found:
        for path in PATHS:
            columns = zip(curves.mean(path), *(seed[path] for seed in curves.seeds), strict=True)
            cells = [_percent(mean, every) for mean, *every in columns]
            lines.append(f"| {curves.kind.name}, step {curves.step} | {path} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _percent(mean: float, every: Sequence[float]) -> str:
    return f"{100 * mean:+.3f} ({100 * min(every):+.3f} to {100 * max(every):+.3f})"


_WIDTH, _LEFT, _GAP, _RIGHT = 1080, 96, 108, 24
_TOP, _HEIGHT, _ROW = 124, 200, 300
_ACROSS = (_WIDTH - _LEFT - _GAP - _RIGHT) / 2
_STROKES = {path: 'stroke-width="2.4"' + ' stroke-dasharray="8 5"' * (path == "both") for path in PATHS}
_SMALL, _BOLD = 'font-size="12"', 'font-weight="600"'


@dataclass(frozen=True, kw_only=True)
class _Panel:
    left: float
    top: float
    last: int
    low: float
    high: float

    def x(self, steps: float) -> float:
        return self.left + _ACROSS * math.log1p(steps) / math.log1p(self.last)

    def y(self, rise: float) -> float:
        return self.top + _HEIGHT * (self.high - rise) / (self.high - self.low)


def _text(x: float, y: float, words: str, style: str = "", *, anchor: str = "start", color: str = INK) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text {place} fill="{color}" {style}>{escape(words)}</text>'


def _line(points: Sequence[tuple[float, float]], color: str, style: str = "") -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{path}" fill="none" stroke="{color}" {style}/>'


def _tick(span: float) -> float:
    """A round distance of which three to seven fit."""
    decade: float = 10.0 ** math.floor(math.log10(span / 3))
    return next(decade * step for step in (5, 2, 1) if decade * step <= span / 3)


def _frame(curves: Curves, panel: _Panel) -> list[str]:
    left, top, right, bottom = panel.left, panel.top, panel.left + _ACROSS, panel.top + _HEIGHT
    parts = [_text(left, top - 12, curves.kind.title, _BOLD)]
    tick = _tick(panel.high - panel.low)
    for count in range(math.ceil(panel.low / tick), math.floor(panel.high / tick) + 1):
        y, label = panel.y(count * tick), f"{100 * count * tick:+.3g} %" if count else "0"
        parts.append(_line([(left, y), (right, y)], GRID if count else FAINT))
        parts.append(_text(left - 8, y + 4, label, _SMALL, anchor="end", color=FAINT))
    for mark in curves.marks:
        x = panel.x(mark)
        parts.append(_line([(x, top), (x, bottom)], GRID))
        parts.append(_text(x, bottom + 18, str(mark), _SMALL, anchor="middle", color=FAINT))
    below = f"steps after the restore at step {curves.step}"
    parts.append(_text(right, bottom + 36, below, _SMALL, anchor="end", color=FAINT))
    turned = f'{_SMALL} transform="translate({left - 70:.1f} {(top + bottom) / 2:.1f}) rotate(-90)"'
    return [*parts, _text(0, 0, "rise of the loss", turned, anchor="middle", color=FAINT)]


def _drawn(curves: Curves, left: float, top: float) -> list[str]:
    every = [rise for seed in curves.seeds for path in PATHS for rise in seed[path]]
    low, high = min(0.0, *every), max(0.0, *every)
    room = max(high - low, 1e-5) / 12
    panel = _Panel(left=left, top=top, last=curves.marks[-1], low=low - room, high=high + room)

    def points(rises: Sequence[float]) -> list[tuple[float, float]]:
        return [(panel.x(mark), panel.y(rise)) for mark, rise in zip(curves.marks, rises, strict=True)]

    parts, bold = _frame(curves, panel), []
    for path, color in PATHS.items():
        for seed in curves.seeds if len(curves.seeds) > 1 else ():
            parts.append(_line(points(seed[path]), color, 'stroke-width="1" stroke-opacity="0.35"'))
        mean = points(curves.mean(path))
        bold.append(_line(mean, color, _STROKES[path]))
        bold += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.6" fill="{color}"/>' for x, y in mean]
    return parts + bold


def picture(found: Sequence[Curves]) -> str:
    """An SVG document with a panel for every training, two in a row."""
    height = _TOP + _ROW * math.ceil(len(found) / 2) - 40
    title = "Rise of the held-out loss after one restore, beside the undisturbed run"
    body = [_text(24, 34, title, f'font-size="17" {_BOLD}'), _text(24, 56, WORDS, _SMALL, color=FAINT)]
    x = 24.0
    for path, color in PATHS.items():
        label = f"{path} restored" if path == "both" else f"only {path} restored"
        body += [_line([(x, 78), (x + 24, 78)], color, _STROKES[path]), _text(x + 32, 82, label)]
        x += 70 + 7.2 * len(label)
    for index, curves in enumerate(found):
        body += _drawn(curves, _LEFT + index % 2 * (_ACROSS + _GAP), _TOP + index // 2 * _ROW)
    size = f'viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" font-family="system-ui, sans-serif"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-size="13"><title>{title}</title>'
    return "\n".join([head, f'<rect width="{_WIDTH}" height="{height}" fill="#ffffff"/>', *body, "</svg>\n"])


def main(given: Sequence[str] | None = None) -> None:
    """Measure, print and draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", type=trainings, default=",".join(TRAININGS))
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--quick", action="store_true", help="tiny models: whether it runs, no results")
    arguments = parser.parse_args(given)
    torch.set_num_threads(1)
    found = [measure(kind, arguments.seeds, arguments.quick) for kind in arguments.only]
    print(table(found))
    arguments.out.write_text(picture(found))


if __name__ == "__main__":
    main()
