"""The scheme of our own: weights on a dithered trellis, moments in levels of their second one's root.

The noise of a row's weights is at most ``scale`` times what training has moved that row since the checkpoint before
(`shrinkpoint.quantize.movement`), root mean square; one scale for the whole model, up to 1, which the search chooses. What training has
not moved is kept, or stored exactly. However far it has moved, the step size of a weight is at most
``2 scale size (v / V) ** -1/4``: `size` the root mean square of all matrices, v the row's and column's second moment, V the
geometric mean of all matrices' own. A matrix's own is its arithmetic mean: in an embedding, most rows may hardly be used, and
the others must not pay for them. Of biases, norms and other small tensors it is an eighth of that: they cost few bytes.
The curvature is Adam's second moment, or what an optimizer keeps that grows with it: the square of its momentum, or of the
gradients' mean that was collected. Where there is nothing of the kind, steps are a share of the tensor's own size.

What is known of each optimizer's state:

* Adam and its kin: the second moment as a row times a column, the first in units of its root;
* SGD with momentum, Lion: the momentum in units of its own root mean square by rows and columns;
* masters of half-precision weights: on the trellis, and the weights rounded from them;
* other squares of gradients (RMSprop, Adagrad, Adadelta, amsgrad's maximum and the second moment beside it), and other sizes
  (Adamax's largest gradient, Rprop's steps): every element to a share of itself;
* averages of the weights (EMA, SWA, ASGD's): on the trellis, by how far each has itself moved, with its weight's curvature; exactly
  while that is not known, or they are copies of their weights; an optimizer's copies that move with their weights, not at all;
* any other state, and whatever is small: exactly.

What a restored first moment has lost is lost progress: as many steps as the optimizer remembers, times the share that is
lost. It may be a small share of the steps between two checkpoints, however high the learning rate is or will be.
"""

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from shrinkpoint.arrays import Float64s
from shrinkpoint.entropy.contexts.coder import Effort
from shrinkpoint.entropy.trellis.states import States
from shrinkpoint.schemes.auto.copied import CopiedCodec
from shrinkpoint.schemes.auto.curvature import Curvature, curvature_of, mean_levels, size_of, square
from shrinkpoint.schemes.auto.factors import matrix_shape
from shrinkpoint.schemes.auto.first_moments import CentroidFirstMomentCodec, CentroidMomentumCodec
from shrinkpoint.schemes.auto.lattice import LatticeCodec
from shrinkpoint.schemes.auto.lattice_steps import curvature_exponents
from shrinkpoint.schemes.auto.log_levels import LogLevelsCodec
from shrinkpoint.schemes.auto.optimizer_memory import EPSILON, UNKNOWN, epsilons, memories
from shrinkpoint.schemes.auto.rounded import RoundedCodec
from shrinkpoint.schemes.auto.row_steps import narrowed
from shrinkpoint.schemes.auto.second_moments import FactoredSecondMomentCodec
from shrinkpoint.schemes.auto.trellis_points import WIDER
from shrinkpoint.schemes.auto.trellis_weights import TrellisLatticeCodec
from shrinkpoint.schemes.base import Makers, SaveContext, TensorCodec
from shrinkpoint.schemes.codec_io import CODED_DTYPES
from shrinkpoint.schemes.recipe import check_choice, check_number, described
from shrinkpoint.state.training import LayerType, Role, TensorSpec, TrainingState
from shrinkpoint.state.tree import JSON

__all__ = ["MILD_SCALE", "Auto", "AutoOptions"]


MILD_SCALE = 0.25
"""Without a way to measure; a restore then costs the bench's convolutional network 0.2 % of the loss, its GPT much less."""

_FARTHEST = 64.0  # no tensor's curvature changes its steps by more
_LEAST = 1e-30
_FINER = 8  # biases and norms: few elements, each of which counts for many
# Levels of other squares and sizes, in sixteenths of an octave: wider where what a restore has changed is soon forgotten
_FADING = ("square_avg", "acc_delta")  # RMSprop's and Adadelta's
_FADING_STEP, _LASTING_STEP = 16, 8
_CURVED = (Role.EXP_AVG, Role.EXP_AVG_SQ, Role.SQUARES)
_NOISE = math.sqrt(1 / 12)  # of a uniform quantizer, in its step sizes
_WIDEST_STEP = 2.0  # of a weight, in root mean squares of all of them; the movement is nearly always less
_FEW = 2000  # so do those of small tensors
# Of the steps between two checkpoints: how many of them a restored first moment may have lost.
_LOST_STEPS = 0.01
_OF_DIRECTION = 8  # times less where an optimizer uses the direction of a moment alone
_MOST_LOST = 0.45  # of a first moment; from a half on, it would be farther from the truth than zeros are
_LEAST_LOST = 0.005
_UNMOVED = 2.0**-6  # of the tensor's own movement: rows that have moved less have not moved
_FINEST = 2.0**-13  # of a tensor's largest weight: no step size is less
_UNKNOWN_MOVEMENT = 1 / 64  # of a row's size, where nothing is known of how far training has moved it
_USUAL_INTERVAL = 50  # steps between checkpoints, where nothing is known of the last one


@dataclass(frozen=True, kw_only=True)
class AutoOptions:
    """Settings of the scheme.

    Raises:
        ConfigError: a field has a value that cannot work.

    Examples:
        >>> from shrinkpoint.schemes.catalogue import AutoOptions
        >>> config = shrinkpoint.SaverConfig(scheme="auto", options=AutoOptions(effort="max"))
    """

    weight_scale: float | None = None
    """Share of the greatest noise that weights are allowed, 1 being all of it; None leaves it to the search."""
    first_moment_step: float | None = None
    """Distance of two levels of first moments, in roots of the second, or of their own mean square; None lets the
    optimizer's memory decide."""
    movement_share: float = 1.0
    """Greatest noise of a row of weights, in root mean squares of what training has moved it since the last checkpoint."""
    effort: Effort = "default"
    """How much time coding may take: ``fast`` has scalar quantizers, ``default`` and ``max`` a trellis of 4 and of 8 states."""
    min_elements: int = 64
    """Tensors with fewer elements are stored exactly."""

    def __post_init__(self) -> None:
        if self.weight_scale is not None:
            check_number(self, "weight_scale", 1e-4, 64)
        if self.first_moment_step is not None:
            check_number(self, "first_moment_step", 0.001, 64)
        check_number(self, "movement_share", 0.001, 1000)
        check_number(self, "min_elements", 1, 2**48, whole=True)
        check_choice(self, "effort", Effort)

    def takes(self, spec: TensorSpec) -> bool:
        """Whether the tensor is coded as a weight."""
        of_a_kind = spec.tag.role in (Role.WEIGHT, Role.MASTER, Role.AVERAGE)
        return of_a_kind and spec.dtype in CODED_DTYPES and spec.numel >= self.min_elements


def _by_parameter(state: TrainingState, role: Role) -> dict[str | None, str]:
    """Names of the tensors of a role, by their parameter."""
    specs = state.specs.items()
    return {spec.tag.parameter: name for name, spec in specs if spec.tag.role is role and spec.tag.parameter}


def _folder(spec: TensorSpec) -> str:
    """Where a tensor stands in the state: an optimizer's tensors of one parameter share it."""
    return spec.name.rpartition("/")[0]


def _key(spec: TensorSpec) -> str:
    """What an optimizer calls it."""
    return spec.name.rpartition("/")[2]


def _by_folder(state: TrainingState, role: Role) -> dict[str, str]:
    """Names of the tensors of a role, the first of each place where they stand."""
    found: dict[str, str] = {}
    for name, spec in state.specs.items():
        if spec.tag.role is role:
            found.setdefault(_folder(spec), name)
    return found


def _master(state: TrainingState, spec: TensorSpec, masters: Mapping[str | None, str]) -> torch.Tensor | None:
    """The fp32 weight that this half of it is rounded from, if it is."""
    if spec.tag.role is not Role.WEIGHT or spec.dtype not in (torch.float16, torch.bfloat16):
        return None
    name = masters.get(spec.tag.parameter)
    return state.tensors[name] if name is not None and state.specs[name].shape == spec.shape else None


class _Step(NamedTuple):
    step: float
    curvature: torch.Tensor | None
    """What the steps' rows and columns follow, of the weight's shape."""
    moved: Float64s | None = None
    """(rows,): how far training has moved each, root mean square; None where no step size will do."""
    finest: float = 0.0
    """The least step size."""
    kept: npt.NDArray[np.bool_] | None = None
    """(rows,): those that stay as the previous checkpoint has them; None for none."""


@dataclass(frozen=True, kw_only=True)
class Auto:
    """The scheme.

    Args:
        options: its settings.
        save_context: the save: a base, and the first save after a restore, take dithers of their own.
        scale: the steps' scale, where the search has chosen it; None takes the options', or else a mild one.
    """

    name: ClassVar[str] = "auto"

    options: AutoOptions = field(default_factory=AutoOptions)
    save_context: SaveContext
    scale: float | None = None

    def codecs(self, state: TrainingState) -> Mapping[str, Callable[[], TensorCodec]]:
        """See `Scheme.codecs`."""
        makers: dict[str, Callable[[], TensorCodec]] = {}
        left: dict[str, str] = {}
        steps = self._steps(state, left)
        losses, added = self._moment_losses(state), epsilons(state)
        masters = _by_parameter(state, Role.MASTER)
        weights = _by_parameter(state, Role.WEIGHT)
        firsts, seconds, squares = (
            _by_folder(state, role) for role in (Role.EXP_AVG, Role.EXP_AVG_SQ, Role.SQUARES)
        )
        for name, spec in state.specs.items():
            folder = _folder(spec)
            master = _master(state, spec, masters)
            if master is not None:
                makers[name] = partial(RoundedCodec, master=master)
            elif self._is_copy(state, spec, weights.get(spec.tag.parameter)):
                makers[name] = partial(CopiedCodec, weight=state.tensors[weights[spec.tag.parameter]])
            elif name in steps:
                makers[name] = partial(self._lattice, spec, steps[name])
            elif spec.numel < self.options.min_elements:
                continue
            elif spec.tag.role in (Role.SQUARES, Role.STATE) or (
                spec.tag.role is Role.EXP_AVG_SQ and folder in squares  # of which that is the maximum
            ):
                makers[name] = partial(
                    LogLevelsCodec,
                    step=_FADING_STEP if _key(spec) in _FADING else _LASTING_STEP,
                    seed=self._seed_of_levels(spec),
                    divides=spec.tag.role is not Role.STATE,
                )
            elif spec.tag.role is Role.EXP_AVG_SQ:
                first = firsts.get(folder)
                makers[name] = partial(
                    FactoredSecondMomentCodec, first_moment=state.tensors[first] if first else None
                )
            elif spec.tag.role is Role.EXP_AVG:
                make: Callable[..., TensorCodec] = CentroidFirstMomentCodec
                if folder not in seconds:
                    # the update is a multiple of the momentum, or has its direction alone
                    make = partial(CentroidMomentumCodec, linear=name not in self.save_context.directions)
                elif folder not in squares:  # where amsgrad keeps a maximum, it divides by that
                    second = seconds[folder]
                    make = partial(
                        make, second_moment=state.tensors[second], epsilon=added.get(second, EPSILON)
                    )
                makers[name] = partial(make, step=self.options.first_moment_step, loss=losses[name])
        return Makers(makers, left)

    def _moment_losses(self, state: TrainingState) -> dict[str, float]:
        """The greatest share of each first moment that may be lost, by what its optimizer remembers."""
        known, losses = memories(state), {}
        interval = (
            self.save_context.movement.steps if self.save_context.movement is not None else _USUAL_INTERVAL
        )
        for name, spec in state.specs.items():
            if spec.tag.role is Role.EXP_AVG:
                lost = _LOST_STEPS * interval / max(known.get(name, UNKNOWN), _LEAST)
                lost /= _OF_DIRECTION if name in self.save_context.directions else 1
                losses[name] = min(max(lost, _LEAST_LOST), _MOST_LOST)
        return losses

    def describe(self) -> JSON:
        """See `Scheme.describe`."""
        return {**described(self.name, self.options), "scale": self._scale}

    @property
    def settings(self) -> str:
        """In short, for logs."""
        fixed = self.options.first_moment_step
        return f"scale={self._scale:.3g}" + (f" first_moment_step={fixed:g}" if fixed is not None else "")

    @property
    def _scale(self) -> float:
        return self.scale or self.options.weight_scale or MILD_SCALE

    def _scale_of(self, spec: TensorSpec) -> float:
        """The network's own weights have mild steps where nothing but their averages is measured."""
        if self.save_context.averages_only and spec.tag.role is not Role.AVERAGE:
            return min(self._scale, self.options.weight_scale or MILD_SCALE)
        return self._scale

    def _lattice(self, spec: TensorSpec, step: _Step) -> TensorCodec:
        height, width = matrix_shape(spec.shape)
        exponents = (np.zeros(height, np.int8), np.zeros(width, np.int8))
        if step.curvature is not None:
            exponents = curvature_exponents(step.curvature, spec.shape)
        size = step.step
        if step.moved is not None:
            share = self._scale_of(spec) * self.options.movement_share
            noise = np.maximum(share * step.moved, _NOISE * step.finest)
            if step.kept is not None:
                noise[step.kept] = np.inf
            size, exponents = narrowed(size, exponents, noise)
        states = self._states
        if states is not None:
            return TrellisLatticeCodec(
                step=size * WIDER[states],
                exponents=exponents,
                seed=self._seed(spec),
                after_restore=self.save_context.restored,
                states=states,
                kept=step.kept,
            )
        reference = (self.save_context.reference or {}).get(spec.name)
        goes_on = (
            reference is not None and reference.codec == LatticeCodec.id and not self.save_context.restored
        )
        seed = None if goes_on else self._seed(spec)
        return LatticeCodec(step=size, exponents=exponents, seed=seed, effort="fast")

    def _kept(self, spec: TensorSpec) -> npt.NDArray[np.bool_] | None:
        """(rows,): those that stay as the previous checkpoint has them, since training has not moved them.

        Through a chain of 32 checkpoints they move by half of what the tensor moves between two of them at most.
        """
        moved = self._known_movement(spec)
        if moved is None or not self._is_on_trellis(spec):
            return None
        return np.asarray(moved <= _UNMOVED * math.sqrt(float(np.square(moved).mean())))

    @property
    def _states(self) -> States | None:
        """Of the trellises; None for scalar quantizers, which take half the time."""
        by_effort: dict[Effort, States | None] = {"fast": None, "default": 4, "max": 8}
        return by_effort[self.options.effort]

    def _seed_of_levels(self, spec: TensorSpec) -> int | None:
        """None goes on with the dither of the checkpoint before, as long as no restore has put a tensor on its levels.

        Tensors that stand together share it: so amsgrad's maximum is never restored below the second moment that it is of.
        """
        reference = (self.save_context.reference or {}).get(spec.name)
        goes_on = (
            reference is not None and reference.codec == LogLevelsCodec.id and not self.save_context.restored
        )
        return None if goes_on else zlib.crc32(f"{self.save_context.step}/{_folder(spec)}".encode())

    def _seed(self, spec: TensorSpec) -> int:
        return zlib.crc32(f"{self.save_context.step}/{spec.name}".encode())

    def _steps(self, state: TrainingState, left: dict[str, str]) -> dict[str, _Step]:
        """Of the weights that have one; what is all zeros or of no ordinary size is stored exactly, and `left` gets why."""
        specs = [spec for spec in state.specs.values() if self.options.takes(spec)]
        moments: dict[str, list[TensorSpec]] = {}
        for spec in state.specs.values():
            if spec.tag.parameter is not None and spec.tag.role in _CURVED:
                moments.setdefault(spec.tag.parameter, []).append(spec)
        found = {
            spec.name: self._curvature(state, spec, moments.get(spec.tag.parameter or "", ()))
            for spec in specs
        }
        own = [spec for spec in specs if spec.tag.role is not Role.AVERAGE] or specs
        many = [spec for spec in own if _finer(spec) == 1] or own
        size = size_of([state.tensors[spec.name] for spec in many])
        means = mean_levels([(found[spec.name], spec.numel) for spec in many])
        steps = {}
        weights = _by_parameter(state, Role.WEIGHT)
        for spec in specs:
            if spec.tag.role is Role.AVERAGE and not self._is_averaged(
                state, spec, weights.get(spec.tag.parameter)
            ):
                left[spec.name] = "copy"
                continue
            scale = self._scale_of(spec)
            curvature, moved = found[spec.name], self._moved(spec, state.tensors[spec.name])
            finest = _FINEST * float(state.tensors[spec.name].abs().max())
            kept = self._kept(spec)
            moving = moved[moved > _UNMOVED * math.sqrt(float(np.square(moved).mean()))]
            allowed = scale * self.options.movement_share * float(np.median(moving)) if moving.size else 0.0
            if allowed <= _NOISE * finest and bool(np.isfinite(moved).all()):
                left[spec.name] = "frozen" if spec.tag.frozen else "unmoved" if finest else "zeros"
                continue  # what training hardly changes is stored exactly, and what is all zeros
            if curvature is None:
                unit, tensor = size_of([state.tensors[spec.name]]), None
            else:
                octaves = (means.get(curvature.kind, curvature.level) - curvature.level) / 4
                unit = size * min(_FARTHEST, max(1 / _FARTHEST, math.exp(octaves)))
                tensor = curvature.tensor
            if 1e-20 < unit < 1e20:
                steps[spec.name] = _Step(
                    _WIDEST_STEP * scale / _finer(spec) * unit, tensor, moved, finest, kept
                )
            elif not bool(torch.isfinite(state.tensors[spec.name]).all()):
                steps[spec.name] = _Step(1.0, None)  # of any step: the codec refuses the tensor, and says why
            else:
                left[spec.name] = "size"
        return steps

    def _is_averaged(self, state: TrainingState, spec: TensorSpec, weight: str | None) -> bool:
        """Whether an average is more than a copy of its weight, and it is known how far it moves: else it is stored exactly."""
        if weight is None or self._known_movement(spec) is None:
            return False
        return not _is_equal(state.tensors[spec.name], state.tensors[weight])

    def _is_copy(self, state: TrainingState, spec: TensorSpec, weight: str | None) -> bool:
        """Whether an optimizer's average, as ASGD's, is its weight, bit by bit, and moves as that does.

        What stands still is a reference, and exact; so are copies that the user keeps.
        """
        if spec.tag.role is not Role.AVERAGE or weight is None or not _is_of_optimizer(spec):
            return False
        moved = self._known_movement(spec)
        if moved is None:  # the first one that is saved
            moved = self._known_movement(state.specs[weight])
        moves = moved is not None and bool((moved > 0).any())
        return moves and _is_equal(state.tensors[spec.name], state.tensors[weight])

    def _is_on_trellis(self, spec: TensorSpec) -> bool:
        """Whether the previous checkpoint has the tensor so that its rows can be kept."""
        reference = (self.save_context.reference or {}).get(spec.name)
        return reference is not None and reference.codec == TrellisLatticeCodec.id

    def _moved(self, spec: TensorSpec, weights: torch.Tensor) -> Float64s:
        """How far training has moved each row; where nothing is known of that, as if by a small share of its size."""
        rows = self._known_movement(spec)
        if rows is not None:
            return rows
        squares = weights.detach().reshape(matrix_shape(spec.shape)).float().square().mean(dim=1)
        sizes: Float64s = squares.double().sqrt().numpy()
        return _UNKNOWN_MOVEMENT * sizes

    def _known_movement(self, spec: TensorSpec) -> Float64s | None:
        """(rows,), where it was measured and is a number in all rows."""
        rows = (
            self.save_context.movement.rows.get(spec.name) if self.save_context.movement is not None else None
        )
        return rows if rows is not None and bool(np.isfinite(rows).all()) else None

    def _curvature(
        self, state: TrainingState, weight: TensorSpec, moments: Sequence[TensorSpec]
    ) -> Curvature | None:
        beside: dict[Role, str] = {}
        for spec in moments:
            if spec.shape == weight.shape:
                beside.setdefault(spec.tag.role, spec.name)
        gradient = (self.save_context.gradients or {}).get(weight.tag.parameter or weight.name)
        if Role.EXP_AVG_SQ in beside:
            return curvature_of("second moment", state.tensors[beside[Role.EXP_AVG_SQ]])
        if Role.SQUARES in beside:
            return curvature_of("second moment", state.tensors[beside[Role.SQUARES]])
        if Role.EXP_AVG in beside:
            return curvature_of("momentum", square(state.tensors[beside[Role.EXP_AVG]]))
        if gradient is not None and tuple(gradient.shape) == weight.shape:
            return curvature_of("gradient", square(gradient))
        return None


def _is_of_optimizer(spec: TensorSpec) -> bool:
    """Whether it stands in an optimizer's state, by parameter and key: ``.../state/0/ax``."""
    folders = spec.name.split("/")
    return len(folders) > 3 and folders[-3].endswith("state")


def _is_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)


def _finer(spec: TensorSpec) -> int:
    few = len(spec.shape) < 2 or spec.tag.layer_type is LayerType.NORM or spec.numel < _FEW
    return _FINER if few else 1
