"""One save as the training thread hands it over, and what the next delta builds on."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from shrinkpoint.optimizers.updates import OptimizerKind
from shrinkpoint.quality.evaluation import Measure, ResumedSteps
from shrinkpoint.saving.takeover import Takeover
from shrinkpoint.schemes.base import ReferenceState
from shrinkpoint.state.snapshot import Snapshot
from shrinkpoint.store.manifest import Manifest

__all__ = ["Job", "Link"]


@dataclass(frozen=True, kw_only=True)
class Job:
    """One save, as the training thread hands it over."""

    snapshot: Snapshot
    step: int
    metrics: Mapping[str, float]
    measure: Measure | None
    resume: ResumedSteps | None = None
    gradients: Mapping[str, torch.Tensor] | None
    optimizers: Sequence[OptimizerKind] = ()
    exact: bool
    weights_only: bool = False
    blocked_s: float
    takeover: Takeover | None = None
    """Of a planned save that training goes on from."""


@dataclass(frozen=True)
class Link:
    """What the next delta builds on."""

    parent: Manifest
    reference: dict[str, ReferenceState]
    restored: bool = False
    """Whether the training went on from a restore of it."""
    exact: bool = False
    """Whether nothing of it was quantized, so that its weights stand for themselves, as after a restore."""
    base: str | None = None
    """Of a link to the base of the parent's chain alone, with what has not changed since: the base's digest."""
