"""The options of a step log, checked before training starts."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, get_args

import torch

from shrinkpoint.errors import ConfigError
from shrinkpoint.state.wrappers import parameters_of
from shrinkpoint.steps.segment import Kind
from shrinkpoint.store.urls import Location, parse_url
from shrinkpoint.warn import brief, refuses_unknown_options

__all__ = [
    "StepLog",
    "chosen_log",
    "log_location",
    "nbytes_of",
    "refuse_optimizers",
    "steps_of_segment",
]

_SEGMENT = 256 * 2**20
_STEPS = 2, 8  # least and most of a segment: its digest reads three times as much as a step's gradients

_SMALL_ONLY = ("every", "quantization_step")


@refuses_unknown_options
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
        ...     step_log=shrinkpoint.StepLog(url="steps"),  # better in memory, such as /dev/shm/steps
        ... )
    """

    kind: Kind = "exact"
    """``exact``: the inputs of each `optimizer.step()`, bit for bit. ``small``: the weights, in under one bit per element."""
    url: str | None = None
    """The folder of the log, near the training, such as ``/dev/shm/steps``. None puts a ``small`` log into the run itself."""
    after_step: Callable[[], object] | None = None
    """``exact``, of `Checkpointer`: what the training does to large tensors after each step and before it calls `step`, such as
    ``lambda: ema.update_parameters(model)``. Called when steps are replayed, and only then."""
    segment_steps: int | None = None
    """Steps (with ``small``, records) that are written together; at most this many are lost in a crash, or twice as many
    where writing them takes longer than a step. None takes as many as make 256 MiB before they are coded, but from 2 to 8."""
    keep: int = 2
    """Intervals between checkpoints whose steps are kept."""
    every: int = 1
    """``small``: steps between two records."""
    overhead: float | None = 0.02
    """``small``: the share of the training's time that the log may take; `every` is raised until it is met. ``exact``: the share
    that the training may wait for the writer, after the first second; then no steps are logged until the next checkpoint. None:
    training waits for the log as long as it takes."""
    quantization_step: float = 6.5
    """``small``: in root mean squares of one step's update, by tensor. Every logged weight is within half of it, unless it
    moves by more than 127 of them from one record to the next."""
    storage_options: Mapping[str, Any] | None = None
    """For fsspec, where the log is not on a local file system."""

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ConfigError(f"step_log={brief(self.kind)} must be 'exact' or 'small', or None for no log")
        self._check_small()
        if type(self.keep) is not int or not 1 <= self.keep <= 1000:
            raise ConfigError(f"keep must be an integer from 1 to 1000, not {brief(self.keep)}")
        steps = self.segment_steps
        if steps is not None and (type(steps) is not int or not 1 <= steps <= 10_000):
            raise ConfigError(
                f"segment_steps must be an integer from 1 to 10000, or None, not {brief(steps)}"
            )

    def _check_small(self) -> None:
        if type(self.every) is not int or not 1 <= self.every <= 10_000:
            raise ConfigError(f"every must be an integer from 1 to 10000, not {brief(self.every)}")
        if self.overhead is not None and not _is_number(self.overhead, 1e-6, 1.0):
            raise ConfigError(
                f"overhead must be a share of the training's time, such as 0.02, or None, not {brief(self.overhead)}"
            )
        if not _is_number(self.quantization_step, 1e-3, 1e3):
            raise ConfigError(
                f"quantization_step must be a number from 0.001 to 1000, such as 6.5, not {brief(self.quantization_step)}"
            )
        given = [f.name for f in fields(self) if f.name in _SMALL_ONLY and getattr(self, f.name) != f.default]
        if self.kind == "exact" and given:
            raise ConfigError(f"{given[0]} is of use with kind='small' only: leave it out")
        if self.kind == "small" and self.after_step is not None:
            raise ConfigError("after_step is of use with kind='exact' only: leave it out")


def _is_number(value: object, least: float, most: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most


def chosen_log(step_log: object) -> StepLog:
    """Give the `StepLog` requested by ``step_log=``.

    Args:
        step_log: ``"exact"``, ``"small"``, a `StepLog`, or a mapping of its fields, as it stands in YAML.

    Raises:
        ConfigError: it is something else.
    """
    if isinstance(step_log, StepLog):
        return step_log
    return StepLog(**step_log) if isinstance(step_log, Mapping) else StepLog(kind=step_log)  # type: ignore[arg-type]


def log_location(
    url: str | None,
    run_urls: Sequence[str | os.PathLike[str]],
    optimizers: Sequence[torch.optim.Optimizer],
) -> Location:
    """The location of the log.

    Args:
        url: as the user gave it.
        run_urls: of the run's stores.
        optimizers: whose parameters say how much that is.

    Raises:
        ConfigError: it is missing, or within the run.
    """
    if url is None:
        size = nbytes_of(optimizers)
        raise ConfigError(
            f"step_log='exact' writes the gradients of every step, here {size / 1e6:.3g} MB; at one step per second, that is"
            f" {3600 * size / 1e9:.3g} GB per hour, too much for most stores of runs. Say where to with step_log=StepLog(url=...): a"
            " folder near the training, such as /dev/shm/steps or one on a local disk"
        )
    location = parse_url(url)
    for run in map(parse_url, run_urls):
        one, other = (os.path.realpath(at.path) if at.kind == "local" else at.path for at in (location, run))
        if location.protocol == run.protocol and f"{one.rstrip('/')}/".startswith(f"{other.rstrip('/')}/"):
            raise ConfigError(
                f"StepLog(url={url!r}) is within the run {run.display}, whose files are not to be mixed with a log's:"
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


def steps_of_segment(options: StepLog, nbytes: float) -> int:
    """Steps of a segment whose tensors are mostly of this many bytes in each step."""
    if options.segment_steps is not None:
        return options.segment_steps
    least, most = _STEPS
    return int(min(most, max(least, _SEGMENT // max(1, nbytes))))


def nbytes_of(optimizers: Sequence[torch.optim.Optimizer]) -> int:
    """The bytes of all parameters, which the gradients of a step take too."""
    return sum(parameter.nbytes for one in optimizers for parameter in parameters_of(one))
