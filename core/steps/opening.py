"""From the options of a training to its step log."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

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
    run_url: str,
    scheme: str,
    every: int | None,
    alone: bool,
) -> ExactLog | None:
    """The log that the options ask for; None where they ask for none.

    Args:
        model: the module that is trained.
        optimizers: all that train it.
        stateful: further objects with a state, by name.
        step_log: None, ``"exact"`` or a `StepLog`.
        step_log_url: where to.
        after_step: as of `ExactLog`.
        run_url: where the checkpoints are.
        scheme: how they are coded.
        every: steps between two of them, if known.
        alone: whether one process trains.

    Raises:
        ConfigError: there can be no such log.
    """
    given = {"step_log_url": step_log_url, "after_step": after_step}
    options = chosen_log(step_log, given=[name for name, value in given.items() if value is not None])
    if options is None:
        return None
    if scheme != "lossless":
        raise ConfigError(
            f"step_log='exact' needs scheme='lossless', not {scheme!r}: the gradients that it logs are those of the true weights,"
            " and lead from a checkpoint that is not exact to weights that the training never had"
        )
    if not alone:
        raise ConfigError("step_log='exact' is for one process so far: leave it out where there are several")
    return ExactLog(
        model,
        optimizers,
        stateful,
        options=options,
        location=log_location(step_log_url, run_url, optimizers),
        after_step=after_step,
        every=every,
    )
