"""The probe of a Composer run: some steps from a saved state, which are undone completely."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from composer.algorithms import GradientClipping
from composer.algorithms.gradient_clipping import apply_gradient_clipping
from composer.core import Event, Precision, State, get_precision_context
from composer.loggers import Logger
from composer.utils import ensure_tuple
from torch import nn

from shrinkpoint.integrations.common import probe as common
from shrinkpoint.integrations.common.probe import to_host

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


class StepProbe(common.StepProbe):
    """See the base class; runs are as of `LossProbe`."""

    _first = True

    def batch_starts(self) -> None:
        """A batch is about to be trained on."""
        self._first = True

    def see(self, state: State) -> None:
        """The model is about to get a batch, or the part of one that fits into memory."""
        self._recent.see(state.batch, first=self._first)
        self._first = False

    def parts(self, state: State) -> common.StepParts:
        """See the base class."""
        module, named, around = self._losses.live(state)
        (optimizer,) = state.optimizers
        return common.StepParts(
            module=module,
            optimizers=[optimizer],
            wrapped=state.model,
            losses=lambda parts, _: _losses(state, module, parts),
            clip=lambda: _clip(state, module),
            scaler=state.scaler,
            around=around,
            states=lambda stored: (
                named(stored["state"]["model"]),
                [stored["state"]["optimizers"][type(optimizer).__qualname__]],
            ),
        )

    def obstacle(self, state: State) -> str | None:
        """See the base class."""
        if state.fsdp_enabled is not self._shards or state.precision not in _PRECISIONS:
            return "the model is sharded, or its precision is a library's"
        if len(state.optimizers) != 1 or getattr(state.optimizers[0], "_step_supports_amp_closure", False):
            return "there are several optimizers, or one that computes the loss itself"
        for algorithm in state.algorithms:
            if not isinstance(algorithm, GradientClipping) and any(
                algorithm.match(event, state) for event in _EVENTS_OF_A_STEP
            ):
                return f"{type(algorithm).__name__} takes part in every step"
        return None


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
