"""The objects of a hand-written loop that several processes run: what of their state each rank holds, and how it is filled again."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shrinkpoint.errors import ConfigError
from shrinkpoint.group.group import world
from shrinkpoint.session.ddp import bucket_order, restore_buckets, stateful_hook
from shrinkpoint.session.objects import LoopObjects
from shrinkpoint.sharded.boxes import is_sharded
from shrinkpoint.sharded.restoring import RANKS_KEY
from shrinkpoint.sharded.targets import reshard, unreduced
from shrinkpoint.sharded.trees import GRADIENTS, own_of
from shrinkpoint.state.rng import diverge_rng
from shrinkpoint.state.stateful import parameters_of, state_of
from shrinkpoint.state.training import Describe, Role, TensorSpec, TrainingState, plain
from shrinkpoint.warn import warn

if TYPE_CHECKING:
    from shrinkpoint.steps.training import Captured

_BUCKETS = "buckets"  # of a state: the order in which DDP sums gradients
_RANKS = "ranks"  # of a segment of a log: what is each rank's own


def has_shards(model: Any) -> bool:
    """Return whether a model's parameters are shards, or copies that the ranks know to be the same.

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


def refuse_deepspeed(model: Any, optimizers: Sequence[Any]) -> None:
    """Refuse DeepSpeed, whose engine flattens and divides weights and optimizer state where no ``state_dict`` shows
    it.

    Raises:
        ConfigError: the model or an optimizer is DeepSpeed's, or the model's parameters are.
    """
    modules = model.modules() if isinstance(model, nn.Module) else [model]
    kinds = [base for one in (*modules, *optimizers) for base in type(one).__mro__]
    if any(kind.__module__.partition(".")[0] == "deepspeed" for kind in kinds) or (
        isinstance(model, nn.Module) and any(hasattr(parameter, "ds_id") for parameter in model.parameters())
    ):
        raise ConfigError(
            "the model or its optimizer is DeepSpeed's, whose state no state_dict shows in whole: it is not supported. Use"
            " torch.distributed.fsdp.fully_shard (FSDP2), or save with the engine's save_checkpoint"
        )


class ShardedObjects(LoopObjects):
    """As `LoopObjects`, on one of the ranks that train a sharded model together."""

    ordered = False  # `Targets` finds it by name
    writer = "a Checkpointer"

    def gradients(self) -> dict[str, torch.Tensor]:
        """Return none of shards, and warn where some wait for a step; before the first step they may be of one that was not counted."""
        if self._steps.count and (self._steps.accumulated() or unreduced(self.model)):
            self.session.warn_once(
                "a save is within an accumulation of gradients, which checkpoints of shards do not hold: after a resume the next step of the optimizer lacks"
                " them. Save after optimizer.step()"
            )
        return {}

    def state(self) -> dict[str, Any]:
        """See `LoopObjects.state`; its DTensors are this rank's."""
        reshard(self.model)
        return super().state()

    def followed(self) -> dict[str, Any]:
        """See `LoopObjects.followed`; its DTensors are this rank's."""
        reshard(self.model)
        return super().followed()

    def captured(self, state: object, describe: Describe = plain) -> TrainingState:
        return TrainingState.capture(state, describe, shards=True)

    def settle(self) -> None:
        reshard(self.model)

    def own(self) -> dict[str, dict[str, Any]]:
        """Return what this rank has for itself: its generators, and the other objects' state."""
        return {
            "rng": self.rng(),
            "stateful": {name: state_of(value) for name, value in self.stateful.items()},
            "trained": self.session.trained.values(),
        }

    def targets(self, specs: Mapping[str, TensorSpec], others: Any = None) -> dict[str, torch.Tensor]:
        others = {name: state_of(value) for name, value in self.stateful.items()}
        return super().targets(specs, {"stateful": others})

    def load(self, state: Any, *, warns: bool = True) -> None:
        """See `LoopObjects.load`; the model's shards are filled already."""
        ranks = state.pop(RANKS_KEY, None) if isinstance(state, dict) else None
        if isinstance(state, dict) and isinstance(state.get("optimizers"), list):
            state["optimizers"] = self.reordered(state["optimizers"])
        if ranks is not None and ranks["rank"] >= ranks["stored"]:  # the first one's are no other rank's
            state["rng"] = {name: one for name, one in state["rng"].items() if name not in ("own", "starts")}
        super().load(state, warns=warns)
        if ranks is None or ranks["stored"] == ranks["here"]:
            return
        if ranks["rank"] >= ranks["stored"]:
            diverge_rng(ranks["rank"])
        if warns and ranks["rank"] == 0:
            names = ", ".join(sorted(self.stateful))
            theirs = f". The state of {names} is rank 0's on every rank" if names else ""
            warn(
                f"the run was written by {ranks['stored']} ranks, and is continued by {ranks['here']}: it goes on from the same weights,"
                f" but not bit by bit{theirs}"
            )


class CopiedObjects(ShardedObjects):
    """As `ShardedObjects`, of a model that every rank has in whole, and stores a share of.

    Of a ``DistributedDataParallel`` the order of sums is stored, too.
    """

    fills_copies = True

    def __init__(self, model: Any, *options: Any) -> None:
        self._wrapper = model if isinstance(model, DistributedDataParallel) else None
        self._waiting: dict[str, torch.Tensor] = {}
        super().__init__(model if self._wrapper is None else model.module, *options)
        if world().is_first:
            self._warn_of_differences()

    def _warn_of_differences(self) -> None:
        if self._wrapper is None:
            if world().size > 2:  # a + b = b + a
                warn(
                    "the model that the Checkpointer was given is no DistributedDataParallel: where it is inside of one, give that one,"
                    " for the order in which it sums gradients is needed to continue bit by bit"
                )
            return
        if not self._wrapper.broadcast_buffers and any(True for _ in self.model.buffers()):
            warn("DDP(broadcast_buffers=False): a resume gives every process the buffers of the first one")

    @property
    def wrapped(self) -> Any:
        return self.model if self._wrapper is None else self._wrapper

    def gradients(self) -> dict[str, torch.Tensor]:
        """Return this process's gradients that wait for a step; within DDP's ``no_sync()`` each process has its own."""
        return self._waiting

    def own(self) -> dict[str, dict[str, Any]]:
        """See `ShardedObjects.own`."""
        return {**super().own(), GRADIENTS: self._waiting}

    def state(self) -> dict[str, Any]:
        """See `LoopObjects.state`; a collective, since one process alone may fail to give its own."""
        self._waiting = self._steps.accumulated(lambda wanted: world().any_of(wanted)[0])
        return world().on_every(super().state)

    def logged(self, state: Callable[[], Mapping[str, Any]]) -> "Captured":
        """See `LoopObjects.logged`: what is each rank's own, where it differs from the first one's; a collective."""
        from shrinkpoint.steps.capture import CannotLogError
        from shrinkpoint.steps.exact import ExactLog

        self._waiting = {}  # there is no such log where some wait
        group, hook, buckets = world(), stateful_hook(self._wrapper), bucket_order(self._wrapper)
        own = group.on_every(lambda: own_of(self.own(), group.rank))
        known = group.broadcast(own.digests())
        kept: dict[str, dict[str, Any]] = {}
        for (of, name), part in own.without(known).parts.items():
            kept.setdefault(of, {})[name] = part.to_object()
        captured = {_RANKS: group.gather(kept), _BUCKETS: buckets}
        log = self.session.log
        if log is not None and isinstance(log.log, ExactLog) and log.log.accumulates():
            return CannotLogError(
                "gradients are accumulated over several calls of Checkpointer.step, other ones on each process: call it after"
                " optimizer.step() only"
            )
        if hook is not None:
            return CannotLogError(
                f"the state of the DDP communication hook, a {hook}, is each process's own, and not logged here: the callbacks of"
                " Lightning and Composer log it"
            )
        return captured

    def log_options(self) -> dict[str, Any]:
        """See `LoopObjects.log_options`; the first rank writes and replays it."""
        from shrinkpoint.steps.training import on_host

        def share(step: int, captured: Mapping[str, Any]) -> None:
            parameters = [parameter for one in self.optimizers for parameter in parameters_of(one)]
            state: dict[str, Any] = {}
            gradients = None
            if world().is_first:
                self.step = step
                state = on_host(self.whole())
                gradients = [on_host(parameter.grad) for parameter in parameters]
            self.load(_with_own({**world().broadcast(state), **captured}), warns=False)
            restore_buckets(self._wrapper, captured.get(_BUCKETS) or [])
            found = world().broadcast(gradients)
            if not world().is_first:
                for parameter, gradient in zip(parameters, found or (), strict=True):
                    parameter.grad = None if gradient is None else gradient.to(parameter.device)

        return {**super().log_options(), "share": share}

    def copied(self, spec: TensorSpec) -> bool:
        """Return parameters and their optimizers' state; of buffers the first rank's counts, whose DDP gives them to all."""
        return spec.tag.role is Role.WEIGHT or spec.name.startswith("optimizers/")

    def obstacle(self, *, shards: bool) -> str | None:
        return "several processes train copies of the model"


def _with_own(state: dict[str, Any]) -> dict[str, Any]:
    """Return the first rank's state with what is this one's own, if a rank of this number has written some."""
    ranks, here = state.pop(_RANKS), world()
    own = ranks[here.rank] if here.rank < len(ranks) else {}
    merged = {of: {**state[of], **values} for of, values in own.items()}
    return {**state, **merged, RANKS_KEY: {"stored": len(ranks), "here": here.size, "rank": here.rank}}
