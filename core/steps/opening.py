"""Creates the step log from the options of a training."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import nn

from shrinkpoint.config import SaverConfig
from shrinkpoint.errors import ConfigError
from shrinkpoint.steps.exact import ExactLog
from shrinkpoint.steps.log import LogFolder, near_segments, run_segments
from shrinkpoint.steps.options import StepLog, log_location
from shrinkpoint.steps.small import ReadBase, SmallLog
from shrinkpoint.store.connect import StorageOptions
from shrinkpoint.store.objects import ObjectStore
from shrinkpoint.store.urls import RunUrl, parse_url, split_urls

__all__ = ["TrainingLog", "log_of_training"]

TrainingLog: TypeAlias = ExactLog | SmallLog


def log_of_training(
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    stateful: Mapping[str, Any],
    options: StepLog,
    *,
    run_url: RunUrl,
    storage_options: StorageOptions,
    config: SaverConfig,
    alone: bool,
    read_base: ReadBase,
) -> TrainingLog:
    """Make the log that the options request.

    Args:
        model: the module that is trained.
        optimizers: all that train it.
        stateful: further objects with a state, by name.
        options: of the log.
        run_url: where the checkpoints are.
        storage_options: of `run_url`.
        config: how the checkpoints are saved.
        alone: whether the processes train whole models, and this one's log is that of all.
        read_base: the weights of the checkpoint of a step, for a small log; called in a thread of its own.

    Raises:
        ConfigError: there can be no such log.
    """
    if not alone:
        raise ConfigError(
            f"step_log={options.kind!r} needs one process, or a DistributedDataParallel that every process gives to a Checkpointer as"
            " the model, and no shards (FSDP2): leave it out elsewhere, or use the callbacks of Lightning and Composer"
        )
    if config.adopt:
        raise ConfigError("adopt=True and step_log= exclude each other: a logged step knows no adoption")
    if options.kind == "exact":
        _require_exact(config)
    if options.kind == "small" and options.url is None:
        location = parse_url(split_urls(run_url)[0])  # of several stores: each has a share of a segment

        def segments(run: str) -> ObjectStore:
            return run_segments(run_url, storage_options)
    else:
        location = log_location(options.url, split_urls(run_url), optimizers)

        def segments(run: str) -> ObjectStore:
            return near_segments(location, options.storage_options, run)

    folder = LogFolder(options.kind, segments, location, options.keep)
    if options.kind == "small":
        return SmallLog(model, options=options, folder=folder, read_base=read_base)
    return ExactLog(
        model, optimizers, stateful, options=options, folder=folder, after_step=options.after_step
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
            "step_log='exact' continues from the optimizer's state, which keep_optimizer=0 does not store: leave one of them out"
        )
