"""The start of a Composer run: checks that it can be saved to its url, and continues it from the newest checkpoint."""

import logging
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from composer.core import State
from composer.loggers import Logger

from shrinkpoint.errors import ConfigError, ShrinkpointWarning
from shrinkpoint.integrations.common.gradient_buckets import Buckets
from shrinkpoint.integrations.common.ranks import is_first, on_every, on_first, rank, world_size
from shrinkpoint.integrations.common.run_session import RunSession
from shrinkpoint.integrations.composer.data import DataPlace
from shrinkpoint.integrations.composer.state import (
    OUTLINE,
    load_state,
    require_own_run,
    require_same_optimizers,
)
from shrinkpoint.integrations.composer.step_log import replayed, start_log
from shrinkpoint.saving.resume import overridden_rates
from shrinkpoint.saving.retention import is_weights_only
from shrinkpoint.store.manifest import Manifest
from shrinkpoint.warn import warn

__all__ = ["continue_run", "require_supported"]

_log = logging.getLogger(__name__)


def require_supported(state: State) -> None:
    """Refuse a run whose whole state no process will ever have.

    Args:
        state: while the trainer is being built.

    Raises:
        ConfigError: the message says what to change.
    """
    config = state.fsdp_config
    if config is None:
        return
    if config.state_dict_type != "full":
        raise ConfigError(
            f"parallelism_config['fsdp']['state_dict_type']={config.state_dict_type!r}: no process has the whole state,"
            " and CompressedCheckpoint does not save shards yet. Set it to 'full', or save with save_folder"
        )
    if state.load_monolith_rank0_only:
        raise ConfigError(
            "parallelism_config['fsdp']['load_monolith_rank0_only']=True wraps the model while Composer itself loads a"
            " checkpoint, which a callback cannot do: leave it out"
        )


def continue_run(
    run: RunSession,
    data: DataPlace,
    state: State,
    logger: Logger,
    *,
    take: Callable[[Mapping[str, Any]], None] | None = None,
) -> Buckets:
    """Continue a run from its newest sound checkpoint, unless it was loaded from a load_path already.

    Args:
        run: where to look.
        data: gets the position in the training data.
        state: at Composer's event ``AFTER_LOAD``.
        logger: for Composer.
        take: gets the whole stored state, if there is one.

    Returns:
        The buckets to sum gradients in, when DDP exists.

    Raises:
        NoCheckpointError: there is none, and ``resume="must"``.
        StateMismatchError: the run is another model's, optimizer's or framework's.
        ChainError, StoreError: no checkpoint can be read.
    """
    loaded = state.load_path if int(state.timestamp.batch) else None
    manifest = run.choose() if loaded is None else None
    if manifest is None:
        _require_own_run(run, state)
        start_log(run, state)
        run.log.restart(int(state.timestamp.batch))
        if loaded is not None:
            run.saved_step = int(state.timestamp.batch)
            _warn_newer(run, state, str(loaded))
        return []
    url = run.settings.url
    start_log(run, state)
    stored = on_every(lambda: _read(run, manifest))
    live = state.get_model_state_dict()

    def require_same_run() -> None:
        require_own_run(stored, live, state, url)
        require_same_optimizers(stored, state, url)

    on_first(require_same_run)
    stores_optimizers = not is_weights_only(manifest.meta)
    if stores_optimizers:
        _warn_overridden(stored["state"]["optimizers"], state)
    load_state(stored, state, logger, url, optimizers=stores_optimizers)
    stored = replayed(run.log, stored, state, logger, url)
    _take_place(stored["ranks"], data)
    if take is not None:
        take(stored)
    run.saved_step = manifest.step
    run.remember()
    if not is_first():  # only the first process saves deltas to the checkpoint that it has read
        run.saver.forget()
    _warn_resumed(run, state)
    return stored["buckets"] if len(stored["ranks"]) == world_size() else []


def _warn_overridden(stored: Mapping[str, Any], state: State) -> None:
    there = [stored[type(optimizer).__qualname__] for optimizer in state.optimizers]
    overridden = overridden_rates(there, state.optimizers, scheduled=bool(state.schedulers))
    if overridden is not None and is_first():
        warn(overridden)


def _read(run: RunSession, manifest: Manifest) -> Any:
    restored = run.saver.restore(manifest)
    assert restored is not None
    return restored.state.to_object()


def _require_own_run(run: RunSession, state: State) -> None:
    """Refuse to save among another model's checkpoints, which retention would remove."""
    found: list[Any] = []

    def look() -> bool:
        found.append(run.outline(OUTLINE))
        return found[0] is not None

    if on_first(look):
        live = state.get_model_state_dict()
        on_first(lambda: require_own_run(found[0], live, state, run.settings.url))


def _take_place(ranks: list[Any], data: DataPlace) -> None:
    if len(ranks) == world_size():
        data.load(ranks[rank()])
    elif is_first():
        warnings.warn(
            f"the checkpoint was saved by {len(ranks)} processes and is continued by {world_size()}: random numbers and"
            " the order of samples will differ",
            ShrinkpointWarning,
            stacklevel=2,
        )


def _warn_resumed(run: RunSession, state: State) -> None:
    if not is_first():
        return
    _log.info("continuing %s from batch %d", run.settings.url, int(state.timestamp.batch))
    done = state.get_elapsed_duration() if state.max_duration is not None else None
    if done is not None and done >= 1.0:
        warnings.warn(
            f"the run in {run.settings.url} is complete: max_duration={state.max_duration} was reached at batch"
            f" {int(state.timestamp.batch)}. Raise max_duration to continue; Trainer.fit will report that there is nothing to train",
            ShrinkpointWarning,
            stacklevel=2,
        )


def _warn_newer(run: RunSession, state: State, loaded: str) -> None:
    newest = on_first(lambda: next(iter(run.saver.store.manifests()), None))
    batch = int(state.timestamp.batch)
    if newest is not None and newest.step > batch and is_first():
        warnings.warn(
            f"load_path={loaded!r} takes precedence: the run continues from its batch {batch}, although {run.settings.url} has"
            f" batch {newest.step}. Leave load_path (and autoresume) out to continue from there",
            ShrinkpointWarning,
            stacklevel=2,
        )
