"""The levels of `shrinkpoint.schemes.auto.log_levels`, their predictions and residuals, computed some elements at a time.

An element's level and its residual are 2 bytes each; numbers of 4 and 8 bytes are made for `CHUNK` elements only, so
that a large tensor takes little further memory.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shrinkpoint.arrays import Bools, Float32s, Int16s, Int32s, UInt8s
from shrinkpoint.quantize.dither import dither
from shrinkpoint.schemes.auto.factors import EMPTY, Factors
from shrinkpoint.schemes.codec_io import matrix_shape
from shrinkpoint.state.training import TensorSpec

__all__ = [
    "CHUNK",
    "HIGH",
    "LOW",
    "NONE",
    "PER_OCTAVE",
    "Levels",
    "Prediction",
    "offsets_in",
    "offsets_of",
    "parts_of",
    "reached",
    "shift_between",
    "values_of",
]

PER_OCTAVE = 16
CHUNK = 1 << 16
_SAMPLED = 4  # chunks by which predictions are compared
LOW, HIGH = -126 * PER_OCTAVE, 128 * PER_OCTAVE - 1
"""The exponents of normal numbers."""
NONE = np.int16(-(2**15))
"""The exponent of zero."""
# 2 ** (k / 16), written out: a library's power function may differ by a rounding from one machine to another
_SIXTEENTHS = np.array(
    [
        *(1, 1.04427373, 1.09050775, 1.13878858, 1.18920708, 1.24185777, 1.29683959, 1.35425556),
        *(1.41421354, 1.47682619, 1.54221082, 1.61049032, 1.68179286, 1.75625217, 1.83400810, 1.91520655),
    ],
    np.float32,
)
_OTHER = 0x5BD1E995  # another seed, for what readers need not know


def parts_of(count: int) -> Iterator[slice]:
    """Slices of so many elements, `CHUNK` each."""
    for start in range(0, count, CHUNK):
        yield slice(start, min(start + CHUNK, count))


def offsets_of(seed: int, count: int, step: int) -> UInt8s:
    """The dither of each element, 0 to ``step - 1``: every number on the way is exact in fp32."""
    offsets = np.empty(count, np.uint8)
    for part in parts_of(count):
        offsets[part] = offsets_in(seed, part, step)
    return offsets


def offsets_in(seed: int, part: slice, step: int) -> UInt8s:
    """The dither of some elements, as `offsets_of`."""
    scaled = (dither(seed, part.stop - part.start, first=part.start) + np.float32(0.5)) * np.float32(step)
    offsets: UInt8s = np.floor(scaled).astype(np.uint8)
    return offsets


@dataclass(frozen=True)
class Prediction:
    """The exponents that elements are expected to have: the product of factors, or the checkpoint before, moved."""

    factors: Factors | None
    before: Int16s | None = None
    shift: int = 0
    """What is added to those of `before`, in sixteenths of an octave."""
    middle: int = 0
    """Taken in the place of those of `before` that are zeros."""

    @classmethod
    def by_factors(cls, values: Float32s, spec: TensorSpec) -> "Prediction":
        """By the factors of the elements' magnitudes."""
        return cls(Factors.of_second_moment(np.abs(values).reshape(matrix_shape(spec.shape))))

    @classmethod
    def by_predecessor(cls, before: Int16s, shift: int) -> "Prediction":
        """By exponents of the checkpoint before; of what was zero, by the mean of the others."""
        total = count = 0
        for part in parts_of(before.size):
            others = before[part][before[part] != NONE]
            total, count = total + int(others.sum(dtype=np.int64)), count + others.size
        return cls(None, before, shift, total // count if count else 0)

    def of(self, part: slice) -> Int32s:
        """The exponents of some elements, in sixteenths of an octave."""
        if self.before is not None:
            wide = self.before[part].astype(np.int32)
            wide[self.before[part] == NONE] = self.middle
            return wide + np.int32(self.shift)
        assert self.factors is not None
        width = self.factors.columns.size
        first, last = part.start // width, -(-part.stop // width)
        start, stop = part.start - first * width, part.stop - first * width
        rows = _sixteenths(self.factors.rows[first:last])
        if width < CHUNK:
            columns = _sixteenths(self.factors.columns)
            found: Int32s = (rows[:, None] + columns[None]).reshape(-1)[start:stop]
            return found
        ends = [
            _sixteenths(self.factors.columns[max(start - row * width, 0) : stop - row * width]) + exponent
            for row, exponent in enumerate(rows)
        ]
        return np.concatenate(ends)


def _sixteenths(side: Int16s) -> Int32s:
    """A factor's quarter octaves in sixteenths; 0 for those of zeros."""
    quarters = np.where(side == EMPTY, np.int32(0), side.astype(np.int32))
    found: Int32s = quarters * np.int32(PER_OCTAVE // 4)
    return found


@dataclass(frozen=True)
class Levels:
    """Elements as levels, of which level l stands for ``l * step + offset`` sixteenths of an octave."""

    levels: Int16s
    offsets: UInt8s
    step: int
    seed: int
    zeros: Bools

    @classmethod
    def of(cls, values: Float32s, step: int, seed: int, *, keeps_mean_inverse: bool) -> "Levels":
        """The nearest ones.

        Args:
            values: flat, finite.
            step: distance of two levels, in sixteenths of an octave.
            seed: of the dither.
            keeps_mean_inverse: whether the mean of ``1 / v`` is to be right, instead of that of ``log v``.
        """
        offsets, zeros = offsets_of(seed, values.size, step), values == 0
        larger = _shortfall(step) if keeps_mean_inverse else 0.0
        levels = np.empty(values.size, np.int16)
        for part in parts_of(values.size):
            with np.errstate(divide="ignore"):
                octaves = np.log2(np.abs(values[part]).astype(np.float64))
            octaves[zeros[part]] = 0
            # offsets are whole: what was restored before lies on whole exponents, and would be moved by a half on average
            whole = dither(seed ^ _OTHER, octaves.size, first=part.start)
            exact = octaves * PER_OCTAVE + whole + larger
            nearest = np.rint((exact - offsets[part]) / step).astype(np.int32)
            levels[part] = _within(nearest, offsets[part], step)
        return cls(levels, offsets, step, seed, zeros)

    @classmethod
    def known(cls, exponents: Int16s, step: int, seed: int) -> "Levels":
        """What such exponents were made of, but for those that were brought within the range of fp32."""
        zeros, offsets = exponents == NONE, offsets_of(seed, exponents.size, step)
        levels = np.empty(exponents.size, np.int16)
        for part in parts_of(exponents.size):
            nearest = np.rint((exponents[part].astype(np.int32) - offsets[part]) / step)
            nearest[zeros[part]] = 0
            levels[part] = nearest
        return cls(levels, offsets, step, seed, zeros)

    @property
    def exponents(self) -> Int16s:
        """What they stand for."""
        found = np.empty(self.levels.size, np.int16)
        for part in parts_of(found.size):
            found[part] = self._exponents(self.levels[part].astype(np.int32), part)
        return found

    def _exponents(self, levels: Int32s, part: slice) -> Int16s:
        return _exponents(levels, self.offsets[part], self.step, self.zeros[part])

    def away(self, prediction: Prediction) -> Int16s:
        """How far they lie from where they are predicted, in steps; 0 for zeros."""
        found = np.empty(self.levels.size, np.int16)
        for part in parts_of(found.size):
            found[part] = self._away(prediction, part)
        return found

    def cost(self, prediction: Prediction) -> float:
        """Bits of a level that is predicted so, without any context, by a sample of them."""
        parts = list(parts_of(self.levels.size))
        sample = [self._away(prediction, part) for part in parts[:: -(-len(parts) // _SAMPLED)]]
        counts = np.bincount(np.concatenate(sample).view(np.uint16)) if sample else np.zeros(1, np.int64)
        counts = counts[counts > 0]
        return float(-(counts * np.log2(counts / counts.sum())).sum() / max(int(counts.sum()), 1))

    def _away(self, prediction: Prediction, part: slice) -> Int16s:
        away = self.levels[part] - _rounded(prediction.of(part), self.offsets[part], self.step)
        away[self.zeros[part]] = 0
        return away.astype(np.int16)


def reached(away: Int16s, prediction: Prediction, offsets: UInt8s, step: int, zeros: Bools | None) -> Int16s:
    """The exponents of coded elements.

    Args:
        away: as `Levels.away`.
        prediction: of the elements.
        offsets: as `offsets_of`.
        step: distance of two levels.
        zeros: which elements are zero; None for none.
    """
    found = np.empty(away.size, np.int16)
    for part in parts_of(away.size):
        levels = _rounded(prediction.of(part), offsets[part], step) + away[part].astype(np.int32)
        none = np.zeros(levels.size, np.bool_) if zeros is None else zeros[part]
        found[part] = _exponents(levels, offsets[part], step, none)
    return found


def shift_between(exponents: Int16s, before: Int16s) -> int:
    """By how many sixteenths elements have grown on average since the checkpoint before."""
    total = count = 0
    for part in parts_of(exponents.size):
        both = (exponents[part] != NONE) & (before[part] != NONE)
        moved = exponents[part][both].astype(np.int32) - before[part][both]
        total, count = total + int(moved.sum(dtype=np.int64)), count + moved.size
    return round(total / count) if count else 0


def values_of(exponents: Int16s, negative: Bools | None) -> Float32s:
    """The numbers that exponents stand for.

    Args:
        exponents: in sixteenths of an octave.
        negative: whose signs are negative; None where none is.
    """
    values = np.empty(exponents.size, np.float32)
    for part in parts_of(exponents.size):
        octaves, rest = np.divmod(exponents[part].astype(np.int32), PER_OCTAVE)
        values[part] = np.ldexp(_SIXTEENTHS[rest], np.clip(octaves, -126, 127))
        values[part][exponents[part] == NONE] = 0
    if negative is not None:
        np.negative(values, out=values, where=negative)
    return values


def _shortfall(step: int) -> float:
    """By how many sixteenths the mean of ``2 ** -error`` is above 1, errors being uniform over a step."""
    half = step / PER_OCTAVE * math.log(2) / 2
    return PER_OCTAVE * math.log2(math.sinh(half) / half)


def _rounded(predicted: Int32s, offsets: UInt8s, step: int) -> Int32s:
    rounded: Int32s = (predicted - offsets + step // 2) // step
    return rounded


def _within(levels: Int32s, offsets: UInt8s, step: int) -> Int32s:
    """Levels whose exponents are those of normal numbers."""
    wide = offsets.astype(np.int32)
    return np.clip(levels, -((wide - LOW) // step), (HIGH - wide) // step)


def _exponents(levels: Int32s, offsets: UInt8s, step: int, zeros: npt.NDArray[np.bool_]) -> Int16s:
    # numbers of a hostile file do not wrap: levels are below 2 ** 18, and a step is 32 at most
    exponents = np.clip(levels * np.int32(step) + offsets, LOW, HIGH).astype(np.int16)
    exponents[zeros] = NONE
    return exponents
