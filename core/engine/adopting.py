"""Saves from which the training itself goes on: what is stored is decided so that a replay decides the same.

A planned save is quantized while the training waits, and the training takes the restored values over. From then on the
background is in the state of one that has just restored that checkpoint: so is the search (`Planner.begin_again`), movement
is counted from the restored values, and the reference of the next save has these values. What is quantized next depends on
the training's state, on the values adopted last, on the number of adoptions and on the settings: neither on whether the save
before was committed, nor on time, nor on the container in which a reader finds the values.

Saves that were not planned are stored exactly, as side branches of the chain: the next planned save builds on the last
planned one, before and after a resume.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from shrinkpoint.coding.encode import EncodedState, StagedState
from shrinkpoint.coding.selective import Decoded, decode_chain, sources_of_run
from shrinkpoint.config import SaverConfig
from shrinkpoint.engine.job import Job
from shrinkpoint.engine.meta import Adopted
from shrinkpoint.engine.planned import PlannedChain, noted_settings
from shrinkpoint.engine.takeover import Takeover
from shrinkpoint.errors import ConfigError
from shrinkpoint.quality.evaluation import Loss, ResumedSteps
from shrinkpoint.quality.planner import Planner
from shrinkpoint.state.training import Role, Tag, TensorSpec, TrainingState
from shrinkpoint.store.manifest import Manifest
from shrinkpoint.store.run import RunStore

__all__ = ["Adopting", "carried_in", "carrying", "planned_before"]

_STEPS_EACH = 1.2
"""Training steps that a probe's resumed step counts as: evaluations and copies of the state included."""


@dataclass
class StepClock:
    """The search's time: training steps, which a replay counts alike."""

    step: int = 0
    spent: float = 0.0

    def now(self) -> float:
        """The time, in steps."""
        return float(self.step)

    def paid(self) -> float:
        """Steps that resumed steps have taken from training."""
        return self.spent

    def charged(self, resume: ResumedSteps | None) -> ResumedSteps | None:
        """The same, counting the steps."""
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
        """A search of which nothing is known yet, by a clock that a replay has too."""
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

    def adopted(self, job: Job, takeover: Takeover, staged: StagedState, planner: Planner) -> Adopted:
        """Become what a process is that has just restored this save; until it is stored, values stand in for its container.

        Args:
            job: the save.
            takeover: by which training has taken the values over.
            staged: the values.
            planner: that has chosen how they are quantized.
        """
        more = {"measured": job.measure is not None, "probed": job.resume is not None, **takeover.settings}
        settings = noted_settings(self._config, more, self._settings, step=job.step, warns=self._warns)
        self._settings = None
        search = json.loads(json.dumps(planner.state_dict()))
        planner.begin_again(search, restored=True)
        last = self.chain.next(job.step, staged, settings, search)
        self.chain = PlannedChain(last)
        return last

    def branch(self, since: int | None, *, is_delta: bool) -> Adopted:
        """What the manifest of a save that was not planned says.

        Args:
            since: step of the weights that the next save's movement is counted from.
            is_delta: whether it builds on the last planned save.
        """
        last = replace(self.chain.last or Adopted(), planned=False, since=since)
        return last if is_delta else replace(last, stand_ins=last.stand_ins | self.chain.quantized)

    def stored(self, last: Adopted, encoded: EncodedState) -> None:
        """The planned save is committed."""
        self.chain = PlannedChain(last, encoded.reference)


def planned_before(
    store: RunStore, manifest: Manifest, last: Adopted, threads: int
) -> tuple[Decoded, Manifest | None] | None:
    """The last planned save, on which an exact one builds, and its manifest if that is still there; None where there is none.

    Args:
        store: the run.
        manifest: of the exact one.
        last: what that says of the planned one.
        threads: threads that decode.
    """
    if manifest.kind == "base" or not last.count:
        return None
    decoded = decode_chain(sources_of_run(store, manifest)[:-1], threads=threads)
    if decoded.header.step != last.step:
        return None
    digest = decoded.header.state_digest
    parents = (m for m in store.manifests() if m.state_digest == digest and m.step == last.step)
    return decoded, next(parents, None)


_PREFIX = "adopted before/"


def carrying(state: TrainingState, noted: Mapping[str, torch.Tensor]) -> TrainingState:
    """A state with these weights in addition, which its tree does not refer to: only `carried_in` finds them.

    Args:
        state: that is stored.
        noted: weights by name, as they were at the last planned save, or where training began.
    """
    tag = Tag(role=Role.OTHER)
    specs = {
        _PREFIX + name: TensorSpec(
            name=_PREFIX + name, dtype=tensor.dtype, shape=tuple(tensor.shape), tag=tag
        )
        for name, tensor in noted.items()
    }
    tensors = {_PREFIX + name: tensor for name, tensor in noted.items()}
    return TrainingState(state.tree, {**state.tensors, **tensors}, {**state.specs, **specs})


def carried_in(state: TrainingState) -> TrainingState | None:
    """The weights that `carrying` has added, by their own names; None where there are none."""
    tensors = {
        name.removeprefix(_PREFIX): tensor
        for name, tensor in state.tensors.items()
        if name.startswith(_PREFIX) and name.removeprefix(_PREFIX) in state.specs
    }
    return TrainingState(None, tensors, {name: state.specs[name] for name in tensors}) if tensors else None
