"""The start of a Composer run: checks that it can be saved to its url, and continues it from the newest checkpoint and its step log."""

from collections.abc import Mapping
from typing import Any

from composer.core import State

from shrinkpoint.engine.resume import overridden_options
from shrinkpoint.engine.retention import is_weights_only
from shrinkpoint.errors import ConfigError
from shrinkpoint.group.group import world
from shrinkpoint.integrations.composer.adapter import ComposerAdapter
from shrinkpoint.integrations.composer.data import DataPlace
from shrinkpoint.integrations.composer.state import (
    OUTLINE,
    add_late,
    load_state,
    model_state,
    place_in,
    plain_optimizers,
    require_own_run,
    require_same_optimizers,
    shards_model,
    stored_state,
    trained_module,
)
from shrinkpoint.session.data import other_processes
from shrinkpoint.session.session import TrainingSession
from shrinkpoint.sharded.restoring import RANKS_KEY


def require_supported(state: State) -> None:
    """Refuse a run whose state cannot be taken."""
    config = state.fsdp_config
    if config is None or shards_model(state):
        return
    if config.state_dict_type != "full":
        raise ConfigError(
            f"parallelism_config['fsdp']['state_dict_type']={config.state_dict_type!r}: no process has the whole state,"
            " and the flat shards of FSDP1 are not supported. Set the environment variable FSDP_VERSION=2, or it to 'full'"
        )
    if state.load_monolith_rank0_only:
        raise ConfigError(
            "parallelism_config['fsdp']['load_monolith_rank0_only']=True wraps the model while Composer itself loads a"
            " checkpoint, which a callback cannot do: leave it out"
        )


def continue_run(run: TrainingSession, adapter: ComposerAdapter, *, lineage: str | None) -> None:
    """Continue a run from its newest sound checkpoint, at Composer's ``AFTER_LOAD``, unless it was loaded from a
    load_path already.

    `lineage` is the training of the checkpoint that Composer has loaded by itself: saves go on with it if the run has
    it.

    Raises:
        NoCheckpointError: there is none, and ``resume="must"``.
        StateMismatchError: the run is another model's, optimizer's or framework's.
        ChainError, StoreError: no checkpoint can be read.
    """
    state, logger = adapter.run, adapter.logger
    loaded = state.load_path if adapter.step else None
    manifest = run.choose() if loaded is None else None
    if manifest is None:
        _require_own_run(run, state)
        start_log(run, state)
        if run.log is not None:
            run.log.restart(adapter.step)
        if loaded is not None:
            run.saved_step = adapter.step
            run.go_on_with(lineage)
            run.warn_newer(f"load_path={str(loaded)!r} (or autoresume)", adapter.step)
        return
    url = run.settings.url
    start_log(run, state)
    model = model_state(state)

    def require_same_run(stored: Any) -> None:
        require_own_run(stored, model, state, url)
        require_same_optimizers(stored, state, url)

    if run.shards:
        world().on_first(lambda: require_same_run(run.outline(OUTLINE, manifest)))
    stored = run.restore(manifest)
    if not run.shards:
        world().on_first(lambda: require_own_run(stored, model, state, url))
        run.warn_once(add_late(stored, state))
        world().on_first(lambda: require_same_optimizers(stored, state, url))
    stores_optimizers = not is_weights_only(manifest.meta)
    if stores_optimizers or not state.fsdp_enabled:
        live, there = plain_optimizers(state), stored["state"]["optimizers"]
        inner = [there[name] for name in live], [*live.values()]
        run.warn_once(overridden_options(*inner, schedulers=state.schedulers))
    load_state(stored, state, logger, url, optimizers=stores_optimizers)
    stored = replayed(run, stored, adapter)
    _take_place(run, stored, adapter.data)
    run.note_restored(stored)
    run.saved_step = manifest.step
    run.remember()
    run.announce(adapter.step)
    done = state.get_elapsed_duration() if state.max_duration is not None else None
    if done is not None and done >= 1.0:
        run.warn_complete(adapter.step, f"Raise max_duration={state.max_duration} to continue")


def _require_own_run(run: TrainingSession, state: State) -> None:
    """Refuse to save among another model's checkpoints, which retention would remove."""
    found: list[Any] = []

    def look() -> bool:
        found.append(run.outline(OUTLINE))
        return found[0] is not None

    if world().on_first(look):
        live = model_state(state)
        world().on_first(lambda: require_own_run(found[0], live, state, run.settings.url))


def _take_place(run: TrainingSession, stored: Mapping[str, Any], data: DataPlace) -> None:
    """Restore this process's position in the data, where it is known."""
    ranks = stored.get(RANKS_KEY)
    own = ranks["stored"] == ranks["here"] if ranks is not None else world().size == 1
    written, place = place_in(stored, own=own)
    if place is not None:
        data.load(place)
    else:
        run.warn_once(other_processes(written, own=False))


def start_log(run: TrainingSession, state: State) -> None:
    """Make the log, if one is wanted."""
    if run.settings.step_log is not None and state.fsdp_enabled:
        raise ConfigError(
            "step_log= is not available with FSDP, where no process has all gradients: leave it out"
        )
    run.begin_log(trained_module(state), state.optimizers)


def replayed(run: TrainingSession, stored: dict[str, Any], adapter: ComposerAdapter) -> dict[str, Any]:
    """Replay the logged steps after a checkpoint that has just been loaded, and return the state that the run continues from."""
    if run.log is None:
        return stored
    state, logger, url = adapter.run, adapter.logger, run.settings.url
    base, checkpoint = adapter.step, stored
    reached, rest = run.log.recover(base, lambda: lambda: load_state(checkpoint, state, logger, url))
    if reached > base:
        now = stored_state(state, [])["state"]
        kept = {key: now[key] for key in ("model", "optimizers")}
        stored = {**rest, "state": {**rest["state"], **kept}}
        load_state(stored, state, logger, url)
    run.log.restart(adapter.step)
    return stored
