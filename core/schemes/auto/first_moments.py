"""First moments rounded to levels around zero, restored as long as they were.

A first moment lives for some ten or hundred steps. What counts is how much of it is kept, that updates after a restore are
no longer than they would have been, and that it is never farther from the truth than zeros would be. Dither, which the
weights have, would buy an unbiased mean at the price of errors of several times the moment itself.

So an element becomes the nearest multiple of a step size, and each level stands for the mean of its elements (the Lloyd-Max
condition; S. Lloyd, "Least squares quantization in PCM", 1982). These means are shorter than the moment, by
``sqrt(1 - e^2)`` where their relative error is e: all of them are multiplied by one number that makes up for it. Then
``1 - sqrt(1 - e^2)`` of the moment is lost, half of what is lost without that number, and the relative error is
``sqrt(2 - 2 sqrt(1 - e^2))``, which is at most 1 up to e = 0.866; beyond it the number is 2 and no more.

Adam divides by the root of a second moment that is not restored exactly either. What counts is the quotient: where that root
comes back too large, the first moment is made as much larger before it is put on levels, and so is the update what it would have been.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch

from shrinkpoint.arrays import Float32s, Float64s, UInt8s
from shrinkpoint.entropy.lanes.coder import decode_matrix, encode_matrix
from shrinkpoint.entropy.lanes.trellis import row_width
from shrinkpoint.errors import CannotRepresentError, FormatError
from shrinkpoint.runtime.threads import in_parts, map_in_parts
from shrinkpoint.schemes.auto.factors import Factors
from shrinkpoint.schemes.base import Context, EncodedTensor, Planes, Staged
from shrinkpoint.schemes.codec_io import (
    CODED_DTYPES,
    as_float32,
    check_moment,
    check_sections,
    emit,
    emitted,
    finite,
    integer,
    matrix_shape,
    number,
    second_root,
    section,
)
from shrinkpoint.state.training import Role, TensorSpec
from shrinkpoint.state.tree import JSON

_PARTS = 256  # of a step, in which a centroid's distance from its level is stored
_CENTROIDS = 16  # levels from which on the middle of the cell does
_PER_OCTAVE = 4
# Step sizes tried, in quarter octaves of a unit. Where a loss falls by orders of magnitude, second moments remember gradients that were
# larger by as much, and first moments are a thousandth of their unit.
_NARROWEST, _WIDEST = -40 * _PER_OCTAVE, 3 * _PER_OCTAVE
_CLIPPING = 6 * _PER_OCTAVE  # how many of those are tried that clip the largest values
_CLIP_STEPS = 126
_LONGEST = 2.0  # by what levels are lengthened at most: from there on, they would be farther from the truth than zeros
_NOTHING = np.zeros(0, np.float32)
_PLANE = "levels"  # the section of what an element is restored from
_STRANGE = 31.0  # roots of a second moment that a first one of the same gradient is large at most: it hardly exceeds ten of the
# true one, and twice that of a factored one
_STRANGERS = 1e-3  # share of elements beyond that shows the two not to be moments of one gradient
_SAMPLE = 1 << 16  # elements by which a step size is chosen


@dataclass(frozen=True, kw_only=True)
class _CentroidCodec(ABC):
    """Levels of a moment in units of each element's own, which both sides know, and their centroids."""

    id: ClassVar[str]
    needs: ClassVar[tuple[str, ...]] = ()

    step: float | None = None
    """Distance of two levels in units; None takes the widest that loses no more than `loss`."""
    loss: float = 0.1
    """Greatest share of the moment to be lost: 1 less its product with the restored one over its square, in units."""
    linear: bool = False
    """Whether updates are as long as the moment itself is, so that its length and what is lost of it are those of the values;
    otherwise those of the values in units."""

    @abstractmethod
    def _measure(
        self, values: Float32s, spec: TensorSpec, context: Context
    ) -> tuple[Float32s, dict[str, bytes]]:
        """Return each element's unit, and what has to be stored for it; refuses what it does not suit."""

    @abstractmethod
    def _units(self, encoded: EncodedTensor, spec: TensorSpec, context: Context) -> Float32s:
        """Return the units again, from what is stored.

        Raises:
            FormatError: it is malformed.
        """

    def stage(self, tensor: torch.Tensor, spec: TensorSpec, context: Context) -> Staged:
        """See `TensorCodec.stage`; refuses what has no unit, or is not finite."""
        quantized = self._quantize(tensor, spec, context)
        value = emitted(quantized.values(), spec)
        quantized = replace(quantized, units=_NOTHING)  # which coding does not need

        def emit() -> tuple[EncodedTensor, Planes]:
            levels = quantized.plane.astype(np.int16) - np.int16(quantized.radius)
            width = row_width(*matrix_shape(spec.shape))
            payload = encode_matrix(levels, None, width=width, predictable=True)
            params: dict[str, JSON] = {"step": float(quantized.step), "radius": quantized.radius}
            params["centroids"] = list(quantized.centroids)
            return EncodedTensor(self.id, params, {_PLANE: payload, **quantized.sections}), {}

        return Staged(value, emit)

    def _quantize(self, tensor: torch.Tensor, spec: TensorSpec, context: Context) -> "_Quantized":
        from shrinkpoint.schemes.auto import moment_kernels  # numba

        values = as_float32(tensor, spec, CODED_DTYPES)
        units, sections = self._measure(values, spec, context)
        values = self._wanted(values, units, spec)
        step = np.float32(
            self.step if self.step is not None else _widest(values, units, self.loss, linear=self.linear)
        )
        plane = np.empty(values.size, np.uint8)

        def level(part: slice) -> tuple[int, float, Float64s]:
            found, given = np.zeros((2, 128)), (values[part], units[part])
            largest = moment_kernels.levels(*given, step, _CLIP_STEPS, self.linear, plane[part], *found)
            return largest, moment_kernels.square_sum(*given, self.linear), found

        largest, squares, found = zip(*map_in_parts(level, values.size), strict=True)
        radius, true = max(largest), float(sum(squares))
        sums, counts = sum(found, np.zeros((2, 128)))
        plane -= np.uint8(_CLIP_STEPS - radius)
        centroids = _centroids(sums, counts, radius)
        longer = _longer(true, counts, step, _sizes(centroids, radius))
        return _Quantized(plane, radius, step * np.float32(longer), centroids, units, sections)

    def _wanted(self, values: Float32s, units: Float32s, spec: TensorSpec) -> Float32s:
        """Return what a reader should have, but for the levels."""
        return values

    def decode(self, encoded: EncodedTensor, spec: TensorSpec, context: Context) -> Planes:
        """See `TensorCodec.decode`; nothing of it helps to decode the next checkpoint."""
        return {}

    def reconstruct(
        self, encoded: EncodedTensor, planes: Planes, spec: TensorSpec, context: Context
    ) -> torch.Tensor:
        """See `TensorCodec.reconstruct`."""
        check_moment(spec)
        step, radius = (
            number(encoded.params, spec, "step"),
            integer(encoded.params, spec, "radius", 0, _CLIP_STEPS),
        )
        if not 0 < step < 1e30:
            raise FormatError(f"{spec.name}: the step {step} is not of ordinary size")
        centroids = _read_centroids(encoded.params.get("centroids"), radius, spec)
        units = self._units(encoded, spec, context)
        levels = decode_matrix(
            section(encoded, spec, _PLANE), spec.numel, None, width=row_width(*matrix_shape(spec.shape))
        )
        plane = np.empty(levels.size, np.uint8)

        def put(part: slice) -> bool:
            some = levels[part] + np.int16(radius)
            plane[part] = some
            return bool(some.min() >= 0 and some.max() <= 2 * radius)

        if not all(map_in_parts(put, levels.size)):
            raise FormatError(f"{spec.name}: a level lies beyond {radius}")
        return emit(_Quantized(plane, radius, step, centroids, units, {}).values(), spec, own=True)


@dataclass(frozen=True, kw_only=True)
class CentroidFirstMomentCodec(_CentroidCodec):
    """Levels of ``m / sqrt(v)``, v being Adam's second moment as restored.

    Guarantees: in units of v as restored, m is restored no farther from what is wanted than zeros are, and no longer than that; it is
    zero where v is restored as zero. Wanted is m itself or, where v as training has it is given, what makes the true update.
    """

    id: ClassVar[str] = "centroid-first-moment"
    needs: ClassVar[tuple[str, ...]] = (Role.EXP_AVG_SQ.value,)

    second_moment: torch.Tensor | None = None
    """v as training has it, of the same shape; only encoding needs it."""
    epsilon: float = 1e-8
    """What the optimizer adds to the root of v: where that is less, an update hardly depends on it."""

    def _measure(
        self, values: Float32s, spec: TensorSpec, context: Context
    ) -> tuple[Float32s, dict[str, bytes]]:
        """Refuses moments without a second one, or that are not moments of one gradient."""
        from shrinkpoint.schemes.auto import moment_kernels  # numba

        roots = second_root(spec, context)
        if roots is None:
            raise CannotRepresentError(f"{spec.name} has no second moment to be measured by: stored exactly")

        strangers = sum(in_parts(moment_kernels.count_beyond, values, roots, np.float32(_STRANGE)))
        if strangers > _STRANGERS * values.size:
            raise CannotRepresentError(f"{spec.name} is too large for its second moment: stored exactly")
        return roots, {}

    def _units(self, encoded: EncodedTensor, spec: TensorSpec, context: Context) -> Float32s:
        check_sections(encoded, spec, _PLANE)
        roots = second_root(spec, context)
        if roots is None:
            raise FormatError(f"{spec.name}: the second moment that it is measured by is missing")
        return roots

    def _wanted(self, values: Float32s, units: Float32s, spec: TensorSpec) -> Float32s:
        """Such that ``m' / (sqrt(v') + epsilon)``, with v' as restored, is ``m / (sqrt(v) + epsilon)``."""
        from shrinkpoint.schemes.auto import moment_kernels  # numba

        second = self.second_moment
        if second is None or tuple(second.shape) != spec.shape:
            return values
        wanted, true = np.empty_like(values), as_float32(second, spec, CODED_DTYPES)
        in_parts(moment_kernels.in_other_units, values, true, units, self.epsilon, _STRANGE, wanted)
        return wanted


@dataclass(frozen=True, kw_only=True)
class CentroidMomentumCodec(_CentroidCodec):
    """Levels of a momentum in units of its own root mean square by row and column, for optimizers without a second moment.

    Guarantees as `CentroidFirstMomentCodec`; with `linear`, which is for optimizers whose update is a multiple of
    the momentum, the guarantees hold for the momentum itself.
    """

    id: ClassVar[str] = "centroid-momentum"

    def _measure(
        self, values: Float32s, spec: TensorSpec, context: Context
    ) -> tuple[Float32s, dict[str, bytes]]:
        """Refuses what reaches the end of fp32's range."""
        factors = Factors.of_roots(values.reshape(matrix_shape(spec.shape)))
        units = factors.product()
        if not finite(units):
            raise CannotRepresentError(f"{spec.name} reaches the end of fp32's range: stored exactly")
        return units, {"factors": factors.encode()}

    def _units(self, encoded: EncodedTensor, spec: TensorSpec, context: Context) -> Float32s:
        check_sections(encoded, spec, _PLANE, "factors")
        return Factors.read(encoded, spec).product()


@dataclass(frozen=True)
class _Quantized:
    plane: UInt8s
    """Levels, plus `radius`."""
    radius: int
    step: np.float32
    """What a level stands for but for its centroid, in units: the step size, lengthened."""
    centroids: tuple[int, ...]
    units: Float32s
    sections: dict[str, bytes]

    def values(self) -> Float32s:
        """Return what a reader will have, before it is rounded to the tensor's dtype: a product of two fp32 numbers for each element."""
        from shrinkpoint.schemes.auto import moment_kernels  # numba

        sizes = self.step * _sizes(self.centroids, self.radius)
        values = np.empty(self.plane.size, np.float32)
        in_parts(moment_kernels.unlevel, self.plane, self.units, sizes, self.radius, values)
        return values


def _sizes(centroids: tuple[int, ...], radius: int) -> Float32s:
    """fp32 (radius + 1,): what levels stand for, in steps; whole numbers and parts of 256, all exact."""
    sizes = np.arange(radius + 1, dtype=np.float32)
    sizes[1 : 1 + len(centroids)] += np.array(centroids, np.float32) / np.float32(_PARTS)
    return sizes


def _longer(true: float, counts: Float64s, step: np.float32, sizes: Float32s) -> float:
    """By what the restored moment must be multiplied to be as long as the true one, whose square is `true`; at most 2."""
    found = float((counts[: sizes.size] * np.square(sizes.astype(np.float64))).sum()) * float(step) ** 2
    return min(_LONGEST, math.sqrt(true / found)) if found > 0 and math.isfinite(true) else 1.0


def _centroids(sums: Float64s, counts: Float64s, radius: int) -> tuple[int, ...]:
    """Return how far the first levels' means lie from them, in 1/256 step; the first level's is not beyond it."""
    last = min(radius, _CENTROIDS)
    levels, sums, counts = np.arange(1.0, last + 1), sums[1 : last + 1], counts[1 : last + 1]
    away = np.divide(sums, counts, out=levels.copy(), where=counts > 0) - levels
    parts = np.clip(np.rint(away * _PARTS), -_PARTS // 2, _PARTS // 2 - 1)
    parts[:1] = np.minimum(parts[:1], 0)
    return tuple(int(part) for part in parts)


def _read_centroids(stored: JSON, radius: int, spec: TensorSpec) -> tuple[int, ...]:
    half, size = _PARTS // 2, min(radius, _CENTROIDS)
    parts = stored if isinstance(stored, list) and len(stored) == size else [None]
    if not all(type(part) is int and -half <= part < half for part in parts):
        raise FormatError(f"{spec.name}: 'centroids' must list {size} integers from {-half} to {half - 1}")
    return tuple(parts)


def _widest(values: Float32s, units: Float32s, loss: float, *, linear: bool) -> float:
    """Return the widest step size, in quarter octaves of a unit, that loses at most such a share; the one that loses least if none does.

    What is lost of the values themselves is mostly lost of their largest rows. Where that counts, no more of them in units may
    be lost either: so small rows keep as much as large ones.
    """
    # odd: it takes all columns of a matrix that has a power of two of them
    stride = values.size // _SAMPLE | 1
    used = units[::stride] > 0
    moment, unit = (each[::stride][used].astype(np.float64) for each in (values, units))
    sizes = np.abs(moment) / unit
    counted = [np.ones(sizes.size), *([np.square(unit)] if linear else [])]
    totals = [float((np.square(sizes) * weights).sum()) for weights in counted]
    if not all(0 < total < math.inf for total in totals):
        return 1.0

    def lost(size: int) -> float:
        step = _step_of(size)
        return max(_lost(sizes, each, total, step) for each, total in zip(counted, totals, strict=True))

    return _step_of(_widest_size(lost, math.log2(float(sizes.max()) / _CLIP_STEPS), loss))


def _widest_size(lost: Callable[[int], float], clipped: float, loss: float) -> int:
    """Return the number of the widest step size that loses at most `loss`; of that which loses least if none does.

    Args:
        lost: the share that a step size loses. It falls with the step size, until the largest values are beyond the last level;
            from there on it rises again.
        clipped: binary logarithm of the step size below which that begins.
        loss: the greatest share.
    """
    low = max(_NARROWEST, min(math.ceil(clipped * _PER_OCTAVE), _WIDEST))
    if (least := lost(low)) > loss:  # a few large values clipped may be less than all others rounded
        best = low
        for size in range(low - 1, low - 1 - _CLIPPING, -1):
            if (found := lost(size)) <= loss:
                return size
            if found < least:
                best, least = size, found
        return best
    high = _WIDEST + 1  # of which the first is good enough, and the last is not taken
    while high - low > 1:
        middle = (low + high) // 2
        if lost(middle) <= loss:
            low = middle
        else:
            high = middle
    return low


def _step_of(size: int) -> float:
    return float(2.0 ** (size / _PER_OCTAVE))


def _lost(sizes: Float64s, weights: Float64s, total: float, step: float) -> float:
    """Return the share that is lost: levels' means explain a part of the moment's square, and are lengthened."""
    from shrinkpoint.schemes.auto import moment_kernels  # numba

    explained = float(
        moment_kernels.explained(sizes, weights, step, _CLIP_STEPS, np.empty((2, _CLIP_STEPS + 1)))
    )
    if explained <= 0:
        return 1.0
    return 1 - min(_LONGEST, math.sqrt(total / explained)) * explained / total
