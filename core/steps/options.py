"""The options of a step log, checked before training starts."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, get_args

from shrinkpoint.errors import ConfigError
from shrinkpoint.steps.segment import Kind
from shrinkpoint.warn import brief, refuses_unknown_options

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
    """The folder of the log, near the training, such as ``/dev/shm/steps``, which is memory. ``exact`` needs it. None puts a ``small`` log
    into the run itself."""
    after_step: Callable[[], object] | None = None
    """``exact``, of `Checkpointer`: what the training does to large tensors after each step and before it calls `step`, such as
    ``lambda: ema.update_parameters(model)``. Called when steps are replayed, and only then."""
    segment_steps: int | None = None
    """Steps (with ``small``, records) that are written together; at most twice as many are lost in a crash. None takes 256 MiB, but from 2 to
    8 of them."""
    keep: int = 2
    """Intervals between checkpoints whose steps are kept."""
    every: int = 1
    """``small``: steps between two records."""
    overhead: float | None = 0.02
    """``small``: the share of the training's time that the log may take; `every` is raised until it is met. ``exact``: the share
    that the training may wait for the writer; then no steps are logged until the next checkpoint. None: training waits."""
    quantization_step: float = 6.5
    """``small``: in root mean squares of one step's update, by tensor. Every logged weight is within half of it, unless it
    moves by more than 127 of them."""
    storage_options: Mapping[str, Any] | None = None
    """For fsspec, where the log is not on a local file system."""

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ConfigError(f"step_log={brief(self.kind)} must be 'exact' or 'small', or None for no log")
        for name, most in (("keep", 1000), ("every", 10_000), ("segment_steps", 10_000)):
            value = getattr(self, name)
            if (type(value) is not int or not 1 <= value <= most) and (name, value) != (
                "segment_steps",
                None,
            ):
                none = ", or None" if name == "segment_steps" else ""
                raise ConfigError(f"{name} must be an integer from 1 to {most}{none}, not {brief(value)}")
        if self.overhead is not None and not _is_number(self.overhead, 1e-6, 1.0):
            raise ConfigError(
                f"overhead must be a share of the training's time, such as 0.02, or None, not {brief(self.overhead)}"
            )
        if not _is_number(self.quantization_step, 1e-3, 1e3):
            raise ConfigError(
                f"quantization_step must be a number from 0.001 to 1000, such as 6.5, not {brief(self.quantization_step)}"
            )
        if self.after_step is not None and not callable(self.after_step):
            raise ConfigError(f"after_step must be a function, not {type(self.after_step).__name__}")
        other, useless = ("exact", ("after_step",)) if self.kind == "small" else ("small", _SMALL_ONLY)
        for one in fields(self):
            if one.name in useless and getattr(self, one.name) != one.default:
                raise ConfigError(f"{one.name} is of use with kind={other!r} only: leave it out")

    def steps_of_segment(self, nbytes: int) -> int:
        """Count the steps, or records, that are written together where each takes so many bytes before it is coded."""
        least, most = _STEPS
        return self.segment_steps or min(most, max(least, _SEGMENT // max(1, nbytes)))


def _is_number(value: object, least: float, most: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most


def chosen_log(step_log: object) -> StepLog:
    """Give the `StepLog` requested by ``step_log=``: ``"exact"``, ``"small"``, a `StepLog`, or a mapping of its fields, as in YAML.

    Raises:
        ConfigError: it is something else.
    """
    if isinstance(step_log, StepLog):
        return step_log
    return StepLog(**step_log) if isinstance(step_log, Mapping) else StepLog(kind=step_log)  # type: ignore[arg-type]
