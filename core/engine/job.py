"""One save as the training thread hands it over, and what its delta builds on."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from shrinkpoint.engine.takeover import Takeover
from shrinkpoint.optimizers.updates import OptimizerKind
from shrinkpoint.quality.evaluation import Measure, ResumedSteps
from shrinkpoint.schemes.base import ReferenceState
from shrinkpoint.state.own import OwnState
from shrinkpoint.state.snapshot import Snapshot
from shrinkpoint.store.manifest import Anchor

__all__ = ["Job", "Link"]


@dataclass(frozen=True, kw_only=True)
class Job:
    """One save, as the training thread hands it over."""

    snapshot: Snapshot
    """The state, or the tensors of it that this rank codes."""
    step: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    measure: Measure | None = None
    """Evaluates a candidate; of several ranks together, which all have one then."""
    resume: ResumedSteps | None = None
    gradients: Mapping[str, torch.Tensor] | None = None
    optimizers: Sequence[OptimizerKind] = ()
    exact: bool = False
    weights_only: bool = False
    blocked_s: float = 0.0
    takeover: Takeover | None = None
    """Of a planned save that training goes on from."""

    number: int = 0
    """Of several ranks' saves; their messages have it in their names."""
    own: OwnState = field(default_factory=OwnState)
    """What this rank has for itself."""
    session: str = ""
    """The writer's, which the names of all ranks' parts have."""
    began: float = 0.0
    """The first rank's writer's clock."""
    clock_s: float = 0.0
    """The first rank's time, by which all ranks decide."""


@dataclass(frozen=True)
class Link:
    """What the next delta builds on."""

    digest: str
    """State digest of the whole checkpoint."""
    reference: dict[str, ReferenceState]
    """What a reader of it holds; coding uses it up."""
    number: int = 0
    """Of the save, by which ranks make sure that they all have the same; 0 is a restore."""
    restored: bool = False
    """Whether the training went on from a restore of it."""
    exact: bool = False
    """Whether nothing of it was quantized, so that its weights stand for themselves, as after a restore."""
    anchor: Anchor | None = None
    """What of its chain is built on instead; the digest is the anchor's then."""
