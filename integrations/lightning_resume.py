"""Making ``Trainer.fit`` continue a run although it was given no ``ckpt_path``."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from shrinkpoint.address import Address
from shrinkpoint.container.reader import ContainerReader
from shrinkpoint.errors import ConfigError, StateMismatchError
from shrinkpoint.integrations.lightning_ranks import on_rank_zero
from shrinkpoint.resume import ResumePolicy, require_same_model, resume_from
from shrinkpoint.saver import Saver
from shrinkpoint.state import TrainingState
from shrinkpoint.store.manifest import Manifest

__all__ = ["continue_run", "is_tuning", "require_module"]

_HOOK = "resume_start"
_VERSION = "pytorch-lightning_version"  # in every checkpoint of Lightning


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
        loaded = Address.parse(str(checkpoint_path))
        others = [saver for url, (saver, _) in runs.items() if loaded is None or loaded.url != url]
        on_rank_zero(trainer.strategy, lambda: _require_own_runs(others, trainer.lightning_module))
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
    for other in chosen.keys() - {url}:
        runs[other][0].forget()  # a whole state that nobody will ask for
    rank_zero_info(f"continuing {url} from step {chosen[url].step}")
    return str(Address(url=url, seq=chosen[url].seq))


def _require_own_runs(savers: Sequence[Saver], module: LightningModule) -> None:
    """Refuse to save beside another model's checkpoints: retention would remove them."""
    for saver in savers:
        for manifest in saver.store.manifests()[:1]:
            require_module(_outline(saver, manifest), module, saver.url)


def _outline(saver: Saver, manifest: Manifest) -> dict[str, Any]:
    """A stored checkpoint with tensors that have shapes but no elements; only the container's header is read."""
    ref = manifest.chain[-1]
    reader = ContainerReader(
        lambda start, length: saver.store.fetch_range(ref, start, start + length), ref.size
    )
    header = reader.header
    specs = {name: record.spec for name, record in header.tensors.items()}
    shapes = {name: torch.empty(spec.shape, dtype=spec.dtype, device="meta") for name, spec in specs.items()}
    tree = {key: header.tree[key] for key in ("state_dict", _VERSION) if key in header.tree}
    outline: dict[str, Any] = TrainingState(tree, shapes, specs).to_object()
    return outline


def require_module(checkpoint: dict[str, Any], module: LightningModule, url: str) -> None:
    """Refuse a checkpoint of another model, unless the module translates what it loads.

    Raises:
        StateMismatchError: names or shapes differ; the message says which. Or it is not a Lightning checkpoint.
    """
    if "state_dict" not in checkpoint or _VERSION not in checkpoint:
        raise StateMismatchError(
            f"{url} was not written by Lightning's callback: give this run a URL of its own, or continue the other one"
            " with what it was made with"
        )
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
