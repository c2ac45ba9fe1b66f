"""What a training asks to be saved, from the callback to the saver."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from shrinkpoint.engine.arguments import plain_metrics, plain_step
from shrinkpoint.engine.takeover import Adoption
from shrinkpoint.errors import ConfigError
from shrinkpoint.quality.evaluation import Evaluate, ResumedSteps
from shrinkpoint.reports import Accepted
from shrinkpoint.state.training import Describe, plain
from shrinkpoint.warn import brief

__all__ = ["SaveRequest", "StateSaver"]


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
    """EMA of the gradients by parameter name; None takes Adam's first moments."""
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

    def checked(self) -> "SaveRequest":
        """Check all fields, and give a copy with a plain step and plain metrics.

        Raises:
            ConfigError: `step` is no step, a metric is no number, or another field has a type that cannot work.
        """
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


class StateSaver(ABC):
    """Saves what it is asked to."""

    def save(self, state: object, **fields: Any) -> Accepted | None:
        """Save a state; as `accept`.

        Args:
            state: what a framework would give to ``torch.save``.
            fields: further ones of `SaveRequest`, by name; `step` is needed.
        """
        return self.accept(SaveRequest(state=state, **fields))

    @abstractmethod
    def accept(self, request: SaveRequest) -> Accepted | None:
        """Save a state; returns as soon as it is copied.

        Returns:
            What was accepted; None when a save was still being written and `busy` is ``skip``, when shards have too little memory,
            or when it was to be waited for and has failed.

        Raises:
            SaveFailedError: three saves in a row have failed.
            FencedError: another writer has taken over the run.
            CannotRepresentError: the state holds an object that cannot be stored without pickle.
            ConfigError: a field cannot work, or this was called within another call, by an evaluation, say.
        """
