"""Adam's second moment as a row times a column, such that the updates after a restore are as long as they would have been.

Of the second moment v a row and a column factor are kept, as in Adafactor (arXiv 1804.04235, section 3). What Adam does
with v is to divide: so factors are chosen by what the division gives. Gradients are about as large as the root of v, and their
updates keep their length where ``v / (row x column)`` is 1 on average: first by rows, then by columns. The present first moment,
which is gone long before v has forgotten the factors, has no part in it: it is restored such that the next update is the true one
(`shrinkpoint.schemes.auto.first_moments`). Factors that kept its length instead would make later updates up to a tenth too short.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch

from shrinkpoint.errors import CannotRepresentError
from shrinkpoint.schemes.auto.factors import Factors, matrix_shape
from shrinkpoint.schemes.auto.moment_units import check_dtype, emitted, fp32_values
from shrinkpoint.schemes.base import Coded, Context, EncodedTensor, Planes, Staged
from shrinkpoint.schemes.codec_io import check_sections, emit, finite
from shrinkpoint.state.training import TensorSpec

__all__ = ["FactoredSecondMomentCodec", "rank_one_misfit"]


@dataclass(frozen=True, kw_only=True)
class FactoredSecondMomentCodec:
    """``v = row x column``, each a power of ``2 ** (1/4)``.

    By rows and by columns, the mean of ``v / v'`` is 1, to 9 %, v' being what is restored. Guarantees: a second moment that is not
    zero is never restored as zero.
    """

    id: ClassVar[str] = "factored-second-moment"
    needs: ClassVar[tuple[str, ...]] = ()

    def encode(self, tensor: torch.Tensor, spec: TensorSpec, context: Context) -> Coded:
        """See `TensorCodec.encode`; second moments that are negative or not finite are refused."""
        return self.stage(tensor, spec, context).coded(context.threads)

    def stage(self, tensor: torch.Tensor, spec: TensorSpec, context: Context) -> Staged:
        """See `Stages.stage`; refuses what `encode` refuses."""
        factors, value = self._factored(tensor, spec)

        def coded(threads: int) -> Coded:
            return Coded(EncodedTensor(self.id, {}, {"factors": factors.encode(threads)}), {}, value)

        return Staged(value, coded)

    def restored(self, tensor: torch.Tensor, spec: TensorSpec, context: Context) -> torch.Tensor:
        """See `Quantizer.restored`."""
        return self._factored(tensor, spec)[1]

    def _factored(self, tensor: torch.Tensor, spec: TensorSpec) -> tuple[Factors, torch.Tensor]:
        values = fp32_values(tensor, spec)
        if values.min() < 0:
            raise CannotRepresentError(f"{spec.name} has negative second moments: stored exactly")
        matrix = values.reshape(matrix_shape(spec.shape))
        factors = Factors.of_second_moment(matrix).balanced(matrix)
        product = factors.product()
        if not finite(product):
            raise CannotRepresentError(f"{spec.name} reaches the end of fp32's range: stored exactly")
        return factors, emitted(product, spec, nonzero=values)

    def decode(self, encoded: EncodedTensor, spec: TensorSpec, context: Context) -> Planes:
        """See `TensorCodec.decode`; nothing of it helps to decode the next checkpoint."""
        return {}

    def reconstruct(
        self, encoded: EncodedTensor, planes: Planes, spec: TensorSpec, context: Context
    ) -> torch.Tensor:
        """See `TensorCodec.reconstruct`."""
        check_sections(encoded, spec, "factors")
        check_dtype(spec)
        return emit(Factors.read(encoded, spec, context.threads).product(), spec, own=True)


def rank_one_misfit(tensor: torch.Tensor, spec: TensorSpec) -> float:
    """How far a second moment is from a row times a column: the root mean square of ``log2(v / (row x column))``, in octaves.

    Elements that are zero do not count; 0 where the codec refuses the tensor.
    """
    try:
        matrix = fp32_values(tensor, spec).reshape(matrix_shape(spec.shape))
    except CannotRepresentError:
        return 0.0
    return 0.0 if matrix.min() < 0 else Factors.of_second_moment(matrix).balanced(matrix).misfit(matrix)
