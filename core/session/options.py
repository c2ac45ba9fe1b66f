"""The options of a hand-written loop, checked before anything is built of them, and the saver that they lead to."""

import copy
import os
from collections.abc import Callable, Collection, Mapping
from typing import Any, cast

from shrinkpoint.coding.selective import decode_checkpoint
from shrinkpoint.config import SaverConfig, whereabouts
from shrinkpoint.errors import ConfigError
from shrinkpoint.group.group import world
from shrinkpoint.saver import Saver
from shrinkpoint.session.objects import LoopObjects
from shrinkpoint.session.sharded import CopiedObjects, ShardedObjects
from shrinkpoint.sharded.saver import ShardedSaver
from shrinkpoint.store.connect import StorageOptions
from shrinkpoint.store.manifest import Manifest
from shrinkpoint.store.urls import RunUrl, Stores, url_text
from shrinkpoint.warn import brief, meant, warn

__all__ = ["check_adoption", "check_options", "require_states", "saver_for", "warn_of_copies", "way_back"]


def check_options(
    url: object,
    *,
    every: object,
    evaluate: object,
    train_loss: object,
    clip_grad_norm: object,
) -> None:
    """Check what `Checkpointer` was given, each option as it documents it.

    Raises:
        ConfigError: one cannot work.
    """
    if not isinstance(url, str | os.PathLike | list | tuple | Stores):
        raise ConfigError(
            f"url must be a folder or a URL, as in 'runs/7', or a list of several, not {brief(url)}"
        )
    for name, function in (("evaluate", evaluate), ("train_loss", train_loss)):
        if function is not None and not callable(function):
            raise ConfigError(
                f"{name} must be a function that returns a loss, or None, not {brief(function)}"
            )
    if clip_grad_norm is not None and not (
        isinstance(clip_grad_norm, int | float)
        and not isinstance(clip_grad_norm, bool)
        and clip_grad_norm > 0
    ):
        raise ConfigError(f"clip_grad_norm must be a positive number, or None, not {brief(clip_grad_norm)}")
    if "#" in url_text(cast("RunUrl", url)):
        raise ConfigError(
            f"url={url_text(cast('RunUrl', url))!r} must name a run without '#', which separates a checkpoint's step"
        )
    if every is not None and (type(every) is not int or every < 1):
        raise ConfigError(f"every must be a positive number of steps, or None, not {brief(every)}")
    if train_loss is not None and evaluate is None:
        raise ConfigError(
            "train_loss is of use with evaluate= only: what the steps come to is measured by that"
        )


def require_states(stateful: Mapping[str, Any], options: Collection[str]) -> None:
    """Refuse keyword arguments that are neither options nor objects with a state.

    Args:
        stateful: the arguments that are no options.
        options: all options, for messages.

    Raises:
        ConfigError: one has no state.
    """
    for name, value in stateful.items():
        if not (hasattr(value, "state_dict") and hasattr(value, "load_state_dict")):
            place = whereabouts(name)
            raise ConfigError(
                f"{name}={brief(value)}: Checkpointer has no such option{f'; {place}' if place else meant(name, options)}. Other"
                f" keyword arguments are objects with state_dict and load_state_dict; the options are: {', '.join(sorted(options))}"
            )
        if getattr(value, "use_stateful_dataloader", True) is False:
            raise ConfigError(
                f"{name}={brief(value)}, a loader that accelerate has prepared, has no state here: leave it out, and skip the batches that"
                " were trained on, or draw batches from torch's generator (docs/resuming.md)"
            )


def check_adoption(config: SaverConfig, every: int | None) -> None:
    """Check that an adopting training plans its saves.

    Raises:
        ConfigError: it does not.
    """
    if every is None:
        raise ConfigError("adopt=True needs every=: only planned saves are adopted, and without it none is")
    if config.adoptions is None:
        raise ConfigError(
            "adopt=True does not say how many planned saves the whole run has (total steps / every), among which max_degradation"
            " is divided: give their number, as in adopt=200"
        )


LoopSaver = Saver | ShardedSaver


def saver_for(
    objects: LoopObjects, url: RunUrl, config: SaverConfig, *, storage_options: StorageOptions
) -> LoopSaver:
    """Return the saver for the objects' kind.

    Args:
        objects: of the loop.
        url: as of `Checkpointer`, like `config` and `storage_options`.
        config: see there.
        storage_options: see there.
    """
    if not isinstance(objects, ShardedObjects):
        return Saver(url, config, storage_options=storage_options)
    return ShardedSaver(
        url,
        config,
        targets=objects.targets,
        own=objects.own,
        copied=objects.copied if isinstance(objects, CopiedObjects) else None,
        storage_options=storage_options,
    )


def warn_of_copies() -> None:
    """Warn, on every process but the first one, that copies of a model are each saved to one run."""
    if world().rank == 0:
        return
    warn(
        f"this is process {world().rank} of {world().size}, and the model is not sharded: processes that save to one run"
        " stop each other. Give the Checkpointer of every process the DistributedDataParallel wrapper; or use a framework's callback; or"
        " give each process a run of its own"
    )


def way_back(objects: LoopObjects, saver: LoopSaver, manifest: Manifest | None) -> Callable[[], None]:
    """Return a function that restores the present state: that of a checkpoint, or of a fresh start.

    Both are called on the first process alone, and call nothing that communicates with others.

    Args:
        objects: in that state.
        saver: of their kind.
        manifest: of the checkpoint; None for a fresh start.
    """
    fresh = copy.deepcopy(LoopObjects.state(objects, 0)) if manifest is None else None

    def reload() -> None:
        if manifest is None:  # a copy, since an optimizer may keep and change it
            LoopObjects.load(objects, copy.deepcopy(fresh), saver.url, warns=False)
            return
        again = decode_checkpoint(saver.store, manifest, threads=saver.config.encoder_threads)
        LoopObjects.load(objects, again.state.to_object(), saver.url, warns=False)

    return reload
