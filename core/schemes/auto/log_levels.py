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
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch

from shrinkpoint.arrays import Bools, Float32s, Int16s, Int32s
from shrinkpoint.entropy.lanes.coder import decode_matrix, encode_matrix
from shrinkpoint.entropy.lanes.trellis import row_width
from shrinkpoint.entropy.numbers import decode_numbers, encode_numbers
from shrinkpoint.errors import FormatError
from shrinkpoint.runtime.threads import FIRST, in_parts
from shrinkpoint.schemes.auto.factors import EMPTY, Factors
from shrinkpoint.schemes.base import Context, EncodedTensor, PackedPlanes, Planes, ReferenceState, Staged
from shrinkpoint.schemes.codec_io import (
    CODED_DTYPES,
    SEEDS,
    as_float32,
    check_moment,
    check_sections,
    emit,
    emitted,
    flag,
    integer,
    matrix_shape,
    section,
)
from shrinkpoint.state.training import TensorSpec
from shrinkpoint.state.tree import JSON

if TYPE_CHECKING:
    from shrinkpoint.schemes.auto.log_kernels import Prediction

_PER_OCTAVE = 16
_WIDEST = 2 * _PER_OCTAVE
_SHIFT = 254 * _PER_OCTAVE - 1  # between the greatest and the least normal number
_NONE = np.int16(-(2**15))  # the exponent of zero
_CHUNK, _SAMPLED = 1 << 16, 4  # elements by which predictions are compared
# 2 ** (k / 16), written out: a library's power function may differ by a rounding from one machine to another
_SIXTEENTHS = np.array(
    [
        *(1, 1.04427373, 1.09050775, 1.13878858, 1.18920708, 1.24185777, 1.29683959, 1.35425556),
        *(1.41421354, 1.47682619, 1.54221082, 1.61049032, 1.68179286, 1.75625217, 1.83400810, 1.91520655),
    ],
    np.float32,
)
_NO_BITS, _NO_EXPONENTS, _NO_FACTORS = np.zeros(0, np.bool_), np.zeros(0, np.int16), np.zeros(0, np.int32)


@dataclass(frozen=True, kw_only=True)
class LogLevelsCodec:
    """Sizes as ``2 ** (k / 16)``, and signs where there are any.

    Guarantees: zeros alone are restored as zeros, signs are kept, and no element is restored farther from itself than a factor of
    ``2 ** ((step + 1) / 32)``, and 2 % with the widest step, if `divides`; but what is subnormal may be restored larger.
    """

    id: ClassVar[str] = "log-levels"
    needs: ClassVar[tuple[str, ...]] = ()

    step: int = _PER_OCTAVE // 2
    """Distance of two levels, in sixteenths of an octave: 1 to 32."""
    seed: int | None = 0
    """Of the dither; None takes the one of the checkpoint before."""
    divides: bool = False
    """Whether updates are divided by its root. Then the mean of ``1 / v`` is right, and updates are as long as they would have been;
    else that of ``log v`` is."""

    def stage(self, tensor: torch.Tensor, spec: TensorSpec, context: Context) -> Staged:
        """See `TensorCodec.stage`; refuses what is not finite."""
        values = as_float32(tensor, spec, CODED_DTYPES)
        before, seed = _exponents_before(context.reference, spec), self.seed
        if seed is None:
            known = context.reference.params.get("seed") if context.reference is not None else None
            seed = known if isinstance(known, int) else 0
        exponents = _nearest(values, self.step, seed, _shortfall(self.step) if self.divides else 0.0)
        levels = _Levels(exponents, self.step, seed)
        negative = values < 0 if float(values.min()) < 0 else None
        alone = Factors.of_second_moment(np.abs(values).reshape(matrix_shape(spec.shape)))
        factors: Factors | None = alone
        prediction = _by_factors(alone)
        if before is not None:
            moved = _by_predecessor(before, _shift_between(exponents, before))
            if levels.cost(moved) < levels.cost(prediction):
                factors, prediction = None, moved
        params: dict[str, JSON] = {"step": self.step, "seed": seed, "signed": negative is not None}
        if factors is None:
            params["shift"] = prediction.shift
        away, zeros = levels.away(prediction), exponents == _NONE
        planes = levels.planes()
        value = emitted(_values_of(exponents, negative), spec, nonzero=values)
        del levels, exponents, prediction  # they take as much memory as the tensor

        def emit() -> tuple[EncodedTensor, Planes]:
            sections = _encoded(away, zeros, spec)
            if factors is not None:
                sections["factors"] = factors.encode()
            if negative is not None:
                sections["signs"] = encode_numbers(np.packbits(negative))
            return EncodedTensor(self.id, params, sections, factors is None), planes

        return Staged(value, emit)

    def rebase(
        self, encoded: EncodedTensor, reference: ReferenceState, spec: TensorSpec
    ) -> EncodedTensor | None:
        """See `Rebasable.rebase`."""
        exponents = _exponents_before(reference, spec)
        if exponents is None:
            return None
        levels = _Levels(exponents, *_read_step(encoded, spec))
        factors = Factors.of_second_moment(_values_of(exponents, None).reshape(matrix_shape(spec.shape)))
        try:
            away = levels.away(_by_factors(factors))
        except ValueError:
            return None  # those that were brought within fp32's range cannot be recovered from here
        params = {name: value for name, value in encoded.params.items() if name != "shift"}
        sections = {
            **encoded.sections,
            **_encoded(away, exponents == _NONE, spec),
            "factors": factors.encode(),
        }
        return EncodedTensor(self.id, params, sections)

    def decode(self, encoded: EncodedTensor, spec: TensorSpec, context: Context) -> Planes:
        """See `TensorCodec.decode`."""
        from shrinkpoint.schemes.auto import log_kernels  # numba

        check_moment(spec)
        step, seed = _read_step(encoded, spec)
        others = [name for name in ("zeros",) if name in encoded.sections]
        others += ["signs"] if flag(encoded.params, spec, "signed") else []
        if encoded.uses_reference:
            check_sections(encoded, spec, "levels", *others)
            before = _exponents_before(context.reference, spec)
            if before is None:
                raise FormatError(f"{spec.name}: its reference plane is missing")
            shift = integer(encoded.params, spec, "shift", -_SHIFT, _SHIFT)
            prediction = _by_predecessor(before, shift)
        else:
            check_sections(encoded, spec, "levels", "factors", *others)
            prediction = _by_factors(Factors.read(encoded, spec))
        away = decode_matrix(
            section(encoded, spec, "levels"), spec.numel, None, width=row_width(*matrix_shape(spec.shape))
        )
        zeros = _read_bits(encoded, spec, "zeros") if "zeros" in others else _NO_BITS
        exponents = np.empty(spec.numel, np.int16)
        in_parts(log_kernels.reach, away, zeros, prediction, step, seed, FIRST, exponents)
        return _Levels(exponents, step, seed).planes()

    def reconstruct(
        self, encoded: EncodedTensor, planes: Planes, spec: TensorSpec, context: Context
    ) -> torch.Tensor:
        """See `TensorCodec.reconstruct`."""
        negative = _read_bits(encoded, spec, "signs") if flag(encoded.params, spec, "signed") else None
        return emit(_values_of(np.asarray(planes["exponent"], np.int16), negative), spec, own=True)


@dataclass(frozen=True)
class _Levels:
    """Elements on levels, by their exponents (`shrinkpoint.schemes.auto.log_kernels`)."""

    exponents: Int16s
    step: int
    seed: int

    def away(self, prediction: "Prediction", part: slice | None = None) -> Int16s:
        """Return how far all elements, or some, lie from where they are predicted, in steps.

        Raises:
            ValueError: one lies on no level.
        """
        from shrinkpoint.schemes.auto import log_kernels  # numba

        first, end, _ = (part or slice(None)).indices(self.exponents.size)
        found = np.empty(end - first, np.int16)
        if not log_kernels.away(self.exponents, first, prediction, self.step, self.seed, found):
            raise ValueError("an exponent lies on no level")
        return found

    def cost(self, prediction: "Prediction") -> float:
        """Return bits of a level that is predicted so, without any context, by a sample of them."""
        starts = range(0, self.exponents.size, _CHUNK)
        some = starts[:: -(-len(starts) // _SAMPLED)]
        sample = [self.away(prediction, slice(start, start + _CHUNK)) for start in some]
        away = np.concatenate(sample).astype(np.intp)
        least = min(int(away.min()), 0)
        away -= least
        counts = np.bincount(away)
        counts = np.append(counts[-least:], counts[:-least])  # sums depend on the order: 0 is the first
        counts = counts[counts > 0]
        return float(-(counts * np.log2(counts / counts.sum())).sum() / max(int(counts.sum()), 1))

    def planes(self) -> Planes:
        """Return the plane ``exponent``: of levels in one byte each, where these can hold them; else as it is, as where it was clipped."""
        from shrinkpoint.schemes.auto import log_kernels  # numba

        levels = np.empty(self.exponents.size, np.int8)
        fits, middle = log_kernels.pack(self.exponents, self.step, self.seed, levels)
        if not fits:
            return {"exponent": self.exponents}
        unpack = partial(_unpacked, middle=middle, step=self.step, seed=self.seed)
        return PackedPlanes(levels.size, {"levels": levels}, {"exponent": unpack})


def _unpacked(parts: Planes, middle: int, step: int, seed: int) -> Int16s:
    from shrinkpoint.schemes.auto import log_kernels  # numba

    levels = np.asarray(parts["levels"], np.int8)
    exponents = np.empty(levels.size, np.int16)
    in_parts(log_kernels.unpack, levels, middle, step, seed, FIRST, exponents)
    return exponents


def _by_factors(factors: Factors) -> "Prediction":
    from shrinkpoint.schemes.auto.log_kernels import Prediction  # numba

    return Prediction(_sixteenths(factors.rows), _sixteenths(factors.columns), _NO_EXPONENTS, 0, 0)


def _sixteenths(side: Int16s) -> Int32s:
    """Return a factor's quarter octaves in sixteenths; 0 for those of zeros."""
    return np.where(side == EMPTY, 0, side.astype(np.int32) * (_PER_OCTAVE // 4)).astype(np.int32)


def _by_predecessor(before: Int16s, shift: int) -> "Prediction":
    """By exponents of the checkpoint before; of what was zero, by the mean of the others."""
    from shrinkpoint.schemes.auto.log_kernels import Prediction  # numba

    known = before != _NONE
    middle = int(before.sum(where=known, dtype=np.int64)) // max(np.count_nonzero(known), 1)
    return Prediction(_NO_FACTORS, _NO_FACTORS, before, shift, int(middle))


def _shift_between(exponents: Int16s, before: Int16s) -> int:
    """By how many sixteenths elements have grown on average since the checkpoint before."""
    both = (exponents != _NONE) & (before != _NONE)
    now, then = (int(each.sum(where=both, dtype=np.int64)) for each in (exponents, before))
    return round((now - then) / max(np.count_nonzero(both), 1))


def _nearest(values: Float32s, step: int, seed: int, larger: float) -> Int16s:
    from shrinkpoint.schemes.auto import log_kernels  # numba

    exponents = np.empty(values.size, np.int16)
    in_parts(log_kernels.nearest, values, step, seed, larger, FIRST, exponents)
    return exponents


def _values_of(exponents: Int16s, negative: Bools | None) -> Float32s:
    from shrinkpoint.schemes.auto import log_kernels  # numba

    values = np.empty(exponents.size, np.float32)
    signs = _NO_BITS if negative is None else negative
    in_parts(log_kernels.values, exponents, signs, _SIXTEENTHS, values)
    return values


def _shortfall(step: int) -> float:
    """By how many sixteenths the mean of ``2 ** -error`` is above 1, errors being uniform over a step."""
    half = step / _PER_OCTAVE * math.log(2) / 2
    return _PER_OCTAVE * math.log2(math.sinh(half) / half)


def _encoded(away: Int16s, zeros: Bools, spec: TensorSpec) -> dict[str, bytes]:
    width = row_width(*matrix_shape(spec.shape))
    sections = {"levels": encode_matrix(away, None, width=width, predictable=True)}
    if zeros.any():
        sections["zeros"] = encode_numbers(np.packbits(zeros))
    return sections


def _read_bits(encoded: EncodedTensor, spec: TensorSpec, name: str) -> Bools:
    packed = decode_numbers(section(encoded, spec, name), -(-spec.numel // 8), np.uint8)
    return np.unpackbits(packed, count=spec.numel).astype(np.bool_)


def _exponents_before(reference: ReferenceState | None, spec: TensorSpec) -> Int16s | None:
    plane: npt.NDArray[Any] | None = reference.planes.get("exponent") if reference is not None else None
    right = plane is not None and plane.size == spec.numel and plane.dtype == np.int16
    return np.asarray(plane, np.int16) if right else None


def _read_step(encoded: EncodedTensor, spec: TensorSpec) -> tuple[int, int]:
    return (
        integer(encoded.params, spec, "step", 1, _WIDEST),
        integer(encoded.params, spec, "seed", 0, SEEDS - 1),
    )
