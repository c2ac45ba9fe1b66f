"""Evaluates other weights between two steps of a Hugging Face run, without side effects on it.

``Trainer.evaluate`` fires events, logs, and reads the loaders. So a few recent batches are kept, and the trainer's own
``compute_loss`` is called on them.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers import Trainer

from shrinkpoint.errors import ConfigError
from shrinkpoint.integrations.common.probe import (
    MORE_BATCHES,
    KeptBatches,
    RecentBatches,
    loss_of,
    to_host,
)
from shrinkpoint.integrations.common.ranks import world_size
from shrinkpoint.integrations.transformers.state import optimizers_of
from shrinkpoint.loop.alone import alone, wrapper_obstacle
from shrinkpoint.quality.evaluation import Loss, ResumedSteps
from shrinkpoint.quality.resumed_steps import ResumedRun, obstacle
from shrinkpoint.quality.swap import swapped_weights
from shrinkpoint.state.averages import without_averages

__all__ = ["LossProbe", "StepProbe"]


class LossProbe:
    """Evaluates a run's model on a few batches: the first ones of evaluation, or of training where there is none yet.

    Args:
        batches: how many to use at first; some more are kept, in host memory.
    """

    def __init__(self, *, batches: int) -> None:
        self.kept = KeptBatches(batches, MORE_BATCHES * batches)
        self._number = 0

    def evaluates(self, inputs: Any) -> None:
        """The model is about to get a held-out batch."""
        self.kept.see_validation(inputs, self._number)
        self._number += 1

    def evaluation_ends(self) -> None:
        """The next held-out batch is the first of another evaluation."""
        self._number = 0

    def evaluation(self, trainer: Any) -> Callable[[Mapping[str, torch.Tensor]], tuple[float, ...]]:
        """Measures the loss with given weights on each of the batches that are kept now, even if others are kept later.

        Args:
            trainer: between two steps. Its model's parameters, buffers, modes, metrics and all random number generators are
                as before afterwards.

        Raises:
            ConfigError: raised by the returned function, if no batch has been seen, or the model returns no loss.
        """
        measure = self.measurement(trainer)
        module: nn.Module = trainer.model

        def evaluate(weights: Mapping[str, torch.Tensor]) -> tuple[float, ...]:
            with swapped_weights(module, without_averages(weights), *_around(trainer)), alone():
                return measure()

        return evaluate

    def measurement(self, trainer: Any) -> Callable[[], tuple[float, ...]]:
        """The losses of the model with its current weights on the batches that are kept now, even if others are kept
        later.

        Args:
            trainer: the caller of the returned function puts its model in eval mode, and back afterwards.
        """
        batches = list(self.kept.batches)

        def measure() -> tuple[float, ...]:
            if not batches:
                raise ConfigError("there is nothing to measure the loss with: no batch has been seen")
            trainer.log = _nowhere  # until all is put back
            return tuple(loss_of(_loss(trainer, kept)) for kept in batches)

        return measure


class StepProbe:
    """Keeps batches for the steps of a probe, and makes these steps.

    Args:
        losses: measures the loss after the steps.
        steps: how many batches to keep, in host memory; 0 keeps none and makes none.
    """

    def __init__(self, losses: LossProbe, *, steps: int) -> None:
        self._losses = losses
        self._recent = RecentBatches(steps)

    def starts(self, trainer: Any) -> None:
        """Keep no batches in a training that does not allow probes."""
        if _obstacle(trainer) is not None:
            self._recent.stop()

    def see(self, batch: Any, number: int, *, accumulated: int) -> None:
        """A batch is about to be trained on.

        Args:
            batch: as the loader gives it.
            number: in its epoch, from 0.
            accumulated: batches to a step.
        """
        self._recent.see(batch, first=number % accumulated == 0)

    def resumed(self, trainer: Any) -> ResumedSteps | None:
        """Resumed steps from a present `stored_state`; None where that is impossible."""
        batches = self._recent.take()
        if not batches or _obstacle(trainer) is not None:
            return None
        run = ResumedRun(
            module=trainer.model,
            optimizers=optimizers_of(trainer),
            losses=lambda index: _losses(trainer, batches[index % len(batches)]),
            evaluate=self._losses.measurement(trainer),
            clip=lambda: _clip(trainer),
            scale=_scale(trainer),
            around=_around(trainer),
        )

        def resumed(stored: Any, marks: Sequence[int]) -> Sequence[Loss]:
            with alone():
                return run.steps(stored["model"], stored["optimizers"], marks)

        return resumed


def _obstacle(trainer: Any) -> str | None:
    if trainer.args.n_gpu > 1:
        return "one process trains on several GPUs"
    if type(trainer).training_step is not Trainer.training_step or "training_step" in vars(trainer):
        return "the trainer makes its steps in a way of its own"
    if getattr(trainer, "use_apex", False) or "lomo" in str(trainer.args.optim).lower():
        return "the optimizer or the precision is a library's"
    return wrapper_obstacle(trainer.model_wrapped) or obstacle(
        trainer.model, optimizers_of(trainer), alone=True
    )


def _scale(trainer: Any) -> float:
    """The present scale of the losses, where half-precision training has a scaler; not changed."""
    scaler = getattr(trainer.accelerator, "scaler", None)
    return 1.0 if scaler is None or not scaler.is_enabled() else float(scaler.get_scale())


def _losses(trainer: Any, parts: Sequence[Any]) -> Iterator[torch.Tensor]:
    trainer.log = _nowhere  # until all is put back
    items = _items(trainer, parts)
    for part in parts:
        loss = _loss(trainer, part, items)
        scaled = items is not None and getattr(trainer, "model_accepts_loss_kwargs", False)
        if not scaled and getattr(trainer, "compute_loss_func", None) is None:
            loss = loss / len(parts)
        yield loss


def _items(trainer: Any, parts: Sequence[Any]) -> Any:
    """The number of labels by which the trainer divides the sum of a step's losses; None where it averages means.

    Of several processes one alone cannot know it.
    """
    if world_size() > 1 or not hasattr(trainer, "get_batch_samples"):
        return None
    batches = iter([trainer._prepare_inputs(to_host(part)) for part in parts])
    device = (
        [trainer.args.device] if "device" in inspect.signature(trainer.get_batch_samples).parameters else []
    )
    return trainer.get_batch_samples(batches, len(parts), *device)[1]


def _loss(trainer: Any, kept: Any, items: Any = None) -> torch.Tensor:
    inputs = trainer._prepare_inputs(to_host(kept))  # a copy: labels are taken out of it
    more = {} if items is None else {"num_items_in_batch": items}
    with trainer.compute_loss_context_manager():
        loss: torch.Tensor = trainer.compute_loss(trainer.model, inputs, **more)
    return loss


def _clip(trainer: Any) -> None:
    if trainer.args.max_grad_norm is not None and trainer.args.max_grad_norm > 0:
        nn.utils.clip_grad_norm_(trainer.model.parameters(), trainer.args.max_grad_norm)


def _nowhere(*args: Any, **kwargs: Any) -> None:
    pass


def _around(trainer: Any) -> tuple[object, ...]:
    return trainer, trainer.args, trainer.state, trainer.control, trainer.callback_handler.callbacks
