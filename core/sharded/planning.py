"""One plan for all ranks: the first rank chooses, and the others make their parts of each candidate that it names.

Each rank has the tensors that it owns, and checks and restores these alone. What the planner must know of all of them, the first
rank asks for: commands and answers are messages between background threads. The losses come from `shrinkpoint.sharded.probing`.
"""

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import torch

from shrinkpoint.config import SaverConfig
from shrinkpoint.group.mailbox import Mailbox, sound
from shrinkpoint.quality.comparison import Candidates, Change
from shrinkpoint.quality.evaluation import EvaluationUnavailableError, ResumedSteps
from shrinkpoint.quality.guards import Guard
from shrinkpoint.quality.inshrinkerator_search.strategy import ConfigurationStrategy
from shrinkpoint.quality.measurement import Losses
from shrinkpoint.quality.planner import Planner
from shrinkpoint.quality.snapshots import PlannedSnapshot
from shrinkpoint.quality.strategy import Guard as PlannersGuard
from shrinkpoint.quality.strategy import Measure, Plan, Strategy, exactly
from shrinkpoint.quality.trial import restored_model, true_model
from shrinkpoint.schemes.auto.scheme import Auto
from shrinkpoint.schemes.base import SaveContext, Scheme
from shrinkpoint.schemes.catalogue import build, entry_of
from shrinkpoint.schemes.inshrinkerator.scheme import Inshrinkerator, weights_of
from shrinkpoint.schemes.inshrinkerator.space import Configuration
from shrinkpoint.state.training import TrainingState

__all__ = ["Leader", "follow", "lead", "measurable"]


def measurable(config: SaverConfig) -> bool:
    """Whether the settings of a scheme are chosen by measurements on shards."""
    return not config.adopt and entry_of(config.scheme).choice != "nothing"


def _settings_of(scheme: Scheme) -> dict[str, Any]:
    """What distinguishes a scheme from the others of a save."""
    if isinstance(scheme, Auto):
        exact = sorted(scheme.exact_optimizers)
        return {"scale": scheme.scale, "finer": scheme.finer_moments, "exact_optimizers": exact}
    return {"chosen": scheme.configuration.to_json()} if isinstance(scheme, Inshrinkerator) else {}


def _candidate(key: Hashable) -> dict[str, Any]:
    """What distinguishes a candidate for its weights."""
    if isinstance(key, Configuration):
        return {"chosen": key.to_json()}
    return {"scale": key if isinstance(key, float) else None}


def _scheme(config: SaverConfig, save_context: SaveContext, command: Mapping[str, Any]) -> Scheme:
    """The scheme that a command names."""
    if entry_of(config.scheme).choice == "scale":
        return Auto(
            options=config.scheme_options,
            save_context=save_context,
            scale=command["scale"],
            finer_moments=command.get("finer", 0),
            exact_optimizers=command.get("exact_optimizers", ()),
        )
    if entry_of(config.scheme).choice == "configurations":
        weights = weights_of(save_context, config.scheme_options)
        return Inshrinkerator(config.scheme_options, weights, Configuration.from_json(command["chosen"]))
    return build(config.scheme, config.scheme_options, save_context)


# ---- the first rank


class Leader:
    """The first rank's commands of one save, and the others' answers.

    Args:
        mailbox: of the background thread.
        number: of the save.
        timeout_s: seconds that another rank has for an answer, from when the first one has its own.
    """

    def __init__(self, mailbox: Mailbox, number: int, timeout_s: float) -> None:
        self._mailbox, self._number, self._timeout_s = mailbox, number, timeout_s
        self._count = 0
        self.averages_only = False
        """As of `SaveContext`."""

    def say(self, op: str, **more: Any) -> str:
        """Give a command; all ranks do what it says.

        Returns:
            By which its answers are known.
        """
        key = _command_key(self._number, self._count)
        self._mailbox.post(key, {"op": op, "averages_only": self.averages_only, **more})
        self._count += 1
        return key

    def answers(self, key: str) -> list[dict[str, Any]]:
        """What the other ranks answer.

        Raises:
            StoreError: one has failed, or has not answered in time.
        """
        deadline = time.monotonic() + self._timeout_s
        return [
            sound(self._mailbox.wait(f"{key}/{rank}", deadline - time.monotonic()))
            for rank in range(1, self._mailbox.size)
        ]

    @property
    def messages(self) -> list[str]:
        """All that was said, which everyone has read when the next save begins."""
        keys = [_command_key(self._number, index) for index in range(self._count)]
        return keys + [f"{key}/{rank}" for key in keys for rank in range(1, self._mailbox.size)]


def _command_key(number: int, index: int) -> str:
    return f"{number}/plan/{index}"


def lead(
    leader: Leader,
    planner: Planner,
    save_context: SaveContext,
    measure: Measure,
    resume: ResumedSteps | None = None,
) -> Plan:
    """Choose for all ranks, and let them know.

    Args:
        leader: of this save.
        planner: whose guard is this rank's.
        save_context: with this rank's tensors, and the sums of all ranks.
        measure: the losses of all ranks, for this rank's part of a candidate.
        resume: the losses of all ranks after some steps, from this rank's part of a state; None where some rank takes none.

    Raises:
        StoreError: another rank has failed.
    """
    if planner.guard is not None:
        planner.guard = _SharedGuard(leader, planner.guard)
    snapshot = _SharedSnapshot(leader, save_context.state, measure)
    plan = planner.plan(save_context, None, resume, snapshot=snapshot)
    leader.say(
        "plan",
        exact=plan.is_exact,
        explained=plan.is_explained,
        **_settings_of(plan.scheme),
        configuration=plan.configuration,
        reason=plan.reason,
    )
    return plan


class _OwnSnapshot(PlannedSnapshot):
    """This rank's part of a snapshot: steps get its tensors by name."""

    def _given(self, state: TrainingState) -> object:
        return state.tensors


class _SharedSnapshot(_OwnSnapshot):
    def __init__(self, leader: Leader, state: TrainingState, measure: Measure) -> None:
        super().__init__(state, measure)
        self._leader = leader
        self._shared = measure
        self._averages = False, False

    def weights(self, strategy: Strategy) -> tuple[list[str], list[str]]:
        asked = self._leader.say("weights")
        finite, not_finite = super().weights(strategy)
        there, taken = super().averages(strategy)
        for answer in self._leader.answers(asked):
            finite += answer["finite"]
            not_finite += answer["not_finite"]
            there, taken = there or answer["averages"], taken or answer["taken"]
        self._averages = there, taken
        return finite, not_finite

    def averages(self, strategy: Strategy) -> tuple[bool, bool]:
        return self._averages

    def candidates(self) -> Candidates:
        return _SharedCandidates(self._leader, self._state, self._shared)

    def stepped(
        self,
        steps: ResumedSteps,
        marks: Sequence[int],
        save_context: SaveContext,
        scheme: Scheme | None,
        threads: int,
    ) -> list[Losses]:
        settings = {} if scheme is None else _settings_of(scheme)
        self._leader.say("steps", marks=list(marks), true=scheme is None, **settings)
        return super().stepped(steps, marks, save_context, scheme, threads)

    def sees(self, *, averages_only: bool) -> None:
        self._leader.averages_only = averages_only


class _SharedCandidates(Candidates):
    """This rank's part of each candidate; the others are asked for theirs."""

    def __init__(self, leader: Leader, state: TrainingState, measure: Measure) -> None:
        super().__init__(state, measure)
        self._leader = leader

    def true(self) -> Losses:
        self._leader.say("true")
        return super().true()

    def take(self, key: Hashable, restored: Callable[[], Mapping[str, torch.Tensor]]) -> Change:
        asked = self._leader.say("take", **_candidate(key))
        own = super().take(key, restored)
        names, squares = own.names, own.squares
        for answer in self._leader.answers(asked):
            names, squares = names | frozenset(answer["names"]), squares + answer["squares"]
        return Change(names, squares)

    def restored(self) -> Losses:
        self._leader.say("restored")
        return super().restored()

    def mirrored(self) -> Losses:
        self._leader.say("mirrored")
        return super().mirrored()

    def summed(self, numbers: Callable[[], list[float]]) -> list[float]:
        asked = self._leader.say("sizes")
        total = super().summed(numbers)
        for answer in self._leader.answers(asked):
            total = [one + other for one, other in zip(total, answer["sizes"], strict=True)]
        return total

    def noisy(self, share: float, *, changed: bool = False, averages: bool = True) -> Losses:
        self._leader.say("noisy", share=share, changed=changed, averages=averages)
        return super().noisy(share, changed=changed, averages=averages)


class _SharedGuard:
    """Accepts what all ranks' guards accept."""

    def __init__(self, leader: Leader, own: PlannersGuard) -> None:
        self._leader, self._own = leader, own
        self._moments = False
        self._at_fault: frozenset[int] = frozenset()
        self._lost_steps = 0.0
        self._update_error: float | None = None

    @property
    def refuses_moments(self) -> bool:
        """Whether the rank that has refused has done so for the optimizer's state."""
        return self._moments

    @property
    def at_fault(self) -> frozenset[int]:
        """Those of all ranks."""
        return self._at_fault

    @property
    def lost_steps(self) -> float:
        """The most of any rank."""
        return self._lost_steps

    @property
    def update_error(self) -> float | None:
        """The greatest of the ranks that know it."""
        return self._update_error

    def __call__(self, save_context: SaveContext, scheme: Scheme) -> str | None:
        asked = self._leader.say("guard", **_settings_of(scheme))
        reasons = [(self._own(save_context, scheme), self._own.refuses_moments)]
        answers = self._leader.answers(asked)
        reasons += [(answer["reason"], answer["moments"]) for answer in answers]
        self._at_fault = self._own.at_fault.union(*(answer["at_fault"] for answer in answers))
        self._lost_steps = max([self._own.lost_steps, *(answer["lost_steps"] for answer in answers)])
        errors = [self._own.update_error, *(answer["update_error"] for answer in answers)]
        self._update_error = max((error for error in errors if error is not None), default=None)
        refused = [(reason, moments) for reason, moments in reasons if reason is not None]
        if not refused:
            return None
        reason, self._moments = min(refused, key=lambda one: one[1])  # one for the weights first
        return reason


# ---- the other ranks


def follow(
    mailbox: Mailbox,
    number: int,
    config: SaverConfig,
    strategy: Strategy,
    save_context: SaveContext,
    measure: Measure,
    guard: Guard,
    resume: ResumedSteps | None = None,
    *,
    patience_s: float,
) -> Plan:
    """Do what the first rank says, until it says what it has chosen.

    Args:
        mailbox: of the background thread.
        number: of the save.
        config: how to save.
        strategy: as the first rank's.
        save_context: with this rank's tensors, and the sums of all ranks.
        measure: as of `lead`.
        guard: of this rank's tensors.
        resume: as of `lead`.
        patience_s: seconds to wait for a command.

    Raises:
        StoreError: the first rank has failed, or is gone.
    """
    own = _Follower(config, strategy, save_context, guard, Candidates(save_context.state, measure), resume)
    for index in count():
        key = _command_key(number, index)
        command = sound(mailbox.wait(key, patience_s))
        if command["op"] == "plan":
            return own.plan(command)
        try:
            answer = own.answer(command)
        except EvaluationUnavailableError:
            continue  # on the first rank too, which goes on accordingly
        except Exception as error:
            mailbox.post(f"{key}/{mailbox.rank}", {"error": f"on rank {mailbox.rank}: {error}"})
            raise
        if answer is not None:
            mailbox.post(f"{key}/{mailbox.rank}", answer)
    raise AssertionError("unreachable")


@dataclass
class _Follower:
    config: SaverConfig
    strategy: Strategy
    save_context: SaveContext
    guard: Guard
    candidates: Candidates
    resume: ResumedSteps | None

    def answer(self, command: Mapping[str, Any]) -> dict[str, Any] | None:
        """Do what a command says; what the first rank waits for, if it does."""
        op, candidates = command["op"], self.candidates
        if op == "weights":
            return self._weights()
        if op == "guard":
            reason = self.guard(self._context(command), self._scheme(command))
            return {
                "reason": reason,
                "moments": self.guard.refuses_moments,
                "at_fault": sorted(self.guard.at_fault),
                "lost_steps": self.guard.lost_steps,
                "update_error": self.guard.update_error,
            }
        if op == "take":
            change = candidates.take(None, lambda: self._restored(command))
            return {"names": sorted(change.names), "squares": change.squares}
        if op == "sizes":
            assert isinstance(self.strategy, ConfigurationStrategy)
            return {"sizes": self.strategy.sizes(self.save_context)}
        if op == "steps":
            self._step(command)
        elif op == "noisy":
            candidates.noisy(command["share"], changed=command["changed"], averages=command["averages"])
        else:
            {"true": candidates.true, "restored": candidates.restored, "mirrored": candidates.mirrored}[op]()
        return None

    def plan(self, command: Mapping[str, Any]) -> Plan:
        if command["exact"]:
            return exactly(command["reason"], is_explained=command["explained"])
        return Plan(self._scheme(command), command["configuration"], command["reason"])

    def _weights(self) -> dict[str, Any]:
        snapshot = PlannedSnapshot(self.save_context.state, None)
        finite, not_finite = snapshot.weights(self.strategy)
        averages, taken = snapshot.averages(self.strategy)
        return {"finite": finite[:1], "not_finite": not_finite, "averages": averages, "taken": taken}

    def _step(self, command: Mapping[str, Any]) -> None:
        if self.resume is None:
            raise EvaluationUnavailableError("this rank takes no steps from a state")
        context = self._context(command)
        scheme = None if command["true"] else _scheme(self.config, context, command)
        _OwnSnapshot(context.state, None).stepped(self.resume, command["marks"], context, scheme, 1)

    def _restored(self, command: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        context = self._context(command)
        scheme = _scheme(self.config, context, command)
        if isinstance(scheme, Inshrinkerator):
            return true_model(context.state) | scheme.weights.restored(scheme.configuration)
        return restored_model(context.state, scheme, context.reference)

    def _scheme(self, command: Mapping[str, Any]) -> Scheme:
        return _scheme(self.config, self._context(command), command)

    def _context(self, command: Mapping[str, Any]) -> SaveContext:
        return replace(self.save_context, averages_only=command["averages_only"])
