"""What is replaced in Lightning so that it captures and reads shrinkpoint's checkpoints: a plugin, and a few methods."""

import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from functools import wraps
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO
from lightning.pytorch import Trainer
from lightning.pytorch.core import saving
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.connectors.checkpoint_connector import _CheckpointConnector
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from shrinkpoint.engine.address import Address
from shrinkpoint.engine.retention import metrics_of
from shrinkpoint.errors import ConfigError, NoCheckpointError
from shrinkpoint.group.group import world
from shrinkpoint.integrations.lightning.position import OWN_MARK, POSITION_KEY
from shrinkpoint.io.loading import load_state
from shrinkpoint.optimizers.objects import with_object_states
from shrinkpoint.saver import Saver
from shrinkpoint.session.session import TrainingSession
from shrinkpoint.sharded.restoring import RANKS_KEY
from shrinkpoint.sharded.targets import reshard
from shrinkpoint.state.stateful import own_names, without_functions
from shrinkpoint.state.tree import refusal
from shrinkpoint.store.connect import StorageOptions

Read = Callable[[Address], dict[str, Any]]

CAPTURED = "shrinkpoint-run"
"""The path of a checkpoint that is captured."""
NAMES_KEY = "shrinkpoint_names"
"""The entry of a checkpoint with the names that the trained module had for its weights, where they were others."""
_HYPER_PARAMETERS = {
    "hyper_parameters": "hparams_type",
    "datamodule_hyper_parameters": "datamodule_hparams_type",
}
_left_out: set[str] = set()  # what was warned of

_SHARDED = {"DeepSpeedStrategy", "FSDPStrategy"}
_BESIDE = "current_model_state"
"""The key of the trained module's state where ``WeightAveraging``, since Lightning 2.6, has stored its average in the module's place."""


class RunCheckpointIO(CheckpointIO):
    """Handles the paths of shrinkpoint runs and delegates all others to the previous plugin."""

    def __init__(self, base: CheckpointIO, strategy: Strategy) -> None:
        self.base, self._strategy = base, strategy
        self._runs: dict[str, Read] = {}
        self._captured: list[dict[str, Any]] | None = None

    def __getattr__(self, name: str) -> Any:
        if name == "base":  # not set yet, where pickle makes one
            raise AttributeError(name)
        return getattr(self.base, name)  # a plugin's own, which its user may ask of the strategy's

    def __deepcopy__(self, memo: dict[int, Any]) -> CheckpointIO:
        return deepcopy(self.base, memo)  # a copied trainer saves to no run

    @classmethod
    def install(cls, strategy: Strategy) -> "RunCheckpointIO":
        """Put one in front of the strategy's plugin, or return the one that is there already."""
        current = strategy.checkpoint_io
        if not isinstance(current, cls):
            current = cls(current, strategy)
            strategy.checkpoint_io = current
            if shards_model(strategy):  # which reads past any plugin
                vars(strategy)["load_checkpoint"] = current._reading(strategy.load_checkpoint)
        return current

    def add_run(self, url: str, read: Read) -> None:
        """Read the run at `url` by `read`; where the model is sharded, `read` fills it and the optimizers, and returns the rest."""
        self._runs[url] = read

    @contextmanager
    def capturing(self, trainer: Trainer) -> Iterator[list[dict[str, Any]]]:
        """Inside this block, a checkpoint saved to `CAPTURED` is kept in the list, on every rank that has one, and
        not written; its tensors are live.

        A strategy that shards the model writes folders of its own, past any plugin. Its optimizers' states are theirs
        as they are: torch's own way to collect them makes a step where there was none yet.
        """
        self._captured = captured = list[dict[str, Any]]()
        own, replaced = vars(self._strategy), dict[str, Callable[..., Any]]()

        def keep(checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
            captured.append(checkpoint)

        if shards_model(self._strategy):
            reshard(trainer.lightning_module)
            replaced["lightning_module_state_dict"] = lambda: trainer.lightning_module.state_dict()
            replaced["optimizer_state"] = lambda optimizer: optimizer.state_dict()
        if replaced or world().size > 1:  # of these Lightning gives it to the first one's plugin alone
            replaced["save_checkpoint"] = keep
        own.update(replaced)
        try:
            yield captured
        finally:
            self._captured = None
            for name in replaced:
                del own[name]

    @property
    def is_capturing(self) -> bool:
        """Whether the checkpoint that is being made is shrinkpoint's; known on every rank."""
        return self._captured is not None

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None
    ) -> None:
        """Called by Lightning on the first rank."""
        if self._captured is not None and str(path) == CAPTURED:
            self._captured.append(checkpoint)
        else:
            self.base.save_checkpoint(checkpoint, path, storage_options=storage_options)

    def load_checkpoint(
        self, path: str | Path, map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Called by Lightning on every rank. A run's checkpoint contains no pickle, so `weights_only` has no effect."""
        address = self._address(path)
        if address is None:
            more = {} if map_location is None else {"map_location": map_location}
            loaded: dict[str, Any] = self.base.load_checkpoint(path, weights_only=weights_only, **more)
            return loaded
        read = self._runs.get(address.url)
        checkpoint = load_checkpoint(address, Saver(address.url)) if read is None else read(address)
        if self._strategy.lightning_module is not None:
            checkpoint = _with_own_names(checkpoint, own_names(self._strategy.lightning_module))
        return (
            checkpoint
            if map_location is None
            else torch.load(_to_ckpt(checkpoint), map_location=map_location)
        )

    def _address(self, path: Any) -> Address | None:
        known = str(path).rstrip("/") in self._runs
        return Address.parse(str(path)) or (Address(url=str(path)) if known else None)

    def _reading(self, original: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
        def load_checkpoint(checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
            address = self._address(checkpoint_path)
            if address is None:
                return original(checkpoint_path, *args, **kwargs)
            read = self._runs.get(address.url) or next(iter(self._runs.values()), None)
            if read is None:
                raise ConfigError(
                    f"{address} is read into a sharded model by CompressedCheckpoint: add it to the trainer's callbacks"
                )
            return read(address)

        return load_checkpoint

    def remove_checkpoint(self, path: str | Path) -> None:
        """Remove an ordinary file; a run's checkpoints are removed by its own retention."""
        self.base.remove_checkpoint(path)

    def teardown(self) -> None:
        """Called by Lightning at the end of a stage, after exceptions too."""
        self.base.teardown()


def load_checkpoint(
    address: Address, saver: Saver, *, adopt: bool = True, shards: bool = False
) -> dict[str, Any]:
    """Decode one checkpoint of a run; on every rank. Raises NoCheckpointError.

    `adopt` is that of `Saver.restore`. Of shards the position is marked where it is this rank's own.
    """
    which = None
    if not address.is_newest:
        which = world().on_first(lambda: address.find(saver.store.manifests()))
    restored = saver.restore(which, adopt=adopt)
    if restored is None:
        raise NoCheckpointError(f"{address.url} contains no checkpoint: {saver.store.what_is_there()}")
    checkpoint: dict[str, Any] = restored.state.to_object()
    ranks = checkpoint.pop(RANKS_KEY, None)
    if shards and POSITION_KEY in checkpoint:
        checkpoint[POSITION_KEY][OWN_MARK] = ranks["stored"] == ranks["here"]
    return checkpoint


def open_as_ckpt(
    address: str, *, storage_options: StorageOptions = None, without: Collection[str] = ()
) -> BytesIO:
    """Return a run's checkpoint, by its address, as an ordinary ``.ckpt`` file in memory; entries to leave out are
    not read.

    Raises:
        NoCheckpointError: the run has no such checkpoint.
        StoreError: it could not be read.
    """
    parsed = Address.parse(address) or Address(url=address)
    checkpoint = load_state(str(parsed), without=without, storage_options=storage_options)
    return _to_ckpt(_with_own_names(checkpoint, checkpoint.get(NAMES_KEY, {})))


def _with_own_names(checkpoint: dict[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    renamed = {
        key: {names.get(name, name): value for name, value in checkpoint[key].items()}
        for key in ("state_dict", _BESIDE)
        if key in checkpoint
    }
    return checkpoint | renamed


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


def trained_key(checkpoint: Mapping[str, Any]) -> str:
    """Return the key of the trained module's state in a checkpoint."""
    return _BESIDE if _BESIDE in checkpoint else "state_dict"


def shards_model(strategy: Strategy) -> bool:
    """Return whether a strategy shards the model by DTensors."""
    return "ModelParallelStrategy" in {base.__name__ for base in type(strategy).__mro__}


def require_supported(strategy: Strategy) -> None:
    """Refuse strategies that keep the state in flat buffers of their own."""
    if _SHARDED & {base.__name__ for base in type(strategy).__mro__}:
        raise ConfigError(
            f"strategy={type(strategy).__name__} shards the model in flat buffers, which CompressedCheckpoint does not support:"
            " use ModelParallelStrategy, with fully_shard (FSDP2) in configure_model (docs/sharded.md), or save with"
            " Lightning's ModelCheckpoint"
        )


def storable(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Return the checkpoint without entries that only pickle could store and that a resume does not need: some
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
        if given is None or refusal(given) is None:
            continue
        checkpoint[key] = {name: value for name, value in given.items() if refusal(value) is None}
        whose = "data module's " if key.startswith("data") else ""
        lost = ", ".join(sorted(given.keys() - checkpoint[key].keys()))
        if lost not in _left_out:
            _left_out.add(lost)
            rank_zero_warn(
                f"the {whose}hyper-parameters {lost} are objects that cannot be stored without pickle; the"
                " checkpoints leave them out (save_hyperparameters(ignore=...) silences this)"
            )
    return checkpoint


# ---- ``ckpt_path="last"`` and ``"best"``, and addresses of checkpoints, wherever Lightning takes a path

_PARSE = "_parse_ckpt_path"
FOUND = "found_by_lightning"
"""The attribute of its connector that has the path which Lightning took where the user gave none: written before a requeue, or at an error."""
_READER = "pl_load"
_NAMED = 8


def answer_words(runs_of: Callable[[Trainer], list[TrainingSession]]) -> None:
    """Make trainers resolve ``"last"`` and ``"best"`` through the runs that their callbacks save to, and read
    addresses without one.

    Lightning turns the words into a path before any hook of a callback, asks ``ModelCheckpoint`` alone for the last
    one, and continues with the present weights where it finds nothing: an evaluation of untrained weights. Only its
    connector's method can change that; it is wrapped here, once per process. Every other path is not affected.
    """
    original = getattr(_CheckpointConnector, _PARSE, None)
    if not callable(original) or hasattr(original, "answers_words"):
        return

    @wraps(original)
    def parse(self: Any, state_fn: TrainerFn, ckpt_path: Any, *args: Any, **kwargs: Any) -> Any:
        runs = runs_of(self.trainer)
        if not runs and Address.parse(str(ckpt_path)) is not None:
            RunCheckpointIO.install(self.trainer.strategy)
            if state_fn == TrainerFn.FITTING:
                rank_zero_warn(
                    f"{ckpt_path} is continued without CompressedCheckpoint: the place in the data and random numbers are not"
                    " restored, and nothing is saved to the run. Add the callback to the trainer"
                )
        if not runs or ckpt_path not in ("last", "best") or self.trainer.fast_dev_run:
            found = original(self, state_fn, ckpt_path, *args, **kwargs)
            vars(self)[FOUND] = found if ckpt_path is None else None
            return found
        if ckpt_path == "best":
            first = self.trainer.checkpoint_callback
            found = getattr(first, "best_model_path", "") or _best(runs[0])
            # Lightning answers what the callback knows by now, and warns where there are several.
            known = getattr(first, "best_model_path", "")
            return original(self, state_fn, ckpt_path, *args, **kwargs) if known else found
        if state_fn == TrainerFn.FITTING:
            return _last_to_train(runs)
        return runs[0].best.last_path or str(Address(url=runs[0].settings.url))

    parse.answers_words = True  # type: ignore[attr-defined]
    setattr(_CheckpointConnector, _PARSE, parse)


def _last_to_train(runs: list[TrainingSession]) -> str | None:
    """None where the run continues by itself, or is empty: the same command starts it and continues it."""
    if any(run.settings.resume != "never" for run in runs):
        return None
    run = runs[0]
    return str(Address(url=run.settings.url)) if run.saver.store.manifests() else None


def _best(run: TrainingSession) -> str:
    url, saver = run.settings.url, run.settings.saver
    if saver.monitor is None:
        raise ConfigError(
            f'ckpt_path="best": which checkpoint of {url} is the best is not known: give CompressedCheckpoint a'
            ' monitor=, or take ckpt_path="last" for the newest'
        )
    if saver.save_top_k == 0:
        raise ConfigError(
            'ckpt_path="best" with save_top_k=0, which ranks none: give save_top_k=1, or ckpt_path="last"'
        )
    manifests = run.saver.store.manifests()
    run.add_best(manifests)
    if run.best.best_path:
        return run.best.best_path
    logged = sorted({name for manifest in manifests for name in metrics_of(manifest)})
    raise NoCheckpointError(
        f"none of the {len(manifests)} checkpoints of {url} was saved with the metric {saver.monitor!r};"
        f" they have {', '.join(logged[:_NAMED]) or 'no metrics'}"
        if manifests
        else f"{url} contains no checkpoint"
    )


def take_addresses() -> None:
    """Let Lightning's method read ``<run>#step=1000``, ``<run>#seq=7`` and ``<run>#newest``.

    It opens its path by fsspec, and passes it to ``torch.load``, without asking a plugin. The function of its module that does
    so is wrapped, once per process. Only addresses are read in another way: every other path, and a file whose name looks
    like an address, is Lightning's own matter as before.
    """
    original = getattr(saving, _READER, None)
    if not callable(original) or hasattr(original, "takes_addresses"):
        return

    @wraps(original)
    def load(path_or_url: Any, *args: Any, **kwargs: Any) -> Any:
        path = str(path_or_url) if isinstance(path_or_url, (str, Path)) else ""
        if Address.parse(path) is None or Path(path).exists():
            return original(path_or_url, *args, **kwargs)
        file = open_as_ckpt(path, without=("optimizer_states",))
        if "weights_only" in kwargs:
            kwargs["weights_only"] = False  # there is no pickle in it but our own, of plain data
        return original(file, *args, **kwargs)

    load.takes_addresses = True  # type: ignore[attr-defined]
    setattr(saving, _READER, load)
