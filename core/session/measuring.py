"""Measurements of quality on the objects of a hand-written loop, which notice nothing of it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler

from shrinkpoint.config import SaverConfig
from shrinkpoint.errors import ConfigError
from shrinkpoint.quality.evaluation import Evaluate, Loss, ResumedSteps, losses_of
from shrinkpoint.quality.preserve import TraceError
from shrinkpoint.quality.resumed_steps import ResumedRun, UntilFailure
from shrinkpoint.quality.swap import swapped_tensors, swapped_weights
from shrinkpoint.session.objects import LoopObjects
from shrinkpoint.state.averages import averages_in, live_tensors, without_averages
from shrinkpoint.state.stateful import state_of
from shrinkpoint.state.training import Role
from shrinkpoint.state.tree import join_path
from shrinkpoint.warn import warn

__all__ = ["LoopMeasurements"]


class LoopMeasurements:
    """What a saver asks for to measure the quality of checkpoints.

    Args:
        objects: of the loop.
        loss: the held-out loss of the model as it is; None measures nothing.
        train_loss: the training loss of a batch by its index, with a graph; None makes no resumed steps.
        clip_grad_norm: as the training clips gradients.
    """

    def __init__(
        self,
        objects: LoopObjects,
        loss: Callable[[], Loss] | None,
        train_loss: Callable[[int], torch.Tensor] | None,
        clip_grad_norm: float | None,
    ) -> None:
        self._objects = objects
        self._loss = loss
        self._train_loss = train_loss
        self._clip_grad_norm = clip_grad_norm
        self._until_failure = UntilFailure(warn)
        self._warned = False

    def evaluation(self) -> Evaluate | None:
        """Return the loss with other weights in the model's place; None if no loss was given."""
        return self._evaluate if self._loss is not None else None

    def _evaluate(self, weights: Mapping[str, torch.Tensor]) -> Loss:
        assert self._loss is not None
        try:
            with (
                self._objects.undone(),
                self._averages(averages_in(weights)),
                self._objects.swapped(without_averages(weights)),
            ):
                return losses_of(self._loss())
        except Exception as error:
            if not self._warned and not isinstance(error, TraceError):
                self._warned = True
                warn(
                    "the quality of checkpoints cannot be measured, so they are stored exactly: evaluate() raised"
                    f" {type(error).__name__}: {error}"
                )
            raise

    def resumed(self, config: SaverConfig) -> ResumedSteps | None:
        """Resumed steps from a state of `LoopObjects.state`; None if they are not possible, or not wanted."""
        return self._until_failure.guard(self._resumed(config))

    def _resumed(self, config: SaverConfig) -> ResumedSteps | None:
        objects, loss, evaluate = self._objects, self._train_loss, self._loss
        if loss is None or evaluate is None or not config.probe_steps or config.scheme == "lossless":
            return None
        reason = objects.obstacle()
        if reason is not None:
            self._until_failure.give_up(reason)
            return None
        run = ResumedRun(
            module=objects.model,
            optimizers=objects.inner,
            losses=lambda index: [loss(index)],
            evaluate=evaluate,
            clip=self._clip,
            scale=self._scale(),
            settle=objects.settle,
            around=[[*objects.stateful.values()]],
        )
        describe = objects.describe()

        def resumed(state: Any, marks: Sequence[int]) -> Sequence[Loss]:
            changed = objects.obstacle()
            if changed is not None:
                raise ConfigError(changed)
            found = objects.captured({"stateful": state["stateful"]}, describe)
            values = {
                name: found.tensors[name]
                for name, spec in found.specs.items()
                if spec.tag.role is Role.AVERAGE
            }
            with objects.undone(), self._averages(values):
                return run.steps(state["model"], state["optimizers"], marks)

        return resumed

    @contextmanager
    def _averages(self, values: Mapping[str, torch.Tensor]) -> Iterator[None]:
        """Swap averaged weights into the objects with a state, if their state shares memory with them.

        Args:
            values: by name in the state.
        """
        owners = {
            name: value
            for name, value in self._objects.stateful.items()
            if any(key.startswith(join_path(("stateful", name)) + "/") for key in values)
        }

        def state() -> dict[str, Any]:
            return {"stateful": {name: state_of(value) for name, value in owners.items()}}

        with ExitStack() as stack:
            for value in owners.values():
                if isinstance(value, nn.Module):  # in eval mode, which is undone afterwards
                    stack.enter_context(swapped_weights(value, {}))
            if owners:
                stack.enter_context(
                    swapped_tensors(live_tensors(state, values, self._objects.captured), values)
                )
            yield

    def _scale(self) -> float:
        """Scale of the training loss, if a gradient scaler is among the objects with a state."""
        scalers = (value for value in self._objects.stateful.values() if isinstance(value, GradScaler))
        return float(next((scaler.get_scale() for scaler in scalers if scaler.is_enabled()), 1.0))

    def _clip(self) -> None:
        if self._clip_grad_norm is not None:
            groups = [
                group["params"] for optimizer in self._objects.optimizers for group in optimizer.param_groups
            ]
            nn.utils.clip_grad_norm_(chain.from_iterable(groups), self._clip_grad_norm)
