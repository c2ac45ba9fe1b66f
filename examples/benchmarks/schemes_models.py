"""The trainings that the bench of schemes measures on: two networks over real text, and undisturbed runs of them.

The demo's GPT with two settings of beta2, and a small convolutional network: causal dilated convolutions over the same
text, as in ByteNet (arXiv 1610.10099). Its held-out loss is smooth and far from overfitting, which that of a classifier
of the few pictures that are on every machine is not.

A batch follows from the seed and the step alone, so that two runs at the same step see the same one.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gpt import GPT, VOCABULARY, GPTConfig, build_optimizer, load_corpus, val_batches
from schemes_cache import digest

from shrinkpoint.coding.encode import encode_state
from shrinkpoint.coding.selective import decode_chain, in_memory
from shrinkpoint.container.writer import write_container
from shrinkpoint.schemes.lossless import Lossless
from shrinkpoint.state.roles import describe_training
from shrinkpoint.state.training import TrainingState

__all__ = ["MODELS", "ConvNet", "Course", "Training", "Undisturbed"]

_QUICK = {"width": 32, "layers": 2, "heads": 2, "block": 64, "warmup": 10}
_DILATIONS = (1, 2, 4, 8, 16)


class ConvNet(nn.Module):
    """Residual blocks of causal dilated convolutions that predict the next byte; 1.5 million parameters for the demo's width."""

    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, width)
        self.convs = nn.ModuleList(
            nn.Conv1d(width, width, 3, dilation=_DILATIONS[i % len(_DILATIONS)]) for i in range(blocks)
        )
        self.mixers = nn.ModuleList(nn.Conv1d(width, width, 1) for _ in range(blocks))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(blocks + 1))
        self.head = nn.Linear(width, VOCABULARY)
        nn.init.normal_(self.token.weight, std=0.1)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits ``(batch, length, 256)`` for int64 tokens ``(batch, length)``."""
        x = self.token(tokens).transpose(1, 2)
        for index, (conv, mixer) in enumerate(zip(self.convs, self.mixers, strict=True)):
            inner = self._normed(index, x)
            # padded on the left alone: no position sees a later one
            inner = conv(F.pad(inner, (2 * conv.dilation[0], 0)))
            x = x + mixer(F.gelu(inner, approximate="tanh"))
        return self.head(self._normed(-1, x).transpose(1, 2))

    def _normed(self, index: int, x: Tensor) -> Tensor:
        return self.norms[index](x.transpose(1, 2)).transpose(1, 2)

    def loss(self, windows: Tensor) -> Tensor:
        """Mean cross-entropy in nats per byte over windows ``(batch, length + 1)``."""
        logits = self(windows[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())


@dataclass(frozen=True)
class _Recipe:
    build: Callable[[GPTConfig], nn.Module]
    beta2: float


def _conv(config: GPTConfig) -> nn.Module:
    return ConvNet(config.width, blocks=2 * config.layers)


MODELS = {
    "gpt": _Recipe(GPT, 0.95),
    "gpt-999": _Recipe(GPT, 0.999),
    "conv": _Recipe(_conv, 0.999),
}
"""By name; all are trained with AdamW."""


@dataclass(frozen=True, kw_only=True)
class Course:
    """One training: what is trained, from which seed, when it is saved, and where its losses are compared."""

    model: str
    seed: int
    every: int
    saves: int
    marks: tuple[int, ...]
    """Resumed steps after which a restored run is compared with the undisturbed one; ascending, from 0."""
    quick: bool = False
    held_out: int = 24
    """Batches of eight windows."""

    def __post_init__(self) -> None:
        if self.model not in MODELS:
            raise ValueError(f"model={self.model!r} must be one of {', '.join(MODELS)}")
        if self.saves < 3 or self.every < self.marks[-1]:
            raise ValueError(f"{self}: needs three saves, and {self.marks[-1]} steps between them")

    @property
    def save_steps(self) -> range:
        """The steps after which checkpoints are written."""
        return range(self.every, self.every * self.saves + 1, self.every)

    @property
    def steps(self) -> int:
        """Of the whole training: evenly spread saves leave one more interval behind the last one."""
        return self.every * (self.saves + 1)

    @property
    def probes(self) -> tuple[int, int]:
        """The two checkpoints, the middle one and the last, from which restored runs are compared."""
        return self.save_steps[(self.saves - 1) // 2], self.save_steps[-1]

    @property
    def config(self) -> GPTConfig:
        """Shape and recipe; the convolutional network takes its width from it too."""
        config = GPTConfig(steps=self.steps, warmup=min(100, self.steps // 5))
        return replace(config, **_QUICK) if self.quick else config

    @property
    def key(self) -> str:
        """Short, and another one for every other course."""
        return digest({"course": asdict(self), "config": asdict(self.config), "version": 1})


@cache
def _corpus() -> tuple[Tensor, Tensor]:
    return load_corpus()


class Training:
    """A training that can be stopped, looked at, and put elsewhere."""

    def __init__(self, course: Course) -> None:
        self._course, config = course, course.config
        recipe = MODELS[course.model]
        torch.manual_seed(course.seed)
        self.model = recipe.build(config)
        self._optimizer, self._schedule = build_optimizer(self.model, config)
        for group in self._optimizer.param_groups:
            group["betas"] = (0.9, recipe.beta2)
        self._describe = describe_training(
            self.model, [self._optimizer], model_path=("model",), optimizers_path=("optimizers",)
        )
        self._held_out = val_batches(_corpus()[1], config, count=course.held_out)
        self.step = 0

    def run(self, to: int) -> None:
        """Train until so many steps are done."""
        while self.step < to:
            loss = self.model.loss(self._batch())
            self._optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self._optimizer.step()
            self._schedule.step()
            self.step += 1

    def _batch(self) -> Tensor:
        config, text = self._course.config, _corpus()[0]
        generator = torch.Generator().manual_seed(self._course.seed * 1_000_003 + self.step)
        begin = torch.randint(len(text) - config.block - 1, (config.batch, 1), generator=generator)
        return text[begin + torch.arange(config.block + 1)].long()

    @torch.no_grad()
    def losses(self) -> Tensor:
        """Of the held-out batches one by one, float64, in nats per byte."""
        return torch.stack([self.model.loss(batch).double() for batch in self._held_out])

    def loss(self) -> float:
        """Mean over the held-out batches."""
        return float(self.losses().mean())

    def state(self) -> TrainingState:
        """A copy of the whole state, as a framework would save it."""
        live = {
            "model": self.model.state_dict(),
            "optimizers": [self._optimizer.state_dict()],
            "schedule": self._schedule.state_dict(),
            "step": self.step,
        }
        return _copy(TrainingState.capture(live, self._describe))

    def load(self, state: TrainingState) -> None:
        """Go on from a state; its tensors are not touched."""
        # the optimizer keeps the tensors that it is given, and training changes them
        saved = _copy(state).to_object()
        self.model.load_state_dict(saved["model"])
        self._optimizer.load_state_dict(saved["optimizers"][0])
        self._schedule.load_state_dict(saved["schedule"])
        self.step = saved["step"]


def _copy(state: TrainingState) -> TrainingState:
    tensors = {name: tensor.detach().clone() for name, tensor in state.tensors.items()}
    return TrainingState(state.tree, tensors, state.specs)


class Undisturbed:
    """The run without any restore: its states at the saves, and its losses wherever another is compared with it.

    Trained once and kept in a folder of files that the library itself writes, bit-exactly.

    Args:
        course: the training.
        folder: where the runs of all courses are kept.
    """

    def __init__(self, course: Course, folder: Path) -> None:
        self.course = course
        self._folder = folder / f"{course.model}-{course.every}-seed{course.seed}-{course.key}"
        self._read: tuple[int, TrainingState] | None = None

    @property
    def ready(self) -> bool:
        """Whether it was trained already."""
        return (self._folder / "losses.json").exists()

    def train(self) -> None:
        """Train it, unless that is done."""
        if self.ready:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        course, training = self.course, Training(self.course)
        marked = {save + mark for save in course.probes for mark in course.marks}
        losses = {}
        for step in sorted({*course.save_steps, *marked, course.steps}):
            training.run(step)
            if step in marked or step == course.steps:
                losses[step] = training.loss()
            if step in course.save_steps:
                self._file(step).write_bytes(_exactly(training.state(), step))
        self._save_losses(losses)

    def _save_losses(self, losses: dict[int, float]) -> None:
        part = self._folder / "losses.json.part"
        part.write_text(json.dumps(losses))
        part.rename(self._folder / "losses.json")  # last of all: it says that the run is complete

    def _file(self, step: int) -> Path:
        return self._folder / f"step-{step:06}.ckpt"

    def state(self, step: int) -> TrainingState:
        """The state that was saved after this step."""
        if self._read is None or self._read[0] != step:
            self._read = step, decode_chain([in_memory(self._file(step).read_bytes())]).state
        return self._read[1]

    @property
    def losses(self) -> dict[int, float]:
        """The held-out loss by step."""
        stored = json.loads((self._folder / "losses.json").read_text())
        return {int(step): loss for step, loss in stored.items()}

    def rises(self, training: Training, marks: Sequence[int]) -> dict[int, float]:
        """Go on with a training; its loss over this run's, less 1, after so many steps from now."""
        start, losses, rises = training.step, self.losses, {}
        for mark in marks:
            training.run(start + mark)
            rises[mark] = training.loss() / losses[start + mark] - 1
        return rises


def _exactly(state: TrainingState, step: int) -> bytes:
    coded = encode_state(state, Lossless(), step=step, reference=None, parent=None)
    return write_container(coded.checkpoint)
