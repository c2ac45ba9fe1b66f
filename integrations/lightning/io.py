"""A checkpoint plugin for Lightning that captures and reads shrinkpoint's checkpoints, and delegates everything else."""

import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from shrinkpoint.engine.address import Address
from shrinkpoint.errors import CannotRepresentError, ConfigError, NoCheckpointError
from shrinkpoint.group.group import world
from shrinkpoint.integrations.lightning.state import with_own_names
from shrinkpoint.io.loading import load_state
from shrinkpoint.optimizers.objects import with_object_states
from shrinkpoint.saver import Saver
from shrinkpoint.sharded.restoring import RANKS_KEY
from shrinkpoint.sharded.saver import ShardedSaver
from shrinkpoint.state.stateful import own_names, without_functions
from shrinkpoint.state.tree import encode_tree
from shrinkpoint.store.connect import StorageOptions

__all__ = ["NAMES_KEY", "RunCheckpointIO", "load_checkpoint", "open_as_ckpt", "require_supported", "storable"]

Check = Callable[[dict[str, Any]], None]

NAMES_KEY = "shrinkpoint_names"
"""The entry of a checkpoint with the names that the trained module had for its weights, where they were others."""
_HYPER_PARAMETERS = {
    "hyper_parameters": "hparams_type",
    "datamodule_hyper_parameters": "datamodule_hparams_type",
}
_left_out: set[str] = set()  # what was warned of

_SHARDED = {"DeepSpeedStrategy", "FSDPStrategy"}


class _Run(NamedTuple):
    saver: Callable[[], Saver | ShardedSaver]
    check: Check
    adopts: Callable[[], bool]


class Captured:
    """A checkpoint collected by Lightning: on the first rank its state, whose tensors are the live ones."""

    path = "shrinkpoint-run"

    def __init__(self) -> None:
        self._checkpoint: dict[str, Any] | None = None

    @property
    def is_kept(self) -> bool:
        """Whether this rank has it."""
        return self._checkpoint is not None

    def keep(self, checkpoint: dict[str, Any]) -> None:
        """Store the checkpoint that Lightning collected."""
        self._checkpoint = checkpoint

    def checkpoint(self) -> dict[str, Any]:
        """Return the collected checkpoint.

        Raises:
            CannotRepresentError: there is none: the strategy does not write checkpoints through its plugin.
        """
        if self._checkpoint is None:
            raise CannotRepresentError(
                "Lightning's strategy did not pass the checkpoint on to its checkpoint plugin: this strategy is not supported"
            )
        return self._checkpoint


class RunCheckpointIO(CheckpointIO):
    """Handles the paths of shrinkpoint runs and delegates all others to the previous plugin."""

    def __init__(self, base: CheckpointIO, strategy: Strategy) -> None:
        self.base, self._strategy = base, strategy
        self._runs: dict[str, _Run] = {}
        self._captured: Captured | None = None

    @classmethod
    def install(cls, strategy: Strategy) -> "RunCheckpointIO":
        """Put one in front of the strategy's plugin, or return the one that is there already."""
        current = strategy.checkpoint_io
        if not isinstance(current, cls):
            current = cls(current, strategy)
            strategy.checkpoint_io = current
        return current

    def add_run(
        self,
        url: str,
        saver: Callable[[], Saver | ShardedSaver],
        check: Check,
        *,
        adopts: Callable[[], bool],
    ) -> None:
        """Read the run at `url` through `saver`, with its storage options, and verify its checkpoints with `check`.

        Args:
            url: the run's.
            saver: gives what reads, and continues its saves from the checkpoint read, if `adopts` returns True; called when the model is
                built.
            check: raises an error for an unsuitable checkpoint.
            adopts: whether training continues from the checkpoint, instead of only an evaluation.
        """
        self._runs[url] = _Run(saver, check, adopts)

    @contextmanager
    def capturing(self) -> Iterator[Captured]:
        """Inside this block, a checkpoint saved to `Captured.path` is kept there, on every rank, instead of being written to a file."""
        self._captured = captured = Captured()
        own, several = vars(self._strategy), world().size > 1

        def keep(checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
            captured.keep(checkpoint)

        if several:  # of these Lightning gives it to the first one's plugin alone
            own["save_checkpoint"] = keep
        try:
            yield captured
        finally:
            self._captured = None
            if several:
                own.pop("save_checkpoint", None)  # `capturing_shards` has a replacement of its own

    @property
    def is_capturing(self) -> bool:
        """Whether the checkpoint that is being made is shrinkpoint's; known on every rank."""
        return self._captured is not None

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None
    ) -> None:
        """Called by Lightning on the first rank."""
        if self._captured is not None and str(path) == self._captured.path:
            self._captured.keep(checkpoint)
        else:
            self.base.save_checkpoint(checkpoint, path, storage_options=storage_options)

    def load_checkpoint(
        self, path: str | Path, map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Called by Lightning on every rank. A run's checkpoint contains no pickle, so `weights_only` has no effect."""
        address = Address.parse(str(path))
        if address is None and str(path).rstrip("/") in self._runs:
            address = Address(url=str(path))
        if address is None:
            more = {} if map_location is None else {"map_location": map_location}
            loaded: dict[str, Any] = self.base.load_checkpoint(path, weights_only=weights_only, **more)
            return loaded
        run = self._runs.get(address.url)
        if run is None:
            checkpoint = load_checkpoint(address, Saver(address.url))
        else:
            checkpoint = load_checkpoint(address, run.saver(), adopt=run.adopts())
            run.check(checkpoint)
        if self._strategy.lightning_module is not None:
            checkpoint = with_own_names(checkpoint, own_names(self._strategy.lightning_module))
        return (
            checkpoint
            if map_location is None
            else torch.load(_to_ckpt(checkpoint), map_location=map_location)
        )

    def remove_checkpoint(self, path: str | Path) -> None:
        """Remove an ordinary file; a run's checkpoints are removed by its own retention."""
        self.base.remove_checkpoint(path)

    def teardown(self) -> None:
        """Called by Lightning at the end of a stage, after exceptions too."""
        self.base.teardown()


def load_checkpoint(address: Address, saver: Saver | ShardedSaver, *, adopt: bool = True) -> dict[str, Any]:
    """Decode one checkpoint of a run, on the host.

    Args:
        address: which one.
        saver: reads it.
        adopt: whether its saves continue from there.

    Raises:
        NoCheckpointError: the run has no such checkpoint.
    """
    which = None
    if not address.is_newest:
        which = address.find(saver.store.manifests())
    restored = saver.restore(which, adopt=adopt)
    if restored is None:
        raise NoCheckpointError(f"{address.url} contains no checkpoint: {saver.store.what_is_there()}")
    checkpoint: dict[str, Any] = restored.state.to_object()
    checkpoint.pop(RANKS_KEY, None)
    return checkpoint


def open_as_ckpt(
    address: str, *, storage_options: StorageOptions = None, without: Collection[str] = ()
) -> BytesIO:
    """Return a run's checkpoint as an ordinary ``.ckpt`` file in memory.

    Args:
        address: ``<run>#step=1000``, ``<run>#newest``, or the run alone, which means its newest checkpoint.
        storage_options: for fsspec.
        without: entries of the checkpoint to leave out, unread.

    Raises:
        NoCheckpointError: the run has no such checkpoint.
        StoreError: it could not be read.
    """
    parsed = Address.parse(address) or Address(url=address)
    checkpoint = load_state(str(parsed), without=without, storage_options=storage_options)
    return _to_ckpt(with_own_names(checkpoint, checkpoint.get(NAMES_KEY, {})))


def _to_ckpt(checkpoint: dict[str, Any]) -> BytesIO:
    # As Lightning does: what load_from_checkpoint gives a module that takes them as one argument.
    kinds = {
        kind: type(checkpoint[key])
        for key, kind in _HYPER_PARAMETERS.items()
        if key in checkpoint and type(checkpoint[key]) is not dict
    }
    file = BytesIO()
    torch.save(checkpoint | kinds, file)
    file.seek(0)
    # torch.load reads by itself what a state holds, and asks for leave to make enums, dataclasses and OmegaConf's containers.
    names = torch.serialization.get_unsafe_globals_in_checkpoint(file)
    found = (
        getattr(sys.modules.get(module), name, None) for module, _, name in (n.rpartition(".") for n in names)
    )
    torch.serialization.add_safe_globals([each for each in found if each is not None])
    file.seek(0)
    return file


def require_supported(strategy: Strategy) -> None:
    """Refuse strategies that keep the state in flat buffers of their own.

    Raises:
        ConfigError: `strategy` is one of these.
    """
    if _SHARDED & {base.__name__ for base in type(strategy).__mro__}:
        raise ConfigError(
            f"strategy={type(strategy).__name__} shards the model in flat buffers, which CompressedCheckpoint does not support:"
            " use ModelParallelStrategy, with fully_shard (FSDP2) in configure_model (docs/sharded.md), or save with"
            " Lightning's ModelCheckpoint"
        )


def storable(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """The checkpoint without entries that only pickle could store and that a resume does not need: some
    hyper-parameters, and the functions of torch's ``SWALR``, which its constructor sets."""
    of_schedulers = ("lr_schedulers", "callbacks")
    checkpoint = checkpoint | {
        name: without_functions(checkpoint[name]) for name in of_schedulers if name in checkpoint
    }
    if "optimizer_states" in checkpoint:
        checkpoint["optimizer_states"] = [
            with_object_states(state) for state in checkpoint["optimizer_states"]
        ]
    for key, kind in _HYPER_PARAMETERS.items():
        given = checkpoint.get(key)
        checkpoint.pop(kind, None)
        if given is None or _is_plain(given):
            continue
        checkpoint[key] = {name: value for name, value in given.items() if _is_plain(value)}
        whose = "data module's " if key.startswith("data") else ""
        lost = ", ".join(sorted(given.keys() - checkpoint[key].keys()))
        if lost not in _left_out:
            _left_out.add(lost)
            rank_zero_warn(
                f"the {whose}hyper-parameters {lost} are objects that cannot be stored without pickle; the"
                " checkpoints leave them out (save_hyperparameters(ignore=...) silences this)"
            )
    return checkpoint


def _is_plain(value: object) -> bool:
    try:
        encode_tree(value, lambda path, tensor: "")
    except CannotRepresentError:
        return False
    return True
