"""How a save is stored: a `Ladder` of a scheme's settings chooses a `Plan`, and a `Refusal` asks for a milder one."""

import weakref
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from shrinkpoint.quality.budget import RestoreCost
from shrinkpoint.quality.comparison import Comparison
from shrinkpoint.quality.guards import Verdict
from shrinkpoint.quality.measurement import EXACT, Rise
from shrinkpoint.reports import Measured
from shrinkpoint.schemes.base import SaveContext, Scheme
from shrinkpoint.schemes.exact import Lossless
from shrinkpoint.state.training import Role, TensorSpec


@dataclass(frozen=True)
class Plan:
    """The chosen scheme and settings of one save, the measurements behind it, and the reason."""

    scheme: Scheme
    configuration: str
    reason: str
    rise: Rise | None = None
    """The rise of the loss at the restore; None where nothing could be measured."""
    baseline: float | None = None
    evaluations: int = 0
    """Evaluations made for this save."""
    resumed: Mapping[int, Rise] = field(default_factory=dict)
    """The rise of the loss by number of steps after a restore, where this save was probed."""
    cost: Rise | None = None
    """The rise that training does not recover; None where only `rise` is known."""
    allowed: float | None = None
    """The allowed cost of one restore."""
    verdict: Verdict | None = None
    """What the guard has found of the scheme; None where it was not asked."""
    whole: RestoreCost | None = None
    """The cost of a restore with what no measurement at a save sees; None where nothing could be measured."""
    options: str = ""
    """The settings other than the scale that determine the cost of a restore."""
    scale: float = 1.0
    """Scale factor of the step sizes, where the scheme has one: a restore's cost grows with its square."""
    is_explained: bool = False
    """Whether the user asked for exact storage, or was already warned why it is used."""
    is_blind: bool = False
    """Whether the evaluation was found not to see the weights."""
    overhead: float = 0.0
    """Share of the training time of this process that evaluations and probes have taken so far."""

    @property
    def lasting(self) -> Rise:
        """The rise that training does not recover; zero where it is not known."""
        return self.cost or EXACT

    @property
    def measured(self) -> Measured:
        """Whether the degradation was measured, is 0 by exactness, or is unknown."""
        if self.is_exact:
            return "exact"
        if self.rise is not None:
            return "measured"
        return "blind" if self.is_blind else "unmeasured"

    @property
    def is_exact(self) -> bool:
        """Whether the plan stores every tensor bit-exactly."""
        return self.configuration == "exact"


class Refusal(NamedTuple):
    """Why a plan must not be used as it is."""

    reason: str
    moments: bool
    """Whether the optimizer's state is to be milder, and not the weights."""
    at_fault: frozenset[int]
    """Positions of the optimizers whose moments differ most."""
    times: float | None = None
    """By how many times less the moments are to lose, where that is known."""
    is_firm: bool = True
    """Whether the plan must not be used even where nothing is milder."""


class Ladder(ABC):
    """The settings of one scheme, from which each save takes the smallest encoding that keeps the bound; keeps measurements between saves.

    Args:
        name: the scheme's.
        options: its settings.
    """

    def __init__(self, name: str, options: Any) -> None:
        self._name, self._options = name, options
        self._comparison: weakref.ref[Comparison] | None = None  # which holds the whole snapshot

    def takes(self, spec: TensorSpec) -> bool:
        """Return whether the scheme codes this tensor as a weight."""
        if self._options is None:
            return spec.tag.role is Role.WEIGHT
        return bool(self._options.takes(spec))

    @abstractmethod
    def unmeasured(self, save_context: SaveContext) -> Plan:
        """Return the plan where there is no way to evaluate the model."""

    @abstractmethod
    def measured(self, save_context: SaveContext, comparison: Comparison, allowed: float) -> Plan:
        """Return the plan whose restore raises the loss by no more than `allowed`, relative, at the upper end of the interval.

        Raises:
            EvaluationUnavailableError: training can no longer evaluate.
            BlindEvaluationError: the evaluation does not see the weights.
        """

    def milder(
        self, save_context: SaveContext, comparison: Comparison | None, allowed: float, refusal: Refusal
    ) -> Plan | None:
        """Return a plan with milder settings than the last one had, or None where there are none.

        Args:
            save_context: as of `measured`.
            comparison: as of `measured`; None where nothing can be measured.
            allowed: as of `measured`.
            refusal: why the last plan must not be used.
        """
        return None

    @abstractmethod
    def state_dict(self) -> dict[str, object]:
        """Return what is known, in JSON primitives, for a resumed training."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned.

        Raises:
            ConfigError: it is no such state.
        """

    def _begins(self, comparison: Comparison) -> bool:
        """Return whether this comparison is of another save than the last one."""
        begins = self._comparison is None or self._comparison() is not comparison
        self._comparison = weakref.ref(comparison)
        return begins


def exactly(reason: str, *, is_explained: bool = False) -> Plan:
    """Return a plan that stores everything bit-exactly."""
    return Plan(Lossless(), "exact", reason, EXACT, is_explained=is_explained)
