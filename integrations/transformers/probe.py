"""Evaluates other weights between two steps of a Hugging Face run, without side effects on it.

``Trainer.evaluate`` fires events, logs, and reads the loaders. So a few recent batches are kept, and the trainer's own
``compute_loss`` is called on them.
"""

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from transformers import Trainer

from shrinkpoint.errors import ConfigError
from shrinkpoint.group.group import world
from shrinkpoint.integrations.transformers.state import optimizers_of
from shrinkpoint.session import probe as common
from shrinkpoint.session.probe import loss_of, to_host

__all__ = ["LossProbe", "StepProbe"]


class LossProbe(common.LossProbe):
    """Evaluates a run's model on a few batches: see the base class, whose runs are a trainer between two steps."""

    _number = 0

    def evaluates(self, inputs: Any) -> None:
        """The model is about to get a held-out batch."""
        self.kept.see_validation(inputs, self._number)
        self._number += 1

    def evaluation_ends(self) -> None:
        """The next held-out batch is the first of another evaluation."""
        self._number = 0

    def live(self, trainer: Any) -> Any:
        """See the base class."""
        around = trainer, trainer.args, trainer.state, trainer.control, trainer.callback_handler.callbacks
        return trainer.model, lambda weights: weights, around

    def measurement(self, trainer: Any, *, together: list[Any] | None = None) -> common.Measured:
        """See the base class."""
        batches = list(self.kept.batches) if together is None else together

        def measure() -> tuple[float, ...]:
            if not batches:
                raise ConfigError("there is nothing to measure the loss with: no batch has been seen")
            trainer.log = _nowhere  # until all is put back
            return tuple(loss_of(_loss(trainer, kept)) for kept in batches)

        return measure


class StepProbe(common.StepProbe):
    """See the base class; runs are as of `LossProbe`."""

    def see(self, batch: Any, number: int, *, accumulated: int) -> None:
        """A batch is about to be trained on.

        Args:
            batch: as the loader gives it.
            number: in its epoch, from 0.
            accumulated: batches to a step.
        """
        self._recent.see(batch, first=number % accumulated == 0)

    def parts(self, trainer: Any) -> common.StepParts:
        """See the base class."""
        module, _, around = self._losses.live(trainer)
        return common.StepParts(
            module=module,
            optimizers=optimizers_of(trainer),
            wrapped=trainer.model_wrapped,
            losses=lambda parts, _: _losses(trainer, parts),
            clip=lambda: _clip(trainer),
            scaler=getattr(trainer.accelerator, "scaler", None),
            around=around,
            states=lambda stored: (stored["model"], stored["optimizers"]),
        )

    def obstacle(self, trainer: Any) -> str | None:
        """See the base class."""
        if trainer.args.n_gpu > 1:
            return "one process trains on several GPUs"
        if type(trainer).training_step is not Trainer.training_step or "training_step" in vars(trainer):
            return "the trainer makes its steps in a way of its own"
        if getattr(trainer, "use_apex", False) or "lomo" in str(trainer.args.optim).lower():
            return "the optimizer or the precision is a library's"
        return None


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
    if world().size > 1 or not hasattr(trainer, "get_batch_samples"):
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
