"""The objects of a hand-written loop in several processes that train copies of a model, and the saver that all of them share."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch.nn.parallel import DistributedDataParallel

from shrinkpoint.config import SaverConfig
from shrinkpoint.engine.address import Address
from shrinkpoint.engine.request import SaveRequest, StateSaver
from shrinkpoint.errors import ConfigError
from shrinkpoint.group.ending import Ending
from shrinkpoint.group.group import Distributed, world
from shrinkpoint.group.mailbox import Mailbox
from shrinkpoint.loop.alone import alone
from shrinkpoint.loop.gradient_buckets import bucket_order, restore_buckets, stateful_hook
from shrinkpoint.loop.objects import LoopObjects, Stateful
from shrinkpoint.loop.sharded import ShardedObjects
from shrinkpoint.quality.evaluation import Evaluate, Loss
from shrinkpoint.reports import Accepted, SaveReport
from shrinkpoint.saver import Restored, Saver
from shrinkpoint.sharded.agreement import require_same
from shrinkpoint.sharded.spreading import share_adopted
from shrinkpoint.sharded.trees import own_of
from shrinkpoint.state.own import OwnState
from shrinkpoint.state.rng import capture_rng, diverge_rng
from shrinkpoint.state.stateful import state_of
from shrinkpoint.state.training import Describe, Role, TensorSpec, plain
from shrinkpoint.store.connect import StorageOptions
from shrinkpoint.store.manifest import Manifest
from shrinkpoint.store.run import RunStore
from shrinkpoint.store.urls import RunUrl
from shrinkpoint.warn import warn

__all__ = ["CopiedObjects", "ReplicatedObjects", "ReplicatedSaver", "replicated_saver"]

T = TypeVar("T")

_RANKS, _BUCKETS = "ranks", "buckets"


class ReplicatedObjects(LoopObjects):
    """As `LoopObjects`, on one of the processes that train copies of a model together.

    Args:
        model: the trained model, or the ``DistributedDataParallel`` around it, whose order of sums is stored then.
        optimizer: see `LoopObjects`.
        stateful: see `LoopObjects`; what differs between the processes (samplers, say) is stored for each of them.
    """

    def __init__(self, model: Any, optimizer: Any, stateful: Mapping[str, Stateful]) -> None:
        wrapped = isinstance(model, DistributedDataParallel)
        super().__init__(model.module if wrapped else model, optimizer, stateful)
        self._group, self._wrapper = Distributed(), model if wrapped else None
        if self._group.rank == 0:
            _warn_of_sums(model, self._group.size)

    def state(self, step: int) -> dict[str, Any]:
        """See `LoopObjects.state`; a collective."""
        return {**super().state(step), **self.of_ranks()}

    def of_ranks(self) -> dict[str, Any]:
        """The part of `state` that is each rank's own; a collective."""
        own = self._group.on_every(self._own)
        known = self._group.broadcast(own.digests())
        kept: dict[str, dict[str, Any]] = {}
        for (group, name), part in own.without(known).parts.items():
            kept.setdefault(group, {})[name] = part.to_object()
        return {_RANKS: self._group.gather(kept), _BUCKETS: bucket_order(self._wrapper)}

    @property
    def stateful_hook(self) -> str | None:
        """The name of the state of DDP's communication hook, which is in no state here; None where it has none."""
        return stateful_hook(self._wrapper)

    def _own(self) -> OwnState:
        groups = {
            "rng": capture_rng(),
            "stateful": {name: state_of(value) for name, value in self.stateful.items()},
            "trained": self._trained.values(),
        }
        return own_of(groups, self._group.rank)

    def load(self, state: Any, url: str, *, warns: bool = True) -> None:
        """See `LoopObjects.load`; a collective."""
        stored = state.get(_RANKS) if isinstance(state, dict) else None
        rank, size = self._group.rank, self._group.size
        written = len(stored) if isinstance(stored, list) else 1
        if isinstance(stored, list) and rank < written:
            own = stored[rank]
            merged = {group: {**state[group], **values} for group, values in own.items() if group in state}
            state = {**state, **merged}
        super().load(state, url, warns=warns)
        restore_buckets(self._wrapper, state.get(_BUCKETS) or [])
        if written == size:
            return
        if rank >= written:
            diverge_rng(rank)
        if warns and rank == 0:
            warn(
                f"the run was written by {written} processes, and is continued by {size}: it goes on from the same weights, but not bit"
                " by bit"
            )


class CopiedObjects(ShardedObjects):
    """As `ShardedObjects`, of a model that every rank has in whole, and stores a share of.

    Args:
        model: as it is trained.
        optimizer: see `LoopObjects`.
        stateful: see `LoopObjects`.
    """

    def __init__(self, model: Any, optimizer: Any, stateful: Mapping[str, Stateful]) -> None:
        super().__init__(model.module, optimizer, stateful)
        self._wrapper = model
        if world().is_first:
            _warn_of_sums(model, world().size)
        if world().is_first and not model.broadcast_buffers and any(True for _ in model.module.buffers()):
            warn("DDP(broadcast_buffers=False): a resume gives every process the buffers of the first one")

    def state(self, step: int) -> dict[str, Any]:
        """See `LoopObjects.state`; a collective, since one process alone may fail to give its own."""
        state = world().on_every(lambda: ShardedObjects.state(self, step))
        return {**state, _BUCKETS: bucket_order(self._wrapper)}

    def copied(self, spec: TensorSpec) -> bool:
        """Parameters and their optimizers' state; of buffers the first rank's counts, whose DDP gives them to all."""
        return spec.tag.role is Role.WEIGHT or spec.name.startswith("optimizers/")

    def obstacle(self) -> str | None:
        """See `LoopObjects.obstacle`."""
        return "several processes train copies of the model"

    def load(self, state: Any, url: str, *, warns: bool = True) -> None:
        """See `LoopObjects.load`."""
        super().load(state, url, warns=warns)
        restore_buckets(self._wrapper, state.get(_BUCKETS) or [])


def _warn_of_sums(model: Any, size: int) -> None:
    if not isinstance(model, DistributedDataParallel):
        if size > 2:  # a + b = b + a
            warn(
                "the model that the Checkpointer was given is no DistributedDataParallel: where it is inside of one, give that one, for"
                " the order in which it sums gradients is needed to continue bit by bit"
            )
    elif (hook := stateful_hook(model)) is not None:
        warn(
            f"checkpoints leave out the state of the DDP communication hook, a {hook}: a continued run starts with a fresh one, and is"
            " not bit-identical"
        )


def replicated_saver(
    url: RunUrl,
    config: SaverConfig,
    *,
    storage_options: StorageOptions,
    tried: bool,
) -> "ReplicatedSaver":
    """The saver of a loop that several processes run on copies of a model.

    Args:
        url: as of `Checkpointer`.
        config: how to save.
        storage_options: as of `Checkpointer`.
        tried: whether steps from a restored state could be tried, which is not done yet.
    """
    saver = ReplicatedSaver(url, config, storage_options=storage_options)
    if tried and world().is_first:
        warn("train_loss= is not used where several processes train: evaluate= alone measures")
    return saver


class ReplicatedSaver(StateSaver):
    """As `shrinkpoint.saver.Saver`, for processes that train copies of a model: the first one measures, quantizes and stores.

    Every method but `begin`, `poll`, `reports` and `close` is a collective: all ranks call it, with the same arguments. An error on
    one rank is raised on all.

    Args:
        url: see `Saver`.
        config: how to save.
        storage_options: see `Saver`.
    """

    def __init__(
        self,
        url: RunUrl,
        config: SaverConfig,
        *,
        storage_options: StorageOptions = None,
    ) -> None:
        self._group = Distributed()
        self._saver = Saver(url, config, storage_options=storage_options)
        self._mailbox: Mailbox | None = None
        self.url = self._saver.url
        self.config = config
        self.refer_to = self._saver.refer_to
        self.failed = False
        """Whether the last save that was accepted could not be stored, as of the last `flush`."""

    @property
    def store(self) -> RunStore:
        """The run's checkpoints."""
        return self._saver.store

    def check(self) -> None:
        """See `Saver.check`; all ranks must have been given the same.

        Raises:
            ConfigError: they were not.
            StoreError, RunMismatchError: as `Saver.check`.
        """
        require_same(self._group, self.url, self.config)
        self._group.on_first(self._saver.check)
        self._mailbox = Mailbox(self._group)

    def ending(self) -> Ending:
        """See `ShardedSaver.ending`."""
        mailbox = self._mailbox
        if mailbox is None:
            raise ConfigError("call check() first, on every rank")
        return self._group.on_every(lambda: Ending(mailbox))

    def begin(self, state: object, *, step: int = 0, describe: Describe = plain) -> None:
        """See `Saver.begin`."""
        if self._group.rank == 0:
            self._saver.begin(state, step=step, describe=describe)

    def accept(self, request: SaveRequest) -> Accepted | None:
        """See `StateSaver.accept`; with `adoption` every rank has the values that are stored when this returns.

        `evaluate` is called on the first rank alone, where it must not communicate with the others; `resumed` is not used yet.
        """
        adoption, evaluate = request.adoption, request.evaluate
        if adoption is not None:
            adoption = replace(adoption, settings={**adoption.settings, "ranks": self._group.size})
        alone = None if evaluate is None else _alone(evaluate)
        request = replace(request, evaluate=alone, resumed=None, adoption=adoption)
        accepted = self._group.on_first(lambda: self._saver.accept(request))
        if adoption is not None:
            share_adopted(self._group, self._saver.adopted, adoption.live)
        if request.wait:
            self._learn()
        return accepted

    def poll(self) -> float:
        """See `Saver.poll`."""
        return self._saver.poll() if self._group.rank == 0 else 0.0

    def flush(self, timeout_s: float | None = None) -> bool:
        """See `Saver.flush`."""
        done = self._group.on_first(lambda: self._saver.flush(timeout_s))
        self._learn()
        return done

    def require_stored(self) -> None:
        """See `Saver.require_stored`."""
        self._group.on_first(self._saver.require_stored)

    def _learn(self) -> None:
        self.failed = self._group.broadcast(self._saver.failed)

    def restore_alone(self, manifest: Manifest) -> Restored | None:
        """What `restore` returns, on one rank that the others wait for."""
        return self._saver.restore(manifest, adopt=False)

    def close(self, timeout_s: float | None = None) -> bool:
        """See `Saver.close`; no collective, so that it may be called after an error."""
        return self._saver.close(timeout_s) if self._group.rank == 0 else True

    def reports(self) -> list[SaveReport]:
        """See `Saver.reports`: those of the first rank."""
        return self._saver.reports()

    def newest(self, *, begins: Callable[[Manifest], object] = lambda manifest: None) -> Manifest | None:
        """See `Saver.newest`.

        Args:
            begins: called on the first rank alone.
        """
        return self._group.on_first(lambda: self._saver.newest(begins=begins))

    def restore(self, which: Manifest | int | None = None, *, adopt: bool = True) -> Restored | None:
        """See `Saver.restore`; every rank reads the checkpoint that the first one has found."""

        def find() -> Manifest | None:
            if isinstance(which, Manifest):
                return which
            if which is None:
                return self._saver.newest()
            return Address(url=self.url, step=which).find(self.store.manifests())

        manifest = self._group.on_first(find)
        if manifest is None:
            return None
        first = self._group.rank == 0
        return self._group.on_every(lambda: self._saver.restore(manifest, adopt=adopt and first))


def _alone(evaluate: Evaluate) -> Evaluate:
    def evaluated(weights: Mapping[str, torch.Tensor]) -> Loss:
        with alone():
            return evaluate(weights)

    return evaluated
