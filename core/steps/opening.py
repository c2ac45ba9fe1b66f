"""Creates the step log from the options of a training."""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from shrinkpoint.config import SaverConfig
from shrinkpoint.errors import ConfigError
from shrinkpoint.steps.exact import ExactLog
from shrinkpoint.steps.options import chosen_log, log_location

__all__ = ["log_of_training"]


def log_of_training(
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    stateful: Mapping[str, Any],
    *,
    step_log: object,
    step_log_url: str | None,
    after_step: Callable[[], object] | None,
    run_urls: Sequence[str | os.PathLike[str]],
    config: SaverConfig,
    every: int | None,
    alone: bool,
) -> ExactLog | None:
    """The log that the options request; None without one.

    Args:
        model: the module that is trained.
        optimizers: all that train it.
        stateful: further objects with a state, by name.
        step_log: None, ``"exact"`` or a `StepLog`.
        step_log_url: the log's folder.
        after_step: as of `ExactLog`.
        run_urls: where the checkpoints are.
        config: how they are saved.
        every: steps between two of them, if known.
        alone: whether one process trains.

    Raises:
        ConfigError: there can be no such log.
    """
    given = {"step_log_url": step_log_url, "after_step": after_step}
    options = chosen_log(step_log, given=[name for name, value in given.items() if value is not None])
    if options is None:
        return None
    if config.scheme != "lossless":
        raise ConfigError(
            f"step_log='exact' needs scheme='lossless', not {config.scheme!r}: the gradients that it logs are those of the true weights,"
            " and lead from a checkpoint that is not exact to weights that the training never had"
        )
    if config.weights_only:
        raise ConfigError(
            "step_log='exact' continues from the optimizer's state, which weights_only=True does not store: leave one of them out"
        )
    if not alone:
        raise ConfigError("step_log='exact' is for one process so far: leave it out where there are several")
    return ExactLog(
        model,
        optimizers,
        stateful,
        options=options,
        location=log_location(step_log_url, run_urls, optimizers),
        after_step=after_step,
        every=every,
    )
