"""The interfaces of the planner: a `Strategy` chooses a scheme's settings, `Plan` carries the choice, a `Guard` may refuse it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from shrinkpoint.quality.comparison import Comparison
from shrinkpoint.quality.evaluation import Measure
from shrinkpoint.quality.measurement import EXACT, Rise
from shrinkpoint.quality.restore_budget import RestoreCost
from shrinkpoint.reports import Measured
from shrinkpoint.schemes.base import SaveContext, Scheme
from shrinkpoint.schemes.lossless import Lossless
from shrinkpoint.state.training import TensorSpec

__all__ = ["Guard", "Measure", "Plan", "Strategy", "exactly"]


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
    fall: float = 0.0
    """Relative fall of the loss in a step, where this save was probed."""
    cost: Rise | None = None
    """The rise that training does not recover; None where only `rise` is known."""
    allowed: float | None = None
    """The allowed cost of one restore."""
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
    def degradation(self) -> float | None:
        """The relative rise of the loss at a restore; None where it could not be measured."""
        return None if self.rise is None else self.rise.mean

    @property
    def degradation_low(self) -> float | None:
        """Lower end of its interval."""
        return None if self.rise is None else self.rise.low

    @property
    def degradation_high(self) -> float | None:
        """Upper end of its interval."""
        return None if self.rise is None else self.rise.high

    @property
    def degradation_luck(self) -> float | None:
        """The first-order part of the rise at the restore, in addition to `degradation`."""
        return None if self.rise is None else self.rise.first_order

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


class Guard(Protocol):
    """Accepts or refuses a lossy plan by its tensors alone, see `shrinkpoint.quality.guards`."""

    @property
    def refuses_moments(self) -> bool:
        """Whether the last refusal was for the optimizer's state: less noise in the weights would not help."""
        ...

    @property
    def at_fault(self) -> frozenset[int]:
        """Positions of the optimizers whose moments differ most under the last plan checked; empty where unknown."""
        ...

    @property
    def lost_steps(self) -> float:
        """Training steps that a restore under the last plan checked would set training back by; 0 where unknown."""
        ...

    @property
    def update_error(self) -> float | None:
        """Relative error of the first update after a restore under the last plan checked; None where unknown."""
        ...

    def __call__(self, save_context: SaveContext, scheme: Scheme) -> str | None:
        """Why a lossy scheme must not store a snapshot, or None where it may."""
        ...


class Strategy(Protocol):
    """Chooses the settings of one scheme, and keeps its measurements between saves.

    One that has milder settings than those of its last plan may also have a method ``milder`` with the arguments of
    `measured` (`comparison` is None where nothing can be measured) and ``moments``: whether the optimizer's state is to be
    milder, and not the weights; ``at_fault``, as of `Guard`; and ``times``, by how many times less moments are to lose, or None. It gives a
    plan, or None where there are none.
    """

    def takes(self, spec: TensorSpec) -> bool:
        """Whether the scheme codes this tensor as a weight."""
        ...

    def unmeasured(self, save_context: SaveContext) -> Plan:
        """The plan where there is no way to evaluate the model."""
        ...

    def measured(self, save_context: SaveContext, comparison: Comparison, allowed: float) -> Plan:
        """The plan whose restore raises the loss by no more than `allowed`, relative, at the upper end of the interval.

        Raises:
            EvaluationUnavailableError: training can no longer evaluate.
            BlindEvaluationError: the evaluation does not see the weights.
        """
        ...

    def state_dict(self) -> dict[str, object]:
        """The strategy's state in JSON primitives, for a resumed training."""
        ...

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Continue from what `state_dict` returned.

        Raises:
            ConfigError: it is no such state.
        """
        ...


def exactly(reason: str, *, is_explained: bool = False) -> Plan:
    """A plan that stores everything bit-exactly."""
    return Plan(Lossless(), "exact", reason, EXACT, is_explained=is_explained)
