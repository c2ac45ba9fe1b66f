"""Step sizes of the weights that ``auto`` codes.

Two limits hold for every row of a weight, and the smaller one counts:

* movement: the noise of the row, root mean square, is at most ``scale * movement_share`` times what training has moved it since the
  previous checkpoint (`SaveContext.movement`);
* curvature: the step size is at most ``2 scale size (v / V) ** -1/4``, with `size` the root mean square of all matrices, v the row's
  and column's second moment, and V the geometric mean of all matrices' own. A matrix's own is its arithmetic mean: in an embedding,
  most rows may hardly be used, and the others must not pay for them. Biases, norms and other small tensors get an eighth of that,
  since they cost few bytes. v is Adam's second moment, or what an optimizer keeps that grows with it: the square of its momentum, or
  of the gradients' mean that was collected. Without any of these, step sizes are a share of the tensor's own size.

What training has not moved keeps the values of the previous checkpoint, or is stored exactly.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from shrinkpoint.arrays import Bools, Float64s, Int8s, widened
from shrinkpoint.schemes.auto.options import AutoOptions
from shrinkpoint.schemes.auto.row_and_column_steps import MAX_EXPONENT, curvature_exponents, within
from shrinkpoint.schemes.auto.trellis_weights import TrellisWeightCodec
from shrinkpoint.schemes.base import SaveContext
from shrinkpoint.schemes.codec_io import matrix_shape
from shrinkpoint.schemes.sums import WeightSums
from shrinkpoint.state.training import LayerType, Role, TensorSpec, TrainingState

_CURVED = (Role.EXP_AVG, Role.EXP_AVG_SQ, Role.SQUARES)
_FARTHEST = 64.0  # no tensor's curvature changes its steps by more
_PER_OCTAVE = 4  # exponents of rows and columns
_ROWS = 256  # by which columns are judged
_FINER = 8  # biases and norms: few elements, each of which counts for many
_FEW = 2000  # so do those of small tensors
_NOISE = math.sqrt(1 / 12)  # of a uniform quantizer, in its step sizes
_UNSEEN_SCALE = 0.25  # at most, of weights of which averages alone are measured
_WIDEST_STEP = 2.0  # of a weight, in root mean squares of all of them; the movement is nearly always less
_UNMOVED = 2.0**-6  # of the tensor's own movement: rows that have moved less have not moved
_FINEST = 2.0**-13  # of a tensor's largest weight: no step size is less
_UNKNOWN_MOVEMENT = 1 / 64  # of a row's size, where nothing is known of how far training has moved it
_LEAST = 1e-30  # of a mean square
_USUAL = (1e-20, 1e20)  # sizes of weights that can be quantized in fp32


class Curvature(NamedTuple):
    """How the squares of one tensor's gradients differ between elements and from other tensors'."""

    kind: str
    """What it was read off: levels of different kinds cannot be compared."""
    tensor: torch.Tensor
    """What grows with it, of the weight's shape."""
    level: float
    """Natural logarithm of the mean."""


@dataclass(frozen=True, kw_only=True)
class WeightStep:
    """What limits the step sizes of one weight."""

    step: float
    """The greatest step size, at the mean curvature."""
    curvature: torch.Tensor | None = None
    """What the step sizes of rows and columns follow, of the weight's shape."""
    noise: Float64s | None = None
    """(rows,): the greatest noise of each, root mean square; None where no step size will do. Rows that may have none, or less than
    2 ** -8 of the noisiest row's, take the finest step sizes that there are."""
    kept: Bools | None = None
    """(rows,): those that keep the values of the previous checkpoint; None for none."""

    def sizes(self, spec: TensorSpec) -> tuple[float, tuple[Int8s, Int8s]]:
        """Return the tensor's own step size, and the exponents of those of its rows and of its columns (`Steps`).

        Where the curvature allows every element of a row more noise than the row may have, elements have equal steps: none may have more.
        """
        height, width = matrix_shape(spec.shape)
        exponents = (np.zeros(height, np.int8), np.zeros(width, np.int8))
        if self.curvature is not None:
            exponents = curvature_exponents(self.curvature, spec.shape)
        if self.noise is None:
            return self.step, exponents
        rows, columns = (side.astype(np.float64) for side in exponents)
        with np.errstate(divide="ignore"):
            most = _PER_OCTAVE * np.log2(self.noise / (_NOISE * self.step))
        moved = np.flatnonzero(np.isfinite(most))
        if not moved.size or float(rows.max() + columns.max()) <= float(most.min()):
            return self.step, exponents
        some = moved[:: max(1, moved.size // _ROWS)]
        wanted = np.minimum(rows[some, None] + columns[None], most[some, None])
        columns = np.rint(wanted.mean(axis=0) - wanted.mean())
        # of a row, over its columns: noise goes with the square of the step size
        spread = _PER_OCTAVE * math.log2(math.sqrt(float(np.exp2(columns / (_PER_OCTAVE / 2)).mean())))
        rows = np.floor(np.minimum(rows + exponents[1].mean(), most - spread))
        # the widest row takes the tensor's own step size, and the others are within reach below it
        shift = float(rows.max())
        sides = within(rows - shift, MAX_EXPONENT), within(columns, MAX_EXPONENT)
        return self.step * 2.0 ** (shift / _PER_OCTAVE), sides


class WeightSteps:
    """Finds the step sizes of all weights of one save.

    Args:
        options: the scheme's.
        save_context: the save.
        scale: of all step sizes.
    """

    def __init__(self, options: AutoOptions, save_context: SaveContext, scale: float) -> None:
        self._options = options
        self._save_context = save_context
        self._scale = scale

    def of(
        self, specs: Sequence[TensorSpec], state: TrainingState, left: dict[str, str]
    ) -> dict[str, WeightStep]:
        """By name, of those that have one.

        Args:
            specs: the tensors that are coded as weights.
            state: the snapshot.
            left: receives why the others are stored exactly: they are all zeros, hardly moved, or of no ordinary size.
        """
        curvatures = self._curvatures(state, specs)
        sums = self._save_context.sums or self.sums(specs, state, curvatures)
        size, means = sums.size, sums.means
        steps: dict[str, WeightStep] = {}
        for spec in specs:
            step = self._step(spec, state.tensors[spec.name], curvatures[spec.name], means, size)
            if isinstance(step, WeightStep):
                steps[spec.name] = step
            else:
                left[spec.name] = step
        return steps

    def sums(
        self,
        specs: Sequence[TensorSpec],
        state: TrainingState,
        curvatures: Mapping[str, Curvature | None] | None = None,
    ) -> WeightSums:
        """Return what `of` takes sizes and means from; those of several ranks can be added.

        Args:
            specs: the tensors that are coded as weights.
            state: the snapshot.
            curvatures: of these, where they are known.
        """
        if curvatures is None:
            curvatures = self._curvatures(state, specs)
        own = [spec for spec in specs if spec.tag.role is not Role.AVERAGE] or specs
        many = [spec for spec in own if _finer(spec) == 1] or own
        return _sums_of([(state.tensors[spec.name], curvatures[spec.name]) for spec in many])

    def _step(
        self,
        spec: TensorSpec,
        weight: torch.Tensor,
        curvature: Curvature | None,
        means: Mapping[str, float],
        size: float,
    ) -> WeightStep | str:
        """Of one weight, or why it is stored exactly."""
        scale = self._scale_of(spec)
        moved = self._moved(spec, weight)
        least, most = torch.aminmax(weight)
        finest = _FINEST * max(-float(least), float(most))
        moving = moved[moved > _least_movement(moved)]
        share = scale * self._options.movement_share
        typical = float(np.median(moving)) if moving.size else 0.0
        if share * typical <= _NOISE * finest and bool(np.isfinite(moved).all()):
            if spec.tag.frozen or not finest:
                return "frozen" if spec.tag.frozen else "zeros"
            # at the widest scale it would not be exact: so it has moved, and the scale is too narrow
            return "narrow" if typical * self._options.movement_share > _NOISE * finest else "unmoved"
        if curvature is None:
            unit = _sums_of([(weight, None)]).size
        else:
            octaves = (means.get(curvature.kind, curvature.level) - curvature.level) / 4
            unit = size * min(_FARTHEST, max(1 / _FARTHEST, math.exp(octaves)))
        if not _USUAL[0] < unit < _USUAL[1]:
            # of any step, where it is not finite: the codec refuses the tensor, and says why
            return "size" if bool(torch.isfinite(weight).all()) else WeightStep(step=1.0)
        noise, kept = np.maximum(share * moved, _NOISE * finest), self._kept(spec)
        if kept is not None:
            noise[kept] = np.inf
        return WeightStep(
            step=_WIDEST_STEP * scale / _finer(spec) * unit,
            curvature=None if curvature is None else curvature.tensor,
            noise=noise,
            kept=kept,
        )

    def _scale_of(self, spec: TensorSpec) -> float:
        """Return the scale of a weight's noise: mild where nothing but averages is measured."""
        if self._save_context.averages_only and spec.tag.role is not Role.AVERAGE:
            return min(self._scale, self._options.weight_scale or _UNSEEN_SCALE)
        return self._scale

    def _moved(self, spec: TensorSpec, weight: torch.Tensor) -> Float64s:
        """Return how far training has moved each row; where nothing is known of that, as if by a small share of its size."""
        rows = known_movement(self._save_context, spec)
        if rows is not None:
            return rows
        squares = weight.detach().reshape(matrix_shape(spec.shape)).float().square().mean(dim=1)
        sizes: Float64s = squares.double().sqrt().numpy()
        return _UNKNOWN_MOVEMENT * sizes

    def _kept(self, spec: TensorSpec) -> Bools | None:
        """(rows,): those that keep the values of the previous checkpoint, since training has not moved them.

        Even through 32 checkpoints they move by half of what the tensor moves between two of them at most.
        """
        moved = known_movement(self._save_context, spec)
        reference = (self._save_context.reference or {}).get(spec.name)
        if moved is None or reference is None or reference.codec != TrellisWeightCodec.id:
            return None
        if self._save_context.is_anchor:  # they may have moved before the previous checkpoint
            return None
        return np.asarray(moved <= _least_movement(moved))

    def _curvatures(self, state: TrainingState, specs: Sequence[TensorSpec]) -> dict[str, Curvature | None]:
        moments: dict[str, list[TensorSpec]] = {}
        for spec in state.specs.values():
            if spec.tag.parameter is not None and spec.tag.role in _CURVED:
                moments.setdefault(spec.tag.parameter, []).append(spec)
        return {
            spec.name: self._curvature(state, spec, moments.get(spec.tag.parameter or "", ()))
            for spec in specs
        }

    def _curvature(
        self, state: TrainingState, weight: TensorSpec, moments: Sequence[TensorSpec]
    ) -> Curvature | None:
        siblings: dict[Role, torch.Tensor] = {}
        for spec in moments:
            if spec.shape == weight.shape:
                siblings.setdefault(spec.tag.role, state.tensors[spec.name])
        gradient = (self._save_context.gradients or {}).get(weight.tag.parameter or weight.name)
        for role in (Role.EXP_AVG_SQ, Role.SQUARES):
            if role in siblings:
                return _curvature_of("second moment", siblings[role])
        if Role.EXP_AVG in siblings:
            return _curvature_of("momentum", siblings[Role.EXP_AVG].float().square())
        if gradient is not None and tuple(gradient.shape) == weight.shape:
            return _curvature_of("gradient", gradient.float().square())
        return None


def _curvature_of(kind: str, tensor: torch.Tensor) -> Curvature | None:
    """Return the curvature from a tensor of squares; None if it is not finite, negative or all zeros.

    Args:
        kind: see `Curvature`.
        tensor: not negative, on the host.
    """
    if tensor.is_complex() or tensor.numel() == 0:
        return None
    least, most = torch.aminmax(tensor)
    if not (bool(least >= 0) and bool(most > 0) and bool(torch.isfinite(most))):  # NaN is neither
        return None
    # in one thread, so that step sizes do not depend on the number of threads
    mean = float(widened(tensor).mean(dtype=np.float64))
    return Curvature(kind, tensor, math.log(max(mean, _LEAST)))


def _sums_of(found: Sequence[tuple[torch.Tensor, Curvature | None]]) -> WeightSums:
    """Of weights with their curvatures, those alone whose squares are finite in sum."""
    from shrinkpoint.quantize import matrix_kernels  # numba

    squares, elements = 0.0, 0
    levels: dict[str, tuple[float, int]] = {}
    for tensor, curvature in found:
        own = float(matrix_kernels.square_sum(widened(tensor)))
        if math.isfinite(own):
            squares, elements = squares + own, elements + tensor.numel()
        if curvature is not None:
            total, before = levels.get(curvature.kind, (0.0, 0))
            levels[curvature.kind] = total + tensor.numel() * curvature.level, before + tensor.numel()
    return WeightSums(squares=squares, count=elements, levels=levels)


def known_movement(save_context: SaveContext, spec: TensorSpec) -> Float64s | None:
    """(rows,): how far training has moved each, where it was measured and is a number in all rows."""
    rows = save_context.movement.rows.get(spec.name) if save_context.movement is not None else None
    return rows if rows is not None and bool(np.isfinite(rows).all()) else None


def _least_movement(moved: Float64s) -> float:
    """Of rows that count as moved."""
    return _UNMOVED * math.sqrt(float(np.square(moved).mean()))


def _finer(spec: TensorSpec) -> int:
    few = len(spec.shape) < 2 or spec.tag.layer_type is LayerType.NORM or spec.numel < _FEW
    return _FINER if few else 1
