"""Rate against distortion of first moments: bits an element, and what they do to the next updates. Prints a table.

    python examples/benchmarks/moments.py [--only gpt,moe-muon] [--seed 1] [--quick]

Trainings of the bench of the bound are taken to a checkpoint in the middle. Its first moments are stored with a greatest loss
that is the same for all of them, beside true second moments; then with the losses that `auto` chooses; then with restored
second moments as well. The training's own optimizer is stepped on copies of its tensors, from the true state and from
the restored one (`shrinkpoint.optimizers.updates`).
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported

import argparse
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]

from bound_training import Kind, Training
from bound_trainings import KINDS

from shrinkpoint.coding.encode import encode_state, restored_values
from shrinkpoint.optimizers.updates import OptimizerKind, Updates, compare_updates, moments_of_direction
from shrinkpoint.quantize.movement import MovementTracker
from shrinkpoint.schemes.auto.factors import Factors
from shrinkpoint.schemes.auto.first_moments import CentroidFirstMomentCodec, CentroidMomentumCodec
from shrinkpoint.schemes.auto.scheme import Auto
from shrinkpoint.schemes.base import SaveContext, TensorCodec
from shrinkpoint.schemes.codec_io import matrix_shape
from shrinkpoint.state.roles import describe_training
from shrinkpoint.state.training import Role, TrainingState

__all__ = ["Middle", "middle_of", "trainings"]

LOSSES = (0.005, 0.02, 0.05, 0.1, 0.2, 0.45)
TRAININGS = ("gpt", "recommender", "vae-lion", "gpt-lion", "moe-muon")
_MIDDLE = 5  # of eleven checkpoints, counted from 0


@dataclass(frozen=True, kw_only=True)
class Middle:
    """A training, and its checkpoint in the middle as a scheme gets to see it."""

    training: Training
    save_context: SaveContext
    kinds: Sequence[OptimizerKind]
    """Of the optimizers."""

    @property
    def state(self) -> TrainingState:
        """The checkpoint; its tensors are copies."""
        return self.save_context.state


def middle_of(kind: Kind, seed: int, quick: bool, place: int = _MIDDLE) -> Middle:
    """Train up to the checkpoint in the middle; how far weights have moved since the one before is known, as in a run.

    Args:
        kind: the training.
        seed: its seed.
        quick: whether the quick form is meant.
        place: of another of the eleven checkpoints, counted from 0.
    """
    training = kind.build(seed, kind, quick)
    before, step = [0, *kind.save_steps("spread", quick)][place : place + 2]
    tracker = MovementTracker()
    for index in range(step):
        if index == before:
            tracker.note(_captured(training), index)
        training.step(index)
    state, kinds = _captured(training), [OptimizerKind.of(each) for each in training.optimizers]
    save_context = SaveContext(
        state=state,
        step=step,
        movement=tracker.since(state, step),
        directions=moments_of_direction(state, kinds),
    )
    return Middle(training=training, save_context=save_context, kinds=kinds)


def _captured(training: Training) -> TrainingState:
    state = {
        "model": training.model.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in training.optimizers],
        "stateful": {name: each.state_dict() for name, each in training.saved.items()},
    }
    describe = describe_training(
        training.model,
        list(training.optimizers),
        model_path=("model",),
        optimizers_path=("optimizers",),
    )
    live = TrainingState.capture(state, describe)
    return TrainingState(live.tree, {n: t.detach().clone() for n, t in live.tensors.items()}, live.specs)


@dataclass(frozen=True, kw_only=True)
class _Moments:
    """What `auto` does with moments; everything else is stored exactly."""

    name: ClassVar[str] = "moments"

    auto: Auto
    loss: float | None = None
    """Of all first moments; None leaves each the one that `auto` chooses."""
    seconds: bool = False
    """Whether second moments are coded too."""

    def codecs(self, state: TrainingState) -> Mapping[str, Callable[[], TensorCodec]]:
        """See `Scheme.codecs`."""
        wanted = (Role.EXP_AVG, *((Role.EXP_AVG_SQ,) if self.seconds else ()))
        makers = self.auto.codecs(state).items()
        return {n: partial(self._codec, make) for n, make in makers if state.specs[n].tag.role in wanted}

    def _codec(self, make: Callable[[], TensorCodec]) -> TensorCodec:
        codec = make()
        if self.loss is None or not isinstance(codec, (CentroidFirstMomentCodec, CentroidMomentumCodec)):
            return codec
        return replace(codec, loss=self.loss)

    def losses(self, state: TrainingState) -> list[float]:
        """Those of first moments, in order of size."""
        codecs = [make() for make in self.codecs(state).values()]
        return sorted({codec.loss for codec in codecs if hasattr(codec, "loss")})

    def describe(self) -> dict[str, Any]:
        """See `Scheme.describe`."""
        return {"name": self.name, "loss": self.loss, "seconds": self.seconds}


@dataclass(frozen=True, kw_only=True)
class _Row:
    label: str
    bits: float
    """Per element of all first moments, without what a container's header has of them."""
    error: float
    """``||m' - m|| / ||m||`` of all together, each in its own units: with Adam, of ``m / sqrt(v)``."""
    length: float
    """``||m'|| / ||m||``, likewise."""
    updates: Updates | str

    @property
    def cells(self) -> list[str]:
        """As they stand in the table."""
        cells = [self.label, f"{self.bits:.2f}", f"{self.error:.2f}", f"{self.length:.2f}"]
        found = self.updates
        if isinstance(found, str):
            return [*cells, *5 * ["-"]]
        shares = (found.error, found.length, found.later_error, found.later_length)
        return [*cells, *(f"{share:.2f}" for share in shares), f"{found.lost_steps:.2f}"]


def measure(middle: Middle) -> list[_Row]:
    """All rows of a training."""
    auto = Auto(save_context=middle.save_context)
    fixed = [_Moments(auto=auto, loss=loss) for loss in LOSSES]
    chosen = _Moments(auto=auto)
    losses = chosen.losses(middle.state)
    label = "`auto`: " + " to ".join(f"{loss:.3g}" for loss in dict.fromkeys((losses[0], losses[-1])))
    rows = [(f"{scheme.loss:g}", scheme) for scheme in fixed] + [(label, chosen)]
    if any(spec.tag.role is Role.EXP_AVG_SQ for spec in middle.state.specs.values()):
        rows.append((f"{label}, and second moments", replace(chosen, seconds=True)))
    return [_row(said, middle, scheme) for said, scheme in rows]


def _row(label: str, middle: Middle, scheme: _Moments) -> _Row:
    state, step = middle.state, middle.save_context.step
    entries = encode_state(state, scheme, step=step, reference=None, parent=None).checkpoint.entries
    firsts = [entry for entry in entries if entry.spec.tag.role is Role.EXP_AVG]
    restored = TrainingState(state.tree, restored_values(state, scheme, None), state.specs)
    away, true, found = (
        sum(sums) for sums in zip(*(_squares(e.spec.name, state, restored) for e in firsts), strict=True)
    )
    return _Row(
        label=label,
        bits=8 * sum(e.encoded.nbytes for e in firsts) / sum(e.spec.numel for e in firsts),
        error=math.sqrt(away / true),
        length=math.sqrt(found / true),
        updates=compare_updates(state, restored, middle.kinds, parameters=_parameters(state)),
    )


def _parameters(state: TrainingState) -> set[str]:
    return {spec.tag.parameter for spec in state.specs.values() if spec.tag.parameter is not None}


def _squares(name: str, true: TrainingState, restored: TrainingState) -> tuple[float, float, float]:
    """The squares of a moment's error, of the moment, and of the restored one, in units, where it has one."""
    moment, values = true.tensors[name].double(), restored.tensors[name].double()
    folder = name.rpartition("/")[0]
    seconds = [other for other, spec in true.specs.items() if spec.tag.role is Role.EXP_AVG_SQ]
    beside = [other for other in seconds if other.rpartition("/")[0] == folder]
    if beside:
        units, others = (state.tensors[beside[0]].double().sqrt() for state in (true, restored))
    else:
        matrix = true.tensors[name].reshape(matrix_shape(tuple(moment.shape))).numpy()
        units = torch.from_numpy(Factors.of_roots(matrix).product()).reshape(moment.shape).double()
        others = units
    used = units > torch.finfo(torch.float32).tiny ** 0.5 if beside else units > 0
    one, other = moment[used] / units[used], values[used] / others[used]
    return float((other - one).square().sum()), float(one.square().sum()), float(other.square().sum())


_HEAD = (
    "loss allowed", "bits", "error", "length", "update: error", "length", "ten updates: error", "length", "lost steps",
)  # fmt: skip


def table(kind: Kind, middle: Middle, rows: Sequence[_Row]) -> str:
    """Markdown, with a title."""
    lines = [
        f"### {kind.title} ({kind.name}, step {middle.save_context.step})",
        "",
        "| " + " | ".join(_HEAD) + " |",
        "|---" * len(_HEAD) + "|",
        *("| " + " | ".join(row.cells) + " |" for row in rows),
    ]
    untried = dict.fromkeys(row.updates for row in rows if isinstance(row.updates, str))
    return "\n".join([*lines, *(f"\nUpdates were not tried: {why}." for why in untried), ""])


def trainings(given: str) -> list[Kind]:
    """For argparse: kinds by their names, between commas."""
    unknown = [name for name in given.split(",") if name not in KINDS]
    if unknown:
        raise argparse.ArgumentTypeError(
            f"no such training: {', '.join(unknown)}; there are {', '.join(KINDS)}"
        )
    return [KINDS[name] for name in given.split(",")]


def main(given: Sequence[str] | None = None) -> None:
    """Measure and print, training by training."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", type=trainings, default=",".join(TRAININGS))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="tiny models: whether it runs, no results")
    arguments = parser.parse_args(given)
    torch.set_num_threads(1)
    for kind in arguments.only:
        middle = middle_of(kind, arguments.seed, arguments.quick)
        print(table(kind, middle, measure(middle)), flush=True)


if __name__ == "__main__":
    main()
