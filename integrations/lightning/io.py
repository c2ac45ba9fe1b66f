"""Lightning's checkpoint plugin for our runs: it takes our tokens and addresses, and passes everything else on."""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from shrinkpoint.errors import CannotRepresentError, ConfigError, NoCheckpointError
from shrinkpoint.loading import load_state
from shrinkpoint.saver import Saver
from shrinkpoint.saving.address import Address
from shrinkpoint.state.tree import encode_tree
from shrinkpoint.store.connect import StorageOptions

__all__ = ["RunCheckpointIO", "load_checkpoint", "open_as_ckpt", "require_supported", "storable"]

Write = Callable[[dict[str, Any]], None]
Check = Callable[[dict[str, Any]], None]

_FUNCTIONS = ("anneal_func", "_anneal_func")
_SHARDED = {"DeepSpeedStrategy", "FSDPStrategy", "ModelParallelStrategy"}


class _Run(NamedTuple):
    saver: Saver
    check: Check
    adopts: Callable[[], bool]


class RunCheckpointIO(CheckpointIO):
    """Routes the paths that belong to runs of ours and delegates all others to the plugin that was there before."""

    def __init__(self, base: CheckpointIO) -> None:
        self.base = base
        self._runs: dict[str, _Run] = {}
        self._token: str | None = None
        self._write: Write | None = None

    @classmethod
    def install(cls, strategy: Strategy) -> "RunCheckpointIO":
        """Put one in front of the strategy's plugin, or find the one that stands there already."""
        current = strategy.checkpoint_io
        if not isinstance(current, cls):
            current = cls(current)
            strategy.checkpoint_io = current
        return current

    def add_run(self, url: str, saver: Saver, check: Check, *, adopts: Callable[[], bool]) -> None:
        """Read the run at `url` through `saver`, with its storage options, and let `check` refuse what is read.

        Args:
            url: the run's.
            saver: whose saves go on from what is read, if `adopts` says so.
            check: raises what is wrong.
            adopts: whether what is being read is trained on, not only evaluated.
        """
        self._runs[url] = _Run(saver, check, adopts)

    @contextmanager
    def writing(self, token: str, write: Write) -> Iterator[None]:
        """While this is open, a checkpoint saved to the path `token` is given to `write` instead of to a file."""
        self._token, self._write = token, write
        try:
            yield
        finally:
            self._token = self._write = None

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None
    ) -> None:
        """Called by Lightning on the first rank."""
        if self._write is not None and str(path) == self._token:
            self._write(checkpoint)
        else:
            self.base.save_checkpoint(checkpoint, path, storage_options=storage_options)

    def load_checkpoint(
        self, path: str | Path, map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Called by Lightning on every rank. A run's checkpoint holds no pickle, so `weights_only` changes nothing."""
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
            checkpoint = load_checkpoint(address, run.saver, adopt=run.adopts())
            run.check(checkpoint)
        return (
            checkpoint
            if map_location is None
            else torch.load(_to_ckpt(checkpoint), map_location=map_location)
        )

    def remove_checkpoint(self, path: str | Path) -> None:
        """Only ordinary files are removed this way; a run's checkpoints leave by its own retention."""
        self.base.remove_checkpoint(path)

    def teardown(self) -> None:
        """Called by Lightning at the end of a stage, after exceptions too."""
        self.base.teardown()


def load_checkpoint(address: Address, saver: Saver, *, adopt: bool = True) -> dict[str, Any]:
    """Decode one checkpoint of a run, on the host.

    Args:
        address: which one.
        saver: reads it.
        adopt: whether its saves go on from there.

    Raises:
        NoCheckpointError: the run has no such checkpoint.
    """
    which = None
    if address.step is not None or address.seq is not None:
        which = address.find(saver.store.manifests())
    restored = saver.restore(which, adopt=adopt)
    if restored is None:
        raise NoCheckpointError(f"{address.url} holds no checkpoint")
    checkpoint: dict[str, Any] = restored.state.to_object()
    return checkpoint


def open_as_ckpt(
    address: str, *, storage_options: StorageOptions = None, without: Collection[str] = ()
) -> BytesIO:
    """A run's checkpoint as an ordinary ``.ckpt`` file in memory.

    Args:
        address: ``<run>#step=1000``, ``<run>#newest``, or the run alone, which means its newest checkpoint.
        storage_options: for fsspec.
        without: entries of the checkpoint to leave out, unread.

    Raises:
        NoCheckpointError: the run has no such checkpoint.
        StoreError: it could not be read.
    """
    parsed = Address.parse(address) or Address(url=address)
    return _to_ckpt(load_state(str(parsed), without=without, storage_options=storage_options))


def _to_ckpt(checkpoint: dict[str, Any]) -> BytesIO:
    file = BytesIO()
    torch.save(checkpoint, file)
    file.seek(0)
    return file


def require_supported(strategy: Strategy) -> None:
    """Refuse strategies under which no process holds the whole state.

    Raises:
        ConfigError: `strategy` shards the model.
    """
    if _SHARDED & {base.__name__ for base in type(strategy).__mro__}:
        raise ConfigError(
            f"strategy={type(strategy).__name__} shards the model, which CompressedCheckpoint does not support yet: use"
            " a single device or 'ddp', or save with Lightning's ModelCheckpoint"
        )


def storable(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """The checkpoint without what only pickle could store and nothing needs to continue: some hyper-parameters, and the
    functions of torch's ``SWALR``, which its constructor has set already."""
    key, kind = "hyper_parameters", "hparams_type"
    checkpoint = _without_functions(checkpoint)
    if key not in checkpoint:
        return checkpoint
    kept = {name: value for name, value in checkpoint[key].items() if _is_plain(value)}
    if lost := sorted(set(checkpoint[key]) - set(kept)):
        rank_zero_warn(
            f"the hyper-parameters {', '.join(lost)} are objects that cannot be stored without pickle; the"
            " checkpoints leave them out (save_hyperparameters(ignore=...) silences this)"
        )
    return {name: value for name, value in checkpoint.items() if name != kind} | {key: kept}


def _without_functions(checkpoint: dict[str, Any]) -> dict[str, Any]:
    def cleared(value: Any) -> Any:
        if type(value) is dict:
            items = value.items()
            return {key: cleared(item) for key, item in items if key not in _FUNCTIONS or not callable(item)}
        return [cleared(item) for item in value] if type(value) is list else value

    schedulers: dict[str, Any] = {
        key: cleared(checkpoint[key]) for key in ("lr_schedulers", "callbacks") if key in checkpoint
    }
    return {**checkpoint, **schedulers}


def _is_plain(value: object) -> bool:
    try:
        encode_tree(value, lambda path, tensor: "")
    except CannotRepresentError:
        return False
    return True
