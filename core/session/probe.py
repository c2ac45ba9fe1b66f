"""Framework-independent parts of measuring the loss during training: kept batches, losses, and steps from a saved state.

The trainers' own loops cannot be used: they count, log, call all hooks and read the loaders. So a few recent batches are kept, the
framework's own loss is computed on them, and the rest of a step is implemented here, for trainings where that is simple enough.
"""

import copy
from collections import deque
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, TypeAlias

import torch
from torch import nn

from shrinkpoint.errors import ConfigError
from shrinkpoint.group.group import world
from shrinkpoint.quality.evaluation import Loss, ResumedSteps
from shrinkpoint.quality.resumed_steps import ResumedRun, obstacle
from shrinkpoint.quality.swap import swapped_weights
from shrinkpoint.reports import SaveReport
from shrinkpoint.session.alone import alone, wrapper_obstacle
from shrinkpoint.sharded.targets import reshard, swapped_shards, unreduced
from shrinkpoint.state.averages import without_averages
from shrinkpoint.warn import warn

__all__ = [
    "PROBE_BATCHES",
    "KeptBatches",
    "LossProbe",
    "Measured",
    "RecentBatches",
    "StepParts",
    "StepProbe",
    "loss_of",
    "number_of",
    "scale_of",
    "to_host",
]

Measured: TypeAlias = Callable[[], tuple[float, ...]]

PROBE_BATCHES = 2
"""Batches that the loss is measured on at first: training waits for each of them three times a save."""

_MORE_BATCHES = 4
"""So many times as many batches are kept as are used at first."""

_MOST_BYTES = 256 * 2**20


class KeptBatches:
    """A few recent batches, on the host: the first ones of validation, or of training where there is none yet.

    Args:
        count: how many to use at first.
        most: how many to keep, for use where fewer are too imprecise; None for `count`.
    """

    def __init__(self, count: int, most: int | None = None) -> None:
        self._least = self._used = count
        self._most = max(count, most or count)
        self._held_out: list[Any] = []
        self._training: list[Any] = []

    @property
    def batches(self) -> list[Any]:
        """The batches to use, of validation if there are any; not to be changed, `to_host` makes copies."""
        return (self._held_out or self._training)[: self._used]

    def adapt(self, report: SaveReport, overhead: float) -> None:
        """Adapt the number of batches for the next save to the precision and the cost of the last one.

        It is doubled where the confidence interval of a restore's cost is wider than the allowed cost and the time
        suffices, and halved where evaluations take more time than allowed.

        Args:
            report: of the last save.
            overhead: share of the training time that measuring may take.
        """
        low, high, allowed = report.degradation_low, report.degradation_high, report.allowed
        if report.measured == "measured" and low is not None and high is not None and allowed is not None:
            wide = not high - low <= allowed
            if wide and 2 * report.overhead <= overhead:
                self._used = min(2 * self._used, self._most)
        if report.overhead > overhead:
            self._used = max(self._used // 2, self._least)

    def agreed(self) -> list[Any]:
        """As `batches`, as many on every rank, and all of validation or none; a collective."""
        found = world().gather((len(self.batches), self.held_out))
        if len({held_out for _, held_out in found}) > 1:
            return []
        return self.batches[: min(count for count, _ in found)]

    @property
    def held_out(self) -> bool:
        """Whether `batches` are of validation."""
        return bool(self._held_out)

    def see_validation(self, batch: Any, index: int | None = None) -> None:
        """Keep a validation batch if more are needed; the model gets it after this.

        Args:
            batch: to be copied.
            index: its index in this validation; a batch at the index of one that is kept already is ignored, since
                every validation starts with the same batches. None if every batch is different.
        """
        if index is None or index >= len(self._held_out):
            self._keep(batch, self._held_out)

    def see_training(self, batch: Any) -> None:
        """Keep a training batch while there are no validation batches; the model gets it after this."""
        if not self._held_out:
            self._keep(batch, self._training)

    def _keep(self, batch: Any, kept: list[Any]) -> None:
        if len(kept) >= self._most:
            return
        try:
            kept.append(to_host(batch))
        except Exception as error:  # noqa: BLE001 - training continues after any error of a batch's own methods
            self._most = 0
            warn(
                f"the quality of checkpoints cannot be measured on batches of {type(batch).__name__}, which cannot be copied"
                f" ({type(error).__name__}: {error})"
            )


@dataclass
class _Kept:
    parts: list[Any] = field(default_factory=list)
    nbytes: int = 0


class RecentBatches:
    """Some batches that were trained on, on the host; after each `take`, new ones are collected.

    Args:
        count: how many to keep; 0 keeps none.
        most_bytes: how much memory their tensors may take; the oldest ones are dropped.
    """

    def __init__(self, count: int, *, most_bytes: int = _MOST_BYTES) -> None:
        self._count = self._wanted = count
        self._most_bytes = most_bytes
        self._kept: deque[_Kept] = deque()
        self._current: _Kept | None = None

    def see(self, part: Any, *, first: bool = True) -> None:
        """Keep a batch, or a part of one, if it is wanted; the model gets it after this.

        Args:
            part: all that the model gets at once.
            first: whether it is the first part of a batch; the other parts are kept with it.
        """
        if first:
            self._begin()
        if self._current is None:
            return
        try:
            self._current.parts.append(to_host(part))
        except Exception:  # noqa: BLE001 - training continues after any error; `KeptBatches` reports it
            self.stop()
            return
        self._current.nbytes += _nbytes(part)
        while sum(kept.nbytes for kept in self._kept) > self._most_bytes:
            if self._kept.popleft() is self._current:
                self._current = None

    def stop(self) -> None:
        """Drop all, and keep none from now on."""
        self._count = self._wanted = 0
        self._kept.clear()
        self._current = None

    def take(self) -> list[list[Any]]:
        """The parts of each batch that is kept, the oldest first; not to be changed, `to_host` makes copies."""
        self._wanted, self._current = self._count, None
        return [list(kept.parts) for kept in self._kept]

    def _begin(self) -> None:
        self._current = None
        if self._wanted > 0:
            self._wanted -= 1
            if len(self._kept) == self._count:
                self._kept.popleft()
            self._current = _Kept()
            self._kept.append(self._current)


class LossProbe:
    """Evaluates a run's model on a few batches: the first ones of evaluation, or of training where there is none yet.

    A run is what the framework's own `measurement` takes: a state, a trainer, or trainer and module.

    Args:
        together: whether each rank has shards of the model, and all measure together.
    """

    measurement: Callable[..., Measured]
    """The losses of a run's model with its current weights on the batches that are kept now, or on those that all ranks measure on
    ``together``. The caller of the returned function puts the model in eval mode, and back afterwards."""
    live: Callable[
        ...,
        tuple[
            nn.Module, Callable[[Mapping[str, torch.Tensor]], Mapping[str, torch.Tensor]], Sequence[object]
        ],
    ]
    """A run's model, what gives its own names to weights of a checkpoint, and what else a step may change, as of `preserved_state`."""

    def __init__(self, *, together: bool = False) -> None:
        self.together = together
        self.kept = KeptBatches(PROBE_BATCHES, _MORE_BATCHES * PROBE_BATCHES)

    def evaluation(self, *run: Any) -> Callable[[Mapping[str, torch.Tensor]], tuple[float, ...]]:
        """The loss with given weights on each of the batches that are kept now, even if others are kept later: losses are compared by
        batch.

        Together it is a collective, as is what is returned: each rank's losses are on its own batches, as many on all of them.

        Args:
            run: between two steps. Its model's parameters, buffers, modes, metrics and all random number generators are as before
                afterwards.

        Raises:
            ConfigError: raised by the returned function, if no batch has been seen, or the model returns no loss.
        """
        measure = self.measurement(*run, together=self.agreed())
        swapped = swapped_shards if self.together else swapped_weights

        def evaluate(weights: Mapping[str, torch.Tensor]) -> tuple[float, ...]:
            module, named, around = self.live(*run)
            with (
                nullcontext() if self.together else alone(),
                swapped(module, named(without_averages(weights)), *around),
            ):
                return measure()

        return evaluate

    def agreed(self) -> list[Any] | None:
        """The batches that all ranks measure on together, a collective then; None where one rank measures by itself."""
        return self.kept.agreed() if self.together else None


@dataclass(frozen=True, kw_only=True)
class StepParts:
    """What a step of a run is made of."""

    module: nn.Module
    optimizers: Sequence[torch.optim.Optimizer]
    wrapped: nn.Module | None
    """The model as it is trained."""
    losses: Callable[[Sequence[Any], int], Iterable[torch.Tensor]]
    """Of the parts of the batch with this number."""
    clip: Callable[[], None]
    scaler: Any
    """Of half-precision training; None where there is none."""
    around: Sequence[object]
    """As of `ResumedRun`."""
    states: Callable[[Any], tuple[Mapping[str, Any], Sequence[Mapping[str, Any]]]]
    """The weights by the module's own names, and the optimizers' states, in a stored state."""


class StepProbe:
    """Keeps batches for the steps of a probe, and makes these steps; a run is that of its `LossProbe`.

    Args:
        losses: measures the loss after the steps.
        steps: how many batches to keep, in host memory; 0 keeps none and makes none.
    """

    parts: Callable[..., StepParts]
    """What a step of a run is made of."""
    obstacle: Callable[..., str | None]
    """Why the framework makes a run's steps in a way that cannot be repeated; None where it can."""

    def __init__(self, losses: LossProbe, *, steps: int) -> None:
        self._losses = losses
        self._shards = losses.together
        self._recent = RecentBatches(steps)

    def starts(self, *run: Any) -> None:
        """Keep no batches in a training that does not allow probes."""
        if self._obstacle(run) is not None:
            self._recent.stop()

    def resumed(self, *run: Any) -> ResumedSteps | None:
        """Resumed steps from a present checkpoint in the framework's form; None where that is impossible. Of shards a collective.

        Gradients are clipped as in training. No hooks of callbacks are called, nor those of the trainer's loop.
        """
        batches = self._recent.take()
        if self._shards:  # as many on every rank
            batches = batches[: min(world().gather(len(batches)))]
        together = self._losses.agreed()
        if not batches or self._obstacle(run) is not None:
            return None
        parts = self.parts(*run)
        steps = ResumedRun(
            module=parts.module,
            optimizers=parts.optimizers,
            losses=lambda index: parts.losses(batches[index % len(batches)], index),
            evaluate=self._losses.measurement(*run, together=together),
            clip=parts.clip,
            scale=scale_of(parts.scaler),
            settle=lambda: reshard(parts.module) if self._shards else None,
            around=parts.around,
        )

        def resumed(stored: Any, marks: Sequence[int]) -> Sequence[Loss]:
            reason = self._obstacle(run)
            if reason is not None:
                raise ConfigError(reason)
            with nullcontext() if self._shards else alone():
                return steps.steps(*parts.states(stored), marks)

        return resumed

    def _obstacle(self, run: Sequence[Any]) -> str | None:
        reason = self.obstacle(*run)
        if reason is not None:
            return reason
        parts = self.parts(*run)
        if self._shards:
            return obstacle(parts.module, parts.optimizers, shards=True) or unreduced(parts.module)
        return wrapper_obstacle(parts.wrapped) or obstacle(parts.module, parts.optimizers, alone=True)


def scale_of(scaler: Any) -> float:
    """The present scale of the losses, where half-precision training has a scaler; not changed."""
    return 1.0 if scaler is None or not scaler.is_enabled() else float(scaler.get_scale())


def _nbytes(batch: Any) -> int:
    if isinstance(batch, torch.Tensor):
        return batch.nbytes
    if isinstance(batch, Mapping):
        return sum(_nbytes(item) for item in batch.values())
    if isinstance(batch, (list, tuple)):
        return sum(_nbytes(item) for item in batch)
    return sum(_nbytes(item) for item in vars(batch).values()) if hasattr(batch, "__dict__") else 0


def to_host(batch: Any) -> Any:
    """A copy of a batch whose tensors are on the host and share no memory with the original's.

    Handles tensors, lists, tuples and named tuples, mappings (dicts, and such as transformers' ``BatchEncoding``) and
    dataclasses, nested in each other. Another object with a method ``to``, as graph libraries' batches have, is copied
    and moved to the host. Any other object is used unchanged.
    """
    if isinstance(batch, torch.Tensor):
        return batch.detach().to("cpu", copy=True)
    if isinstance(batch, (list, tuple)):
        items = [to_host(item) for item in batch]
        return type(batch)(*items) if hasattr(batch, "_fields") else type(batch)(items)
    if isinstance(batch, MutableMapping):
        # A shallow copy keeps the type without calling its constructor.
        copied: Any = copy.copy(batch)
        for key, value in batch.items():
            copied[key] = to_host(value)
        return copied
    if isinstance(batch, Mapping):
        return {key: to_host(value) for key, value in batch.items()}
    if is_dataclass(batch) and not isinstance(batch, type):
        copied = copy.copy(batch)
        for item in fields(batch):
            object.__setattr__(copied, item.name, to_host(getattr(batch, item.name)))  # frozen ones too
        return copied
    if callable(getattr(batch, "to", None)):
        return copy.deepcopy(batch).to("cpu")  # some move themselves, and the model still needs the original
    return batch


def number_of(value: Any) -> float | None:
    """A number or a tensor of one element as a float; None of anything else."""
    if isinstance(value, (int, float)):
        return float(value)
    return float(value) if isinstance(value, torch.Tensor) and value.numel() == 1 else None


def loss_of(value: Any) -> float:
    """The scalar loss from the return value of a model or a training step.

    Args:
        value: a number; a tensor, of which the mean is taken; a mapping with ``"total"`` or ``"loss"``; or several losses
            in a sequence or another mapping, whose sum is taken.

    Raises:
        ConfigError: it is none of these.
    """
    number = number_of(value)
    if number is not None:
        return number
    if isinstance(value, torch.Tensor) and value.numel() and not value.is_complex():
        return float(value.detach().float().mean())
    if isinstance(value, Mapping):
        for name in ("total", "loss"):
            if name in value:
                return loss_of(value[name])
        value = list(value.values())
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)) and value:
        return sum(loss_of(item) for item in value)
    raise ConfigError(
        f"there is no loss to measure quality by: a {type(value).__name__} is not a number or a tensor"
    )
