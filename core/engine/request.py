"""What a training asks to be saved, from the callback to the saver, checked and made plain."""

import math
import operator
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from shrinkpoint.engine.handover import Adoption, Handover
from shrinkpoint.errors import ConfigError
from shrinkpoint.optimizers.updates import OptimizerKind
from shrinkpoint.quality.evaluation import Evaluate, ResumedSteps
from shrinkpoint.state.snapshot import Snapshot
from shrinkpoint.state.training import Describe, OwnState, plain
from shrinkpoint.store.keys import MAX_STEP
from shrinkpoint.warn import brief


def plain_step(step: Any) -> int:
    """Return a plain int: numpy's and torch's have no place in a container's header, and a tensor may be counted up in place.

    Raises:
        ConfigError: it is no step.
    """
    try:
        truth = isinstance(step, bool) or str(getattr(step, "dtype", "")) in ("bool", "torch.bool")
        plain = -1 if truth else operator.index(step)
    except (TypeError, RuntimeError):  # RuntimeError: of a tensor on the meta device
        plain = -1
    if not 0 <= plain <= MAX_STEP:
        rest = f", and at most {MAX_STEP}" if plain > MAX_STEP else ""
        fix = "; int() makes one of a text or a float" if isinstance(step, str | float) else ""
        raise ConfigError(
            f"step={brief(step)} must be a whole number: of the training steps done so far, 0 or more{rest}{fix}"
        )
    return plain


def check_metrics(metrics: Any) -> None:
    """Check metrics that may be stored later, as far as that takes no time: tensors are not read, which would wait for a GPU.

    Raises:
        ConfigError: they can not be stored.
    """
    for name, value in _named(metrics).items():
        if isinstance(value, torch.Tensor):
            if value.numel() != 1:
                raise ConfigError(
                    f"metrics[{name!r}]={brief(value)} must be one number (it has {value.numel()})"
                )
        else:
            _number(name, value)


def plain_metrics(metrics: Any) -> dict[str, float]:
    """Plain floats, also of tensors of one element; none of None.

    Raises:
        ConfigError: one is no number, or they have no names.
    """
    return {str(name): _number(name, value) for name, value in _named(metrics).items()}


def _named(metrics: Any) -> Mapping[Any, Any]:
    if metrics is not None and not isinstance(metrics, Mapping):
        raise ConfigError(
            f"metrics={brief(metrics)} must be a dict of numbers by name, as in {{'val_loss': 0.5}}, or None"
        )
    return metrics or {}


def _number(name: Any, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise ConfigError(
            f"metrics[{name!r}]={brief(value)} must be one number ({str(error)[:200]})"
        ) from None


def plain_timeout(timeout_s: Any) -> float | None:
    """Return seconds to wait at most; None is without limit.

    Raises:
        ConfigError: it is no number.
    """
    if timeout_s is None:
        return None
    try:
        seconds = float(operator.pos(timeout_s))  # of a text there is no such thing
    except OverflowError:
        seconds = math.inf
    except (TypeError, ValueError, RuntimeError):
        seconds = math.nan
    if math.isnan(seconds):
        raise ConfigError(f"timeout_s={brief(timeout_s)} must be a number of seconds, or None for no limit")
    return min(seconds, threading.TIMEOUT_MAX)


@dataclass(frozen=True, kw_only=True)
class SaveRequest:
    """One save, as a training asks for it.

    Examples:
        >>> from shrinkpoint.engine.request import SaveRequest
        >>> SaveRequest(state={"model": model.state_dict()}, step=500, metrics={"val_loss": 0.5}).exact
        False
    """

    state: object
    """What a framework would give to ``torch.save``; of shards, this rank's, with DTensors."""
    step: int
    """The training step it belongs to; 0 or more."""
    describe: Describe = plain
    """Gives each tensor's role."""
    metrics: Mapping[str, Any] | None = None
    """Numbers, or tensors of one element; stored with the checkpoint, retention by `monitor` reads them."""
    evaluate: Evaluate | None = None
    """The held-out loss with given weights; called on the training thread only. With shards it gets this rank's, as DTensors,
    and is called on all ranks at the same time; None on any rank: nothing is measured."""
    resumed: ResumedSteps | None = None
    """Continues from a state for some optimizer steps and back; called where and when `evaluate` is."""
    gradients: Mapping[str, torch.Tensor] | None = None
    """EMA of the gradients by parameter name. Without them `inshrinkerator` takes Adam's first moments; `auto` uses them for
    parameters without moments alone."""
    optimizers: Sequence[torch.optim.Optimizer] = ()
    """Whose states are in `state`, in the same order: what a restore does to their next updates is tried on copies. None are
    needed for anything else."""
    exact: bool = False
    """Whether this one is stored bit-exactly."""
    wait: bool = False
    """Whether the call returns when it is committed."""
    adoption: Adoption | None = None
    """With ``adopt=True``, for a planned save: the training's tensors get the values that are stored before the call returns.
    None for a save that an undisturbed run would not make: it is stored exactly."""

    def checked(self, *, adopts: bool) -> "SaveRequest":
        """Check all fields, and give a copy with a plain step and plain metrics.

        Args:
            adopts: whether the saver does.

        Raises:
            ConfigError: `step` is no step, a metric is no number, or another field has a type or value that cannot work.
        """
        if self.adoption is not None and not adopts:
            raise ConfigError("adoption needs a saver with adopt=True")
        for name, optional in (("describe", False), ("evaluate", True), ("resumed", True)):
            function = getattr(self, name)
            if not callable(function) and not (optional and function is None):
                raise ConfigError(
                    f"{name}={brief(function)} must be a function{', or None' if optional else ''}"
                )
        if self.gradients is not None and not (
            isinstance(self.gradients, Mapping)
            and all(isinstance(value, torch.Tensor) for value in self.gradients.values())
        ):
            raise ConfigError(
                f"gradients={brief(self.gradients)} must be a dict of tensors by parameter name, or None"
            )
        given = self.optimizers
        if not isinstance(given, Sequence) or not all(hasattr(one, "param_groups") for one in given):
            raise ConfigError(f"optimizers={brief(given)} must be a list of optimizers, [] for none")
        return replace(self, step=plain_step(self.step), metrics=plain_metrics(self.metrics))


class Way(NamedTuple):
    """Say how to save a state: bit-exactly or as planned; exact tensors raw or coded; weights alone or all."""

    exact: bool
    raw: bool = False
    weights_only: bool = False


@dataclass(frozen=True, kw_only=True)
class Job:
    """One save, as the training thread hands it over."""

    snapshot: Snapshot
    """The state, or the tensors of it that this rank codes."""
    step: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    measure: Evaluate | None = None
    """Evaluates a candidate; of several ranks together, which all have one then."""
    resume: ResumedSteps | None = None
    gradients: Mapping[str, torch.Tensor] | None = None
    optimizers: Sequence[OptimizerKind] = ()
    way: Way = field(default_factory=lambda: Way(exact=False))
    blocked_s: float = 0.0
    handover: Handover | None = None
    """Of a planned save that training goes on from."""

    number: int = 0
    """Number of this save; it is in the names of ranks' messages."""
    own: OwnState = field(default_factory=OwnState)
    """What this rank has for itself."""
    began: float = 0.0
    """`RunWriter.now` of the first rank."""
    clock_s: float = 0.0
    """The first rank's time, by which all ranks decide."""
