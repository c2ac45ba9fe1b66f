"""Resolves addresses of checkpoints, and ``ckpt_path="last"`` and ``"best"`` of Lightning's trainer from the runs of shrinkpoint's callbacks."""

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.core import saving
from lightning.pytorch.trainer.connectors.checkpoint_connector import _CheckpointConnector
from lightning.pytorch.trainer.states import TrainerFn

from shrinkpoint.engine.address import Address
from shrinkpoint.errors import ConfigError, NoCheckpointError
from shrinkpoint.integrations.lightning.io import open_as_ckpt
from shrinkpoint.session.reports import metrics_of
from shrinkpoint.session.session import TrainingSession

__all__ = ["answer_words", "take_addresses"]

_HOOK = "_parse_ckpt_path"
_NAMED = 8


def answer_words(runs_of: Callable[[Trainer], list[TrainingSession]]) -> None:
    """Make trainers resolve ``"last"`` and ``"best"`` through shrinkpoint's callbacks.

    Lightning turns the words into a path before any hook of a callback, asks ``ModelCheckpoint`` alone for the last
    one, and continues with the present weights where it finds nothing: an evaluation of untrained weights. Only its
    connector's method can change that; it is wrapped here, once per process. A trainer without shrinkpoint's callback,
    and every other path, is not affected.

    Args:
        runs_of: the runs that a trainer's callbacks save to, in their order.
    """
    original = getattr(_CheckpointConnector, _HOOK, None)
    if not callable(original) or hasattr(original, "answers_words"):
        return

    @wraps(original)
    def parse(self: Any, state_fn: TrainerFn, ckpt_path: Any, *args: Any, **kwargs: Any) -> Any:
        runs = runs_of(self.trainer) if ckpt_path in ("last", "best") else []
        if not runs or self.trainer.fast_dev_run:
            return original(self, state_fn, ckpt_path, *args, **kwargs)
        if ckpt_path == "best":
            known = getattr(self.trainer.checkpoint_callback, "best_model_path", "")
            return known or _best(runs[0])
        if state_fn == TrainerFn.FITTING:
            return _last_to_train(runs)
        return runs[0].best.last_path or str(Address(url=runs[0].settings.url))

    parse.answers_words = True  # type: ignore[attr-defined]
    setattr(_CheckpointConnector, _HOOK, parse)


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


_READER = "pl_load"


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
