"""Checks on a lossy checkpoint's tensors that apply whatever the measured loss is.

A held-out loss depends on its batches and on the moment of the restore. Three more quantities are therefore bounded, on
a sample of the parameters: the noise of restored weights relative to their movement in training, the error of first
moments relative to that of zeros, and the error of the next optimizer updates (`shrinkpoint.optimizers.updates`).
"""

import math
from collections.abc import Callable, Sequence

import torch

from shrinkpoint.coding.encode import restored_values
from shrinkpoint.optimizers.updates import OptimizerKind, Updates, compare_updates
from shrinkpoint.schemes.base import SaveContext, Scheme
from shrinkpoint.state.training import Role, TrainingState

__all__ = ["LONGEST", "LONGEST_SCALED", "Guard", "longest_of"]

_MOST_ELEMENTS = 1 << 20  # of the parameters that are looked at
# Steps of a chain are kept up to a noise of sqrt(1.2) of what is wanted, and rows' exponents are quarters of an octave.
_MOST_NOISE = 1.5
_MOST_ERROR = 1.0  # of updates; 1 is that of having none
LONGEST = 1.1
"""How many times as long as the true one the first update after a restore may be."""
LONGEST_SCALED = 1.05
"""The same of schemes with a scale, which are tried again with less noise where they are refused."""
# Of a first moment's error, in its own size: zeros have 1, noise of its own size has 1.41. Codecs that keep to 1 weigh
# elements by units of their own, in which this is not measured.
_MOST_LOST = 1.2
_WEIGHTS = (Role.WEIGHT, Role.MASTER)
_GOLDEN = (math.sqrt(5) - 1) / 2


def longest_of(scheme: str) -> float:
    """How many times as long as the true one the next update may be under a scheme of this name."""
    return LONGEST_SCALED if scheme == "auto" else LONGEST


class Guard:
    """Refuses checkpoints by their tensors; made for one save.

    Args:
        kinds: of the optimizers, in the order of their states in the snapshot; empty where they are not known.
        threads: parameters handled side by side.
        longest: how many times as long as the true one the next update may be.
        restored: gives the tensors that a scheme restores, all of them, where they are computed anyway; None computes those that
            are looked at.
    """

    def __init__(
        self,
        kinds: Sequence[OptimizerKind] = (),
        threads: int = 1,
        *,
        longest: float = LONGEST,
        restored: Callable[[Scheme], TrainingState] | None = None,
    ) -> None:
        self._kinds = tuple(kinds)
        self._threads = threads
        self._longest = longest
        self._restored = restored
        self.updates: Updates | None = None
        """Error of the next updates under the last scheme checked; None where they could not be computed."""
        self.untried: str | None = None
        """Why they could not be computed."""

    @property
    def lost_steps(self) -> float:
        """Training steps of the optimizers' memory that the last scheme checked would lose; 0 where that is not
        known."""
        return self.updates.lost_steps if self.updates is not None else 0.0

    def __call__(self, save_context: SaveContext, scheme: Scheme) -> str | None:
        """Check the tensors that a scheme would restore.

        Args:
            save_context: the save.
            scheme: set up for it.

        Returns:
            Why the scheme is refused, or None where it is accepted.
        """
        self.updates, self.untried = None, None
        chosen = _sample(save_context.state)
        if not chosen:
            return None
        state = save_context.state
        values = self._values(save_context, scheme, chosen)
        return (
            self._too_noisy(save_context, values)
            or self._worse_than_none(state, values)
            or self._updates_differ(state, TrainingState(state.tree, values, state.specs), chosen)
        )

    def _values(
        self, save_context: SaveContext, scheme: Scheme, chosen: frozenset[str]
    ) -> dict[str, torch.Tensor]:
        """Restored tensors of the chosen parameters, and true ones of the others."""
        state = save_context.state
        if self._restored is None:
            return restored_values(
                state, scheme, save_context.reference, parameters=chosen, threads=self._threads
            )
        found = self._restored(scheme).tensors
        return {
            name: found[name] if spec.tag.parameter in chosen else state.tensors[name]
            for name, spec in state.specs.items()
        }

    def _too_noisy(self, save_context: SaveContext, values: dict[str, torch.Tensor]) -> str | None:
        if save_context.movement is None:
            return None
        for name, rows in save_context.movement.rows.items():
            true, restored = save_context.state.tensors[name], values[name]
            if restored is true or torch.equal(restored, true):
                continue
            moved = math.sqrt(float((rows**2).mean()))
            noise = float((restored.float() - true.float()).square().mean().sqrt())
            if not noise <= _MOST_NOISE * moved:
                times = f"{noise / moved:.1f} times as large as" if moved > 0 else "not zero, as is"
                return f"the noise of {name} would be {times} what training has moved it by since the last checkpoint"
        return None

    def _worse_than_none(self, state: TrainingState, values: dict[str, torch.Tensor]) -> str | None:
        for name, spec in state.specs.items():
            true, restored = state.tensors[name], values[name]
            if spec.tag.role is not Role.EXP_AVG or restored is true or not bool(torch.isfinite(true).all()):
                continue
            length, away = (
                float(torch.linalg.vector_norm(x.float())) for x in (true, restored.float() - true)
            )
            if not away <= _MOST_LOST * length:
                times = f"{away / length:.1f} times as far from" if length > 0 else "not zeros, as is"
                return f"the moment {name} would be {times} the truth" + (
                    " as zeros are" if length > 0 else ""
                )
        return None

    def _updates_differ(
        self, true: TrainingState, restored: TrainingState, chosen: frozenset[str]
    ) -> str | None:
        found = compare_updates(true, restored, self._kinds, parameters=chosen, threads=self._threads)
        if isinstance(found, str):
            self.untried = found
            return None
        self.updates = found
        if not (found.error <= _MOST_ERROR and found.length <= self._longest):  # NaN is neither
            return (
                f"the first update after a restore would be {found.length:.2f} times as long as it should be, with an error of"
                f" {found.error:.0%}"
            )
        return None


def _sample(state: TrainingState) -> frozenset[str]:
    """Parameters spread over the model, `_MOST_ELEMENTS` at most in all; at least one matrix if there is one."""
    sizes: dict[str, int] = {}
    matrices: dict[str, int] = {}
    for spec in state.specs.values():
        name = spec.tag.parameter
        if spec.tag.role in _WEIGHTS and name is not None and spec.numel:
            sizes[name] = spec.numel
            if len(spec.shape) >= 2:
                matrices[name] = spec.numel
    if not sizes:
        return frozenset()
    first = min(matrices or sizes, key=lambda name: sizes[name])
    chosen, elements = {first}, sizes[first]
    places = {name: index * _GOLDEN % 1 for index, name in enumerate(sizes)}  # far apart, one after another
    for name in sorted(sizes, key=lambda name: places[name]):
        if name not in chosen and elements + sizes[name] <= _MOST_ELEMENTS:
            chosen.add(name)
            elements += sizes[name]
    return frozenset(chosen)
