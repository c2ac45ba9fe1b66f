"""The probe of a Composer run: some steps from a saved state, which are undone completely.

The trainer's own loop cannot be used: it counts, logs, fires events and reads the loaders. So the model's own loss is
computed on recent batches, and the rest of a step is implemented here, for trainings where that is simple enough.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from composer.algorithms import GradientClipping
from composer.algorithms.gradient_clipping import apply_gradient_clipping
from composer.core import Event, Precision, State, get_precision_context
from composer.loggers import Logger
from composer.utils import ensure_tuple
from torch import nn

from shrinkpoint.errors import ConfigError
from shrinkpoint.integrations.common.probe import RecentBatches, as_many, to_host
from shrinkpoint.integrations.composer.probe import LossProbe
from shrinkpoint.integrations.composer.state import parameter_names, trained_module
from shrinkpoint.loop.alone import alone, wrapper_obstacle
from shrinkpoint.quality.evaluation import Loss, ResumedSteps
from shrinkpoint.quality.resumed_steps import ResumedRun, obstacle
from shrinkpoint.sharded.targets import reshard, unreduced

__all__ = ["StepProbe"]

_PRECISIONS = (Precision.FP32, Precision.AMP_FP16, Precision.AMP_BF16)
_EVENTS_OF_A_STEP = (
    Event.BEFORE_TRAIN_BATCH,
    Event.BEFORE_FORWARD,
    Event.AFTER_FORWARD,
    Event.BEFORE_LOSS,
    Event.AFTER_LOSS,
    Event.BEFORE_BACKWARD,
    Event.AFTER_BACKWARD,
    Event.AFTER_TRAIN_BATCH,
)


class StepProbe:
    """Keeps batches for the steps of a probe, and makes these steps.

    Args:
        losses: measures the loss after the steps.
        steps: how many batches to keep, in host memory; 0 keeps none and makes none.
        shards: whether each rank has shards of the model, and all make the steps together.
    """

    def __init__(self, losses: LossProbe, *, steps: int, shards: bool = False) -> None:
        self._losses = losses
        self._shards = shards
        self._recent = RecentBatches(steps)
        self._first = True

    def starts(self, state: State) -> None:
        """Keep no batches in a training that does not allow probes."""
        if self._obstacle(state) is not None:
            self._recent.stop()

    def batch_starts(self) -> None:
        """A batch is about to be trained on."""
        self._first = True

    def see(self, state: State) -> None:
        """The model is about to get a batch, or the part of one that fits into memory."""
        self._recent.see(state.batch, first=self._first)
        self._first = False

    def resumed(self, state: State) -> ResumedSteps | None:
        """Resumed steps from a present `stored_state`, of shards `sharded_state`; None where that is impossible. Of shards a collective.

        Gradients are clipped as in training. No event is fired.
        """
        batches, together = self._recent.take(), None
        if self._shards:
            batches, together = as_many(batches), self._losses.kept.agreed()
        if not batches or self._obstacle(state) is not None:
            return None
        module = trained_module(state)
        names = {stored: own for own, stored in parameter_names(module).items()}
        (optimizer,) = state.optimizers
        run = ResumedRun(
            module=module,
            optimizers=[optimizer],
            losses=lambda index: _losses(state, module, batches[index % len(batches)]),
            evaluate=self._losses.measurement(state, together),
            clip=lambda: _clip(state, module),
            scale=_scale(state),
            settle=lambda: reshard(module) if self._shards else None,
            around=[state],
        )

        def resumed(stored: Any, marks: Sequence[int]) -> Sequence[Loss]:
            weights = {
                names[name]: value for name, value in stored["state"]["model"].items() if name in names
            }
            reason = self._obstacle(state)
            if reason is not None:
                raise ConfigError(reason)
            with nullcontext() if self._shards else alone():
                return run.steps(
                    weights, [stored["state"]["optimizers"][type(optimizer).__qualname__]], marks
                )

        return resumed

    def _obstacle(self, state: State) -> str | None:
        reason = _obstacle(state, shards=self._shards)
        if reason is not None:
            return reason
        module = trained_module(state)
        if self._shards:
            return obstacle(module, state.optimizers, shards=True) or unreduced(module)
        return wrapper_obstacle(state.model) or obstacle(module, state.optimizers, alone=True)


def _obstacle(state: State, *, shards: bool) -> str | None:
    if state.fsdp_enabled is not shards or state.precision not in _PRECISIONS:
        return "the model is sharded, or its precision is a library's"
    if len(state.optimizers) != 1 or getattr(state.optimizers[0], "_step_supports_amp_closure", False):
        return "there are several optimizers, or one that computes the loss itself"
    for algorithm in state.algorithms:
        if not isinstance(algorithm, GradientClipping) and any(
            algorithm.match(event, state) for event in _EVENTS_OF_A_STEP
        ):
            return f"{type(algorithm).__name__} takes part in every step"
    return None


def _scale(state: State) -> float:
    """The present scale of the losses, where half-precision training has a scaler; not changed."""
    scaler = state.scaler
    return 1.0 if scaler is None or not scaler.is_enabled() else float(scaler.get_scale())


def _losses(state: State, module: nn.Module, parts: Sequence[Any]) -> Iterator[torch.Tensor]:
    model: Any = module
    model.logger = Logger(state)  # which writes nowhere, until all is put back
    for part in parts:
        batch = state.device.batch_to_device(to_host(part))  # a copy: some models change their batch
        with get_precision_context(state.precision, state.precision_config):
            loss = _total(model.loss(model(batch), batch))
        yield loss / len(parts)


def _total(loss: Any) -> torch.Tensor:
    """The total loss, added up as in Composer."""
    if isinstance(loss, Mapping) and "total" in loss:
        total: torch.Tensor = loss["total"]
        return total
    return torch.stack([part.mean() for part in ensure_tuple(loss)]).sum()


def _clip(state: State, module: nn.Module) -> None:
    for algorithm in state.algorithms:
        if isinstance(algorithm, GradientClipping):
            apply_gradient_clipping(
                module, algorithm.clipping_type, algorithm.clipping_threshold, fsdp_enabled=state.fsdp_enabled
            )
