"""Checks on a lossy checkpoint's tensors that apply whatever the measured loss is.

A held-out loss depends on its batches and on the moment of the restore. So further quantities are bounded, on a sample
of the parameters. Of weights: their noise relative to their movement, and the steps they lose. Of first moments: their
error relative to that of zeros. Of the next updates (`shrinkpoint.optimizers.updates`): their error, their length, and
the steps that weights and moments lose together.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from shrinkpoint.arrays import Bools
from shrinkpoint.coding.encode import restored_values
from shrinkpoint.optimizers.updates import OptimizerKind, Updates, compare_updates
from shrinkpoint.runtime.memory import Returns
from shrinkpoint.schemes.base import SaveContext, Scheme
from shrinkpoint.schemes.codec_io import plane_of
from shrinkpoint.state.training import Role, TrainingState

WEIGHTS = (Role.WEIGHT, Role.MASTER)

# Steps of a chain are kept up to a noise of sqrt(1.2) of what is wanted, and rows' exponents are quarters of an octave.
_MOST_NOISE = 1.5
_MOST_ERROR = 1.0  # of updates; 1 is that of having none
_LONGEST = 1.05  # times the true length that the first update after a restore may have, under every scheme
# Of the steps between two checkpoints: how many a restore may lose by its moments. `auto` takes 1 % for first moments; the other
# half per cent is for the factored second moments.
_MOST_LOST_STEPS = 0.015
_ALWAYS_LOST = 0.25  # steps; ten restores lose less than three, however close the checkpoints are, and more restores no more
# Of a first moment's error, in its own size: zeros have 1, noise of its own size has 1.41. Codecs that keep to 1 weigh
# elements by units of their own, in which this is not measured.
_MOST_LOST = 1.2
_MOST_ELEMENTS = 1 << 20  # of the sampled parameters
_GOLDEN = (math.sqrt(5) - 1) / 2
_CERTAIN = 3.0  # standard errors by which a loss of progress must differ from chance


@dataclass(frozen=True)
class Verdict:
    """What a guard has found in the tensors that a scheme would restore."""

    reason: str | None = None
    """Why the scheme is refused; None where it is accepted."""
    moments: bool = False
    """Whether it is refused for the optimizer's state, which less noise in the weights does not change."""
    lost_steps: float = 0.0
    """Training steps that a restore would lose, by weights and moments; 0 where that is not known."""
    updates: Updates | None = None
    """Error of the next updates; None where they could not be computed."""
    untried: str | None = None
    """Why they could not be computed."""

    def at_fault(self, optimizers: int) -> frozenset[int]:
        """Return positions of the optimizers whose moments make the next updates differ too much.

        Where none does, that of the one that loses most; all where the updates are not known.

        Args:
            optimizers: their number.
        """
        if self.updates is None:
            return frozenset(range(optimizers))
        each = self.updates.each
        found = frozenset(position for position, one in each.items() if not _is_near(one))
        return found or frozenset(sorted(each, key=lambda position: each[position].lost_steps)[-1:])


@dataclass(frozen=True)
class Guard:
    """Refuses checkpoints by their tensors; made for one save."""

    kinds: Sequence[OptimizerKind] = ()
    """Of the optimizers, in the order of their states in the snapshot; empty where they are not known."""
    threads: int = 1
    """Parameters handled side by side."""
    restored: Callable[[Scheme], TrainingState] | None = None
    """Gives the tensors that a scheme restores, where they are computed anyway; None computes a sample."""

    def __call__(self, save_context: SaveContext, scheme: Scheme) -> Verdict:
        """Check the tensors that a scheme would restore.

        Args:
            save_context: the save.
            scheme: set up for it.
        """
        state = save_context.state
        chosen = sampled_parameters(state)
        if not chosen:
            return Verdict()
        # What a candidate took would stay, too.
        Returns(state.nbytes).after(state.nbytes)
        if self.restored is None:
            values = restored_values(
                state, scheme, save_context.reference, parameters=chosen, threads=self.threads
            )
        else:
            found, specs = self.restored(scheme).tensors, state.specs
            values = {
                name: found[name] if specs[name].tag.parameter in chosen else true
                for name, true in state.tensors.items()
            }
        noisy = _too_noisy(save_context, values)
        if noisy is not None:
            return Verdict(noisy)
        progress = _lost_share(save_context, values) * save_context.interval
        worse = _loses_steps(save_context, progress, "weights")
        if worse is not None:
            return Verdict(worse, lost_steps=progress)
        worse = _worse_than_none(state, values)
        if worse is not None:
            return Verdict(worse, moments=True, lost_steps=progress)
        restored = TrainingState(state.tree, values, state.specs)
        updates = compare_updates(state, restored, self.kinds, parameters=chosen)
        if isinstance(updates, str):
            return Verdict(lost_steps=progress, untried=updates)
        lost = progress + updates.lost_steps
        if not _is_near(updates):
            far = (
                f"the first update after a restore would be {updates.length:.2f} times as long as it should be, with an error of"
                f" {updates.error:.0%}"
            )
            return Verdict(far, moments=True, lost_steps=lost, updates=updates)
        what = "weights and moments" if progress > 0 else "moments"
        reason = _loses_steps(save_context, lost, what)
        # the moments lose more than the weights
        moments = reason is not None and lost >= 2 * progress
        return Verdict(reason, moments, lost, updates)


def sampled_parameters(state: TrainingState) -> frozenset[str]:
    """Return parameters spread over the model, `_MOST_ELEMENTS` at most in all; at least one matrix if there is one."""
    weights = [spec for spec in state.specs.values() if spec.tag.role in WEIGHTS and spec.numel]
    sizes = {spec.tag.parameter: spec.numel for spec in weights if spec.tag.parameter is not None}
    if not sizes:
        return frozenset()
    matrices = {spec.tag.parameter for spec in weights if len(spec.shape) >= 2}
    first = min([name for name in sizes if name in matrices] or sizes, key=sizes.__getitem__)
    chosen, left = {first}, _MOST_ELEMENTS - sizes[first]
    places = {name: index * _GOLDEN % 1 for index, name in enumerate(sizes)}  # far apart, one after another
    for name in sorted(sizes, key=places.__getitem__):
        if name not in chosen and sizes[name] <= left:
            chosen.add(name)
            left -= sizes[name]
    return frozenset(chosen)


def sampled_elements(tensor: torch.Tensor) -> torch.Tensor:
    """`_MOST_ELEMENTS` of a large tensor, evenly spread over it, or all, flat."""
    # odd: it takes all columns of a matrix that has a power of two of them
    stride = 1 if tensor.numel() <= _MOST_ELEMENTS else tensor.numel() // _MOST_ELEMENTS | 1
    return tensor.reshape(-1)[::stride]


def _too_noisy(save_context: SaveContext, values: dict[str, torch.Tensor]) -> str | None:
    if save_context.movement is None:
        return None
    for name, rows in save_context.movement.rows.items():
        true, restored = save_context.state.tensors[name], values[name]
        if restored is true or torch.equal(restored, true):
            continue
        errors = (restored.float() - true.float()).reshape(len(rows), -1).square().mean(dim=1).numpy()
        coded = ~_kept_rows(save_context, name, restored, len(rows))
        moved, noise = (math.sqrt(float(x[coded].mean())) if coded.any() else 0.0 for x in (rows**2, errors))
        if not noise <= _MOST_NOISE * moved:
            times = f"{noise / moved:.1f} times as large as" if moved > 0 else "not zero, as is"
            return f"the noise of {name} would be {times} what training has moved it by since the last checkpoint"
    return None


def _worse_than_none(state: TrainingState, values: dict[str, torch.Tensor]) -> str | None:
    for name, spec in state.specs.items():
        true, restored = state.tensors[name], values[name]
        if spec.tag.role is not Role.EXP_AVG or restored is true or not bool(torch.isfinite(true).all()):
            continue
        length, away = (float(torch.linalg.vector_norm(x.float())) for x in (true, restored.float() - true))
        if not away <= _MOST_LOST * length:
            times = f"{away / length:.1f} times as far from" if length > 0 else "not zeros, as is"
            return f"the moment {name} would be {times} the truth" + (" as zeros are" if length > 0 else "")
    return None


def _loses_steps(save_context: SaveContext, lost: float, what: str) -> str | None:
    if lost <= max(_MOST_LOST_STEPS * save_context.interval, _ALWAYS_LOST / save_context.budget_ratio):
        return None
    return (
        f"the {what} of a restore would set training back by {lost:.2f} of the {save_context.interval} steps between"
        " two checkpoints"
    )


def _is_near(updates: Updates) -> bool:
    return updates.error <= _MOST_ERROR and updates.length <= _LONGEST  # NaN is neither


def _kept_rows(save_context: SaveContext, name: str, restored: torch.Tensor, rows: int) -> Bools:
    """(rows,): those that the checkpoint before restores to the same values, whose noise was accepted then."""
    reference = (save_context.reference or {}).get(name)
    before = plane_of(reference, "value", save_context.state.specs[name])
    if before is None:
        return np.zeros(rows, np.bool_)
    values = torch.from_numpy(np.asarray(before, np.float32)).reshape(rows, -1).to(restored.dtype)
    return (values == restored.reshape(rows, -1)).all(dim=1).numpy()


def _lost_share(save_context: SaveContext, values: dict[str, torch.Tensor]) -> float:
    """Return the share of the weights' movement that a restore takes back, as far as that is no chance.

    It is the error's projection onto the movement since the previous checkpoint, -1 where weights stay where they were; the mean of
    the tensors that are not exact, by their elements, so that one that moves far does not hide another. An error that does not depend on
    the movement, and is another in each element, has none but by chance, of a standard error that is known.
    """
    if save_context.movement is None:
        return 0.0
    along = variance = 0.0
    elements = 0
    for name, before in save_context.movement.before.items():
        true, restored = save_context.state.tensors[name], values[name]
        if restored is true:
            continue
        here, there = sampled_elements(true).double(), sampled_elements(restored).double()
        moved = here - before.double()
        finite = torch.isfinite(moved)
        squares = float(moved[finite].square().sum())
        if not squares > 0 or torch.equal(here, there):
            continue
        product = ((there - here) * moved)[finite]
        count = product.numel()
        along += count * float(product.sum()) / squares
        variance += (count / squares) ** 2 * float(product.square().sum())
        elements += count
    if not elements:
        return 0.0
    share = -(along + _CERTAIN * math.sqrt(variance)) / elements
    return max(0.0, share) if math.isfinite(share) else 1.0
