"""State of optimizers to a share of each element: levels of the logarithm of its size, with subtractive dither.

What divides an update, or scales it, element by element (Adagrad's sum, RMSprop's and Adadelta's mean of squares, Adamax's
largest gradient, amsgrad's maximum, Rprop's step sizes) must be restored to a share of itself, be it large or small: an element that
is restored too small makes its weight jump. A row times a column (`shrinkpoint.schemes.auto.second_moments`) does not do that; it
is enough where the first moment decides how long updates are, and where errors are soon forgotten. Adagrad's sum
and amsgrad's maximum forget nothing.

The logarithm of an element is rounded to a multiple of a step, moved by a dither of its own (L. Schuchman, "Dither signals and
their effect on quantization noise", 1964): its error does not depend on it, so that a sum that hardly grows is not rounded back to
what it was at every restore. A run's checkpoints share the dither until the training continues from a restore of one of them, so that what has
hardly changed since the last one costs next to nothing.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch

from shrinkpoint.arrays import Bools, Float32s, Int16s, Int32s, UInt8s
from shrinkpoint.entropy.contexts.coder import decode_plane, encode_plane
from shrinkpoint.entropy.static.bytes import decode_bytes, encode_bytes
from shrinkpoint.entropy.symbols import count_symbols
from shrinkpoint.errors import ConfigError, FormatError
from shrinkpoint.quantize.dither import SEEDS, dither
from shrinkpoint.schemes.auto.factors import EMPTY, Factors, matrix_shape
from shrinkpoint.schemes.auto.moment_units import check_dtype, emitted, fp32_values
from shrinkpoint.schemes.base import Coded, Context, EncodedTensor, Planes, ReferenceState, Staged
from shrinkpoint.schemes.codec_io import check_sections, emit, integer, section
from shrinkpoint.state.training import TensorSpec
from shrinkpoint.state.tree import JSON

__all__ = ["LogLevelsCodec"]

PER_OCTAVE = 16
# 2 ** (k / 16), written out: a library's power function may differ by a rounding from one machine to another
_SIXTEENTHS = np.array(
    [
        *(1, 1.04427373, 1.09050775, 1.13878858, 1.18920708, 1.24185777, 1.29683959, 1.35425556),
        *(1.41421354, 1.47682619, 1.54221082, 1.61049032, 1.68179286, 1.75625217, 1.83400810, 1.91520655),
    ],
    np.float32,
)
_LOW, _HIGH = -126 * PER_OCTAVE, 128 * PER_OCTAVE - 1  # of normal numbers
_NONE = np.int16(-(2**15))  # the exponent of zero
_WIDEST = 2 * PER_OCTAVE
_OTHER = 0x5BD1E995  # another seed, for what readers need not know
_SYMBOLS = 255  # of elements that are not zero


@dataclass(frozen=True, kw_only=True)
class LogLevelsCodec:
    """Sizes as ``2 ** (k / 16)``, and signs where there are any.

    Guarantees: zeros alone are restored as zeros, signs are kept, and no element is restored farther from itself than a factor of
    ``2 ** ((step + 1) / 32)``, and 2 % with the widest step, if `divides`; but what is more than 254 steps smaller than another, or subnormal, may be restored larger.

    Raises:
        ConfigError: an option is out of its range.
    """

    id: ClassVar[str] = "log-levels"
    needs: ClassVar[tuple[str, ...]] = ()

    step: int = PER_OCTAVE // 2
    """Distance of two levels, in sixteenths of an octave."""
    seed: int | None = 0
    """Of the dither; None takes the one of the checkpoint before."""
    divides: bool = False
    """Whether updates are divided by its root. Then the mean of ``1 / v`` is right, and updates are as long as they would have been;
    else that of ``log v`` is."""
    alone: bool = False
    """Whether what is restored may not depend on the checkpoint before, which then only makes it smaller."""

    def __post_init__(self) -> None:
        if type(self.step) is not int or not 1 <= self.step <= _WIDEST:
            raise ConfigError(f"step={self.step!r} must be an integer from 1 to {_WIDEST}")
        if self.seed is not None and not (type(self.seed) is int and 0 <= self.seed < SEEDS):
            raise ConfigError(f"seed={self.seed!r} must be an integer from 0 to {SEEDS - 1}, or None")

    def encode(self, tensor: torch.Tensor, spec: TensorSpec, context: Context) -> Coded:
        """See `TensorCodec.encode`; what is not finite is refused."""
        return self.stage(tensor, spec, context).coded(context.threads)

    def stage(self, tensor: torch.Tensor, spec: TensorSpec, context: Context) -> Staged:
        """See `Stages.stage`; refuses what `encode` refuses."""
        values = fp32_values(tensor, spec)
        levels, negative = self._levels(values, context), _negative(values)
        before = _exponents_before(context.reference, spec)
        shift = 0 if before is None else _shift(levels.exponents, before)
        alone = _Prediction.by_factors(values, spec)
        choices = [(alone, levels.residuals(alone.exponents, spec))]
        if before is not None:
            moved = _Prediction(_moved(before, shift), None)
            by_moved = levels.residuals(moved.exponents, spec)
            if not self.alone or (not _clips(choices[0][1], levels) and not _clips(by_moved, levels)):
                choices.append((moved, by_moved))
        chosen, residuals = min(choices, key=lambda choice: choice[1].cost)
        params: dict[str, JSON] = {"step": self.step, "seed": levels.seed, "lowest": residuals.lowest}
        params |= {"count": residuals.count, "signed": negative is not None}
        if chosen.factors is None:
            params["shift"] = shift
        exponents = residuals.exponents(levels)
        value = emitted(_sized(exponents, negative), spec, nonzero=values)

        def coded(threads: int) -> Coded:
            sections = {"levels": residuals.encode(spec, threads)}
            if chosen.factors is not None:
                sections["factors"] = chosen.factors.encode(threads)
            if negative is not None:
                sections["signs"] = encode_bytes(np.packbits(negative), 1, threads=threads)
            encoded = EncodedTensor(self.id, params, sections, chosen.factors is None)
            return Coded(encoded, {"exponent": exponents}, value)

        return Staged(value, coded)

    def _levels(self, values: Float32s, context: Context) -> "_Levels":
        seed = self.seed
        if seed is None:
            known = context.reference.params.get("seed") if context.reference is not None else None
            seed = known if isinstance(known, int) else 0
        return _Levels.of(values, self.step, seed, _shortfall(self.step) if self.divides else 0.0)

    def rebase(
        self,
        encoded: EncodedTensor,
        reference: ReferenceState,
        spec: TensorSpec,
        sibling_planes: Mapping[str, ReferenceState],
    ) -> EncodedTensor | None:
        """See `Rebasable.rebase`."""
        exponents = _exponents_before(reference, spec)
        if exponents is None:
            return None
        step, seed = _read_step(encoded, spec)
        levels = _Levels.known(exponents, step, seed)
        alone = _Prediction.by_factors(_sized(exponents, None), spec)
        residuals = levels.residuals(alone.exponents, spec)
        if alone.factors is None or not np.array_equal(residuals.exponents(levels), exponents):
            return None  # clipped elements cannot be recovered from here
        params = {name: value for name, value in encoded.params.items() if name != "shift"}
        params |= {"lowest": residuals.lowest, "count": residuals.count}
        sections = {
            **encoded.sections,
            "levels": residuals.encode(spec, 1),
            "factors": alone.factors.encode(),
        }
        return EncodedTensor(self.id, params, sections)

    def decode(self, encoded: EncodedTensor, spec: TensorSpec, context: Context) -> Planes:
        """See `TensorCodec.decode`."""
        check_dtype(spec)
        step, seed = _read_step(encoded, spec)
        signs = ("signs",) if _is_signed(encoded, spec) else ()
        if encoded.uses_reference:
            check_sections(encoded, spec, "levels", *signs)
            before = _exponents_before(context.reference, spec)
            if before is None:
                raise FormatError(f"{spec.name}: its reference plane is missing")
            predicted = _moved(before, integer(encoded.params, spec, "shift", _LOW - _HIGH, _HIGH - _LOW))
        else:
            check_sections(encoded, spec, "levels", "factors", *signs)
            predicted = _predicted(Factors.read(encoded, spec, context.threads))
        count = integer(encoded.params, spec, "count", 0, _SYMBOLS)
        lowest = integer(encoded.params, spec, "lowest", -(2**15), 2**15)
        symbols = decode_plane(
            section(encoded, spec, "levels"),
            spec.numel,
            count + 1,
            columns=matrix_shape(spec.shape)[1],
            threads=context.threads,
        )
        offsets = _offsets(seed, spec.numel, step)
        levels = _rounded(predicted, offsets, step) + symbols.astype(np.int32) + (lowest - 1)
        return {"exponent": _exponents(levels, offsets, step, symbols == 0)}

    def reconstruct(
        self, encoded: EncodedTensor, planes: Planes, spec: TensorSpec, context: Context
    ) -> torch.Tensor:
        """See `TensorCodec.reconstruct`."""
        negative = None
        if _is_signed(encoded, spec):
            size = -(-spec.numel // 8)
            packed = decode_bytes(section(encoded, spec, "signs"), size, 1, threads=context.threads)
            negative = np.unpackbits(packed, count=spec.numel).astype(np.bool_)
        return emit(_sized(np.asarray(planes["exponent"], np.int16), negative), spec)


@dataclass(frozen=True)
class _Levels:
    """Elements as levels, of which level l stands for ``l * step + offset`` sixteenths of an octave."""

    levels: Int32s
    offsets: Int32s
    step: int
    seed: int
    zeros: Bools

    @classmethod
    def of(cls, values: Float32s, step: int, seed: int, larger: float) -> "_Levels":
        zeros, offsets = values == 0, _offsets(seed, values.size, step)
        with np.errstate(divide="ignore"):
            octaves = np.log2(np.abs(values).astype(np.float64))
        octaves[zeros] = 0
        # offsets are whole: what was restored before lies on whole exponents, and would be moved by a half on average
        exact = octaves * PER_OCTAVE + dither(seed ^ _OTHER, values.size) + larger
        levels = np.rint((exact - offsets) / step).astype(np.int32)
        return cls(_within(levels, offsets, step), offsets, step, seed, zeros)

    @classmethod
    def known(cls, exponents: Int16s, step: int, seed: int) -> "_Levels":
        """What such exponents were made of, but for those that were brought within the range of fp32."""
        zeros, offsets = exponents == _NONE, _offsets(seed, exponents.size, step)
        levels = np.rint((exponents.astype(np.int32) - offsets) / step).astype(np.int32)
        levels[zeros] = 0
        return cls(levels, offsets, step, seed, zeros)

    @property
    def exponents(self) -> Int16s:
        return _exponents(self.levels, self.offsets, self.step, self.zeros)

    def residuals(self, predicted: Int32s, spec: TensorSpec) -> "_Residuals":
        """How far they lie from where they are predicted, in steps; the smallest are brought within reach."""
        rounded = _rounded(predicted, self.offsets, self.step)
        away = self.levels - rounded
        used = away[~self.zeros]
        if not used.size:
            return _Residuals(np.zeros(away.size, np.uint8), rounded, 1, 0)
        highest = int(used.max())
        lowest = max(int(used.min()), highest - _SYMBOLS + 1)
        symbols = np.maximum(away, lowest) - (lowest - 1)
        symbols[self.zeros] = 0
        return _Residuals(symbols.astype(np.uint8), rounded, lowest, highest - lowest + 1)


@dataclass(frozen=True)
class _Residuals:
    symbols: UInt8s
    """0 for zeros, else ``residual - lowest + 1``."""
    rounded: Int32s
    lowest: int
    count: int

    @property
    def cost(self) -> float:
        """Bytes, without any context."""
        counts = count_symbols(self.symbols, None, 256, 1)[0]
        counts = counts[counts > 0]
        return float(-(counts * np.log2(counts / self.symbols.size)).sum() / 8)

    def exponents(self, levels: _Levels) -> Int16s:
        """As a reader gets them."""
        reached = self.rounded + self.symbols.astype(np.int32) + (self.lowest - 1)
        return _exponents(reached, levels.offsets, levels.step, levels.zeros)

    def encode(self, spec: TensorSpec, threads: int) -> bytes:
        columns = matrix_shape(spec.shape)[1]
        return encode_plane(self.symbols, self.count + 1, columns=columns, threads=threads)


@dataclass(frozen=True)
class _Prediction:
    exponents: Int32s
    factors: Factors | None
    """What it is made of; None where that is the checkpoint before."""

    @classmethod
    def by_factors(cls, values: Float32s, spec: TensorSpec) -> "_Prediction":
        factors = Factors.of_second_moment(np.abs(values).reshape(matrix_shape(spec.shape)))
        return cls(_predicted(factors), factors)


def _clips(residuals: _Residuals, levels: _Levels) -> bool:
    """Whether some elements were too far from their predictions to be restored as they are."""
    return not np.array_equal(residuals.exponents(levels), levels.exponents)


def _predicted(factors: Factors) -> Int32s:
    """A row's exponent and a column's, in sixteenths; 0 for those of zeros."""
    sides = (np.where(side == EMPTY, 0, side.astype(np.int32)) for side in (factors.rows, factors.columns))
    rows, columns = sides
    exponents: Int32s = (PER_OCTAVE // 4 * (rows[:, None] + columns[None])).reshape(-1)
    return exponents


def _moved(before: Int16s, shift: int) -> Int32s:
    """Exponents of the checkpoint before, by so many sixteenths farther; of what was zero, the mean of the others."""
    wide, zeros = before.astype(np.int32), before == _NONE
    others = wide[~zeros]
    wide[zeros] = int(others.sum(dtype=np.int64)) // others.size if others.size else 0
    return wide + np.int32(shift)


def _shift(exponents: Int16s, before: Int16s) -> int:
    both = (exponents != _NONE) & (before != _NONE)
    if not both.any():
        return 0
    return round(float((exponents[both].astype(np.int32) - before[both]).mean()))


def _shortfall(step: int) -> float:
    """By how many sixteenths the mean of ``2 ** -error`` is above 1, errors being uniform over a step."""
    half = step / PER_OCTAVE * math.log(2) / 2
    return PER_OCTAVE * math.log2(math.sinh(half) / half)


def _rounded(predicted: Int32s, offsets: Int32s, step: int) -> Int32s:
    rounded: Int32s = (predicted - offsets + step // 2) // step
    return rounded


def _within(levels: Int32s, offsets: Int32s, step: int) -> Int32s:
    """Levels whose exponents are those of normal numbers."""
    return np.clip(levels, -((offsets - _LOW) // step), (_HIGH - offsets) // step).astype(np.int32)


def _exponents(levels: Int32s, offsets: Int32s, step: int, zeros: Bools) -> Int16s:
    # numbers of a hostile file do not wrap: levels are below 2 ** 18, and a step is 32 at most
    exponents = np.clip(levels * np.int32(step) + offsets, _LOW, _HIGH).astype(np.int16)
    exponents[zeros] = _NONE
    return exponents


def _offsets(seed: int, count: int, step: int) -> Int32s:
    """The dither of each element, 0 .. step - 1: every number on the way is exact in fp32."""
    scaled = (dither(seed, count) + np.float32(0.5)) * np.float32(step)
    offsets: Int32s = np.floor(scaled).astype(np.int32)
    return offsets


def _sized(exponents: Int16s, negative: Bools | None) -> Float32s:
    octaves, rest = np.divmod(exponents.astype(np.int32), PER_OCTAVE)
    values: Float32s = np.ldexp(_SIXTEENTHS[rest], np.clip(octaves, -126, 127)).astype(np.float32)
    values[exponents == _NONE] = 0
    if negative is not None:
        np.negative(values, out=values, where=negative)
    return values


def _negative(values: Float32s) -> Bools | None:
    negative: Bools = values < 0
    return negative if bool(negative.any()) else None


def _exponents_before(reference: ReferenceState | None, spec: TensorSpec) -> Int16s | None:
    plane: npt.NDArray[Any] | None = reference.planes.get("exponent") if reference is not None else None
    right = plane is not None and plane.size == spec.numel and plane.dtype == np.int16
    return np.asarray(plane, np.int16) if right else None


def _read_step(encoded: EncodedTensor, spec: TensorSpec) -> tuple[int, int]:
    return (
        integer(encoded.params, spec, "step", 1, _WIDEST),
        integer(encoded.params, spec, "seed", 0, SEEDS - 1),
    )


def _is_signed(encoded: EncodedTensor, spec: TensorSpec) -> bool:
    signed = encoded.params.get("signed")
    if type(signed) is not bool:
        raise FormatError(f"{spec.name}: 'signed' must be true or false, not {signed!r}")
    return signed
