"""One rank's saves, in its background thread: code and store a part, report it to the first rank, learn whether it was committed."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch

from shrinkpoint.config import SaverConfig
from shrinkpoint.errors import ConfigError, FencedError, ShrinkpointError, StoreError
from shrinkpoint.group.mailbox import Mailbox
from shrinkpoint.optimizers.recognition import recognised
from shrinkpoint.optimizers.updates import OptimizerKind, moments_of_direction
from shrinkpoint.quality.guards import Guard
from shrinkpoint.quality.measurement import Losses
from shrinkpoint.quality.planner import Planner
from shrinkpoint.quality.strategy import Plan
from shrinkpoint.quantize.movement import MovementTracker
from shrinkpoint.reports import SaveReport
from shrinkpoint.saving.reporting import with_updates
from shrinkpoint.saving.takeover import Takeover
from shrinkpoint.saving.under_way import Failures
from shrinkpoint.saving.warmup import Warmup
from shrinkpoint.schemes.auto.scheme import Auto
from shrinkpoint.schemes.base import SaveContext
from shrinkpoint.schemes.inshrinkerator.partition import added_scores
from shrinkpoint.schemes.inshrinkerator.scheme import weights_of
from shrinkpoint.schemes.sums import WeightSums, added_sums
from shrinkpoint.sharded.encoding import Link, PartJob, StoredPart, store_part
from shrinkpoint.sharded.planning import Together, plan_together
from shrinkpoint.sharded.probing import Probe, owned_weights
from shrinkpoint.sharded.publishing import AdoptedPart, Publisher
from shrinkpoint.sharded.trees import with_blocks, without_tensors
from shrinkpoint.state.averages import confirmed
from shrinkpoint.state.training import TrainingState
from shrinkpoint.store.run import RunStore
from shrinkpoint.warn import warn

__all__ = ["Background", "Save"]

_OWN_S = 60.0
_PATIENCE_S = 600.0
"""Seconds in addition to twice `commit_timeout_s`, after which a rank no longer waits for the first one's answer."""


@dataclass(frozen=True, kw_only=True)
class Save:
    """One save, as the training thread of a rank hands it over."""

    job: PartJob
    metrics: Mapping[str, float]
    optimizers: Sequence[OptimizerKind]
    blocked_s: float
    began: float
    """The first rank's writer's clock."""
    clock_s: float
    """The first rank's time, by which all ranks decide."""
    takeover: Takeover | None = None
    """Of a planned save that training goes on from."""
    measures: bool = False
    """Whether the ranks evaluate candidates."""
    steps: bool = False
    """Whether they take steps from restored states."""


class Background:
    """What one rank's background thread does and remembers.

    Args:
        store: the run.
        config: how to save.
        mailbox: to the other ranks.
        probe: where candidates are evaluated.
        publisher: on the first rank; None on the others.
        url: of the run, for messages.
    """

    def __init__(
        self,
        store: RunStore,
        config: SaverConfig,
        mailbox: Mailbox,
        probe: Probe,
        publisher: Publisher | None,
        warmup: Warmup,
        url: str,
    ) -> None:
        self._store, self._config, self._mailbox = store, config, mailbox
        self._publisher, self._warmup, self._url = publisher, warmup, url
        self._probe = probe
        self._clock_s = 0.0
        self._planner = Planner(
            config, lambda: probe.seconds, clock=lambda: self._clock_s, warns=publisher is not None
        )
        self._together = Together(mailbox, 0, config.commit_timeout_s)
        self._search_s = 0.0
        self.movement = MovementTracker()
        self.link: Link | None = None
        self.failed = False
        """Whether the last save was not committed, as far as this rank knows."""
        self.fatal: ShrinkpointError | None = None
        """On the first rank: why training must not go on."""
        self.reports: list[SaveReport] = []
        self._failures = Failures(config, url)

    def forget(self) -> None:
        """Another training follows: build on nothing, and count no movement from what was before."""
        self.link = None
        self.movement.forget()

    def continue_search(self, stored: object) -> None:
        """Go on with the search for settings of a restored checkpoint, whose cost counts as a restore's.

        Args:
            stored: of its manifest; None where nothing was measured.
        """
        try:
            self._planner.load_state_dict(stored if isinstance(stored, dict) else {})
        except ConfigError as error:
            if self._publisher is not None:
                warn(f"the search starts over: {error}")

    def run(self, handed_over: list[Save]) -> None:
        """Make a save; raises nothing."""
        save = handed_over.pop()
        try:
            self._make(save)
        except Exception as error:  # noqa: BLE001 - whatever it was, training goes on and the next save starts afresh
            self.link, self.failed = None, True
            warn(f"saving step {save.job.step} to {self._url} failed on rank {save.job.rank}: {error}")
        finally:
            self._probe.leave()

    def _make(self, save: Save) -> None:
        job = save.job
        if job.copy is not None:
            save = replace(save, blocked_s=max(save.blocked_s, job.copy.wait()))
        self._forget_messages(job.number - 1)
        self._together = Together(self._mailbox, job.number, self._config.commit_timeout_s)
        self._clock_s, self._search_s = save.clock_s, self._probe.seconds
        stored = self._store_part(save)
        if self._publisher is not None:
            outcome = self._publish(self._publisher, save)
            self._mailbox.post(f"{job.number}/outcome", outcome)
        else:
            outcome = self._mailbox.wait(f"{job.number}/outcome", self._patience_s)
        self._learn(job, stored, outcome)

    @property
    def _patience_s(self) -> float:
        """How long another rank waits for the first one."""
        return 2 * self._config.commit_timeout_s + _PATIENCE_S

    def _store_part(self, save: Save) -> StoredPart | None:
        """Code and put this rank's part, and say so, or why not."""
        job, key = save.job, f"{save.job.number}/own"
        stored = None
        try:
            known: dict[str, Any] = {}
            if job.rank == 0:
                self._mailbox.post(key, job.own.digests())
            else:
                known = self._mailbox.wait(key, _OWN_S)
            self._warmup.wait()
            stored = self._code(save, known)
            post = stored.message()
        except Exception as error:  # noqa: BLE001 - the first rank gets it, and reports it
            post = {"error": f"{type(error).__name__}: {error}"}
            self._together.fail(error)
            self._probe.leave()
        self._mailbox.post(f"{job.number}/part/{job.rank}", post)
        return stored

    def base_is_due(self, *, planned: bool) -> bool:
        """Whether the next checkpoint is to be a base, as far as this rank decides it.

        Args:
            planned: whether it is a planned one of a training that adopts.
        """
        return self._publisher is not None and self._publisher.base_is_due

    def _code(self, save: Save, known: Mapping[str, Any]) -> StoredPart:
        """Code and put this rank's part.

        Args:
            save: the save.
            known: as of `store_part`.
        """
        job = save.job
        if self._config.scheme == "lossless":
            plan = self._planner.plan(SaveContext(state=job.state, step=job.step), None, exact=job.exact)
            return store_part(self._store, self._config, job, plan, known)
        state = self._recognised(save)
        guard = Guard(save.optimizers, self._config.encoder_threads)
        plan = self._plan(save, state, guard)
        job = replace(job, state=TrainingState(job.state.tree, state.tensors, state.specs))
        stored = store_part(self._store, self._config, job, plan, known, tree=state.tree)
        if plan.is_exact or not self._config.guards or not save.optimizers:
            return stored
        return replace(stored, report=with_updates(stored.report, guard), untried=guard.untried)

    def _plan(self, save: Save, state: TrainingState, guard: Guard) -> Plan:
        job = save.job
        movement = self.movement.since(state, job.step)
        self.movement.note(state, job.step, lasting=job.copy is None)
        self._planner.guard = guard if self._config.guards else None
        link = job.link
        context = SaveContext(
            restore_budget=self._config.restore_budget,
            state=state,
            step=job.step,
            reference=link.reference if link else None,
            restored=link is not None and link.restored,
            movement=movement,
            directions=moments_of_direction(state, save.optimizers),
        )
        context = self._with_sums(job, context)
        if not save.measures:
            return self._planner.plan(context, None, exact=job.exact)
        try:
            return self._plan_together(save, context)
        finally:
            self._probe.leave()
            self._search_s = self._probe.seconds - self._search_s

    def _plan_together(self, save: Save, context: SaveContext) -> Plan:
        state = context.state

        def measure(weights: Mapping[str, torch.Tensor]) -> Losses:
            return self._probe.measure(owned_weights(state, weights))

        resume = self._probe.resume if save.steps else None
        leave = self._probe.leave
        return plan_together(self._together, self._planner, context, measure, resume, leave=leave)

    def _recognised(self, save: Save) -> TrainingState:
        """This rank's tensors, as if the model had these alone."""
        state = save.job.state
        tree = without_tensors(with_blocks(state.tree, state.specs), state.tensors)
        return recognised(confirmed(TrainingState(tree, state.tensors, state.specs)), save.optimizers)

    def _with_sums(self, job: PartJob, context: SaveContext) -> SaveContext:
        """With what step sizes or thresholds depend on, added up over all ranks' weights."""
        if job.exact:
            return context
        options = self._config.scheme_options
        together = self._together.combine
        if self._config.scheme == "auto":
            own = Auto(options=options, save_context=context).sums(context.state)
            return replace(context, sums=WeightSums.from_json(together(own.to_json(), added_sums)))
        if self._config.scheme == "inshrinkerator":
            scores = weights_of(context, options).sketches.to_json()
            return replace(context, scores=together(scores, partial(added_scores, options.alpha)))
        return context

    def _publish(self, publisher: Publisher, save: Save) -> dict[str, Any]:
        """On the first rank: wait for all parts, and commit; never raises."""
        job = save.job
        try:
            posts = self._mailbox.collect(f"{job.number}/part", self._config.commit_timeout_s)
            report = publisher.publish(
                posts,
                step=job.step,
                delta=job.link is not None,
                metrics=save.metrics,
                blocked_s=save.blocked_s,
                began=save.began,
                adoption=self._adoption(save),
                search=self._planner.state_dict() if save.measures else None,
                search_s=self._search_s if save.measures else 0.0,
            )
            return {"digest": publisher.digest, "report": asdict(report)}
        except FencedError as error:
            self.fatal = error
            return {"error": str(error)}
        except Exception as error:  # noqa: BLE001 - every rank gets it
            self.fatal = self._failures.note(job.step, error)
            return {"error": str(error)}

    def _adoption(self, save: Save) -> AdoptedPart | None:
        """What the manifest says of adoption; None where the training does not adopt."""
        return None

    def give_up(self, step: int, error: Exception) -> None:
        """Count a save that has failed on all ranks before this thread had anything to do."""
        self.link, self.failed = None, True
        if self._publisher is not None:
            self.fatal = self._failures.note(step, error)

    def _learn(self, job: PartJob, stored: StoredPart | None, outcome: Mapping[str, Any]) -> None:
        if stored is None or "digest" not in outcome:
            self.link, self.failed = None, True
            return
        self.link, self.failed = Link(job.number, outcome["digest"], stored.reference), False
        self._failures.over()
        self.reports.append(SaveReport.of_message(outcome["report"]))

    def _forget_messages(self, number: int) -> None:
        """Of the save before, which all ranks know the outcome of: they have agreed to begin this one."""
        if self._publisher is not None and number > 0:
            size = self._mailbox.size
            several = [f"{number}/part/{rank}" for rank in range(size)]
            several += self._together.messages + self._probe.messages(number, size)
            try:
                self._mailbox.drop([*several, f"{number}/own", f"{number}/outcome"])
            except StoreError as error:
                warn(str(error))
