"""Making ``Trainer.fit`` continue a run although it was given no ``ckpt_path``."""

from collections.abc import Callable, Mapping
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from shrinkpoint.errors import ConfigError
from shrinkpoint.integrations.address import Address
from shrinkpoint.integrations.lightning_ranks import on_rank_zero
from shrinkpoint.resume import ResumePolicy, require_same_model, resume_from
from shrinkpoint.saver import Saver
from shrinkpoint.store.manifest import Manifest

__all__ = ["continue_run", "is_tuning", "require_module"]

_HOOK = "resume_start"


def is_tuning(trainer: Trainer) -> bool:
    """Whether this fit is only a trial of `lightning.pytorch.tuner.Tuner`, which undoes it afterwards."""
    return any(getattr(callback, "_early_exit", False) is True for callback in trainer.callbacks)


def continue_run(trainer: Trainer, saver: Saver, policy: ResumePolicy) -> None:
    """Arrange that the fit which is being set up loads the run's newest sound checkpoint.

    Lightning has fixed the path before any hook of a callback runs, so the one method that takes the path in is
    wrapped, for one call. A path that the user gave wins there.

    Args:
        trainer: in a callback's ``setup`` for ``fit``; called on every rank.
        saver: of the run; the first rank chooses for all.
        policy: the user's wish.

    Raises:
        NoCheckpointError: there is none, and `policy` is ``"must"`` and no path was given.
        ChainError: there are checkpoints, and none is sound.
        StoreError: the store cannot be read.
    """
    connector = getattr(trainer, "_checkpoint_connector", None)
    if not callable(getattr(connector, _HOOK, None)):
        if policy == "must":
            raise ConfigError(
                "this version of Lightning cannot be made to resume by itself: give fit(ckpt_path=...)"
            )
        rank_zero_warn(
            "this version of Lightning cannot be made to resume by itself: give fit(ckpt_path=...)"
        )
        return
    waiting = getattr(getattr(connector, _HOOK), "runs", None)
    if waiting is None:
        waiting = {}
        setattr(connector, _HOOK, _wrapped(trainer, connector, waiting))
    waiting[saver.url] = (saver, policy)


def _wrapped(
    trainer: Trainer, connector: Any, runs: dict[str, tuple[Saver, ResumePolicy]]
) -> Callable[..., None]:
    original = getattr(connector, _HOOK)

    def resume_start(checkpoint_path: Any = None, *args: Any, **kwargs: Any) -> None:
        vars(connector).pop(_HOOK, None)
        if not checkpoint_path:
            checkpoint_path = on_rank_zero(trainer.strategy, lambda: _choose(runs))
        original(checkpoint_path, *args, **kwargs)

    resume_start.runs = runs  # type: ignore[attr-defined]
    return resume_start


def _choose(runs: Mapping[str, tuple[Saver, ResumePolicy]]) -> str | None:
    """The address of the newest sound checkpoint; of several callbacks' runs the one that got furthest."""
    chosen: dict[str, Manifest] = {}
    for url, (saver, policy) in runs.items():
        newest = resume_from(policy, saver.newest() if policy != "never" else None, url)
        if newest is not None:
            chosen[url] = newest
    if not chosen:
        return None
    url = max(chosen, key=lambda url: chosen[url].step)
    rank_zero_info(f"continuing {url} from step {chosen[url].step}")
    return str(Address(url=url, seq=chosen[url].seq))


def require_module(checkpoint: dict[str, Any], module: LightningModule, url: str) -> None:
    """Refuse a checkpoint of another model, unless the module translates what it loads.

    Raises:
        StateMismatchError: names or shapes differ; the message says which.
    """
    if is_overridden("on_load_checkpoint", module) or not module.strict_loading:
        return
    stored = {
        name: tuple(value.shape)
        for name, value in checkpoint["state_dict"].items()
        if hasattr(value, "shape")
    }
    live = {
        name: tuple(value.shape) for name, value in module.state_dict().items() if hasattr(value, "shape")
    }
    require_same_model(stored, live, url)
