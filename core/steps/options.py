"""The options of a step log, checked before training starts."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from shrinkpoint.errors import ConfigError
from shrinkpoint.store.urls import Location, parse_url
from shrinkpoint.warn import brief

__all__ = ["StepLog", "chosen_log", "log_location", "refuse_optimizers"]


@dataclass(frozen=True, kw_only=True)
class StepLog:
    """Options of the log of the steps between two checkpoints.

    Raises:
        ConfigError: a field has a value that cannot work.

    Examples:
        >>> checkpointer = shrinkpoint.Checkpointer(
        ...     "runs/8",
        ...     model,
        ...     optimizer,
        ...     every=500,
        ...     scheme="lossless",
        ...     step_log=shrinkpoint.StepLog(segment_steps=4),
        ...     step_log_url="steps",  # better a folder in memory or on a local disk, such as /dev/shm/steps
        ... )
    """

    kind: Literal["exact"] = "exact"
    """``exact``: the inputs of each `optimizer.step()`, bit for bit."""
    segment_steps: int | None = None
    """Steps that are written together, with one digest of the state after them; at most this many are lost in a crash.
    None takes as many as make 256 MiB, but from 2 to 8."""
    busy: Literal["skip", "wait"] = "skip"
    """When steps are faster than the log can write: log none until the next checkpoint (skip), or let training wait."""
    rehearse: bool = True
    """Replay the first segment at once on a copy of the state, and warn if this training's steps cannot be replayed.
    During that segment it needs as much memory again as the weights and the optimizers' states."""
    storage_options: Mapping[str, Any] | None = None
    """For fsspec, where the log is not on a local file system."""

    def __post_init__(self) -> None:
        if self.kind != "exact":
            raise ConfigError(f"step_log={brief(self.kind)} must be 'exact', or None for no log")
        steps = self.segment_steps
        if steps is not None and (type(steps) is not int or not 1 <= steps <= 10_000):
            raise ConfigError(
                f"segment_steps must be an integer from 1 to 10000, or None, not {brief(steps)}"
            )
        if self.busy not in ("skip", "wait"):
            raise ConfigError(f"busy must be 'skip' or 'wait', not {brief(self.busy)}")
        if type(self.rehearse) is not bool:
            raise ConfigError(f"rehearse must be True or False, not {brief(self.rehearse)}")


def chosen_log(step_log: object, *, given: Sequence[str]) -> StepLog | None:
    """The `StepLog` requested by ``step_log=``.

    Args:
        step_log: None, ``"exact"`` or a `StepLog`.
        given: names of the options that are of use with a log alone, and were given.

    Raises:
        ConfigError: it is something else; or None, with one of those options.
    """
    if step_log is None:
        if given:
            raise ConfigError(
                f"{given[0]} is of use with a step log only: give step_log='exact' too, or leave it out"
            )
        return None
    if isinstance(step_log, StepLog):
        return step_log
    return replace(StepLog(), kind=step_log)  # type: ignore[arg-type]  # which is checked there


def log_location(
    step_log_url: str | None,
    run_urls: Sequence[str | os.PathLike[str]],
    optimizers: Sequence[torch.optim.Optimizer],
) -> Location:
    """The location of the log.

    Args:
        step_log_url: as the user gave it.
        run_urls: of the run's stores.
        optimizers: whose parameters say how much that is.

    Raises:
        ConfigError: it is missing, or within the run.
    """
    if step_log_url is None:
        size = sum(
            p.nbytes
            for o in optimizers
            for group in o.param_groups
            for p in group["params"]
            if p.requires_grad
        )
        raise ConfigError(
            f"step_log='exact' writes the gradients of every step, here {size / 1e6:.3g} MB; at one step per second, that is"
            f" {3600 * size / 1e9:.3g} GB per hour, too much for most stores of runs. Say where to with step_log_url=: a folder"
            " near the training, such as /dev/shm/steps or one on a local disk"
        )
    location = parse_url(step_log_url)
    for run in map(parse_url, run_urls):
        one, other = (os.path.realpath(at.path) if at.kind == "local" else at.path for at in (location, run))
        if location.protocol == run.protocol and f"{one.rstrip('/')}/".startswith(f"{other.rstrip('/')}/"):
            raise ConfigError(
                f"step_log_url={step_log_url!r} is within the run {run.display}, whose files are not to be mixed with a log's:"
                " give a folder of its own, near the training"
            )
    return location


def refuse_optimizers(optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Refuse what evaluates the loss several times in a step: its gradients are not those of one moment.

    Raises:
        ConfigError: there is such an optimizer, or none at all.
    """
    if not optimizers:
        raise ConfigError("step_log='exact' logs the steps of optimizers, and there is none: leave it out")
    for optimizer in optimizers:
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ConfigError(
                "step_log='exact' cannot log LBFGS, which computes gradients several times in each step: leave step_log out"
            )
        if not hasattr(optimizer, "register_step_pre_hook"):
            raise ConfigError(
                f"step_log='exact' needs the step hooks of torch.optim.Optimizer, and {type(optimizer).__name__} has none:"
                " leave step_log out"
            )
