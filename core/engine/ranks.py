"""What the background threads of ranks that save together send each other, for one plan and one outcome.

Every rank runs the same planner over the tensors that it owns, and what these give is combined (`Ranks.combine`). Nothing that is
decided depends on one rank alone: its tensors, its clock or its memory. The time is the first rank's, and evaluations give all
ranks the same losses (`shrinkpoint.sharded.probing`).
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from shrinkpoint.config import SaverConfig
from shrinkpoint.engine.request import Job
from shrinkpoint.errors import StoreError
from shrinkpoint.group.group import Group
from shrinkpoint.group.mailbox import Mailbox
from shrinkpoint.quality.comparison import evaluated
from shrinkpoint.quality.evaluation import Evaluate, EvaluationUnavailableError, ResumedSteps
from shrinkpoint.quality.guards import Guard
from shrinkpoint.quality.measurement import Losses
from shrinkpoint.quality.plan import Plan, exactly
from shrinkpoint.quality.planner import Planner
from shrinkpoint.schemes.auto.scheme import Auto
from shrinkpoint.schemes.base import SaveContext
from shrinkpoint.schemes.inshrinkerator.partition import added_scores
from shrinkpoint.schemes.inshrinkerator.scheme import weights_of
from shrinkpoint.schemes.sums import WeightSums, added_sums
from shrinkpoint.state.averages import average_key
from shrinkpoint.state.training import OwnState, Role, TensorSpec, TrainingState
from shrinkpoint.warn import warn

Message = dict[str, Any]

_OWN_S = 60.0
_PATIENCE_S = 600.0
"""Seconds in addition to twice `commit_timeout_s`, after which a rank no longer waits for the first one's answer."""


class Ranks:
    """The ranks that save together, as one of their background threads reaches them.

    Args:
        group: all of them.
        config: how to save.
        leave: says that this rank asks for no evaluation any more.
        evaluations: gives the keys of the messages of a save's evaluations, by its number.
        coded: gives a snapshot as if the model had only the tensors that this rank codes.
    """

    def __init__(
        self,
        group: Group,
        config: SaverConfig,
        leave: Callable[[], None],
        evaluations: Callable[[int], list[str]],
        coded: Callable[[TrainingState], TrainingState],
    ) -> None:
        self.rank, self.size = group.rank, group.size
        self.leave, self.coded = leave, coded
        self._config, self._evaluations = config, evaluations
        self._number = self._count = 0

    def connect(self, mailbox: Mailbox, session: str) -> None:
        """Take what reaches the others, before the first save; and the session of the writer, which the names of all parts have."""
        self._mailbox, self.session = mailbox, session

    def begin(self, job: Job) -> None:
        """Begin a save: remove the messages of the one before, whose outcome all ranks know, since they have agreed to begin this one."""
        before = self._number
        if self.rank == 0 and before:
            keys = [f"{before}/part/{rank}" for rank in range(self.size)]
            keys += self._messages + self._evaluations(before)
            try:
                self._mailbox.drop([*keys, f"{before}/own", f"{before}/outcome"])
            except StoreError as error:
                warn(str(error))
        self._number, self._count = job.number, 0
        if self.rank == 0:
            self._mailbox.post(f"{job.number}/own", job.own.digests())

    def own(self, job: Job) -> OwnState:
        """Return what this rank stores for itself: only what differs from the first one's."""
        return job.own.without(self._mailbox.wait(f"{job.number}/own", _OWN_S)) if self.rank else OwnState()

    def plan(self, planner: Planner, context: SaveContext, job: Job, guard: Guard | None) -> Plan:
        """Choose the plan of a save on every rank; see `Ranks.plan_together`."""
        if job.way.exact or self._config.scheme == "lossless":
            return planner.plan(context, None, exact=job.way.exact)
        context, measure = self._with_sums(context), job.measure

        def measured(weights: Mapping[str, torch.Tensor]) -> Losses:
            assert measure is not None
            return measure(owned_weights(context.state, weights))  # type: ignore[return-value]  # a tuple, of all ranks

        try:
            return self.plan_together(
                planner, context, None if measure is None else measured, job.resume, guard=guard
            )
        finally:
            self.leave()

    def plan_together(
        self,
        planner: Planner,
        save_context: SaveContext,
        measure: Evaluate | None,
        resume: ResumedSteps | None = None,
        *,
        guard: Guard | None = None,
    ) -> Plan:
        """Choose the plan of a save on every rank.

        Args:
            planner: its state is made the first rank's where it is another one, as after a failed save.
            save_context: with this rank's tensors, and the sums of all ranks.
            measure: the losses of all ranks, for this rank's part of a candidate; None on all where nothing is measured.
            resume: the losses of all ranks after some steps, from this rank's part of a state; None where some rank takes none.
            guard: of this rank's tensors; None accepts all.

        Raises:
            StoreError: another rank has failed, or has come to another plan.
        """
        state = self.combine({"state": json.dumps(planner.state_dict(), sort_keys=True)}, _one_state)
        if state["state"] is not None:
            planner.load_state_dict(json.loads(state["state"]), restored=False)
        plan = planner.plan(save_context, measure, resume, guard=guard, combine=self.combine)
        self.leave()  # before it waits for the others' plans
        return self._agreed(plan)

    def _with_sums(self, context: SaveContext) -> SaveContext:
        """Add what step sizes or thresholds depend on, summed over all ranks' weights."""
        options = self._config.scheme_options
        if self._config.scheme == "auto":
            own = Auto(options=options, save_context=context).sums(context.state)
            return replace(context, sums=WeightSums.from_json(self.combine(own.to_json(), added_sums)))
        if self._config.scheme == "inshrinkerator":
            scores = weights_of(context, options).sketches.to_json()
            return replace(context, scores=self.combine(scores, added_scores))
        return context

    def post_part(self, job: Job, message: Message) -> None:
        """Tell the first rank what this one has stored, or why it has not."""
        self._mailbox.post(f"{job.number}/part/{self.rank}", message)

    def outcome(self, job: Job, commit: Callable[[list[Message]], Message] | None) -> Message:
        """Return what has come of a save.

        Args:
            job: the save.
            commit: on the first rank, commits the parts of all and gives the outcome for all; None on others.

        Raises:
            ShrinkpointError: as `commit`.
        """
        key, patience_s = f"{job.number}/outcome", self._config.commit_timeout_s
        if commit is None:
            return self._mailbox.wait(key, 2 * patience_s + _PATIENCE_S)
        try:
            outcome = commit(self._mailbox.collect(f"{job.number}/part", patience_s))
        except Exception as error:
            self._mailbox.post(key, {"error": str(error)})
            raise
        self._mailbox.post(key, outcome)
        return outcome

    # ---- messages of one plan: every rank makes the same calls in the same order

    def combine(self, own: Message, reduce: Callable[[list[Message]], Message]) -> Message:
        """Reduce the messages of all ranks to one, for each of them.

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

        result = self._mailbox.combine(self._next(), own, reduced, timeout_s=self._config.commit_timeout_s)
        if "left" in result:
            raise EvaluationUnavailableError(result["left"])
        return result

    def _agreed(self, plan: Plan) -> Plan:
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
        agreed = self._mailbox.combine(self._last, own, _one_plan, timeout_s=self._config.commit_timeout_s)
        if agreed["exact"] is None or plan.is_exact:
            return plan
        return exactly(agreed["exact"], is_explained=agreed["explained"])

    def fail(self, error: Exception) -> Message:
        """Tell the ranks that wait for this one's next message that there is none; returns the message in place of its part."""
        message = {"error": f"on rank {self.rank}: {error}"}
        for key in (self._next(), self._last):
            self._post(message, key)
        return {"error": f"{type(error).__name__}: {error}"}

    @property
    def _messages(self) -> list[str]:
        """The keys of all messages, which everyone has read when the next save begins."""
        keys = [*(f"{self._number}/plan/{index}" for index in range(self._count)), self._last]
        return keys + [f"{key}/{rank}" for key in keys for rank in range(self.size)]

    def _post(self, message: Message, key: str) -> None:
        self._mailbox.post(f"{key}/{self.rank}", message)
        if self.rank == 0:
            self._mailbox.post(key, message)

    def _next(self) -> str:
        self._count += 1
        return f"{self._number}/plan/{self._count - 1}"

    @property
    def _last(self) -> str:
        return f"{self._number}/planned"


class OwnedWeights(dict[str, torch.Tensor]):
    """Of a candidate, the whole tensors that one rank owns, by their names in the stored state.

    Args:
        tensors: on the host.
        keys: of each, how an evaluation names the tensor that it is, or of which it is a block.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], keys: Mapping[str, str]) -> None:
        super().__init__(tensors)
        self.evaluated_as = keys
        """The names that an evaluation gets."""


def owned_weights(state: TrainingState, model: Mapping[str, torch.Tensor]) -> OwnedWeights:
    """Return a rank's part of a candidate, as `SharedDesk` takes it.

    Args:
        state: what the rank owns.
        model: its weights and buffers as `shrinkpoint.quality.comparison` names them.
    """
    specs = {key: spec for key, spec in evaluated(state) if key in model}
    return OwnedWeights(
        {spec.name: model[key] for key, spec in specs.items()},
        {spec.name: _key(spec) for spec in specs.values()},
    )


def _key(spec: TensorSpec) -> str:
    if spec.tag.role is Role.AVERAGE:
        return average_key(spec.whole)
    return str(spec.tag.parameter if spec.block is None else spec.block.parameter)


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


def _one_state(messages: list[Message]) -> Message:
    first = messages[0]["state"]
    return {"state": first if any(one["state"] != first for one in messages) else None}
