"""Saving a model that FSDP shards and whose whole state the first rank gathers: the others take part in its evaluations."""

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

from shrinkpoint.errors import ConfigError
from shrinkpoint.group.group import world
from shrinkpoint.integrations.composer.adapter import ComposerAdapter
from shrinkpoint.integrations.composer.state import parameter_names
from shrinkpoint.quality.preserve import TraceError
from shrinkpoint.quality.swap import swapped_weights
from shrinkpoint.session.probe import LossProbe
from shrinkpoint.session.session import TrainingSession
from shrinkpoint.state.stateful import named_buffers, named_parameters

_LOOK_EVERY_S = 0.01


class GatheringSession(TrainingSession):
    """As `TrainingSession`; where the model is sharded, the first rank's evaluations are made by all."""

    adapter: ComposerAdapter

    @property
    def together(self) -> bool:
        """See the base class; what FSDP shards the first rank has alone."""
        state = getattr(self.adapter, "run", None)  # none where no trainer has the callback yet
        return (state is None or state.fsdp_config is None) and super().together

    def start_over(self) -> None:
        """See the base class."""
        super().start_over()
        kept, self.probe = self.probe.kept, GatheringProbe(self.adapter, together=self._measures_together)
        self.probe.kept = kept

    @property
    def _gathers(self) -> bool:
        return bool(self.adapter.run.fsdp_enabled)

    @property
    def evaluation_wanted(self) -> bool:
        """Whether the first rank waits for an evaluation."""
        return self._gathers and world().is_first and self.saver.evaluation_wanted

    def evaluate(self) -> None:
        """Make the evaluation that the first rank waits for; on every rank."""
        if world().is_first:
            self.saver.poll()
        elif isinstance(self.probe, GatheringProbe):
            with suppress(ConfigError):  # the first rank gets it too, and reports it
                self.probe.evaluate(None)

    def serve(self) -> None:
        """See the base class; evaluations are `evaluate`'s, on as many batches always."""
        if not self._gathers:
            super().serve()
            return
        reports = self.attend(serve=False)
        if world().is_first:
            self.log_reports(reports)

    def drain(self) -> None:
        """See the base class."""
        while self._gathers:
            busy, wanted = world().broadcast((self.saver.busy, self.evaluation_wanted))
            if wanted:
                self.evaluate()
            elif not busy:
                return
            elif world().is_first:
                time.sleep(_LOOK_EVERY_S)


class GatheringProbe(LossProbe):
    """As `LossProbe`, of a model whose parameters FSDP shards and whose first rank saves: all ranks evaluate what it asks for."""

    adapter: ComposerAdapter

    def evaluation(self) -> Callable[[Mapping[str, torch.Tensor]], tuple[float, ...]]:
        """See the base class; of shards what is returned is called on the first rank, while the others call `evaluate`."""
        return self.evaluate if self.adapter.run.fsdp_enabled else super().evaluation()

    def evaluate(self, weights: Mapping[str, torch.Tensor] | None) -> tuple[float, ...]:
        """Return the losses of all ranks, each on the batches that it has seen, with the first rank's weights; called
        on every rank."""
        module = self.adapter.model
        # With a different number of batches on one rank, the others would wait in a forward pass forever.
        batches = self.kept.batches[: min(world().gather(len(self.kept.batches)))]
        _reshard(module)  # Composer's own evaluation leaves gathered parameters behind
        try:
            losses = world().gather(self._loss_or_error(_shards(module, weights), batches))
        finally:
            _reshard(module)  # or the next training step would run with these weights
        for loss in losses:
            if isinstance(loss, str):
                raise (TraceError if loss.startswith("measuring") else ConfigError)(loss)
        return tuple(float(loss) for of_rank in losses for loss in of_rank)

    def _loss_or_error(
        self, weights: Mapping[str, torch.Tensor], batches: list[Any]
    ) -> tuple[float, ...] | str:
        try:
            with swapped_weights(self.adapter.model, weights, self.adapter.run):
                return self.measurement(batches)()
        except TraceError as error:
            return str(error)
        except Exception as error:  # noqa: BLE001 - raised on every rank, so that none waits for this one
            return f"{type(error).__name__}: {error}"


def _reshard(module: nn.Module) -> None:
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def _shards(module: nn.Module, weights: Mapping[str, torch.Tensor] | None) -> dict[str, torch.Tensor]:
    """Return each rank's part of the first rank's `weights`, by the module's own names."""
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
