"""One plan for all ranks: each runs the same planner over the tensors that it owns, and what these give is combined.

Nothing that is decided depends on one rank alone: its tensors, its clock or its memory. Numbers of the tensors are combined over
the ranks (`Together`), the time is the first rank's, and evaluations give all ranks the same losses (`shrinkpoint.sharded.probing`).
"""

import json
from collections.abc import Callable
from typing import Any

from shrinkpoint.errors import StoreError
from shrinkpoint.group.mailbox import Mailbox
from shrinkpoint.quality.evaluation import Evaluate, EvaluationUnavailableError, ResumedSteps
from shrinkpoint.quality.guards import Guard
from shrinkpoint.quality.plan import Plan, exactly
from shrinkpoint.quality.planner import Planner
from shrinkpoint.schemes.base import SaveContext

__all__ = ["Together", "plan_together"]

Message = dict[str, Any]


class Together:
    """Combines messages of all ranks in one save; every rank makes the same calls in the same order.

    Args:
        mailbox: of the background thread.
        number: of the save.
        timeout_s: seconds that another rank has for a message, from when the first one has its own.
    """

    def __init__(self, mailbox: Mailbox, number: int, timeout_s: float) -> None:
        self._mailbox, self._number, self._timeout_s = mailbox, number, timeout_s
        self._count = 0

    def combine(self, own: Message, reduce: Callable[[list[Message]], Message]) -> Message:
        """Give every rank what the messages of all come to.

        Args:
            own: this rank's, in JSON primitives.
            reduce: makes one message of those of all ranks.

        Raises:
            StoreError: a rank has failed, or has not sent its message in time.
            EvaluationUnavailableError: a rank plans no longer.
        """

        def reduced(messages: list[Message]) -> Message:
            left = next((one for one in messages if "left" in one), None)
            return reduce(messages) if left is None else left

        result = self._mailbox.combine(self._next(), own, reduced, timeout_s=self._timeout_s)
        if "left" in result:
            raise EvaluationUnavailableError(result["left"])
        return result

    def agree(self, plan: Plan) -> Plan:
        """End the planning, with one plan for all ranks: an exact one, where any rank has come to that.

        Raises:
            StoreError: a rank has failed, or the ranks have come to different plans.
        """
        self._post({"left": "another rank plans this save no longer"}, self._next())
        own = {
            "exact": plan.reason if plan.is_exact else None,
            "explained": plan.is_explained,
            "plan": [plan.scheme.name, plan.configuration, plan.reason],
        }
        agreed = self._mailbox.combine(self._last, own, _one_plan, timeout_s=self._timeout_s)
        if agreed["exact"] is None or plan.is_exact:
            return plan
        return exactly(agreed["exact"], is_explained=agreed["explained"])

    def fail(self, error: Exception) -> None:
        """Tell the ranks that wait for this one's next message."""
        message = {"error": f"on rank {self._mailbox.rank}: {error}"}
        for key in (self._next(), self._last):
            self._post(message, key)

    @property
    def messages(self) -> list[str]:
        """The keys of all messages, which everyone has read when the next save begins."""
        keys = [*(f"{self._number}/plan/{index}" for index in range(self._count)), self._last]
        return keys + [f"{key}/{rank}" for key in keys for rank in range(self._mailbox.size)]

    def _post(self, message: Message, key: str) -> None:
        self._mailbox.post(f"{key}/{self._mailbox.rank}", message)
        if self._mailbox.rank == 0:
            self._mailbox.post(key, message)

    def _next(self) -> str:
        self._count += 1
        return f"{self._number}/plan/{self._count - 1}"

    @property
    def _last(self) -> str:
        return f"{self._number}/planned"


def _one_plan(messages: list[Message]) -> Message:
    exact = next((one for one in messages if one["exact"] is not None), None)
    if exact is not None:
        return exact
    for rank, one in enumerate(messages):
        if one["plan"] != messages[0]["plan"]:
            raise StoreError(
                f"the ranks have come to different plans: {messages[0]['plan']} on rank 0, {one['plan']} on rank {rank}"
            )
    return messages[0]


def plan_together(
    together: Together,
    planner: Planner,
    save_context: SaveContext,
    measure: Evaluate,
    resume: ResumedSteps | None = None,
    *,
    guard: Guard | None = None,
    leave: Callable[[], None] = lambda: None,
) -> Plan:
    """Choose the plan of a save on every rank.

    Args:
        together: of this save.
        planner: its state is made the first rank's where it is another one, as after a failed save.
        save_context: with this rank's tensors, and the sums of all ranks.
        measure: the losses of all ranks, for this rank's part of a candidate.
        resume: the losses of all ranks after some steps, from this rank's part of a state; None where some rank takes none.
        guard: of this rank's tensors; None accepts all.
        leave: called when this rank measures no more, before it waits for the others' plans.

    Raises:
        StoreError: another rank has failed, or has come to another plan.
    """
    state = together.combine({"state": json.dumps(planner.state_dict(), sort_keys=True)}, _one_state)
    if state["state"] is not None:
        planner.load_state_dict(json.loads(state["state"]), restored=False)
    plan = planner.plan(save_context, measure, resume, guard=guard, combine=together.combine)
    leave()
    return together.agree(plan)


def _one_state(messages: list[Message]) -> Message:
    first = messages[0]["state"]
    return {"state": first if any(one["state"] != first for one in messages) else None}
