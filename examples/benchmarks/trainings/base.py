"""What the bench of the bound knows of a training: everything that a loop needs, apart from where its checkpoints go."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from trainings.parts import Rate

Measure = Callable[[], float]
"""A held-out loss of a training as it is; changes nothing in it."""
Batch = Callable[[torch.Generator], Any]
"""Draws a batch."""
Made = Callable[[Any], Optimizer]
"""An optimizer of some parameters."""

PROBE = 3
"""Held-out batches of the probe."""
_PER_SEED = 1_000_003
"""More batches than any training has, so that no two seeds share one."""

_T = TypeVar("_T")


@dataclass(kw_only=True)
class Training:
    """A training that goes on step by step, and could go on from a restored state as well.

    The number of a step determines its batch, and the noise of losses that have some. So a run that is rebuilt and
    restored bit-exactly continues bit by bit.
    """

    model: nn.Module
    optimizers: Sequence[Optimizer]
    """All that train the model; each makes a step for every batch."""
    train_loss: Callable[[int], Tensor]
    """The loss of the batch of step i = 0, 1, ..., with gradients."""
    probe: Measure
    """What the library measures with: the loss on a few held-out batches."""
    final: Measure
    """The truth: the loss on many more, none of them the probe's."""
    scheduler: Any = None
    """Makes a step after every batch, and is saved with the run."""
    clip: float | None = None
    """The greatest norm of all gradients together."""
    stateful: Mapping[str, Any] = field(default_factory=dict)
    """Further objects that are saved with the run."""
    after_step: Callable[[], None] | None = None
    """Called after every step: what keeps averages of the weights."""
    after_restore: Callable[[], None] | None = None
    """What the user changes at every resume. The undisturbed run makes the same change at the same steps."""
    abilities: Mapping[str, Measure] = field(default_factory=dict)
    """What the model could do before this training, which no probe measures."""
    also: Mapping[str, Measure] = field(default_factory=dict)
    """Losses that fall with the final one and are not measured by the probe, as that of averaged weights."""
    originals: Mapping[str, Tensor] = field(default_factory=dict)
    """Copies of what is frozen, by name in the model."""

    def step(self, index: int) -> float:
        """Train on the batch of one step; returns its loss."""
        self.model.train()
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        loss = self.train_loss(index)
        loss.backward()
        if self.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        for optimizer in self.optimizers:
            optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()
        if self.after_step is not None:
            self.after_step()
        return float(loss.detach())

    @property
    def saved(self) -> dict[str, Any]:
        """Everything with a state beside the model and its optimizers, by name."""
        scheduler = {} if self.scheduler is None else {"scheduler": self.scheduler}
        return {**scheduler, **self.stateful}

    def frozen_changes(self) -> int:
        """Count the elements of frozen tensors that are not what they were."""
        live = self.model.state_dict()
        return sum(int((live[name] != value).sum()) for name, value in self.originals.items())


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a training is built for; its seed varies the initial weights and the order of the data, not what there is to learn."""

    seed: int
    steps: int
    every: int
    """Steps between two evenly spread checkpoints."""
    quick: bool

    def size(self, quick: _T, real: _T) -> _T:
        """Choose between the sizes of the quick form and of the real one."""
        return quick if self.quick else real


@dataclass(frozen=True)
class Kind:
    """One training of the bench, for any seed."""

    name: str
    title: str
    build: Callable[[Run], Training]
    every: int = 30
    """Steps between two checkpoints that are spread evenly."""
    quick_every: int = 3

    SAVES = 11
    """Checkpoints of a run: the run is restored from all but the last, which is written at its end."""

    def make(self, seed: int, quick: bool, steps: int | None = None) -> Training:
        """Build it, with the initial weights of a seed; `steps` is for a run of another length."""
        torch.manual_seed(seed)
        every = self.interval(quick)
        return self.build(Run(seed=seed, steps=steps or self.steps(quick), every=every, quick=quick))

    def interval(self, quick: bool) -> int:
        """Steps between two evenly spread checkpoints."""
        return self.quick_every if quick else self.every

    def steps(self, quick: bool) -> int:
        """Of the whole training."""
        return self.SAVES * self.interval(quick)

    def save_steps(self, quick: bool) -> range:
        """The steps after which checkpoints are written, evenly spread."""
        interval = self.interval(quick)
        return range(interval, self.steps(quick) + 1, interval)


# --- batches and losses -------------------------------------------------------------------------------------


def generator(seed: int, index: int) -> torch.Generator:
    """Random numbers of one step of one seed's run; seed 0 has the held-out data."""
    return torch.Generator().manual_seed(seed * _PER_SEED + index)


def held_out(batch: Callable[[torch.Generator], _T], first: int, count: int) -> list[_T]:
    """Held-out batches, which are drawn as those of a training are; from 10 on for a probe, from 100 on for the truth."""
    return [batch(generator(0, first + number)) for number in range(count)]


def chosen(data: tuple[Tensor, ...], batch: int) -> Callable[[torch.Generator], tuple[Tensor, ...]]:
    """Draw batches from a set."""

    def draw(numbers: torch.Generator) -> tuple[Tensor, ...]:
        places = torch.randint(len(data[0]), (batch,), generator=numbers)
        return tuple(column[places] for column in data)

    return draw


def split(data: Sequence[Tensor], batch: int) -> list[tuple[Tensor, ...]]:
    """Cut a set into batches."""
    return list(zip(*(part.split(batch) for part in data), strict=True))


def mean_loss(model: nn.Module, loss: Callable[[Any], Tensor], batches: Sequence[Any]) -> Measure:
    """Measure the mean of a loss over fixed batches, in eval mode; the model's modes are as before afterwards."""

    @torch.no_grad()
    def measure() -> float:
        modes = [(part, part.training) for part in model.modules()]
        model.eval()
        total = sum(loss(batch).double() for batch in batches) / len(batches)
        for part, mode in modes:
            part.training = mode
        return float(total)

    return measure


def training(
    run: Run, model: Any, loss: Callable[[Any], Tensor], batch: Batch, held: Any, *optimizers: Optimizer,
    rate: Rate | None = None, **more: Any,
) -> Training:  # fmt: skip
    """Train on batches that are drawn afresh, or from a set.

    Args:
        run: what it is for.
        model: to be trained.
        loss: of a batch.
        batch: draws one.
        held: the batches of the probe, and those of the truth.
        optimizers: the schedule is the first one's.
        rate: the schedule.
        more: fields of `Training`.
    """
    probe, final = (mean_loss(model, loss, batches) for batches in held)
    fields = {
        "train_loss": lambda index: loss(batch(generator(run.seed, index))),
        "scheduler": None if rate is None else LambdaLR(optimizers[0], rate),
        "probe": probe,
        "final": final,
    }
    return Training(model=model, optimizers=optimizers, **{**fields, **more})


def on_drawn(
    run: Run, model: Any, batch: Batch, *optimizers: Optimizer, held: tuple[Batch, Batch] | None = None,
    probe: int = PROBE, truth: tuple[int, int] = (4, 40), **more: Any,
) -> Training:  # fmt: skip
    """Train a model with a `loss` of its own on drawn batches; so many of the truth in the quick form, and in the real one."""
    few, many = held or (batch, batch)
    drawn = held_out(few, 10, probe), held_out(many, 100, run.size(*truth))
    return training(run, model, model.loss, batch, drawn, *optimizers, **more)
