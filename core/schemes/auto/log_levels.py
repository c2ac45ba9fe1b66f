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

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch

from shrinkpoint.arrays import Bools, Float32s, Int16s
from shrinkpoint.entropy.lanes.coder import decode_matrix, encode_matrix
from shrinkpoint.entropy.lanes.trellis import row_width
from shrinkpoint.entropy.numbers import decode_numbers, encode_numbers
from shrinkpoint.errors import ConfigError, FormatError
from shrinkpoint.quantize.dither import SEEDS
from shrinkpoint.schemes.auto.factors import Factors
from shrinkpoint.schemes.auto.log_planes import LogPlanes
from shrinkpoint.schemes.auto.log_residuals import (
    HIGH,
    LOW,
    PER_OCTAVE,
    Levels,
    Prediction,
    offsets_of,
    reached,
    shift_between,
    values_of,
)
from shrinkpoint.schemes.auto.moment_units import check_dtype, emitted
from shrinkpoint.schemes.base import Coded, Context, EncodedTensor, Planes, ReferenceState, Staged, Stages
from shrinkpoint.schemes.codec_io import (
    CODED_DTYPES,
    as_float32,
    check_sections,
    emit,
    integer,
    matrix_shape,
    section,
)
from shrinkpoint.state.training import TensorSpec
from shrinkpoint.state.tree import JSON

__all__ = ["LogLevelsCodec"]

_WIDEST = 2 * PER_OCTAVE


@dataclass(frozen=True, kw_only=True)
class LogLevelsCodec(Stages):
    """Sizes as ``2 ** (k / 16)``, and signs where there are any.

    Guarantees: zeros alone are restored as zeros, signs are kept, and no element is restored farther from itself than a factor of
    ``2 ** ((step + 1) / 32)``, and 2 % with the widest step, if `divides`; but what is subnormal may be restored larger.

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

    def __post_init__(self) -> None:
        if type(self.step) is not int or not 1 <= self.step <= _WIDEST:
            raise ConfigError(f"step={self.step!r} must be an integer from 1 to {_WIDEST}")
        if self.seed is not None and not (type(self.seed) is int and 0 <= self.seed < SEEDS):
            raise ConfigError(f"seed={self.seed!r} must be an integer from 0 to {SEEDS - 1}, or None")

    def stage(self, tensor: torch.Tensor, spec: TensorSpec, context: Context) -> Staged:
        """See `Stages.stage`; refuses what is not finite."""
        values = as_float32(tensor, spec, CODED_DTYPES)
        levels, negative = self._levels(values, context), _negative(values)
        prediction = self._prediction(levels, values, spec, context)
        factors, shift = prediction.factors, prediction.shift
        params: dict[str, JSON] = {"step": self.step, "seed": levels.seed, "signed": negative is not None}
        if factors is None:
            params["shift"] = shift
        exponents, away, zeros = levels.exponents, levels.away(prediction), levels.zeros
        planes = LogPlanes(exponents, self.step, levels.seed)
        del levels, prediction  # they take as much memory as the tensor
        value = emitted(values_of(exponents, negative), spec, nonzero=values)

        def coded() -> Coded:
            sections = _encoded(away, zeros, spec)
            if factors is not None:
                sections["factors"] = factors.encode()
            if negative is not None:
                sections["signs"] = encode_numbers(np.packbits(negative))
            encoded = EncodedTensor(self.id, params, sections, factors is None)
            return Coded(encoded, planes, value)

        return Staged(value, coded)

    def _prediction(self, levels: Levels, values: Float32s, spec: TensorSpec, context: Context) -> Prediction:
        alone, before = Prediction.by_factors(values, spec), _exponents_before(context.reference, spec)
        if before is None:
            return alone
        moved = Prediction.by_predecessor(before, shift_between(levels.exponents, before))
        return moved if levels.cost(moved) < levels.cost(alone) else alone

    def _levels(self, values: Float32s, context: Context) -> Levels:
        seed = self.seed
        if seed is None:
            known = context.reference.params.get("seed") if context.reference is not None else None
            seed = known if isinstance(known, int) else 0
        return Levels.of(values, self.step, seed, keeps_mean_inverse=self.divides)

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
        levels = Levels.known(exponents, step, seed)
        prediction = Prediction.by_factors(values_of(exponents, None), spec)
        factors = prediction.factors
        if factors is None or not np.array_equal(levels.exponents, exponents):
            return None  # those that were brought within fp32's range cannot be recovered from here
        params = {name: value for name, value in encoded.params.items() if name != "shift"}
        sections = {
            **encoded.sections,
            **_encoded(levels.away(prediction), levels.zeros, spec),
            "factors": factors.encode(),
        }
        return EncodedTensor(self.id, params, sections)

    def decode(self, encoded: EncodedTensor, spec: TensorSpec, context: Context) -> Planes:
        """See `TensorCodec.decode`."""
        check_dtype(spec)
        step, seed = _read_step(encoded, spec)
        others = [name for name in ("zeros",) if name in encoded.sections]
        others += ["signs"] if _is_signed(encoded, spec) else []
        if encoded.uses_reference:
            check_sections(encoded, spec, "levels", *others)
            before = _exponents_before(context.reference, spec)
            if before is None:
                raise FormatError(f"{spec.name}: its reference plane is missing")
            shift = integer(encoded.params, spec, "shift", LOW - HIGH, HIGH - LOW)
            prediction = Prediction.by_predecessor(before, shift)
        else:
            check_sections(encoded, spec, "levels", "factors", *others)
            prediction = Prediction(Factors.read(encoded, spec))
        away = decode_matrix(
            section(encoded, spec, "levels"),
            spec.numel,
            None,
            width=row_width(*matrix_shape(spec.shape)),
        )
        zeros = _read_bits(encoded, spec, "zeros", context) if "zeros" in others else None
        offsets = offsets_of(seed, spec.numel, step)
        return LogPlanes(reached(away, prediction, offsets, step, zeros), step, seed)

    def reconstruct(
        self, encoded: EncodedTensor, planes: Planes, spec: TensorSpec, context: Context
    ) -> torch.Tensor:
        """See `TensorCodec.reconstruct`."""
        negative = _read_bits(encoded, spec, "signs", context) if _is_signed(encoded, spec) else None
        return emit(values_of(np.asarray(planes["exponent"], np.int16), negative), spec, own=True)


def _encoded(away: Int16s, zeros: Bools, spec: TensorSpec) -> dict[str, bytes]:
    width = row_width(*matrix_shape(spec.shape))
    sections = {"levels": encode_matrix(away, None, width=width, predictable=True)}
    if zeros.any():
        sections["zeros"] = encode_numbers(np.packbits(zeros))
    return sections


def _read_bits(encoded: EncodedTensor, spec: TensorSpec, name: str, context: Context) -> Bools:
    packed = decode_numbers(section(encoded, spec, name), -(-spec.numel // 8), np.uint8)
    return np.unpackbits(packed, count=spec.numel).astype(np.bool_)


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
