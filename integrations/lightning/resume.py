"""Makes ``Trainer.fit`` continue a run without a ``ckpt_path``, after a requeue by SLURM too."""

import signal
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.trainer import call
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from shrinkpoint.engine.address import Address
from shrinkpoint.engine.fitting import fitted
from shrinkpoint.engine.resume import require_same_ties
from shrinkpoint.errors import ConfigError, StateMismatchError
from shrinkpoint.group.group import world
from shrinkpoint.integrations.lightning.adapter import LightningAdapter
from shrinkpoint.integrations.lightning.io import FOUND
from shrinkpoint.runtime.termination import TerminationRequest
from shrinkpoint.session.session import TrainingSession
from shrinkpoint.store.manifest import Manifest
from shrinkpoint.warn import warn

if TYPE_CHECKING:
    from shrinkpoint.steps.training import TrainingLog

_HOOK = "resume_start"
_VERSION = "pytorch-lightning_version"  # in every checkpoint of Lightning


def is_tuning(trainer: Trainer) -> bool:
    """Return whether this fit is only a trial of `lightning.pytorch.tuner.Tuner`, which undoes it afterwards."""
    return any(getattr(callback, "_early_exit", False) is True for callback in trainer.callbacks)


def continue_run(trainer: Trainer, run: TrainingSession) -> None:
    """Make the fit that is being set up load the run's newest sound checkpoint; in a callback's ``setup``, on every
    rank.

    Lightning has fixed the path before any hook of a callback runs, so the one method that takes the path in is
    wrapped, for one call. A path from the user takes precedence. That call raises as `TrainingSession.choose`.
    """
    connector = getattr(trainer, "_checkpoint_connector", None)
    if not callable(getattr(connector, _HOOK, None)):
        if run.settings.resume == "must":
            raise ConfigError(
                "this version of Lightning cannot be made to resume by itself: give fit(ckpt_path=...)"
            )
        rank_zero_warn(
            "this version of Lightning cannot be made to resume by itself: give fit(ckpt_path=...)"
        )
        return
    waiting: dict[str, TrainingSession] | None = getattr(getattr(connector, _HOOK), "runs", None)
    if waiting is None:
        waiting = {}
        setattr(connector, _HOOK, _wrapped(trainer, connector, waiting))
    waiting[run.settings.url] = run


def _wrapped(trainer: Trainer, connector: Any, runs: Mapping[str, TrainingSession]) -> Callable[..., None]:
    original = getattr(connector, _HOOK)

    def resume_start(checkpoint_path: Any = None, *args: Any, **kwargs: Any) -> None:
        vars(connector).pop(_HOOK, None)
        found = getattr(connector, "_hpc_resume_path", None), vars(connector).get(FOUND)
        if not checkpoint_path or checkpoint_path in found:  # the user has given none
            written = checkpoint_path or None
            checkpoint_path = next(iter(runs.values())).decide(lambda: _choose(runs, written))
        loaded = Address.parse(str(checkpoint_path))
        others = [run for url, run in runs.items() if loaded is None or loaded.url != url]
        world().on_first(lambda: _require_own_runs(others, trainer.lightning_module))
        original(checkpoint_path, *args, **kwargs)

    resume_start.runs = runs  # type: ignore[attr-defined]
    return resume_start


def _choose(runs: Mapping[str, TrainingSession], written: str | None) -> str | None:
    """Return the address of the newest sound checkpoint; with several callbacks, of the run with the highest step.

    A checkpoint that Lightning wrote before a requeue or at an error is chosen where it is newer.
    """
    chosen: dict[str, Manifest] = {}
    for url, run in runs.items():
        newest = run.newest_wanted()
        if newest is not None:
            chosen[url] = newest
    if not chosen:
        return written
    url = max(chosen, key=lambda url: chosen[url].step)
    own = str(Address(url=url, seq=chosen[url].seq))
    taken = own if written is None or chosen[url].step >= step_written(written) else written
    for other in chosen.keys() - ({url} if taken == own else set()):
        runs[other].saver.forget(follows=chosen[other])  # frees a whole state that is not needed
    if written is not None:
        warn(
            f"Lightning wrote {written} before a requeue or at an error; it is {'older' if taken == own else 'newer'} than step {chosen[url].step} of {url}:"
            f" continuing from {taken}. Remove {written} where it is not needed any more"
        )
    else:
        runs[url].announce(chosen[url].step)
    return taken


def _require_own_runs(runs: Iterable[TrainingSession], module: LightningModule) -> None:
    """Refuse to save among another model's checkpoints, which retention would remove."""
    for run in runs:
        stored = run.outline(("state_dict", _VERSION))
        if stored is not None:
            require_module(stored, module, run.settings.url)


def require_module(
    checkpoint: dict[str, Any], module: LightningModule, url: str, *, warns: bool = False
) -> None:
    """Refuse a checkpoint of another model, unless the module translates what it loads; of others the weights become what `fitted` gives.

    Raises:
        StateMismatchError: names or shapes differ, or separate tensors are tied here. Or it is not a Lightning checkpoint.
    """
    if "state_dict" not in checkpoint or _VERSION not in checkpoint:
        raise StateMismatchError(
            f"{url} was not written by Lightning's callback: give this run a URL of its own, or continue the other one"
            " with what it was made with"
        )
    if is_overridden("on_load_checkpoint", module) or not module.strict_loading:
        return
    stored = checkpoint["state_dict"]
    checkpoint["state_dict"] = fitted(stored, module, url, warns=warns)
    untied = require_same_ties(stored, module, url)
    if untied is not None and warns:
        warn(untied)


def replay(log: "TrainingLog", adapter: LightningAdapter) -> int:
    """Replay the logged steps after the checkpoint that Lightning is loading, and return the step that was reached.

    Lightning loads model and callbacks before the optimizers exist, loops and optimizers after ``on_fit_start``: a
    replay takes place there, on every rank, and changes what the second part is restored from.
    """
    trainer, module = adapter.trainer, adapter.model
    connector: Any = trainer._checkpoint_connector
    loaded: dict[str, Any] = connector._loaded_checkpoint
    base = int(loaded["global_step"])
    connector.restore_optimizers()

    def reload() -> None:
        module.load_state_dict(loaded["state_dict"])
        connector.restore_optimizers()

    reached, rest = log.recover(base, lambda: reload)
    if reached == base:
        return base
    loaded.clear()
    loaded.update(
        rest,
        state_dict=module.state_dict(),
        optimizer_states=[optimizer.state_dict() for optimizer in trainer.optimizers],
    )
    call._call_lightning_module_hook(trainer, "on_load_checkpoint", loaded)
    connector.restore_datamodule()
    connector.restore_callbacks()
    return int(rest["global_step"])


def requeueing(trainer: Trainer, *, answered: Callable[[], bool]) -> TerminationRequest:
    """Take the signal at which Lightning would write a whole checkpoint of its own and requeue the job, which its
    ``end`` does then.

    Called before the trainer installs its handlers, which leaves a signal alone that has one. Of no signal where
    Lightning would do nothing.
    """
    environment = trainer._accelerator_connector.cluster_environment
    requeues = isinstance(environment, SLURMEnvironment) and environment.auto_requeue
    number = (environment.requeue_signal if requeues else None) or signal.SIGUSR1
    present = signal.getsignal(number)
    # of an earlier fit: Lightning puts it back
    ours = isinstance(getattr(present, "__self__", None), TerminationRequest)
    taken = [number] if requeues and (ours or present in (None, signal.SIG_DFL)) else []

    def requeue() -> None:
        trainer.save_checkpoint = lambda *args, **kwargs: None  # the run has been saved
        try:
            trainer._signal_connector._slurm_sigusr_handler_fn(number, None)
        finally:
            del trainer.save_checkpoint

    request = TerminationRequest((), more=taken, answered=answered, then=requeue)
    request.watch()
    return request


def step_written(path: str) -> int:
    """Return the step of a checkpoint of Lightning's own; -1 where it cannot be read, as one that a job's end cut short."""
    try:
        return int(torch.load(path, map_location="meta", mmap=True, weights_only=False)["global_step"])
    except Exception as error:  # noqa: BLE001 - whatever is wrong with it, the run may be continued
        warn(f"{path} cannot be read: {type(error).__name__}: {error}")
        return -1
