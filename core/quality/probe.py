"""What a restore under a plan costs some training steps later."""

import math
from dataclasses import dataclass, replace

from shrinkpoint.config import SaverConfig
from shrinkpoint.quality.evaluation import ResumedSteps
from shrinkpoint.quality.measurement import (
    EXACT,
    absolute_error,
    lasting_rises,
    measured_rise,
    relative_rise,
)
from shrinkpoint.quality.recovery import RecoveryEstimate
from shrinkpoint.quality.snapshots import PlannedSnapshot
from shrinkpoint.quality.strategy import Guard, Plan
from shrinkpoint.schemes.base import SaveContext

__all__ = ["Probe", "stricter"]

# Of updates, where the optimizer could not be stepped: what most trainings of docs/bound.md have.
_USUAL_ERROR = 0.25
_AIM = 0.7  # safety factor on a cost predicted by proportion


@dataclass(frozen=True)
class Probe:
    """Trains on for some steps from the state that a plan restores, and as many from the true one.

    Attributes:
        config: the bound, and how many processors may be used.
        recovery: how many steps are due, and what they have shown so far.
        share: of the bound, which one restore may take.
        guard: knows what the plan does to the next updates; None where nothing is known of them.
    """

    config: SaverConfig
    recovery: RecoveryEstimate
    share: float
    guard: Guard | None

    def of(
        self, plan: Plan, save_context: SaveContext, snapshot: PlannedSnapshot, resume: ResumedSteps
    ) -> Plan:
        """The plan with the rise of the loss after those steps, and with the cost of a restore that follows from it."""
        marks = self.recovery.marks(plan.options, plan.scale) or self.recovery.shortest
        threads = self.config.encoder_threads
        true = snapshot.stepped(resume, marks, save_context, None, threads)
        tried = snapshot.stepped(resume, marks, save_context, plan.scheme, threads)
        at, floor = plan.rise or EXACT, self.config.loss_floor
        absolute = absolute_error(self.share)
        fall = lost = error = 0.0
        if plan.baseline is not None:
            last = sum(true[-1]) / len(true[-1])
            fall = max(0.0, -relative_rise(last, plan.baseline, floor)) / marks[-1]
        if self.guard is not None:
            known = self.guard.update_error
            lost, error = self.guard.lost_steps, _USUAL_ERROR if known is None else known
        rises = lasting_rises(
            {
                mark: measured_rise(baseline, losses, floor=floor, absolute=absolute)
                for mark, losses, baseline in zip(marks, tried, true, strict=True)
            },
            at,
            fall=fall,
            lost_steps=lost,
            update_error=error,
        )
        cost = self.recovery.measured(at, rises, plan.options, plan.scale)
        return replace(plan, resumed=rises, fall=fall, cost=cost)


def stricter(plan: Plan, share: float) -> float:
    """The rise allowed at the restore so that the lasting rise is `share`, by proportion."""
    at, cost = plan.rise or EXACT, plan.lasting
    if not math.isfinite(cost.high):
        return _AIM * share / 4  # four times narrower steps at least
    return _AIM * at.high * share / cost.high
