"""Measures the loss of a training, and makes steps from a saved state, without side effects on it.

The trainers' own loops cannot be used: they count, log, call all hooks and read the loaders. So a few recent batches are kept, the
framework's own loss is computed on them, and the rest of a step is implemented here, for trainings where that is simple enough.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shrinkpoint.errors import ConfigError
from shrinkpoint.group.group import world
from shrinkpoint.quality.evaluation import Evaluate, Loss, ResumedSteps, losses_of
from shrinkpoint.quality.preserve import TraceError
from shrinkpoint.quality.resumed_steps import ResumedRun, obstacle
from shrinkpoint.quality.swap import swapped_weights
from shrinkpoint.runtime.dispatch import Refusing
from shrinkpoint.session.adapter import TrainingAdapter
from shrinkpoint.session.batches import MORE_BATCHES, PROBE_BATCHES, KeptBatches, RecentBatches, to_host
from shrinkpoint.session.reports import number_of
from shrinkpoint.sharded.targets import reshard, swapped_shards, unreduced
from shrinkpoint.state.averages import Candidate, averages_in, without_averages

Measured: TypeAlias = Callable[[], tuple[float, ...]]


class LossProbe:
    """Evaluates a model on a few batches: the first ones of validation, or of training where there is none yet.

    Where all measure `together`, each rank does so on batches of its own.
    """

    def __init__(
        self, adapter: TrainingAdapter, *, together: Callable[[], bool] = bool, shards: bool = False
    ) -> None:
        self.adapter, self.shards, self.together = adapter, shards, together
        self.kept = KeptBatches(PROBE_BATCHES, MORE_BATCHES * PROBE_BATCHES)

    def evaluation(self) -> Callable[[Mapping[str, torch.Tensor]], tuple[float, ...]]:
        """Return the loss with given weights on each of the batches that are kept now, even if others are kept later: losses
        are compared by batch.

        Together it is a collective, as is what is returned: each rank's losses are on its own batches, as many on all
        of them. The model's parameters, buffers, modes, metrics and all random number generators are as before
        afterwards.

        Raises:
            ConfigError: raised by the returned function, if no batch has been seen, or the model returns no loss.
        """
        measure = self.measurement(self.agreed())
        swapped = swapped_shards if self.shards else swapped_weights
        own = {stored: name for name, stored in self.adapter.names().items()}

        def evaluate(weights: Mapping[str, torch.Tensor]) -> tuple[float, ...]:
            named = named_as(own, without_averages(weights))
            named = dict(named) if self.shards else named  # shards do not exchange their memory
            with (
                nullcontext() if self.together() else _alone(),
                _synchronized_as_before(self.adapter.wrapped),
                self.adapter.measuring(averages_in(weights)),
                swapped(self.adapter.model, named, *self.adapter.around()),
            ):
                return measure()

        return evaluate

    def measurement(self, agreed: list[Any] | None) -> Measured:
        """Return a function that gives the losses of the model with its current weights, which its caller puts in
        eval mode and back."""
        batches, held_out = list(self.kept.batches) if agreed is None else agreed, self.kept.held_out
        together = agreed is not None

        def measure() -> tuple[float, ...]:
            if not batches:
                raise ConfigError("there is nothing to measure the loss with: no batch has been seen")
            losses = (
                self.adapter.loss(to_host(batch), index, held_out=held_out, together=together)
                for index, batch in enumerate(batches)
            )
            return tuple(chain.from_iterable(map(losses_of, losses)))

        return measure

    def agreed(self) -> list[Any] | None:
        """Return the batches that all ranks measure on together, a collective then; None where one rank measures by itself."""
        return self.kept.agreed() if self.together() else None


class StepProbe:
    """Keeps as many batches as a probe has steps, and makes these steps.

    `give_up` gets the reason why no steps can be made of the batches that are kept.
    """

    def __init__(self, losses: LossProbe, *, steps: int, give_up: Callable[[str], object] = bool) -> None:
        self._losses, self._adapter, self._give_up = losses, losses.adapter, give_up
        self._shards = losses.shards
        self.recent = RecentBatches(steps)
        """The batches that are kept."""

    def starts(self) -> None:
        """Keep no batches in a training that does not allow probes."""
        if self._refused(self.recent.take()):
            self.recent.stop()

    def resumed(self) -> ResumedSteps | None:
        """Resumed steps from a present checkpoint in the framework's form; None where that is impossible. Together a
        collective.

        Of copies each rank makes the steps by itself, on its own batches. Gradients are clipped as in training. No
        hooks of callbacks are called, nor those of the framework's loop.
        """
        batches = self.recent.take()
        if self._losses.together():  # as many on every rank
            batches = batches[: min(world().gather(len(batches)))]
        agreed = self._losses.agreed()
        if self._refused(batches) or not batches:
            return None
        adapter, module = self._adapter, self._adapter.model
        own = {stored: name for name, stored in adapter.names().items()}
        steps = ResumedRun(
            module=module,
            optimizers=adapter.optimizers,
            losses=lambda index: adapter.step_losses(batches[index % len(batches)], index),
            evaluate=self._losses.measurement(agreed),
            clip=adapter.clip,
            scale=scale_of(adapter.scaler),
            settle=lambda: reshard(module) if self._shards else None,
            around=adapter.around(),
        )

        def resumed(stored: Any, marks: Sequence[int]) -> Sequence[Loss]:
            reason = self._obstacle()
            if reason is not None:
                raise ConfigError(reason)
            weights, states = adapter.parts(stored)
            with nullcontext() if self._shards else _alone(), adapter.measuring(adapter.averages(stored)):
                return steps.steps(named_as(own, weights), states, marks)

        return resumed

    def _refused(self, batches: Sequence[object]) -> bool:
        reason = self._obstacle()
        if batches and reason is not None:
            self._give_up(reason)
        return reason is not None

    def _obstacle(self) -> str | None:
        adapter = self._adapter
        reason = adapter.obstacle(shards=self._shards)
        if reason is not None:
            return reason
        if self._shards:
            return obstacle(adapter.model, adapter.optimizers, shards=True) or unreduced(adapter.model)
        return _wrapper_obstacle(adapter.wrapped) or obstacle(adapter.model, adapter.optimizers, alone=True)


def reporting(evaluate: Evaluate, say: Callable[[str], None]) -> Evaluate:
    """Return the same evaluation, of whose failures `say` gets one line each."""

    def evaluated(weights: Mapping[str, torch.Tensor]) -> Loss:
        try:
            return evaluate(weights)
        except Exception as error:
            if not isinstance(error, TraceError):
                say(
                    "the quality of checkpoints cannot be measured, so they are stored exactly:"
                    f" {type(error).__name__}: {error}"
                )
            raise

    return evaluated


def _alone() -> AbstractContextManager[Any]:
    """Refuse collective communication inside the block: the other processes take no part, so that it would block forever."""
    return nullcontext() if world().size == 1 else Refusing(_refuse_communication)


@contextmanager
def _synchronized_as_before(wrapped: Any) -> Iterator[None]:
    """Let DDP's next forward pass give the first rank's buffers to all, as it would have: after one without gradients it does not."""
    parts = wrapped.modules() if isinstance(wrapped, nn.Module) else ()
    noted = [
        (part, part.require_forward_param_sync) for part in parts if isinstance(part, DistributedDataParallel)
    ]
    try:
        yield
    finally:
        for part, synchronizes in noted:
            part.require_forward_param_sync = synchronizes


def _wrapper_obstacle(wrapped: nn.Module | None) -> str | None:
    """Return why gradients cannot be computed without the model's wrapper, whose hooks on them need its own forward pass; else None."""
    if world().size == 1:
        return None
    if type(wrapped) is not DistributedDataParallel:
        return "several processes train together, and not by DistributedDataParallel"
    # With these two DDP records in every backward pass which parameters have taken part.
    if wrapped.find_unused_parameters or wrapped.static_graph:
        return "DistributedDataParallel looks for unused parameters, or has a static graph"
    return None


def _refuse_communication(operation: Any) -> None:
    if operation.namespace in ("c10d", "_c10d_functional"):
        raise ConfigError(
            f"the model or its loss communicates with the other processes ({operation.__name__}), but each one measures by itself"
        )


def named_as(names: Mapping[str, str], weights: Mapping[str, Any]) -> dict[str, Any]:
    """Return the same tensors by other names; a `Candidate` stays one. Where there are any names, tensors without one
    are left out."""
    kept = {name: names.get(name, name) for name in weights if not names or name in names}
    named = {new: weights[name] for name, new in kept.items()}
    lent = weights.lent & kept.keys() if isinstance(weights, Candidate) else None
    return named if lent is None else Candidate(named, map(kept.__getitem__, lent))


def scale_of(scaler: Any) -> float:
    """Return the present scale of the losses, where half-precision training has a scaler; not changed."""
    return 1.0 if scaler is None or not scaler.is_enabled() else float(scaler.get_scale())


def loss_of(value: Any) -> float:
    """Return the scalar loss from the return value of a model or a training step.

    That is a number; a tensor, of which the mean is taken; a mapping with ``"total"`` or ``"loss"``; or several
    losses in a sequence or another mapping, whose sum is taken.

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
