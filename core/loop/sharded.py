"""The objects of a hand-written loop whose model is sharded: what of their state each rank holds, and how it is filled again."""

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from shrinkpoint.config import SaverConfig
from shrinkpoint.errors import ConfigError, StateMismatchError
from shrinkpoint.loop.objects import LoopObjects
from shrinkpoint.saving.resume import require_same_model
from shrinkpoint.sharded.boxes import is_sharded
from shrinkpoint.sharded.capture import captured
from shrinkpoint.sharded.saver import ShardedSaver
from shrinkpoint.state.rng import capture_rng
from shrinkpoint.state.roles import optimizer_parameter_names
from shrinkpoint.state.training import TensorSpec
from shrinkpoint.store.connect import StorageOptions
from shrinkpoint.store.urls import RunUrl
from shrinkpoint.warn import warn

__all__ = ["ShardedObjects", "has_shards", "reshard", "sharded_saver"]


def has_shards(model: Any) -> bool:
    """Whether a model's parameters are shards, or copies that the ranks know to be the same.

    Raises:
        ConfigError: they are, and there is no process group; or they are shards of a kind that is not supported.
    """
    if not isinstance(model, nn.Module):
        return False
    for name, module in model.named_modules():
        if type(module).__name__ == "FullyShardedDataParallel":
            raise ConfigError(
                f"{name or 'the model'} is sharded by FullyShardedDataParallel (FSDP1), whose flat parameters are not supported:"
                " use torch.distributed.fsdp.fully_shard (FSDP2)"
            )
    reshard(model)
    if not any(map(is_sharded, model.parameters())):
        return False
    if not (dist.is_available() and dist.is_initialized()):
        raise ConfigError(
            "the model is sharded, and torch.distributed is not initialized: start the script with torchrun, and call"
            " torch.distributed.init_process_group() first"
        )
    return True


def reshard(model: nn.Module) -> None:
    """Let FSDP2's modules hold their shards alone: after a forward pass without a backward one the root does not."""
    for module in model.modules():
        if type(module).__name__.startswith("FSDP") and callable(again := getattr(module, "reshard", None)):
            again()


def sharded_saver(
    url: RunUrl,
    config: SaverConfig,
    objects: "ShardedObjects",
    *,
    storage_options: StorageOptions,
    parity: int | None,
    evaluated: bool,
) -> ShardedSaver:
    """The saver of a loop whose model is sharded.

    Args:
        url: as of `Checkpointer`.
        config: how to save.
        objects: of the loop.
        storage_options: as of `Checkpointer`.
        parity: as of `Checkpointer`.
        evaluated: whether a way to measure losses was given, which is not used yet.
    """
    if evaluated and config.scheme != "lossless" and dist.get_rank() == 0:
        warn(
            "evaluate= is not used for sharded models yet, so max_degradation cannot be checked: weights are stored with"
            f" {config.scheme}'s mildest settings, or those given, unmeasured (docs/sharded.md). scheme='lossless' stores them"
            " exactly",
            stacklevel=4,
        )
    return ShardedSaver(
        url,
        config,
        targets=objects.targets,
        own=objects.own,
        storage_options=storage_options,
        parity=parity,
    )


class ShardedObjects(LoopObjects):
    """As `LoopObjects`, on one of the ranks that train a sharded model together."""

    _numbers: dict[int, dict[int, int]]

    def state(self, step: int) -> dict[str, Any]:
        """See `LoopObjects.state`; its DTensors are this rank's."""
        reshard(self.model)
        return super().state(step)

    def own(self) -> dict[str, dict[str, Any]]:
        """What this rank has for itself: its generators, and the other objects' state."""
        return {
            "rng": capture_rng(),
            "stateful": {name: value.state_dict() for name, value in self.stateful.items()},
        }

    def targets(self, specs: Mapping[str, TensorSpec]) -> dict[str, torch.Tensor]:
        """The tensors that a restore fills.

        Args:
            specs: of the checkpoint's whole tensors, by name.

        Raises:
            StateMismatchError: they are another model's.
        """
        reshard(self.model)
        live = dict(captured({"model": self.model.state_dict()}, self.describe()).tensors)
        self._note_order(specs)
        self._check(specs, live)
        others = {name: value.state_dict() for name, value in self.stateful.items()}
        averages = captured({"stateful": others}, self.describe()).tensors
        live |= {name: tensor for name, tensor in averages.items() if is_sharded(tensor)}
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        return {name: _target(spec, live.get(name), parameters) for name, spec in specs.items()}

    def _check(self, specs: Mapping[str, TensorSpec], live: Mapping[str, torch.Tensor]) -> None:
        stored = {name[6:]: spec.shape for name, spec in specs.items() if name.startswith("model/")}
        shapes = {name[6:]: tuple(tensor.shape) for name, tensor in live.items()}
        named = (
            *self.model.named_parameters(remove_duplicate=False),
            *self.model.named_buffers(remove_duplicate=False),
        )
        owners = {id(tensor) for name, tensor in named if name in stored}
        # a tensor that is tied is stored once, under the name that came first
        tied = {name for name, tensor in named if id(tensor) in owners}
        known = {name: shape for name, shape in shapes.items() if name in stored or name not in tied}
        if not stored:
            raise StateMismatchError("the checkpoint was not written by a Checkpointer, or holds no model")
        require_same_model(stored, known, "the run")

    def _note_order(self, specs: Mapping[str, TensorSpec]) -> None:
        """Under which number each optimizer here knows the parameters that the checkpoint has numbers for."""
        self._numbers = {}
        for index, optimizer in enumerate(self.inner):
            names = optimizer_parameter_names(optimizer, self.model)
            here = {name: number for number, name in names.items() if name is not None}
            start, order = f"optimizers/{index}/state/", {}
            for name, spec in specs.items():
                number = name[len(start) :].partition("/")[0]
                if name.startswith(start) and number.isdecimal() and spec.tag.parameter in here:
                    order[int(number)] = here[spec.tag.parameter]
            self._numbers[index] = order

    def _reordered(self, optimizers: Any) -> Any:
        """The optimizers' states by the numbers that parameters have here, whose names decide."""
        found = []
        for index, stored in enumerate(optimizers):
            order = self._numbers.get(index, {})
            state = {order.get(number, number): value for number, value in stored["state"].items()}
            if len(state) != len(stored["state"]):
                raise StateMismatchError(
                    f"optimizer {index} was built with its parameters in another order, and some have no counterpart here: build"
                    " it as the run's"
                )
            found.append({**stored, "state": state})
        return found

    def load(self, state: Any, url: str, *, warns: bool = True) -> None:
        """See `LoopObjects.load`; the model's shards are filled already."""
        ranks = state.pop("ranks", None) if isinstance(state, dict) else None
        if isinstance(state, dict) and isinstance(state.get("optimizers"), list):
            state["optimizers"] = self._reordered(state["optimizers"])
        super().load(state, url, warns=warns)
        if ranks is None or ranks["stored"] == ranks["here"]:
            return
        if ranks["rank"] >= ranks["stored"]:
            _diverge(ranks["rank"])
        if self.stateful and warns and ranks["rank"] == 0:
            names = ", ".join(sorted(self.stateful))
            warn(
                f"the run was written by {ranks['stored']} ranks, and is continued by {ranks['here']}: the state of {names} is"
                " rank 0's on every rank"
            )


def _target(
    spec: TensorSpec, live: torch.Tensor | None, parameters: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    if live is not None:
        return live
    parameter = parameters.get(spec.tag.parameter or "")
    if parameter is not None and tuple(parameter.shape) == spec.shape:
        return torch.zeros_like(parameter.detach(), dtype=spec.dtype)
    return torch.empty(spec.shape, dtype=spec.dtype)


def _diverge(rank: int) -> None:
    """Give a rank that the writers had not its own random numbers: those of the first rank's state and its number."""
    seed = int(torch.randint(2**62, (1,), dtype=torch.int64)) ^ rank
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)
