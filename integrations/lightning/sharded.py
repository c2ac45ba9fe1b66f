"""One Lightning run whose strategy shards the model: every rank saves and restores its part."""

import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException

from shrinkpoint.engine.address import Address
from shrinkpoint.errors import NoCheckpointError
from shrinkpoint.group.group import world
from shrinkpoint.integrations.lightning.adapter import LightningAdapter
from shrinkpoint.integrations.lightning.io import Captured, RunCheckpointIO
from shrinkpoint.integrations.lightning.position import OWN_KEYS, OWN_MARK, POSITION_KEY
from shrinkpoint.integrations.lightning.session import Session
from shrinkpoint.integrations.lightning.settings import Settings
from shrinkpoint.runtime.termination import TerminationRequest
from shrinkpoint.session.session import TrainingSession
from shrinkpoint.sharded.restoring import RANKS_KEY
from shrinkpoint.sharded.saver import ShardedSaver
from shrinkpoint.sharded.targets import Targets, reshard
from shrinkpoint.state.stateful import load_optimizer, named_parameters, plain_names
from shrinkpoint.state.training import TensorSpec

__all__ = ["ShardedSession", "session_for"]

_GRADIENTS = "gradients"


def session_for(trainer: Trainer, session: Session) -> Session:
    """Return the session that a trainer's strategy needs.

    Args:
        trainer: whose strategy is known.
        session: the one that there is, which is returned if it is such a one.
    """
    shards = shards_model(trainer.strategy)
    if shards == isinstance(session, ShardedSession):
        return session
    other = ShardedSession(session.settings) if shards else Session(session.settings)
    other.run.best = session.run.best
    return other


class ShardedSession(Session):
    """As `Session`; the first rank does nothing for the others, and all measure together.

    Args:
        settings: the callback's options.

    Raises:
        ConfigError: an option is not for sharded models.
    """

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self._found: Targets | None = None
        # Lightning's own handler broadcasts, which is another collective than the other ranks are at.
        self._preemption = TerminationRequest(
            [signal.SIGTERM], answered=lambda: self._training, replaces=True
        )

    def _new_run(self) -> TrainingSession:
        self.adapter = adapter = ShardsAdapter(self.settings)
        return TrainingSession(self.settings.run, adapter, targets=self._targets, own=lambda: adapter.own)

    # ---- restoring

    def _read_runs(self, trainer: Trainer) -> None:
        RunReader.install(trainer.strategy).add_run(
            self.settings.run.url, lambda address: self._read(trainer, address)
        )

    def _read(self, trainer: Trainer, address: Address) -> dict[str, Any]:
        """Fill the model and the optimizers from a checkpoint; its other entries are returned.

        Raises:
            NoCheckpointError: the run has no such checkpoint.
            StateMismatchError: it is another model's.
        """
        ours = address.url == self.settings.run.url
        saver = self.run.saver if ours else ShardedSaver(address.url, targets=self._targets, own=dict)
        which = None
        if not address.is_newest:
            which = world().on_first(lambda: address.find(saver.store.manifests()))
        self._found = Targets(
            trainer.lightning_module,
            trainer.optimizers,
            model_key="state_dict",
            optimizers_key="optimizer_states",
            writer="Lightning's callback",
        )
        self._module = trainer.lightning_module
        restored = saver.restore(which, adopt=ours and self._active)
        if restored is None:
            raise NoCheckpointError(f"{address.url} contains no checkpoint")
        state: dict[str, Any] = restored.state.to_object()
        ranks = state.pop(RANKS_KEY)
        if POSITION_KEY in state:
            state[POSITION_KEY][OWN_MARK] = ranks["stored"] == ranks["here"]
        self._load(trainer, state, address.url)
        return state

    def _load(self, trainer: Trainer, state: dict[str, Any], url: str) -> None:
        assert self._found is not None
        weights, optimizers = state.pop("state_dict"), state.pop("optimizer_states", [])
        if trainer.state.fn == TrainerFn.FITTING:
            optimizers = self._found.reordered(optimizers)
            self._note_identities(state)
            self._require_optimizers(trainer, optimizers, url)
            for optimizer, stored in zip(trainer.optimizers, optimizers, strict=True):
                load_optimizer(optimizer, stored, same_dtypes=True)
        # its tensors are filled already; this is for what else modules store
        with plain_names(trainer.lightning_module) as module:
            module.load_state_dict(weights, strict=trainer.lightning_module.strict_loading)

    def _targets(self, specs: Mapping[str, TensorSpec]) -> dict[str, torch.Tensor]:
        assert self._found is not None
        start = f"{POSITION_KEY}/{_GRADIENTS}/"
        gradients = {
            name: torch.zeros_like(parameter.detach())
            for name, parameter in named_parameters(self._module)
            if f"{start}{name}" in specs
        }
        return self._found.find(specs, {POSITION_KEY: {_GRADIENTS: gradients}})

    # ---- during training

    def _begin_saving(self) -> None:
        super()._begin_saving()
        self._preemption.watch()

    # ---- ending

    def _is_asked_to_end(self, trainer: Trainer) -> tuple[bool, bool]:
        asked = self._preempted(trainer) or self._interruption.received or self._requeue.received
        agreed = trainer.strategy.reduce_boolean_decision(asked, all=False)
        return agreed, agreed

    def _is_interrupted(self, trainer: Trainer) -> bool:
        return self._is_asked_to_end(trainer)[0]

    def _preempted(self, trainer: Trainer) -> bool:
        return self._preemption.received or trainer.received_sigterm

    def _end(self, trainer: Trainer) -> None:
        preempted = trainer.strategy.reduce_boolean_decision(self._preempted(trainer), all=False)
        requeued = trainer.strategy.reduce_boolean_decision(self._requeue.received, all=False)
        self.run.serve()
        self.run.warn_unsaved(trainer.global_step)
        if preempted:
            raise SIGTERMException
        (self._requeue if requeued else self._interruption).end()

    def _unwatch(self) -> None:
        super()._unwatch()
        self._preemption.unwatch()


class ShardsAdapter(LightningAdapter):
    """As `LightningAdapter`, with this rank's shards and position.

    Args:
        settings: the callback's options.
    """

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.own: Mapping[str, Mapping[str, Any]] = {}
        """Of the last `state`, what this rank has for itself."""

    def state(self) -> dict[str, Any]:
        """See the base class."""
        found = super().state()
        position = found[POSITION_KEY]
        self.own = {POSITION_KEY: {key: position[key] for key in OWN_KEYS}}
        return found

    def _capturing(self) -> AbstractContextManager[Captured]:
        return capturing_shards(self.trainer)


Read = Callable[[Address], dict[str, Any]]


# ---- Takes and gives back Lightning's state where the strategy shards the model: each rank's own, with its live shards.
#
# Such a strategy writes folders of its own, past any checkpoint plugin. What it does is replaced on the instance.


def shards_model(strategy: Strategy) -> bool:
    """Return whether a strategy shards the model by DTensors."""
    return "ModelParallelStrategy" in {base.__name__ for base in type(strategy).__mro__}


@contextmanager
def capturing_shards(trainer: Trainer) -> Iterator[Captured]:
    """As `RunCheckpointIO.capturing`, on every rank.

    The optimizers' states are theirs as they stand: torch's own way to collect them makes a step where there was none yet.
    """
    strategy = trainer.strategy
    reshard(trainer.lightning_module)
    with RunCheckpointIO.install(strategy).capturing() as captured:

        def keep(checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
            captured.keep(checkpoint)

        replaced: dict[str, Callable[..., Any]] = {
            "save_checkpoint": keep,
            "lightning_module_state_dict": lambda: trainer.lightning_module.state_dict(),
            "optimizer_state": lambda optimizer: optimizer.state_dict(),
        }
        vars(strategy).update(replaced)
        try:
            yield captured
        finally:
            for name in replaced:
                del vars(strategy)[name]


class RunReader:
    """In the place of a strategy's ``load_checkpoint``: reads runs, and leaves other paths to the strategy.

    Args:
        original: the strategy's own method.
    """

    def __init__(self, original: Callable[..., dict[str, Any]]) -> None:
        self._original = original
        self._runs: dict[str, Read] = {}

    @classmethod
    def install(cls, strategy: Strategy) -> "RunReader":
        """Put one in the place of the strategy's method, or return the one that is there already."""
        current = strategy.load_checkpoint
        if not isinstance(current, cls):
            current = cls(current)
            vars(strategy)["load_checkpoint"] = current
        return current

    def add_run(self, url: str, read: Read) -> None:
        """Read the run at `url` by `read`, which fills the model and the optimizers, and returns the rest."""
        self._runs[url] = read

    def __call__(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Called by Lightning on every rank."""
        path = str(checkpoint_path)
        address = Address.parse(path)
        if address is None and path.rstrip("/") in self._runs:
            address = Address(url=path)
        if address is None:
            return self._original(checkpoint_path, *args, **kwargs)
        read = self._runs.get(address.url) or next(iter(self._runs.values()))
        return read(address)
