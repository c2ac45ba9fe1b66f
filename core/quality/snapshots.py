"""A snapshot as the planner sees it: which of its weights can be quantized, and how its candidates are measured."""

from collections.abc import Sequence

import torch

from shrinkpoint.quality.comparison import Candidates
from shrinkpoint.quality.evaluation import ResumedSteps, losses_of
from shrinkpoint.quality.measurement import Losses
from shrinkpoint.quality.strategy import Measure, Strategy
from shrinkpoint.quality.trial import restored_state
from shrinkpoint.schemes.base import SaveContext, Scheme
from shrinkpoint.state.scratch import in_memory
from shrinkpoint.state.training import Role, TrainingState

__all__ = ["PlannedSnapshot"]


class PlannedSnapshot:
    """A snapshot that this process has in whole.

    Args:
        state: the snapshot.
        measure: the losses with given weights; None where there is no way to evaluate the model.
    """

    def __init__(self, state: TrainingState, measure: Measure | None) -> None:
        self._state, self._measure = state, measure

    def weights(self, strategy: Strategy) -> tuple[list[str], list[str]]:
        """Names of the weights to be coded whose values are all finite, and of the others."""
        names: dict[bool, list[str]] = {True: [], False: []}
        for name, spec in self._state.specs.items():
            if strategy.takes(spec):
                names[bool(torch.isfinite(self._state.tensors[name]).all())].append(name)
        return names[True], names[False]

    def averages(self, strategy: Strategy) -> tuple[bool, bool]:
        """Whether there are averages of the weights, and whether the scheme codes some of them as weights."""
        averages = [spec for spec in self._state.specs.values() if spec.tag.role is Role.AVERAGE]
        return bool(averages), any(map(strategy.takes, averages))

    def candidates(self) -> Candidates | None:
        """Its models, to be measured; None where there is no way to evaluate the model."""
        return None if self._measure is None else Candidates(self._state, self._measure)

    def stepped(
        self,
        steps: ResumedSteps,
        marks: Sequence[int],
        save_context: SaveContext,
        scheme: Scheme | None,
        threads: int,
    ) -> list[Losses]:
        """The held-out losses after some steps from it, or from what a scheme restores of it.

        Args:
            steps: takes them.
            marks: after how many.
            save_context: of the save.
            scheme: None takes the true state.
            threads: parameters handled side by side.
        """
        state = self._state
        if scheme is not None:
            state = restored_state(state, scheme, save_context.reference, threads)
        # read here, and not by the training thread, on which steps are taken
        return [losses_of(loss) for loss in steps(self._given(in_memory(state)), marks)]

    def _given(self, state: TrainingState) -> object:
        """What steps are given of a state."""
        return state.to_object()
