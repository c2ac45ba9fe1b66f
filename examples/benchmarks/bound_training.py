"""What the bench of the bound knows of a training: everything that a loop needs, apart from where its checkpoints go."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

__all__ = ["Kind", "Measure", "Training", "generator", "mean_loss", "scheduled"]

Measure = Callable[[], float]
"""A held-out loss of a training as it stands; leaves no trace in it."""

_PER_SEED = 1_000_003
"""More batches than any training has, so that no two seeds share one."""


@dataclass(kw_only=True)
class Training:
    """A training that goes on step by step, and could go on from a restored state as well.

    Batches, and the noise of those losses that have some, are found by the number of the step alone. So a run that is
    rebuilt and restored bit-exactly goes on bit by bit as if nothing had been.
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
        loss = self.train_loss(index)
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        loss.backward()
        self.clip_gradients()
        for optimizer in self.optimizers:
            optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()
        if self.after_step is not None:
            self.after_step()
        return float(loss.detach())

    def clip_gradients(self) -> None:
        """Limit the norm of all gradients, if this training does."""
        if self.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)

    @property
    def saved(self) -> dict[str, Any]:
        """Everything with a state beside the model and its optimizers, by name."""
        scheduler = {} if self.scheduler is None else {"scheduler": self.scheduler}
        return {**scheduler, **self.stateful}

    def frozen_changes(self) -> int:
        """Elements of frozen tensors that are not what they were."""
        live = self.model.state_dict()
        return sum(int((live[name] != value).sum()) for name, value in self.originals.items())


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One training of the bench, for any seed.

    Seeds vary the initial weights and the order of the data; what there is to learn is the same for all.
    """

    name: str
    title: str
    build: Callable[[int, Kind, bool], Training]
    """Makes it from a seed, this kind, and whether the quick form is meant."""
    every: int = 30
    """Steps between two checkpoints that are spread evenly."""
    quick_every: int = 3
    late: bool = False
    """Whether it is also restored ten times within its last tenth, unless other parts are asked for."""
    only_spread: bool = False
    """Whether something happens at the steps of the evenly spread checkpoints, so that others make no sense."""

    SAVES = 11
    """Checkpoints of a run: the run is restored from all but the last, which is written at its end."""

    def interval(self, quick: bool) -> int:
        """Steps between two evenly spread checkpoints."""
        return self.quick_every if quick else self.every

    def steps(self, quick: bool) -> int:
        """Of the whole training."""
        return self.SAVES * self.interval(quick)

    def save_steps(self, part: str, quick: bool) -> list[int]:
        """The steps after which checkpoints are written, the last one being the end; none for the undisturbed run.

        Args:
            part: ``spread`` over the run, ``late`` for the last tenth, or ``plain``.
            quick: whether the quick form is meant.
        """
        steps, interval = self.steps(quick), self.interval(quick)
        if part == "plain":
            return []
        if part == "late":
            interval = max(1, steps // 10 // (self.SAVES - 1))
        return [steps - interval * left for left in reversed(range(self.SAVES))]


def generator(seed: int, index: int) -> torch.Generator:
    """Random numbers of one step of one seed's run."""
    return torch.Generator().manual_seed(seed * _PER_SEED + index)


def mean_loss(model: nn.Module, loss: Callable[[Any], Tensor], batches: Sequence[Any]) -> Measure:
    """Measures the mean of a loss over fixed batches, in eval mode; the model's modes are as before afterwards."""

    @torch.no_grad()
    def measure() -> float:
        modes = [(part, part.training) for part in model.modules()]
        model.eval()
        total = sum(loss(batch).double() for batch in batches) / len(batches)
        for part, training in modes:
            part.training = training
        return float(total)

    return measure


def scheduled(optimizer: Optimizer, rate: Callable[[int], float]) -> LambdaLR:
    """A scheduler whose factor of the learning rate is a function of the steps done."""
    return LambdaLR(optimizer, rate)
