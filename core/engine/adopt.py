"""Saves from which the training itself goes on: what is stored is decided so that a replay decides the same.

A planned save is quantized while the training waits, and the training takes the restored values over. From then on the
background is in the state of one that has just restored that checkpoint: so is the search (`Planner.load_state_dict`), movement
is counted from the restored values, and the reference of the next save has these values. What is quantized next depends on
the training's state, on the values adopted last, on the number of adoptions and on the settings: neither on whether the save
before was committed, nor on time, nor on the container in which a reader finds the values.

Saves that were not planned are stored exactly, as side branches of the chain: the next planned save builds on the last
planned one, before and after a resume.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, Literal

import numpy as np
import torch

from shrinkpoint.arrays import widened
from shrinkpoint.coding.encode import StagedState, stage_state
from shrinkpoint.coding.selective import header_of
from shrinkpoint.engine.background import Background, Choice
from shrinkpoint.engine.chain import Link
from shrinkpoint.engine.handover import Handover, NotAdoptedError
from shrinkpoint.engine.movement import is_followed
from shrinkpoint.engine.placement import Found
from shrinkpoint.engine.request import Job
from shrinkpoint.engine.retention import Adopted, adopted_of
from shrinkpoint.errors import ConfigError
from shrinkpoint.quality.evaluation import Loss, ResumedSteps
from shrinkpoint.quality.guards import Guard
from shrinkpoint.quality.plan import exactly
from shrinkpoint.quality.planner import Planner
from shrinkpoint.reports import SaveReport
from shrinkpoint.schemes.auto.trellis_weights import TrellisWeightCodec
from shrinkpoint.schemes.base import Movement, ReferenceState, Scheme
from shrinkpoint.state.training import Role, Tag, TensorSpec, TrainingState
from shrinkpoint.state.tree import JSON
from shrinkpoint.store.manifest import Manifest
from shrinkpoint.store.run import RunStore
from shrinkpoint.version import __version__
from shrinkpoint.warn import warn

_UNPLANNED = "not planned, so that the undisturbed run would not have adopted it: stored exactly"
_OPTIONS = (
    "max_degradation",
    "adoptions",
    "probe_steps",
    "guards",
    "key_every",
    "search_overhead",
)
_STEPS_EACH = 1.2
"""Training steps that a probe's resumed step counts as: evaluations and copies of the state included."""


class AdoptingBackground(Background):
    """Save in the background of a training that continues from what its planned saves restore to.

    Its search's time is counted in training steps, which a replay counts alike.

    Raises:
        ConfigError: `adoptions` is not given.
    """

    _last: Adopted | None = None
    """The last planned save, as the next one continues it."""
    _known: Mapping[str, ReferenceState] = {}
    """What a reader holds of its container; nothing while it is not stored."""
    _settings: Mapping[str, Any] | None = None
    _warned_of_size = False

    def _new_planner(self) -> Planner:
        if self._config.adoptions is None:
            raise ConfigError(
                "adopt=True does not say how many planned saves the whole run has (total steps / every, say), among which"
                " max_degradation is divided: give their number, as in adopt=200"
            )
        self._step, self._spent_steps = 0, 0.0
        return Planner(
            self._config,
            lambda: self._spent_steps,
            clock=lambda: float(self._step),
            warns=self._chain is not None,
        )

    def base_is_due(self, *, adopts: bool) -> bool:
        """See `Background.base_is_due`; every rank decides alike."""
        return adopts and self._begins_chain

    @property
    def _begins_chain(self) -> bool:
        return self._last is None or self._last.count % self._config.period == 0

    # ---- where a training begins, or continues

    def _continue(self, found: Found) -> None:
        """Continue the last planned save, and its search; after an exact one what the run had before that."""
        manifest, last, group = found.manifest, adopted_of(found.manifest), self._placement.group
        parent: Manifest | None = manifest
        reference = found.reference
        values: tuple[TrainingState, int] | None = found.own_state, manifest.step
        if last is not None and not last.planned:
            parent, reference = None, {}
            planned = group.on_first(lambda: _planned_before(self._store, manifest, last))
            if planned is not None:
                before = self._placement.read(lambda: planned)
                reference, values = before.reference, (before.own_state, last.step)
                parent = group.on_first(lambda: self._listed(planned))
            elif last.since is None:  # no movement is known, in an undisturbed run either
                values = None
            elif last.since != manifest.step:
                carried = carried_in(found.own_state)
                if carried is not None:
                    values = carried, last.since
                elif self._chain is not None and any(map(is_followed, found.own_state.specs.values())):
                    warn(
                        f"the last planned save before step {manifest.step} could not be stored, and with it where the weights were: the next"
                        " save's bits differ from those of an undisturbed run. This run stays reproducible from there on"
                    )
        self._begin_again(last, reference, manifest.step)
        self.link = None if parent is None else Link(parent.state_digest, dict(reference), restored=True)
        self.movement.forget()
        if values is not None:
            self.movement.note(*values, lasting=self._placement.together)
        if last is None:
            if self._chain is not None:
                warn(
                    f"the training adopts its checkpoints from now on (adopt=True), which it did not up to step {manifest.step}: only from"
                    " the next save on is a resumed run the undisturbed one"
                )
            self._resume_search(manifest.meta.get("search"))
        elif last.count:
            self._resume_search(last.search)
        if self._chain is not None:
            self._chain.follow(manifest)
            self._chain.parent = parent

    def _begin_again(self, last: Adopted | None, reference: Mapping[str, ReferenceState], step: int) -> None:
        """Go on as after a restore of a checkpoint of `step`, which says this of the last planned save."""
        self.planner = self._new_planner()
        self._step = step if last is None else last.step
        self._last = last if last is not None and last.count else None
        self._settings = None if self._last is None else self._last.settings
        self._known = dict(reference)

    def _listed(self, planned: Manifest) -> Manifest | None:
        """Return the manifest of a planned save that `_planned_before` has found, if that was not removed."""
        key = planned.state_digest, planned.step
        return next((m for m in self._store.manifests() if (m.state_digest, m.step) == key), None)

    def start_over(self) -> None:
        """See `Background.start_over`."""
        super().start_over()
        self._begin_again(None, {}, 0)

    # ---- saves

    def _next_link(self) -> Link | None:
        return self.link  # it has no reference

    def _choose(self, job: Job, state: TrainingState, movement: Movement | None, link: Link | None) -> Choice:
        if job.handover is None:
            return self._branch(job, state, link)
        try:
            reference = None if self._begins_chain else self._reference()
            threads, exact = self._config.waiting_threads, job.handover.exactly
            made: list[tuple[Scheme, StagedState]] = []

            def staged_by(scheme: Scheme) -> StagedState:
                if not made or made[0][0] is not scheme:
                    made.clear()  # only one is in memory; the guard's last one is mostly the one that is stored
                    staged = stage_state(state, scheme, reference, exactly=exact, threads=threads)
                    made.append((scheme, staged))
                return made[0][1]

            guard = Guard(job.optimizers, threads, restored=lambda scheme: staged_by(scheme).state)
            context = self._context(job, state, movement, reference)
            context = replace(context, restored=reference is not None, adopts=True)
            self._step = job.step
            plan = self._plan(replace(job, resume=self._charged(job.resume)), context, guard)
            staged = staged_by(plan.scheme)
            changed = {n: t for n, t in staged.state.tensors.items() if t is not state.tensors[n]}
            job.handover.offer(changed)
        except Exception as error:
            raise NotAdoptedError(
                f"{error}. Training goes on from its own state, so that a replay will differ from here on"
            ) from error
        link = None if link is None or reference is None else replace(link, reference=dict(self._known))
        last = self._become(job, job.handover, staged)
        return Choice(plan, staged.state, link, staged, last, exactly=plan.reason if plan.is_exact else None)

    def _branch(self, job: Job, state: TrainingState, link: Link | None) -> Choice:
        """Return a side branch of the chain, which stays as it is.

        Where the chain does not hold the last planned save (there was none, or it could not be stored), the branch carries the
        weights that the next one is quantized by.
        """
        last = replace(self._last or Adopted(), planned=False, since=self.movement.step)
        if link is not None:
            link = replace(link, reference=dict(self._known))
        else:
            quantized = {name for name, known in self._known.items() if known.codec == TrellisWeightCodec.id}
            last = replace(last, stand_ins=last.stand_ins | quantized)
            if self.movement.step not in (None, job.step):
                state = carrying(state, self.movement.noted)
        return Choice(exactly(_UNPLANNED, is_explained=True), state, link, last=last)

    def _reference(self) -> dict[str, ReferenceState]:
        """Return the reference of the next save: the values adopted last, whether their container is stored or not."""
        noted, stand_ins = self.movement.noted, frozenset() if self._last is None else self._last.stand_ins
        return {**self._known, **{name: _as_reference(noted[name]) for name in stand_ins if name in noted}}

    def _charged(self, resume: ResumedSteps | None) -> ResumedSteps | None:
        """Return the same, counting the steps."""
        if resume is None:
            return None

        def resumed(state: object, marks: Sequence[int]) -> Sequence[Loss]:
            self._spent_steps += _STEPS_EACH * marks[-1]
            return resume(state, marks)

        return resumed

    def _become(self, job: Job, handover: Handover, staged: StagedState) -> Adopted:
        """Take the state of a process that has just restored this save; until it is stored, its values replace its container."""
        more = {"measured": job.measure is not None, "probed": job.resume is not None, **handover.settings}
        search = json.loads(json.dumps(self.planner.state_dict()))
        self.planner.load_state_dict(search)
        rows = staged.rows.items()
        self._last = Adopted(
            planned=True,
            count=1 if self._last is None else self._last.count + 1,
            step=job.step,
            settings=self._noted_settings(more, job.step),
            since=job.step,
            stand_ins=frozenset(name for name, row in rows if row.codec.id == TrellisWeightCodec.id),
            search=search,
        )
        self._known, self._settings, self.link = {}, None, None
        self.movement.note(staged.state, job.step)
        return self._last

    def _noted_settings(self, more: Mapping[str, JSON], step: int) -> Mapping[str, Any]:
        """Give everything but the training's state that values depend on, as a manifest has it, and warn of what has changed.

        Args:
            more: the integration's own, such as the interval of saves.
            step: of the save.
        """
        options, before = self._config.scheme_options, self._settings
        settings = {
            **{name: _plain(getattr(self._config, name)) for name in _OPTIONS},
            "options": {name: _plain(value) for name, value in asdict(options).items()} if options else {},
            **more,
            "shrinkpoint": __version__,
            "torch_threads": torch.get_num_threads(),
            "torch": str(torch.__version__),
            "numpy": np.__version__,
        }
        now: Mapping[str, Any] = json.loads(json.dumps(settings))
        changed = [
            f"{name}={now.get(name)!r} instead of {before.get(name)!r}"
            for name in sorted({*before, *now} if before is not None else ())
            if before is not None and before.get(name) != now.get(name)
        ]
        if changed and self._chain is not None:
            warn(
                f"settings have changed since the checkpoint that this training continues: {'; '.join(changed)}. From step {step}"
                " on, its bits differ from those of a run that was not stopped"
            )
        return now

    def _learn(self, job: Job, choice: Choice, link: Link, report: SaveReport) -> None:
        if choice.staged is not None:
            self.link = replace(link, reference={}, restored=True)
            self._last, self._known = choice.last, link.reference
        elif self._chain is not None and not self._warned_of_size:
            self._warned_of_size = True
            warn(
                f"step {report.step} was not a planned save and is stored exactly, in {report.bytes / 1e6:.3g} MB (of"
                f" {report.raw_bytes / 1e6:.3g} MB): with adopt=True only planned saves are small. This message comes once"
            )


def _as_reference(value: torch.Tensor) -> ReferenceState:
    """Return a trellis reference with these values; its steps are of no use after a restore."""
    plane, count = widened(value).reshape(-1), value.numel()
    planes: dict[str, np.ndarray[Any, Any]] = {
        "value": plane,
        "exponent": np.zeros(count, np.uint8),
        "offset": np.zeros(count, np.int8),
    }
    return ReferenceState(TrellisWeightCodec.id, {"step": 1.0, "variance_code": 0}, planes)


def _plain(value: Any) -> JSON:
    is_plain = isinstance(value, str | int | bool) or value is None
    return value if is_plain or (isinstance(value, float) and math.isfinite(value)) else str(value)


def _planned_before(store: RunStore, manifest: Manifest, last: Adopted) -> Manifest | None:
    """Return the chain of an exact checkpoint without its own end; None where that is not the last planned save.

    Args:
        store: the run.
        manifest: of the exact one.
        last: what that says of the planned one.
    """
    if manifest.kind == "base" or not last.count:
        return None
    chain = manifest.chain[:-1]
    header = header_of(store, chain[-1])
    if header.step != last.step:
        return None
    kind: Literal["base", "delta"] = "base" if len(chain) == 1 else "delta"
    return replace(
        manifest,
        chain=chain,
        kind=kind,
        step=header.step,
        state_digest=header.state_digest,
        parent_digest=None if kind == "base" else manifest.parent_digest,
    )


CARRIED = "adopted before/"
"""What the names of weights begin with that an exact save carries for the next planned one."""


def carrying(state: TrainingState, noted: Mapping[str, torch.Tensor]) -> TrainingState:
    """Return a state with these weights in addition, which its tree does not refer to: only `carried_in` finds them.

    Args:
        state: that is stored.
        noted: weights by name, as they were at the last planned save, or where training began.
    """
    added = {CARRIED + name: tensor for name, tensor in noted.items()}
    specs = {
        name: TensorSpec(name=name, dtype=one.dtype, shape=tuple(one.shape), tag=Tag(role=Role.OTHER))
        for name, one in added.items()
    }
    return TrainingState(state.tree, {**state.tensors, **added}, {**state.specs, **specs})


def carried_in(state: TrainingState) -> TrainingState | None:
    """Return the weights that `carrying` has added, by their own names; None where there are none."""
    tensors = {
        name.removeprefix(CARRIED): tensor
        for name, tensor in state.tensors.items()
        if name.startswith(CARRIED) and name.removeprefix(CARRIED) in state.specs
    }
    return TrainingState(None, tensors, {name: state.specs[name] for name in tensors}) if tensors else None
