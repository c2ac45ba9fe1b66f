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
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch

from shrinkpoint.arrays import widened
from shrinkpoint.coding.encode import EncodedState, StagedState, stage_state
from shrinkpoint.coding.selective import header_of
from shrinkpoint.config import SaverConfig
from shrinkpoint.engine.handover import Handover
from shrinkpoint.engine.request import Job
from shrinkpoint.engine.retention import Adopted
from shrinkpoint.errors import ConfigError
from shrinkpoint.quality.evaluation import Loss, ResumedSteps
from shrinkpoint.quality.planner import Planner
from shrinkpoint.reports import SaveReport
from shrinkpoint.schemes.auto.trellis_weights import TrellisWeightCodec
from shrinkpoint.schemes.base import ReferenceState, Scheme
from shrinkpoint.state.training import Role, Tag, TensorSpec, TrainingState
from shrinkpoint.state.tree import JSON
from shrinkpoint.store.manifest import Manifest
from shrinkpoint.store.run import RunStore
from shrinkpoint.version import __version__
from shrinkpoint.warn import warn

__all__ = [
    "CARRIED",
    "UNPLANNED",
    "Adopting",
    "PlannedChain",
    "Staging",
    "carried_in",
    "carrying",
    "changed_tensors",
    "noted_settings",
    "planned_before",
    "still_there",
    "warn_adopts_from",
    "warn_unplanned",
]

UNPLANNED = "not planned, so that the undisturbed run would not have adopted it: stored exactly"
"""The reason of an exact checkpoint of a training that adopts."""


class Staging:
    """Quantizes a state by the schemes that are considered; the guard's last one is mostly the one that is stored.

    Args:
        state: host tensors that nobody changes.
        reference: of the values adopted last; None quantizes for a base.
        exactly: tensors that are not quantized, with the reason.
        threads: parameters quantized side by side.
    """

    def __init__(
        self,
        state: TrainingState,
        reference: Mapping[str, ReferenceState] | None,
        exactly: Mapping[str, str],
        *,
        threads: int,
    ) -> None:
        self._state, self._reference, self._exactly = state, reference, exactly
        self._threads = threads
        self._last: tuple[Scheme, StagedState] | None = None

    def by(self, scheme: Scheme) -> StagedState:
        """Return the state, quantized by a scheme."""
        if self._last is None or self._last[0] is not scheme:
            self._last = None  # only one is in memory
            staged = stage_state(
                self._state,
                scheme,
                self._reference,
                exactly=self._exactly,
                threads=self._threads,
            )
            self._last = scheme, staged
        return self._last[1]


@dataclass
class PlannedChain:
    """The last planned save, as the next one continues it."""

    last: Adopted | None = None
    known: Mapping[str, ReferenceState] = field(default_factory=dict)
    """What a reader holds of its container; nothing while it is not stored."""

    def reference(self, noted: Mapping[str, torch.Tensor], period: int) -> dict[str, ReferenceState] | None:
        """The reference of the next save: the values adopted last, whether their container is stored or not.

        Args:
            noted: the weights that were adopted last, by name.
            period: planned saves from base to base.

        Returns:
            None where a base is due.
        """
        if self.last is None or self.last.count % period == 0:
            return None
        stand_ins = {name: _as_reference(noted[name]) for name in self.last.stand_ins if name in noted}
        return {**self.known, **stand_ins}

    @property
    def quantized(self) -> frozenset[str]:
        """Tensors whose values must stand in for their container where a reader does not get it."""
        return frozenset(name for name, known in self.known.items() if known.codec == TrellisWeightCodec.id)

    def next(
        self, step: int, staged: StagedState, settings: Mapping[str, Any], search: JSON = None
    ) -> Adopted:
        """Describe the next planned save; until it is stored, its values take the place of its container.

        Args:
            step: of the save.
            staged: what is adopted.
            settings: see `noted_settings`.
            search: the planner's state; None where nothing is measured.
        """
        count = 1 if self.last is None else self.last.count + 1
        noted = {} if search is None else {"search": search}
        stand_ins = frozenset(
            name for name, row in staged.rows.items() if row.codec.id == TrellisWeightCodec.id
        )
        return Adopted(
            planned=True,
            count=count,
            step=step,
            settings=settings,
            since=step,
            stand_ins=stand_ins,
            **noted,
        )


def changed_tensors(true: TrainingState, adopted: TrainingState) -> dict[str, torch.Tensor]:
    """Return the tensors that quantization has given other memory."""
    return {name: value for name, value in adopted.tensors.items() if value is not true.tensors[name]}


def _as_reference(value: torch.Tensor) -> ReferenceState:
    """Return a trellis reference with these values; its steps are of no use after a restore."""
    plane, count = widened(value).reshape(-1), value.numel()
    planes: dict[str, np.ndarray[Any, Any]] = {
        "value": plane,
        "exponent": np.zeros(count, np.uint8),
        "offset": np.zeros(count, np.int8),
    }
    return ReferenceState(TrellisWeightCodec.id, {"step": 1.0, "variance_code": 0}, planes)


_OPTIONS = (
    "max_degradation",
    "adoptions",
    "probe_steps",
    "guards",
    "key_every",
    "search_overhead",
)


def noted_settings(
    config: SaverConfig, more: Mapping[str, JSON], before: Mapping[str, Any] | None, *, step: int, warns: bool
) -> Mapping[str, Any]:
    """Give everything but the training's state that values depend on, as a manifest has it, and warn of what has changed.

    Args:
        config: of the saver.
        more: the integration's own, such as the interval of saves.
        before: those of the checkpoint that the training continues; None at later saves.
        step: of the save.
        warns: whether this process warns.
    """
    options = config.scheme_options
    settings = {
        **{name: _plain(getattr(config, name)) for name in _OPTIONS},
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
    if changed and warns:
        warn(
            f"settings have changed since the checkpoint that this training continues: {'; '.join(changed)}. From step {step}"
            " on, its bits differ from those of a run that was not stopped"
        )
    return now


def warn_adopts_from(step: int) -> None:
    """Say that a training adopts its checkpoints which did not do so before."""
    warn(
        f"the training adopts its checkpoints from now on (adopt=True), which it did not up to step {step}: only from"
        " the next save on is a resumed run the undisturbed one"
    )


def warn_unplanned(report: SaveReport) -> None:
    """Say that a save which was not planned is large."""
    warn(
        f"step {report.step} was not a planned save and is stored exactly, in {report.bytes / 1e6:.3g} MB (of"
        f" {report.raw_bytes / 1e6:.3g} MB): with adopt=True only planned saves are small. This message comes once"
    )


def _plain(value: Any) -> JSON:
    is_plain = isinstance(value, str | int | bool) or value is None
    return value if is_plain or (isinstance(value, float) and math.isfinite(value)) else str(value)


_STEPS_EACH = 1.2
"""Training steps that a probe's resumed step counts as: evaluations and copies of the state included."""


@dataclass
class StepClock:
    """The search's time: training steps, which a replay counts alike."""

    step: int = 0
    spent: float = 0.0

    def now(self) -> float:
        """Return the time, in steps."""
        return float(self.step)

    def paid(self) -> float:
        """Steps that resumed steps have taken from training."""
        return self.spent

    def charged(self, resume: ResumedSteps | None) -> ResumedSteps | None:
        """Return the same, counting the steps."""
        if resume is None:
            return None

        def resumed(state: object, marks: Sequence[int]) -> Sequence[Loss]:
            self.spent += _STEPS_EACH * marks[-1]
            return resume(state, marks)

        return resumed


class Adopting:
    """What a training that adopts its saves remembers from one to the next, and a resumed one finds again.

    Args:
        config: how to save.
        warns: whether this process warns.

    Raises:
        ConfigError: `config.adoptions` is not given.
    """

    def __init__(self, config: SaverConfig, *, warns: bool) -> None:
        if config.adoptions is None:
            raise ConfigError(
                "adopt=True does not say how many planned saves the whole run has (total steps / every, say), among which"
                " max_degradation is divided: give their number, as in adopt=200"
            )
        self._config, self._warns = config, warns
        self._settings: Mapping[str, Any] | None = None
        self.clock = StepClock()
        self.chain = PlannedChain()
        """The last planned save, as the next one continues it."""
        self.warned_of_size = False

    def planner(self) -> Planner:
        """Return a search of which nothing is known yet, by a clock that a replay has too."""
        self.clock = clock = StepClock()
        return Planner(self._config, clock.paid, clock=clock.now, warns=self._warns)

    def continue_from(self, last: Adopted | None, chain: PlannedChain, *, step: int) -> None:
        """Go on as after a restore.

        Args:
            last: what the restored checkpoint says of the last planned save; None where its training did not adopt.
            chain: the last planned save.
            step: of the restored checkpoint.
        """
        self.chain = chain
        self.clock.step = step if last is None else last.step
        self._settings = last.settings if last is not None and last.count else None

    def adopted(self, job: Job, handover: Handover, staged: StagedState, planner: Planner) -> Adopted:
        """Become what a process is that has just restored this save; until it is stored, values stand in for its container.

        Args:
            job: the save.
            handover: by which training has taken the values over.
            staged: the values.
            planner: that has chosen how they are quantized.
        """
        more = {"measured": job.measure is not None, "probed": job.resume is not None, **handover.settings}
        settings = noted_settings(self._config, more, self._settings, step=job.step, warns=self._warns)
        self._settings = None
        search = json.loads(json.dumps(planner.state_dict()))
        planner.load_state_dict(search)
        last = self.chain.next(job.step, staged, settings, search)
        self.chain = PlannedChain(last)
        return last

    def branch(self, since: int | None, *, is_delta: bool) -> Adopted:
        """Return the record of the last planned save, for the manifest of a save that was not planned.

        Args:
            since: step of the weights that the next save's movement is counted from.
            is_delta: whether it builds on the last planned save.
        """
        last = replace(self.chain.last or Adopted(), planned=False, since=since)
        return last if is_delta else replace(last, stand_ins=last.stand_ins | self.chain.quantized)

    def stored(self, last: Adopted, encoded: EncodedState) -> None:
        """Note that the planned save is committed."""
        self.chain = PlannedChain(last, encoded.reference)


def planned_before(store: RunStore, manifest: Manifest, last: Adopted) -> Manifest | None:
    """The chain of an exact checkpoint without its own end; None where that is not the last planned save.

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


def still_there(store: RunStore, planned: Manifest) -> Manifest | None:
    """Return the manifest of a planned save that `planned_before` has found, if that was not removed."""
    found = (m for m in store.manifests() if (m.state_digest, m.step) == (planned.state_digest, planned.step))
    return next(found, None)


CARRIED = "adopted before/"
"""What the names of weights begin with that an exact save carries for the next planned one."""


def carrying(state: TrainingState, noted: Mapping[str, torch.Tensor]) -> TrainingState:
    """A state with these weights in addition, which its tree does not refer to: only `carried_in` finds them.

    Args:
        state: that is stored.
        noted: weights by name, as they were at the last planned save, or where training began.
    """
    tag = Tag(role=Role.OTHER)
    specs = {
        CARRIED + name: TensorSpec(
            name=CARRIED + name, dtype=tensor.dtype, shape=tuple(tensor.shape), tag=tag
        )
        for name, tensor in noted.items()
    }
    tensors = {CARRIED + name: tensor for name, tensor in noted.items()}
    return TrainingState(state.tree, {**state.tensors, **tensors}, {**state.specs, **specs})


def carried_in(state: TrainingState) -> TrainingState | None:
    """Return the weights that `carrying` has added, by their own names; None where there are none."""
    tensors = {
        name.removeprefix(CARRIED): tensor
        for name, tensor in state.tensors.items()
        if name.startswith(CARRIED) and name.removeprefix(CARRIED) in state.specs
    }
    return TrainingState(None, tensors, {name: state.specs[name] for name in tensors}) if tensors else None
