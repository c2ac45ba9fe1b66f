"""One rank's saves: code and store a part, report it to the first rank, which commits all parts, and learn the outcome."""

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from shrinkpoint.coding.encode import EncodedState
from shrinkpoint.config import SaverConfig
from shrinkpoint.container.layout import PartOf
from shrinkpoint.engine.background import Background, Choice
from shrinkpoint.engine.chain import Chain, Link, StoredPart, commit_parts, store_part
from shrinkpoint.engine.request import Job
from shrinkpoint.engine.retention import ADOPTION
from shrinkpoint.engine.warmup import Warmup
from shrinkpoint.errors import StoreError
from shrinkpoint.group.group import is_first_of_node
from shrinkpoint.group.mailbox import Mailbox
from shrinkpoint.quality.guards import Guard
from shrinkpoint.quality.measurement import Losses
from shrinkpoint.quality.plan import Plan
from shrinkpoint.reports import SaveReport
from shrinkpoint.schemes.auto.scheme import Auto
from shrinkpoint.schemes.base import SaveContext
from shrinkpoint.schemes.inshrinkerator.partition import added_scores
from shrinkpoint.schemes.inshrinkerator.scheme import weights_of
from shrinkpoint.schemes.sums import WeightSums, added_sums
from shrinkpoint.sharded.planning import Together, plan_together
from shrinkpoint.sharded.probing import Probe, owned_weights
from shrinkpoint.sharded.trees import with_blocks, without_tensors
from shrinkpoint.state.training import OwnState, TrainingState
from shrinkpoint.store.manifest import Manifest
from shrinkpoint.store.near import Share
from shrinkpoint.store.run import RunStore
from shrinkpoint.warn import warn

__all__ = ["RankBackground"]

_OWN_S = 60.0
_PATIENCE_S = 600.0
"""Seconds in addition to twice `commit_timeout_s`, after which a rank no longer waits for the first one's answer."""


class _FailedElsewhereError(StoreError):
    """The first rank has said that the save has failed, and reports it."""


@dataclass(frozen=True)
class _Made:
    """This rank's part of a save."""

    choice: Choice
    encoded: EncodedState
    stored: StoredPart


class RankBackground(Background):
    """As `Background`, on one of several ranks, each of which codes what it owns.

    Args:
        store: the run.
        config: how to save.
        mailbox: to the other ranks.
        probe: where candidates are evaluated.
        chain: on the first rank; None on the others.
        warmup: compiles the coders.
        url: of the run, for messages.
    """

    def __init__(
        self,
        store: RunStore,
        config: SaverConfig,
        mailbox: Mailbox,
        probe: Probe,
        chain: Chain | None,
        warmup: Warmup,
        url: str,
    ) -> None:
        self._mailbox, self._probe, self._url = mailbox, probe, url
        self._clock_s = 0.0
        self._together = Together(mailbox, 0, config.commit_timeout_s)
        super().__init__(
            store,
            config,
            lambda: probe.seconds,
            chain,
            ready=warmup.wait,
            url=url,
            clock=lambda: self._clock_s,
        )

    def base_is_due(self, *, planned: bool) -> bool:
        """Return whether the next checkpoint is to be a base, as far as this rank decides it.

        Args:
            planned: whether it is a planned one of a training that adopts, where every rank decides alike.
        """
        if self.adopting is None:
            return self._chain is not None and self._chain.base_is_due
        last = self.adopting.chain.last
        return planned and (last is None or last.count % self._config.period == 0)

    def give_up(self, step: int, error: Exception) -> None:
        """Count a save that has failed on all ranks before this thread had anything to do."""
        self.link, self.failed = None, True
        if self._chain is not None:
            self.fatal = self._failures.note(step, error)

    def _note_failure(self, job: Job, error: Exception) -> None:
        if self._chain is not None:
            super()._note_failure(job, error)
        elif not isinstance(error, _FailedElsewhereError):
            warn(f"saving step {job.step} to {self._url} failed on rank {self._mailbox.rank}: {error}")

    def commit(self, job: Job) -> SaveReport:
        """See `Background.commit`."""
        self._forget_messages(job.number - 1)
        self._together = Together(self._mailbox, job.number, self._config.commit_timeout_s)
        self._clock_s = job.clock_s
        made = self._store_part(job)
        if self._chain is not None:
            outcome = self._publish(self._chain, job, made)
        else:
            patience_s = 2 * self._config.commit_timeout_s + _PATIENCE_S
            outcome = self._mailbox.wait(f"{job.number}/outcome", patience_s)
        if made is None or "error" in outcome:
            raise _FailedElsewhereError(str(outcome.get("error")))
        if "manifest" in outcome:
            share = Share(self._mailbox.rank, self._mailbox.size, is_first_of_node(self._mailbox.rank))
            self._store.copy_near(
                Manifest.from_bytes(outcome["manifest"].encode()), made.stored.copied, share
            )
        report = SaveReport.of_message(outcome["report"])
        self._learn(job, made.choice, made.encoded, outcome["digest"], report)
        return report

    def _store_part(self, job: Job) -> _Made | None:
        """Code and put this rank's part, and say so, or why not."""
        made = None
        try:
            made = self._made(job)
            post = made.stored.message()
        except Exception as error:  # noqa: BLE001 - the first rank gets it, and reports it
            post = {"error": f"{type(error).__name__}: {error}"}
            self._together.fail(error)
        finally:
            self._probe.leave()
            if job.takeover is not None:
                job.takeover.withdraw()
        self._mailbox.post(f"{job.number}/part/{self._mailbox.rank}", post)
        return made

    def _made(self, job: Job) -> _Made:
        spent, rank, known = self._spent_s(), self._mailbox.rank, {}
        if rank == 0:
            self._mailbox.post(f"{job.number}/own", job.own.digests())
        else:
            known = self._mailbox.wait(f"{job.number}/own", _OWN_S)
        self._ready()
        state, movement = self._state(job)
        choice = self._choose(job, state, movement, self._next_link())
        started = time.perf_counter()
        own, values = job.own.without(known) if rank else OwnState(), choice.values
        tensors, specs = {**values.tensors, **own.tensors}, {**values.specs, **own.specs}
        encoded = self._encode(job, replace(choice, values=TrainingState(values.tree, tensors, specs)))
        report = self._report(job, state, choice, encoded, spent)
        last = choice.coded(encoded).last
        stored = store_part(
            self._store,
            encoded,
            replace(report, encode_s=time.perf_counter() - started),
            PartOf(rank, self._mailbox.size, own.tree or None),
            session=job.session,
            tree=job.snapshot.state.tree if rank == 0 else None,
            untried=self._untried(job, choice),
            stand_ins=() if last is None else sorted(last.stand_ins),
        )
        return _Made(choice, encoded, stored)

    def _arrived(self, job: Job) -> TrainingState:
        state = job.snapshot.wait()
        tree = without_tensors(with_blocks(state.tree, state.specs), state.tensors)
        return TrainingState(tree, state.tensors, state.specs)

    def _next_link(self) -> Link | None:
        link = self.link
        if self.adopting is None:
            self.link = None
        return link

    def _plan(self, job: Job, context: SaveContext, guard: Guard) -> Plan:
        if not job.exact:
            context = self._with_sums(context)
        if job.measure is None:
            return super()._plan(job, context, guard)
        state, leave, asked = context.state, self._probe.leave, guard if self._config.guards else None

        def measure(weights: Mapping[str, torch.Tensor]) -> Losses:
            return self._probe.measure(owned_weights(state, weights))

        try:
            return plan_together(
                self._together, self.planner, context, measure, job.resume, guard=asked, leave=leave
            )
        finally:
            leave()

    def _with_sums(self, context: SaveContext) -> SaveContext:
        """With what step sizes or thresholds depend on, added up over all ranks' weights."""
        options = self._config.scheme_options
        together = self._together.combine
        if self._config.scheme == "auto":
            own = Auto(options=options, save_context=context).sums(context.state)
            return replace(context, sums=WeightSums.from_json(together(own.to_json(), added_sums)))
        if self._config.scheme == "inshrinkerator":
            scores = weights_of(context, options).sketches.to_json()
            return replace(context, scores=together(scores, added_scores))
        return context

    def _publish(self, chain: Chain, job: Job, made: _Made | None) -> dict[str, Any]:
        """On the first rank: wait for all parts, commit, and say what has come of it.

        Raises:
            ShrinkpointError: it has failed.
        """
        try:
            posts = self._mailbox.collect(f"{job.number}/part", self._config.commit_timeout_s)
            link, meta, advances = None, {}, True
            if made is not None:
                link, meta = made.choice.link, self._meta(job, made.choice)
                advances = self.adopting is None or made.choice.staged is not None
                if made.choice.last is not None:
                    names = {name for post in posts for name in post.get("stand_ins", ())}
                    meta[ADOPTION] = replace(made.choice.last, stand_ins=frozenset(names)).to_json()
            report = commit_parts(chain, posts, link, began=job.began, meta=meta, advances=advances)
        except Exception as error:
            self._mailbox.post(f"{job.number}/outcome", {"error": str(error)})
            raise
        digest = "" if chain.parent is None else chain.parent.state_digest
        outcome: dict[str, Any] = {"digest": digest, "report": asdict(report)}
        if self._store.copies_near and chain.committed is not None:
            outcome["manifest"] = chain.committed.to_bytes().decode()
        self._mailbox.post(f"{job.number}/outcome", outcome)
        return outcome

    def _forget_messages(self, number: int) -> None:
        """Of the save before, which all ranks know the outcome of: they have agreed to begin this one."""
        if self._chain is not None and number > 0:
            size = self._mailbox.size
            several = [f"{number}/part/{rank}" for rank in range(size)]
            several += self._together.messages + self._probe.messages(number, size)
            try:
                self._mailbox.drop([*several, f"{number}/own", f"{number}/outcome"])
            except StoreError as error:
                warn(str(error))
