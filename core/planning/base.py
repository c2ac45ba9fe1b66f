"""What the planner asks a strategy for, and what it gets."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch

from shrinkpoint.schemes.base import Occasion, Scheme
from shrinkpoint.schemes.lossless import Lossless
from shrinkpoint.state import TensorSpec

__all__ = ["Measure", "Plan", "Strategy", "exactly"]

Measure = Callable[[Mapping[str, torch.Tensor]], float]
"""The held-out loss with the given parameters and buffers, by name, in the model's place."""


@dataclass(frozen=True)
class Plan:
    """What to store a snapshot with, and why."""

    scheme: Scheme
    configuration: str
    reason: str
    degradation: float | None = None
    """At a restore; None where nothing could be measured."""
    baseline: float | None = None
    evaluations: int = 0
    resumed: Mapping[int, float] = field(default_factory=dict)
    """The rise of the loss after so many steps from a restore, where it was measured at this save."""


class Strategy(Protocol):
    """Chooses the settings of one scheme, and keeps what it learned between saves."""

    def takes(self, spec: TensorSpec) -> bool:
        """Whether the scheme codes this tensor as a weight."""
        ...

    def unmeasured(self, occasion: Occasion) -> Plan:
        """The plan where there is no way to evaluate the model."""
        ...

    def measured(self, occasion: Occasion, measure: Measure, allowed: float) -> Plan:
        """The plan whose restore raises the held-out loss by no more than `allowed`, relative.

        Raises:
            EvaluationUnavailableError: there is nobody to evaluate any more.
        """
        ...

    def state_dict(self) -> dict[str, object]:
        """What a resumed training needs, in JSON primitives."""
        ...

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Go on from what `state_dict` returned.

        Raises:
            ConfigError: it is no such state.
        """
        ...


def exactly(reason: str, baseline: float | None = None, evaluations: int = 0) -> Plan:
    """The plan that changes nothing."""
    return Plan(Lossless(), "exact", reason, 0.0, baseline, evaluations)
