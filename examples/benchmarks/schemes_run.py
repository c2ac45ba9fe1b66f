"""What one scheme costs and spares on one training: sizes, and losses after restores.

Every scheme is compared as published, as mended, and swept where size trades for loss. Trained are the demo's GPT with two settings of
beta2, and a small convolutional network over the same text. Its held-out loss is smooth and far from overfitting, which that of a
classifier of the few pictures that are on every machine is not.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent / "baselines"))

import torch
from baselines import (
    AdaptiveOptions,
    DeltaDnnOptions,
    GoboOptions,
    PartialOptions,
    ScarOptions,
    UniformOptions,
)
from cells import Cell
from gpt import GPT, GPTConfig, build_optimizer, load_corpus, val_batches
from torch import Tensor
from trainings.base import Run, mean_loss, training
from trainings.data import windows
from trainings.text import CausalConvolutions, next_loss

from shrinkpoint.coding.encode import encode_state
from shrinkpoint.coding.selective import Decoded, decode_chain, in_memory
from shrinkpoint.container.writer import write_container
from shrinkpoint.engine.movement import MovementTracker
from shrinkpoint.schemes.auto.options import AutoOptions
from shrinkpoint.schemes.base import ReferenceState, SaveContext, Scheme
from shrinkpoint.schemes.catalogue import build, options_of
from shrinkpoint.schemes.inshrinkerator.scheme import Inshrinkerator, InshrinkeratorOptions, Weights
from shrinkpoint.schemes.inshrinkerator.space import Configuration
from shrinkpoint.schemes.published.excp_codecs import ExcpOptions
from shrinkpoint.schemes.published.lc_checkpoint import LCCheckpointOptions
from shrinkpoint.state.roles import describe_training
from shrinkpoint.state.training import Role, TrainingState

PARTS = ("chain", "restores")
KEYS = ("model", "every", "seed", "part", "scheme", "setting", "quick")
"""Columns that tell cells apart."""
WIDE = 200
"""From so many steps between saves on there are few of them."""


# --- settings -----------------------------------------------------------------------------------------------

_MATRICES: dict[str, Any] = {"matrices_only": True, "min_elements": 2000}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One scheme with its options."""

    scheme: str
    label: str
    options: Any = None
    configuration: Configuration | None = None
    """Of Inshrinkerator, which has no settings of its own but those that its search chooses."""
    restores: bool = False
    """Whether runs are restored ten times with it: the few that stand for their scheme."""

    def build(self, save_context: SaveContext) -> Scheme:
        """The scheme for one save."""
        if self.configuration is None:
            return build(self.scheme, self.options, save_context)
        options = self.options or InshrinkeratorOptions()
        weights = Weights(save_context.state, options, save_context.gradients)
        return Inshrinkerator(options, weights, self.configuration)


def _auto() -> Iterator[Setting]:
    for scale in (0.125, 0.25, 0.375, 0.5, 0.75, 0.875, 1.0, 1.5, 2.0, 3.0):
        options = AutoOptions(weight_scale=scale)
        often = scale not in (0.375, 0.75, 0.875, 3.0)
        yield Setting(scheme="auto", label=f"scale {scale:g}", options=options, restores=often)


def _excp() -> Iterator[Setting]:
    """As published but for one-dimensional parameters, then with the second moments restored as row times column, which is the
    better half, and at last with one-dimensional parameters too, as the repository has it.
    """
    for refill, words in (("none", ""), ("factored", ", refilled")):
        for alpha in (5e-5, 2e-4, 5e-4, 1e-3, 3e-3):
            options = ExcpOptions(alpha=alpha, refill=refill, **_MATRICES)
            often = alpha in (5e-5, 1e-3)
            yield Setting(scheme="excp", label=f"alpha {alpha:g}{words}", options=options, restores=often)
    for alpha in (1e-4, 2e-4, 3e-4, 5e-4, 1e-3):
        more = {"refill": "factored", "coder": "rans", "base_moments": "quantized", **_MATRICES}
        options = ExcpOptions(alpha=alpha, **more)
        yield Setting(scheme="excp", label=f"alpha {alpha:g}, refilled, rANS, lossy base", options=options)
    for alpha in (5e-5, 2e-4, 5e-4, 1e-3, 3e-3):
        yield Setting(scheme="excp", label=f"alpha {alpha:g}, vectors", options=ExcpOptions(alpha=alpha))


def _inshrinkerator() -> Iterator[Setting]:
    mild = Configuration(bins=32, prune=0.0, protect=0.01, metric="sensitivity", embedding_bins=32)
    harsh = Configuration(bins=8, prune=0.3, protect=0.005, metric="sensitivity", embedding_bins=16)
    for label, configuration in (("mild", mild), ("harsh", harsh)):
        yield Setting(scheme="inshrinkerator", label=label, configuration=configuration, restores=True)


def _weights_only() -> Iterator[Setting]:
    """The schemes for weights: as published, moments exact; and swept, with Adam's moments in levels, for the whole state."""
    swept: Sequence[tuple[str, str, Any]] = (
        ("lc-checkpoint", "2 bit", LCCheckpointOptions(bits=2)),
        ("lc-checkpoint", "3 bit", LCCheckpointOptions()),
        ("uniform", "by entropy", UniformOptions()),
        ("uniform", "8 bit", UniformOptions(bits=8)),
        ("adaptive", "4 bit", AdaptiveOptions()),
        ("adaptive", "8 bit", AdaptiveOptions(bits=8)),
        ("gobo", "3 bit", GoboOptions()),
        ("gobo", "5 bit", GoboOptions(bits=5)),
        ("delta-dnn", "1e-2", DeltaDnnOptions(error_bound=1e-2)),
        ("delta-dnn", "1e-3", DeltaDnnOptions()),
        ("topn", "a tenth", PartialOptions()),
        ("topn", "half", PartialOptions(fraction=0.5)),
        ("scar", "an eighth", ScarOptions()),
        ("scar", "half", ScarOptions(fraction=0.5)),
    )  # fmt: skip
    for scheme, label, options in swept:
        if options == options_of(scheme):
            yield Setting(scheme=scheme, label=label, options=options, restores=True)
        moments = replace(options, moments="levels")
        yield Setting(scheme=scheme, label=f"{label}, moments too", options=moments)


SETTINGS: tuple[Setting, ...] = (
    *_auto(),
    *_excp(),
    *_inshrinkerator(),
    *_weights_only(),
    Setting(scheme="lossless", label="exact"),
)


def known(texts: Iterable[str]) -> list[str]:
    """What the user named: schemes, or ``scheme:label``; several by commas where no label holds one. Others are a `ValueError`."""
    names = {name for s in SETTINGS for name in (s.scheme, f"{s.scheme}:{s.label}")}
    found = [name for text in texts for name in ([text] if text in names else text.split(","))]
    unknown = sorted(set(found) - names)
    if unknown:
        raise ValueError(f"no setting is called {', '.join(unknown)}; there are {'; '.join(sorted(names))}")
    return found


def chosen(settings: Sequence[Setting], only: Collection[str]) -> list[Setting]:
    """The settings whose scheme, or ``scheme:label``, is named; all of them if nothing is."""
    return [s for s in settings if not only or s.scheme in only or f"{s.scheme}:{s.label}" in only]


# --- trainings ----------------------------------------------------------------------------------------------

MODELS: dict[str, tuple[Callable[[GPTConfig], Any], float]] = {
    "gpt": (GPT, 0.95),
    "gpt-999": (GPT, 0.999),
    "conv": (lambda config: CausalConvolutions(config.width, 2 * config.layers, (1, 2, 4, 8, 16)), 0.999),
}
"""By name, with beta2; all are trained with AdamW."""


_corpus = cache(load_corpus)


@dataclass(frozen=True, kw_only=True)
class Course:
    """One training: what is trained, from which seed, when it is saved, and where its losses are compared."""

    model: str
    seed: int
    every: int
    quick: bool = False

    @property
    def marks(self) -> tuple[int, ...]:
        """Resumed steps after which a restored run is compared with the undisturbed one."""
        return (0, 1, 2, 4) if self.quick else (0, 5, 20, 40)

    @property
    def save_steps(self) -> range:
        """The steps after which checkpoints are written: ten, or four that are far apart."""
        saves = 3 if self.quick else 4 if self.every >= WIDE else 10
        return range(self.every, self.every * saves + 1, self.every)

    @property
    def steps(self) -> int:
        """Of the whole training: evenly spread saves leave one more interval behind the last one."""
        return self.save_steps[-1] + self.every

    @property
    def probes(self) -> tuple[int, int]:
        """The two checkpoints, the middle one and the last, from which restored runs are compared."""
        return self.save_steps[(len(self.save_steps) - 1) // 2], self.save_steps[-1]


@dataclass(frozen=True, kw_only=True)
class Task:
    """One cell."""

    course: Course
    part: str
    setting: Setting

    @property
    def key(self) -> dict[str, Any]:
        """Its place among the cells."""
        named = {"part": self.part, "scheme": self.setting.scheme, "setting": self.setting.label}
        return {**vars(self.course), **named}


class Position:
    """A training that can be stopped, looked at, and put elsewhere."""

    def __init__(self, course: Course) -> None:
        config = GPTConfig(steps=course.steps, warmup=min(100, course.steps // 5))
        if course.quick:
            config = replace(config, width=32, layers=2, heads=2, block=64, warmup=10)
        build, beta2 = MODELS[course.model]
        torch.manual_seed(course.seed)
        model = build(config)
        optimizer, schedule = build_optimizer(model, config)
        for group in optimizer.param_groups:
            group["betas"] = (0.9, beta2)
        text, held = _corpus()
        held_out = val_batches(held, config, count=4 if course.quick else 24)

        def batch(drawn: torch.Generator) -> Tensor:
            return windows(text, config.batch, config.block + 1, drawn)

        loss = partial(next_loss, model)
        made = Run(seed=course.seed, steps=course.steps, every=course.every, quick=course.quick)
        self._made = training(made, model, loss, batch, ([], []), optimizer, clip=1.0, scheduler=schedule)
        self.loss, self.step = mean_loss(model, loss, held_out), 0
        paths = {"model_path": ("model",), "optimizers_path": ("optimizers",)}
        self._describe = describe_training(model, [optimizer], **paths)

    def run(self, to: int) -> None:
        """Train until so many steps are done."""
        while self.step < to:
            self._made.step(self.step)
            self.step += 1

    def state(self) -> TrainingState:
        """Copy the whole state, as a framework would save it."""
        made = self._made
        live = {
            "model": made.model.state_dict(),
            "optimizers": [made.optimizers[0].state_dict()],
            "schedule": made.scheduler.state_dict(),
            "step": self.step,
        }
        return _copy(TrainingState.capture(live, self._describe))

    def load(self, state: TrainingState) -> None:
        """Go on from a state; its tensors are not touched."""
        # the optimizer keeps the tensors that it is given, and training changes them
        saved = _copy(state).to_object()
        self._made.model.load_state_dict(saved["model"])
        self._made.optimizers[0].load_state_dict(saved["optimizers"][0])
        self._made.scheduler.load_state_dict(saved["schedule"])
        self.step = saved["step"]


def _copy(state: TrainingState) -> TrainingState:
    tensors = {name: tensor.detach().clone() for name, tensor in state.tensors.items()}
    return TrainingState(state.tree, tensors, state.specs)


@lru_cache(maxsize=1)
def undisturbed(course: Course) -> tuple[dict[int, TrainingState], dict[int, float]]:
    """Train without any restore: the states at the saves, and the losses wherever another run is compared with it."""
    position, states, losses = Position(course), {}, {}
    marked = {save + mark for save in course.probes for mark in course.marks} | {course.steps}
    states[0] = position.state()
    for step in sorted({*course.save_steps, *marked}):
        position.run(step)
        if step in marked:
            losses[step] = position.loss()
        if step in course.save_steps:
            states[step] = position.state()
    return states, losses


class Chain:
    """A base and its deltas, coded one after another as the library's own saver does, of a training from its start on."""

    def __init__(self, setting: Setting, start: TrainingState) -> None:
        self._setting = setting
        self.files: list[bytes] = []
        self.sizes = {
            kind: dict.fromkeys(("raw", "stored", "raw_weights", "weights"), 0) for kind in ("base", "delta")
        }
        """In bytes, of all checkpoints of a kind: in memory, and as files; and of the weights, their sections."""
        self._held: dict[str, ReferenceState] | None = None
        self._parent: str | None = None
        self._restored = False
        self._movement = MovementTracker()
        self._movement.note(start, 0)

    def add(self, state: TrainingState, step: int) -> None:
        """Code a state as the next checkpoint."""
        known = {
            "reference": self._held,
            "restored": self._restored,
            "movement": self._movement.since(state, step),
        }
        save_context = SaveContext(state=state, step=step, **known)
        scheme = self._setting.build(save_context)
        coded = encode_state(state, scheme, step=step, reference=self._held, parent=self._parent)
        self.files.append(write_container(coded.checkpoint))
        weights = [entry for entry in coded.checkpoint.entries if entry.spec.tag.role is Role.WEIGHT]
        sizes = self.sizes[coded.checkpoint.kind]
        sizes["raw"] += sum(entry.spec.nbytes for entry in coded.checkpoint.entries)
        sizes["stored"] += len(self.files[-1])
        sizes["raw_weights"] += sum(entry.spec.nbytes for entry in weights)
        sizes["weights"] += sum(entry.encoded.nbytes for entry in weights)
        self._held, self._parent = dict(coded.reference), coded.checkpoint.state_digest
        self._restored = False
        self._movement.note(state, step)

    def read(self, count: int | None = None) -> Decoded:
        """Decode what a reader gets of the last one of so many checkpoints; None counts all."""
        return decode_chain([*map(in_memory, self.files[:count])])

    def restore(self) -> TrainingState:
        """Decode the last checkpoint, from which training, and the chain, then go on."""
        decoded = self.read()
        self._held, self._restored = dict(decoded.reference), True
        self._movement.note(decoded.state, decoded.header.step)
        return decoded.state


def measure(task: Task) -> Cell:
    """Measure a cell.

    ``chain``: the undisturbed run's states as a chain, and what a restore of two of them costs, at once and steps later;
    ``restores``: a run that goes on from what a reader gets of every one of its checkpoints, against the undisturbed one.
    """
    course, (states, losses) = task.course, undisturbed(task.course)
    chain, position = Chain(task.setting, states[0]), Position(course)
    if task.part == "restores":
        position.load(states[course.save_steps[0]])  # until there, nothing disturbs it
        for step in course.save_steps:
            position.run(step)
            chain.add(position.state(), step)
            position.load(chain.restore())
        position.run(course.steps)
        return {"sizes": chain.sizes, "rise": position.loss() / losses[course.steps] - 1}
    for step in course.save_steps:
        chain.add(states[step], step)
    probes = [_rises(course, position, chain, losses, step) for step in course.probes]
    return {
        "sizes": chain.sizes,
        "rises": {mark: sum(probe[mark] for probe in probes) / len(probes) for mark in course.marks},
    }


def _rises(
    course: Course, position: Position, chain: Chain, losses: dict[int, float], step: int
) -> dict[int, float]:
    """Rises of the loss over the undisturbed run's, after some steps from a restore."""
    position.load(chain.read(course.save_steps.index(step) + 1).state)
    rises = {}
    for mark in course.marks:
        position.run(step + mark)
        rises[mark] = position.loss() / losses[step + mark] - 1
    return rises
