"""Evaluates other weights between two batches of a Composer run, without side effects on it.

``Trainer.eval`` fires events, fills metrics and reads the user's loaders. So a few recent batches are kept,
and the model's own loss is computed on them.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from composer.algorithms import GradientClipping
from composer.algorithms.gradient_clipping import apply_gradient_clipping
from composer.core import Event, Precision, State, get_precision_context
from composer.loggers import Logger
from composer.utils import ensure_tuple
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

from shrinkpoint.errors import ConfigError
from shrinkpoint.group.group import world
from shrinkpoint.integrations.composer.state import parameter_names, trained_module
from shrinkpoint.quality.preserve import TraceError
from shrinkpoint.quality.swap import swapped_weights
from shrinkpoint.session import probe as common
from shrinkpoint.session.probe import loss_of, to_host
from shrinkpoint.state.wrappers import named_buffers, named_parameters

__all__ = ["LossProbe", "StepProbe"]


class LossProbe(common.LossProbe):
    """Evaluates a run's model on a few batches: see the base class, whose runs are a state between two batches."""

    def live(self, state: State) -> Any:
        """See the base class."""
        module = trained_module(state)
        names = {stored: own for own, stored in parameter_names(module).items()}
        return (
            module,
            lambda weights: {names[name]: value for name, value in weights.items() if name in names},
            [state],
        )

    def measurement(self, state: State, *, together: list[Any] | None = None) -> common.Measured:
        """See the base class."""
        batches = list(self.kept.batches) if together is None else together
        return lambda: _losses(state, trained_module(state), batches)

    def evaluate_sharded(self, state: State, weights: Mapping[str, torch.Tensor] | None) -> tuple[float, ...]:
        """As what `evaluation` returns, for a model whose parameters FSDP1 shards; called on every rank.

        Args:
            state: between two batches.
            weights: the first rank's; None elsewhere.

        Returns:
            The losses of all ranks, each on the batches that it has seen.
        """
        module = trained_module(state)
        # With a different number of batches on one rank, the others would wait in a forward pass forever.
        batches = self.kept.batches[: min(world().gather(len(self.kept.batches)))]
        _reshard(module)  # Composer's own evaluation leaves gathered parameters behind
        try:
            losses = world().gather(self._loss_or_error(state, module, _shards(module, weights), batches))
        finally:
            _reshard(module)  # or the next training step would run with these weights
        for loss in losses:
            if isinstance(loss, str):
                raise (TraceError if loss.startswith("measuring") else ConfigError)(loss)
        return tuple(float(loss) for of_rank in losses for loss in of_rank)

    def _loss_or_error(
        self, state: State, module: nn.Module, weights: Mapping[str, torch.Tensor], batches: list[Any]
    ) -> tuple[float, ...] | str:
        try:
            with swapped_weights(module, weights, state):
                return _losses(state, module, batches)
        except TraceError as error:
            return str(error)
        except Exception as error:  # noqa: BLE001 - raised on every rank, so that none waits for this one
            return f"{type(error).__name__}: {error}"


def _losses(state: State, module: nn.Module, batches: Sequence[Any]) -> tuple[float, ...]:
    if not batches:
        raise ConfigError("there is nothing to measure the loss with: no batch has been seen")
    model: Any = module
    model.logger = Logger(state)  # which writes nowhere, until all is put back
    losses = []
    for kept in batches:
        batch = state.device.batch_to_device(to_host(kept))  # a copy: some models change their batch
        with get_precision_context(state.precision, state.precision_config, fp8_autocast_enabled=False):
            losses.append(loss_of(model.loss(model(batch), batch)))
    return tuple(losses)


def _reshard(module: nn.Module) -> None:
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def _shards(module: nn.Module, weights: Mapping[str, torch.Tensor] | None) -> dict[str, torch.Tensor]:
    """Each rank's part of the first rank's `weights`, by the module's own names."""
    names = {stored: own for own, stored in parameter_names(module).items()}
    live: dict[str, torch.Tensor] = dict(named_parameters(module)) | dict(named_buffers(module))
    given = (
        world().broadcast([name for name in weights if name in names] if weights is not None else None) or []
    )
    shards: dict[str, torch.Tensor] = {}
    for name in given:
        own = live[names[name]]
        value = weights[name] if weights is not None else torch.empty(own.shape, dtype=own.dtype)
        if isinstance(own, DTensor):
            value = value.to(own.device_mesh.device_type, own.dtype)
            shards[names[name]] = distribute_tensor(value, own.device_mesh, own.placements)
        else:
            shards[names[name]] = world().broadcast(value)
    return shards


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
            losses=lambda parts, _: _step_losses(state, module, parts),
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


def _step_losses(state: State, module: nn.Module, parts: Sequence[Any]) -> Iterator[torch.Tensor]:
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
