"""Adam's second moment as a row times a column, such that the updates after a restore are as long as they would have been.

Of the second moment v a row and a column factor are kept, as in Adafactor (arXiv 1804.04235, section 3). What Adam does
with v is to divide: so factors are chosen by what the division gives. Gradients are about as large as the root of v, and their
updates keep their length where ``v / (row x column)`` is 1 on average: first by rows, then by columns. But steps in the direction of
the first moment m would be longer then, where m is large in elements in which v is above the product. They keep their length where
each row of ``m / sqrt(row x column)`` is as long as that of ``m / sqrt(v)``, and then other updates are too short, as long as v
remembers. So rows are scaled half the way, in octaves. The next update hardly depends on it, for m is quantized such that it is the
true one (`shrinkpoint.schemes.auto.first_moments`).
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from shrinkpoint.arrays import Float32s, Float64s
from shrinkpoint.errors import CannotRepresentError
from shrinkpoint.runtime.threads import map_in_parts
from shrinkpoint.schemes.auto.factors import Factors
from shrinkpoint.schemes.base import Context, EncodedTensor, Planes, Staged
from shrinkpoint.schemes.codec_io import (
    CODED_DTYPES,
    as_float32,
    check_moment,
    check_sections,
    emit,
    emitted,
    matrix_shape,
)
from shrinkpoint.state.training import TensorSpec

_SHARE = 0.5
"""Of the octaves by which a row must grow for m's updates to keep their length. An autoencoder restored ten times, ten and 40 steps apart, with
beta2 = 0.999, ended 3.8 to 5.1 and 2.1 to 4.4 % worse with 1, 1.5 to 2.1 and 1.2 to 2.3 % better with 0, within 0.6 % with this."""


@dataclass(frozen=True, kw_only=True)
class FactoredSecondMomentCodec:
    """``v = row x column``, each a power of ``2 ** (1/4)``.

    Rows are half the way from a mean of ``v / v'`` of 1, v' being what is restored, to the length of ``m / sqrt(v)``; without a first
    moment the mean is 1, to 9 %. Guarantees: a second moment that is not zero is never restored as zero.
    """

    id: ClassVar[str] = "factored-second-moment"
    needs: ClassVar[tuple[str, ...]] = ()

    first_moment: torch.Tensor | None = None
    """m as training has it, of the same shape; only encoding needs it."""
    factors: Factors | None = None
    """Of `rank_one`, where it is known; only encoding needs them."""

    def stage(self, tensor: torch.Tensor, spec: TensorSpec, context: Context) -> Staged:
        """See `TensorCodec.stage`; refuses what is negative or not finite."""
        values = as_float32(tensor, spec, CODED_DTYPES)
        matrix = values.reshape(matrix_shape(spec.shape))
        factors = self.factors if self.factors is not None else _factors_of(matrix)
        if factors is None:
            raise CannotRepresentError(f"{spec.name} has negative second moments: stored exactly")
        first = self._first_moment(spec)
        if first is not None:
            factors = factors.lengthened(_longer(first.reshape(matrix.shape), matrix, factors))
        value = emitted(factors.product(), spec, nonzero=values)
        return Staged(value, lambda: (EncodedTensor(self.id, {}, {"factors": factors.encode()}), {}))

    def _first_moment(self, spec: TensorSpec) -> Float32s | None:
        first = self.first_moment
        if first is None or tuple(first.shape) != spec.shape:
            return None
        try:
            return as_float32(first, spec, CODED_DTYPES)
        except CannotRepresentError:  # what is refused there is no reason to refuse the second moment
            return None

    def decode(self, encoded: EncodedTensor, spec: TensorSpec, context: Context) -> Planes:
        """See `TensorCodec.decode`; nothing of it helps to decode the next checkpoint."""
        return {}

    def reconstruct(
        self, encoded: EncodedTensor, planes: Planes, spec: TensorSpec, context: Context
    ) -> torch.Tensor:
        """See `TensorCodec.reconstruct`."""
        check_sections(encoded, spec, "factors")
        check_moment(spec)
        return emit(Factors.read(encoded, spec).product(), spec, own=True)


def rank_one(tensor: torch.Tensor, spec: TensorSpec) -> tuple[Factors | None, float]:
    """Return the row and the column whose product is nearest to a second moment, and how far that is from it: the root mean square of
    ``log2(v / (row x column))``, in octaves.

    Elements that are zero do not count; None and 0 where the codec refuses the tensor.
    """
    try:
        matrix = as_float32(tensor, spec, CODED_DTYPES).reshape(matrix_shape(spec.shape))
    except CannotRepresentError:
        return None, 0.0
    factors = _factors_of(matrix)
    return factors, factors.misfit(matrix) if factors is not None else 0.0


def _factors_of(matrix: Float32s) -> Factors | None:
    """None of negative second moments."""
    return None if matrix.min() < 0 else Factors.of_second_moment(matrix).balanced(matrix)


def _longer(first: Float32s, second: Float32s, factors: Factors) -> Float64s:
    """By how many octaves the second moment of each row is to grow; 0 where that cannot be said."""
    from shrinkpoint.quantize import matrix_kernels  # numba

    wanted, found = np.empty(first.shape[0]), np.empty(first.shape[0])

    def measure(part: slice) -> None:
        product = Factors(rows=factors.rows[part], columns=factors.columns).product()
        matrix_kernels.square_lengths(first[part], second[part], wanted[part])
        matrix_kernels.square_lengths(first[part], product.reshape(first[part].shape), found[part])

    map_in_parts(measure, *first.shape)
    sound = (wanted > 0) & (found > 0) & np.isfinite(wanted) & np.isfinite(found)
    octaves = np.zeros(sound.size)
    octaves[sound] = _SHARE * (np.log2(found[sound]) - np.log2(wanted[sound]))
    return octaves
