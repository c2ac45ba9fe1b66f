"""Creates the step log from the options of a training."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn

from shrinkpoint.config import SaverConfig
from shrinkpoint.errors import ConfigError
from shrinkpoint.steps.exact import ExactLog
from shrinkpoint.steps.folder import LogFolder, near_segments, run_segments
from shrinkpoint.steps.options import StepLog, chosen_log, log_location
from shrinkpoint.steps.small import SmallLog
from shrinkpoint.steps.tiers import NearAndRun
from shrinkpoint.steps.update_writer import ReadBase
from shrinkpoint.store.connect import StorageOptions
from shrinkpoint.store.objects import ObjectStore
from shrinkpoint.store.urls import Location, RunUrl, parse_url, split_urls

__all__ = ["LogRequest", "TrainingLog", "log_of_training"]

TrainingLog: TypeAlias = ExactLog | SmallLog


@dataclass(frozen=True, kw_only=True)
class LogRequest:
    """What a training's owner asks for.

    Raises:
        ConfigError: options of a log without one, or no such log.
    """

    step_log: object = None
    """None, ``"exact"``, ``"small"`` or a `StepLog`."""
    url: str | None = None
    """The log's folder."""
    after_step: Callable[[], object] | None = None
    """As of `ExactLog`."""

    def __post_init__(self) -> None:
        _ = self.options

    @property
    def options(self) -> StepLog | None:
        """The log's options; None without one."""
        given = {"step_log_url": self.url, "after_step": self.after_step}
        return chosen_log(self.step_log, given=[name for name, value in given.items() if value is not None])


def log_of_training(
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    stateful: Mapping[str, Any],
    request: LogRequest,
    *,
    run_url: RunUrl,
    storage_options: StorageOptions,
    parity: int | None,
    config: SaverConfig,
    every: int | None,
    alone: bool,
    read_base: ReadBase,
) -> TrainingLog | None:
    """The log that the options request; None without one.

    Args:
        model: the module that is trained.
        optimizers: all that train it.
        stateful: further objects with a state, by name.
        request: the options.
        run_url: where the checkpoints are.
        storage_options: of `run_url`.
        parity: of `run_url`.
        config: how the checkpoints are saved.
        every: steps between two of them, if known.
        alone: whether the processes train whole models, and this one's log is that of all.
        read_base: the weights of the checkpoint of a step, for a small log; called in a thread of its own.

    Raises:
        ConfigError: there can be no such log.
    """
    options = request.options
    if options is None:
        return None
    if not alone:
        raise ConfigError(
            f"step_log={options.kind!r} needs one process, or a DistributedDataParallel that every process gives to a Checkpointer as"
            " the model, and no shards (FSDP2): leave it out elsewhere, or use the callbacks of Lightning and Composer"
        )
    if config.adopt:
        raise ConfigError("adopt=True and step_log= exclude each other: a logged step knows no adoption")
    if options.copy and request.url is None:
        raise ConfigError(
            "copy=True copies the log of step_log_url= to the run: give a folder near the training too"
        )
    if options.kind == "exact":
        _require_exact(config)
    location = (
        None
        if options.kind == "small" and request.url is None
        else log_location(request.url, split_urls(run_url), optimizers)
    )
    folder = LogFolder(
        options.kind,
        _connector(options, location, lambda: run_segments(run_url, storage_options, parity)),
        location if location is not None else _location_of_run(run_url),
        options.keep,
        every,
    )
    if options.kind == "small":
        if request.after_step is not None:
            raise ConfigError("after_step is of use with step_log='exact' only: leave it out")
        return SmallLog(model, optimizers, stateful, options=options, folder=folder, read_base=read_base)
    return ExactLog(
        model,
        optimizers,
        stateful,
        options=options,
        folder=folder,
        after_step=request.after_step,
    )


def _require_exact(config: SaverConfig) -> None:
    if config.scheme != "lossless":
        raise ConfigError(
            f"step_log='exact' needs scheme='lossless', not {config.scheme!r}: the gradients that it logs are those of the true weights,"
            " and lead from a checkpoint that is not exact to weights that the training never had. step_log='small' works with"
            " every scheme"
        )
    if config.weights_only:
        raise ConfigError(
            "step_log='exact' continues from the optimizer's state, which weights_only=True does not store: leave one of them out"
        )


def _location_of_run(url: RunUrl) -> Location:
    """Of several stores that of the first one: each has a share of a segment, and all are much alike."""
    return parse_url(split_urls(url)[0])


def _connector(
    options: StepLog, location: Location | None, far: Callable[[], ObjectStore]
) -> Callable[[str], ObjectStore]:
    if location is None:
        return lambda run: far()
    if not options.copy:
        return lambda run: near_segments(location, options.storage_options, run)
    return lambda run: NearAndRun(near_segments(location, options.storage_options, run), far())
